"""Octavo: a compiled LLM inference engine on JAX.

Public names load lazily, so `import octavo` costs milliseconds.
"""

import time
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.generate import make_generate as make_generate
    from octavo.llm import LLM as LLM
    from octavo.loading import load_model as load_model
    from octavo.model.config import ModelConfig as ModelConfig
    from octavo.model.forward import forward as forward
    from octavo.outputs import CompletionOutput as CompletionOutput
    from octavo.outputs import RequestOutput as RequestOutput
    from octavo.sampling.params import SamplingParams as SamplingParams
    from octavo.serve.config import EngineConfig as EngineConfig
    from octavo.serve.types import Grammar as Grammar

STARTED = time.monotonic()
"""When octavo was first imported, for the timeline of a start."""

__version__ = "0.1.0"

_HOMES = {
    "LLM": "octavo.llm",
    "CompletionOutput": "octavo.outputs",
    "EngineConfig": "octavo.serve.config",
    "Grammar": "octavo.serve.types",
    "ModelConfig": "octavo.model.config",
    "RequestOutput": "octavo.outputs",
    "SamplingParams": "octavo.sampling.params",
    "forward": "octavo.model.forward",
    "load_model": "octavo.loading",
    "make_generate": "octavo.generate",
}

__all__ = [
    "LLM",
    "CompletionOutput",
    "EngineConfig",
    "Grammar",
    "ModelConfig",
    "RequestOutput",
    "SamplingParams",
    "__version__",
    "forward",
    "load_model",
    "make_generate",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
