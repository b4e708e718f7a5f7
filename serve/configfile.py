"""Config files: Python files with `get_config() -> ml_collections.ConfigDict`, flat keys.

A key is a field of EngineConfig or ServerConfig, or one of the extra sections an experiment holds
(`prompts`, `sampling`). Anything else is an error that suggests the nearest name.
"""

import dataclasses
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.serve.config import EngineConfig, ServerConfig, unknown_field

EXTRA_SECTIONS = ("prompts", "sampling")
ENGINE_FIELDS = frozenset(f.name for f in dataclasses.fields(EngineConfig))
SERVER_FIELDS = frozenset(f.name for f in dataclasses.fields(ServerConfig))


@dataclass(frozen=True)
class LoadedConfig:
    """A config file, typed.

    Attributes:
        engine, server: the settings.
        extra: the sections of an experiment, e.g. prompts and sampling.
    """

    engine: EngineConfig
    server: ServerConfig
    extra: dict[str, Any] = field(default_factory=dict)


def typed(values: Mapping[str, Any]) -> LoadedConfig:
    """Flat keys to typed settings; ValueError on an unknown key or a value out of range."""
    known = ENGINE_FIELDS | SERVER_FIELDS | set(EXTRA_SECTIONS)
    for name in values:
        if name not in known:
            raise ValueError(unknown_field(name, set(known)))
    _check_sections(values)
    pick = lambda names: {k: _plain(v) for k, v in values.items() if k in names}  # noqa: E731
    return LoadedConfig(
        EngineConfig(**pick(ENGINE_FIELDS)),
        ServerConfig(**pick(SERVER_FIELDS)),
        pick(EXTRA_SECTIONS),
    )


def _check_sections(values: Mapping[str, Any]) -> None:
    """ValueError unless the sections of an experiment are lists of what they should hold."""
    is_prompt = lambda item: isinstance(item, str | list | tuple)  # noqa: E731
    is_sampling = lambda item: hasattr(item, "keys")  # noqa: E731  (a ConfigDict is no Mapping)
    for name, fits, words in (
        ("prompts", is_prompt, "texts, or lists of token ids"),
        ("sampling", is_sampling, "dictionaries of sampling parameters"),
    ):
        section = values.get(name, ())
        if not isinstance(section, list | tuple) or not all(map(fits, section)):
            raise ValueError(f"{name} must be a list of {words}, not {section!r}")


def load_config_file(path: str | Path) -> LoadedConfig:
    """Run a config file's `get_config` and type the result."""
    return typed(read_config_file(path))


def read_config_file(path: str | Path) -> dict[str, Any]:
    """What a config file's `get_config` returns; ValueError names the file if it can't be run."""
    path = Path(path)
    if not path.is_file():
        wrong = "is no file" if path.exists() else "does not exist"
        raise ValueError(f"config file {path} {wrong}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"config file {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        get_config = getattr(module, "get_config", None)
        if get_config is None:
            raise ValueError("it has no get_config()")
        found = get_config()
        if not hasattr(found, "keys"):
            raise ValueError(f"get_config() must return a ConfigDict, not {found!r}")
        return dict(found)
    except Exception as error:  # whatever the user's code raises
        raise ValueError(f"config file {path}: {type(error).__name__}: {error}") from error


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
