"""Messages between an API process and the engine core: msgspec structs, one zmq frame each.

API to core: Hello, Add, Abort, Shutdown. Core to API: Ready, Events, Rejected, Fatal.
"""

from typing import Any

import msgspec

from octavo.serve.types import EngineStats, Request, TokenEvent


class Hello(msgspec.Struct, tag="hello"):
    """An API process introduces itself; the core answers Ready once the model is loaded."""


class Add(msgspec.Struct, tag="add"):
    """Admit all of these requests or none of them."""

    requests: list[Request]


class Abort(msgspec.Struct, tag="abort"):
    """Stop these requests; unknown or finished ids are ignored."""

    request_ids: list[str]


class Shutdown(msgspec.Struct, tag="shutdown"):
    """End the core process."""


class Ready(msgspec.Struct, tag="ready"):
    """The model is loaded.

    Attributes:
        max_model_len: longest prompt + output in tokens.
        vocab_size: rows of the model's embedding; valid token ids are below it.
        eos_ids: end-of-sequence ids.
        generation: default sampling values of the model by SamplingParams field.
    """

    max_model_len: int
    vocab_size: int
    eos_ids: tuple[int, ...]
    generation: dict[str, Any] = {}


class Events(msgspec.Struct, tag="events"):
    """All news of one step for one API process; `stats` now and then, also while idle."""

    events: list[TokenEvent] = []
    stats: EngineStats | None = None


class Rejected(msgspec.Struct, tag="rejected"):
    """An Add was refused.

    `reason` is "full" (try again in `retry_after` seconds), "invalid" or "error".
    """

    request_ids: list[str]
    reason: str
    message: str
    retry_after: float = 1.0


class Fatal(msgspec.Struct, tag="fatal"):
    """The core can't go on and exits."""

    message: str


ToCore = Hello | Add | Abort | Shutdown
ToApi = Ready | Events | Rejected | Fatal
