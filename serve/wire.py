"""Messages between an API process and the engine core: msgspec structs, one zmq frame each.

To the core: Hello, Add, Abort, Control, and from the supervisor Gone and Shutdown. From the core:
Ready, EngineState, Events, Rejected, Controlled, Compiling, Fatal. EngineNews is between supervisor
and API processes.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from octavo.serve.types import EngineStats, Request, TokenEvent

SUPERVISOR = b"supervisor"
"""Routing id of the process that starts the core: told first when the core can't start."""


class Hello(msgspec.Struct, tag="hello"):
    """An API process introduces itself; the core answers Ready once the model is loaded."""


class Add(msgspec.Struct, tag="add"):
    """Admit all of these requests or none of them.

    The samples of one prompt carry it once: `requests[i]` has no prompt of its own, it is
    `prompts[places[i]]`. See `add` and `requests_of`.
    """

    requests: list[Request]
    prompts: list[tuple[int, ...]]
    places: list[int]


class Abort(msgspec.Struct, tag="abort"):
    """Stop these requests; unknown or finished ids are ignored."""

    request_ids: list[str]


class Gone(msgspec.Struct, tag="gone"):
    """The API process of this routing id has ended: stop its requests."""

    identity: bytes


class Control(msgspec.Struct, tag="control"):
    """What an operator asks; Controlled answers it by its `serial`.

    Attributes:
        action: "pause", "resume", "reload" or "forget" (the shared prefixes).
        mode: of running requests: "abort" ends them, "wait" lets them end; a pause may "keep" them
            as they are.
        clear_cache: a pause forgets shared prefixes.
        model: whose weights to load; "" reads the present model's files again.
    """

    serial: int
    action: str
    mode: str = ""
    clear_cache: bool = False
    model: str = ""


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

    `reason` is "full" (try again in `retry_after` seconds), "invalid" or "error". No ids: a message
    could not be read, and every request not heard of since may have been in it.
    """

    request_ids: list[str]
    reason: str
    message: str
    retry_after: float = 1.0


class Compiling(msgspec.Struct, tag="compiling"):
    """The core compiles a program before its next step: silence until then is no hang."""


class Controlled(msgspec.Struct, tag="controlled"):
    """A Control is done, or not: `kind` is then "busy", "invalid" or "error"."""

    serial: int
    kind: str = ""
    message: str = ""
    weights_epoch: int = 0


class EngineState(msgspec.Struct, tag="state"):
    """What operators have changed since the start; sent on every change, and before Ready.

    Events that come later are of this state's weights.

    Attributes:
        paused: requests wait for a resume.
        weights_epoch: counts the times that the weights were replaced.
        model: where the present ones came from; "" is the model of the settings.
    """

    paused: bool = False
    weights_epoch: int = 0
    model: str = ""


class Fatal(msgspec.Struct, tag="fatal"):
    """The core can't go on and exits."""

    message: str


ToCore = Hello | Add | Abort | Gone | Control | Shutdown
ToApi = Ready | Events | Rejected | Compiling | Controlled | EngineState | Fatal


def add(requests: Sequence[Request]) -> Add:
    """The message that admits `requests`; a prompt object that several share is sent once."""
    places: dict[int, int] = {}
    prompts: list[tuple[int, ...]] = []
    for request in requests:
        if places.setdefault(id(request.prompt), len(prompts)) == len(prompts):
            prompts.append(request.prompt)
    bare = [replace(request, prompt=()) for request in requests]
    return Add(bare, prompts, [places[id(request.prompt)] for request in requests])


def requests_of(message: Add) -> list[Request]:
    """The requests of an Add, with their prompts; samples of one prompt share the object.

    Raises ValueError when a place names no prompt.
    """
    prompts = message.prompts
    if len(message.places) != len(message.requests):
        raise ValueError(f"{len(message.places)} places for {len(message.requests)} requests")
    if not all(0 <= place < len(prompts) for place in message.places):
        raise ValueError(f"a place is outside 0 .. {len(prompts) - 1}")
    return [
        replace(request, prompt=prompts[place])
        for request, place in zip(message.requests, message.places)
    ]


class EngineNews(msgspec.Struct, tag="news"):
    """What the supervisor tells API processes of the engine core's life.

    Attributes:
        phase: "starting", "ready" (connect to `address`), "restarting" (it has ended and is started
            anew) or "failed" (it is not started before `retry_after` seconds, if at all).
        address: zmq address of the core, when ready.
        reason: why it ended.
        retry_after: seconds until the next start.
        restarts: restarts so far.
    """

    phase: str
    address: str = ""
    reason: str = ""
    retry_after: float = 0.0
    restarts: int = 0
