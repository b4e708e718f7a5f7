"""Command-line flags generated from the settings dataclasses; a field is a flag of the same name.

Precedence: --field, then --config.field, then the config file, then the default. A mistyped flag,
key or value is an error that names it.
"""

import dataclasses
import types
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Union, get_args, get_origin, get_type_hints

from absl import flags

from octavo.serve.configfile import LoadedConfig, read_config_file, typed

OVERRIDE = "config."
"""Prefix of the flags that stand between --field and the config file."""


PROTECTIONS = ("api_key", "api_key_file", "tls_cert", "tls_key")
"""What keeps strangers out: an empty one would let them in unnoticed."""


class UsageError(ValueError):
    """A command line that can't be meant: exit code 2, before anything is done."""


def reason_of(error: Exception) -> str:
    """What an error says; of the operating system's the file and its words, not its number."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


class AutoIntParser(flags.ArgumentParser):
    """An integer, or the word auto (or empty for "none" where the field allows it)."""

    def __init__(self, words: Sequence[str], optional: bool) -> None:
        super().__init__()
        self._words, self._optional = words, optional
        self.syntactic_help = " or ".join(["an integer", *words])

    def parse(self, argument: Any) -> Any:  # noqa: D102  (absl's interface)
        if argument in self._words:
            return argument
        if self._optional and argument in ("", None):
            return None
        try:
            return int(argument)
        except (TypeError, ValueError):
            raise ValueError(f"{argument!r} is not {self.syntactic_help}") from None

    def flag_type(self) -> str:  # noqa: D102  (absl's interface)
        return "int"


def define_settings(
    values: flags.FlagValues, settings: Iterable[type], without: Collection[str] = ()
) -> None:
    """--field and --config.field for the fields of the dataclasses; unset flags are None."""
    flags.DEFINE_string("config", None, "config file", flag_values=values)
    for cls in settings:
        hints = get_type_hints(cls)
        for field in _shown(cls, without):
            for name in (field.name, OVERRIDE + field.name):
                _define(values, name, hints[field.name], field.metadata["help"])
    if "model" in values:
        values["model"].allow_overwrite = False  # a second one would be served instead, not besides


def _shown(cls: type, without: Collection[str]) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(cls) if field.name not in without]


def _define(values: flags.FlagValues, name: str, hint: Any, help_text: str) -> None:
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if hint is bool:
        flags.DEFINE_bool(name, None, help_text, flag_values=values)
    elif hint is float:
        flags.DEFINE_float(name, None, help_text, flag_values=values)
    elif get_origin(hint) is tuple:
        flags.DEFINE_list(name, None, help_text, flag_values=values)
    elif int in options:
        parser = AutoIntParser(("auto",) if str in options else (), type(None) in options)
        flags.DEFINE(parser, name, None, help_text, flag_values=values)
    else:
        flags.DEFINE_string(name, None, help_text, flag_values=values)


def parse_settings(values: flags.FlagValues, settings: Iterable[type]) -> LoadedConfig:
    """Typed settings from parsed flags, with the config file below them.

    The file may hold settings that are no flags of the command: several commands share it.
    """
    path = values["config"].value
    merged: dict[str, Any] = {} if path is None else read_config_file(path)
    names = [f.name for cls in settings for f in dataclasses.fields(cls) if f.name in values]
    for prefix in (OVERRIDE, ""):
        given = {name: values[prefix + name] for name in names}
        merged.update((name, flag.value) for name, flag in given.items() if flag.present)
    for name in PROTECTIONS:
        if merged.get(name) == "":  # most likely a variable of a shell that is not set
            raise UsageError(f"{name} is given and empty: leave it out to serve without it")
    return typed(merged)


def settings_help(settings: Iterable[type], without: Collection[str] = ()) -> str:
    """One line a setting: name, default, meaning."""
    lines = []
    for cls in settings:
        for field in _shown(cls, without):
            default = "" if field.default in ("", (), None) else f" [{field.default}]"
            lines.append(f"  --{field.name:<20} {field.metadata['help']}{default}")
    return "\n".join(lines)
