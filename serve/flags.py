"""Command-line flags generated from the settings dataclasses; a field is a flag of the same name.

Precedence: --field, then --config.field, then the config file, then the default. A mistyped flag,
key or value is an error that names it.
"""

import dataclasses
import types
from collections.abc import Iterable, Sequence
from typing import Any, Union, get_args, get_origin, get_type_hints

from absl import flags
from ml_collections import config_flags

from octavo.serve.configfile import LoadedConfig, typed


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


def define_settings(values: flags.FlagValues, settings: Iterable[type]) -> None:
    """A flag for every field of the dataclasses; unset flags are None."""
    for cls in settings:
        hints = get_type_hints(cls)
        for field in dataclasses.fields(cls):
            _define(values, field.name, hints[field.name], field.metadata["help"])
    config_flags.DEFINE_config_file(
        "config", None, "config file; --config.field=value overrides a field", flag_values=values
    )


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
    """Typed settings from parsed flags, with the config file below them."""
    merged: dict[str, Any] = {}
    if values["config"].value is not None:
        merged.update(values["config"].value.items())
    for cls in settings:
        for field in dataclasses.fields(cls):
            flag = values[field.name]
            if flag.present:
                merged[field.name] = (
                    tuple(flag.value) if flag.value.__class__ is list else flag.value
                )
    return typed(merged)


def settings_help(settings: Iterable[type]) -> str:
    """One line a setting: name, default, meaning."""
    lines = []
    for cls in settings:
        for field in dataclasses.fields(cls):
            default = "" if field.default in ("", (), None) else f" [{field.default}]"
            lines.append(f"  --{field.name:<20} {field.metadata['help']}{default}")
    return "\n".join(lines)
