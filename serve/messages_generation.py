"""Answers of Anthropic's /v1/messages: content blocks, whole or as events."""

from typing import Any

from octavo.serve import errors, objects
from octavo.serve.answer_parser import (
    AnswerEvent,
    CallArguments,
    CallStart,
    ContentDelta,
    ReasoningDelta,
)
from octavo.serve.choice import Choice
from octavo.serve.errors import ApiError
from octavo.serve.objects import event
from octavo.serve.output import Delta
from octavo.serve.split_generation import SplitGeneration
from octavo.serve.strict_json import strict_json
from octavo.serve.types import FINISH_ABORT, FINISH_LENGTH, TokenEvent


class Blocks:
    """Content blocks in the making: text, thinking and tool_use, in the order they came."""

    def __init__(self) -> None:
        self.blocks: list[dict[str, Any]] = []
        self._parts: list[str] | None = None

    def write(self, events: list[AnswerEvent]) -> bytes:
        """Take events; the bytes that tell a stream of them."""
        out = b""
        for one in events:
            match one:
                case ContentDelta(text):
                    out += self._add({"type": "text", "text": ""}, "text_delta", "text", text)
                case ReasoningDelta(text):
                    block = {"type": "thinking", "thinking": "", "signature": ""}
                    out += self._add(block, "thinking_delta", "thinking", text)
                case CallStart(_, id_, name):
                    out += self._open({"type": "tool_use", "id": id_, "name": name, "input": {}})
                case CallArguments(_, text):
                    out += self._delta("input_json_delta", "partial_json", text)
        return out

    def close(self) -> bytes:
        """End the block that is open; its text becomes part of it."""
        if self._parts is None:
            return b""
        block, text = self.blocks[-1], "".join(self._parts)
        self._parts = None
        if block["type"] == "tool_use":
            block["input"] = _input(text)
        else:
            block[block["type"]] = text
        return event("content_block_stop", {"index": len(self.blocks) - 1})

    def _add(self, block: dict[str, Any], kind: str, field: str, text: str) -> bytes:
        goes_on = self._parts is not None and self.blocks[-1]["type"] == block["type"]
        return (b"" if goes_on else self._open(block)) + self._delta(kind, field, text)

    def _open(self, block: dict[str, Any]) -> bytes:
        out = self.close()
        self.blocks.append(block)
        self._parts = []
        fields = {"index": len(self.blocks) - 1, "content_block": block}
        return out + event("content_block_start", fields)

    def _delta(self, kind: str, field: str, text: str) -> bytes:
        assert self._parts is not None
        self._parts.append(text)
        fields = {"index": len(self.blocks) - 1, "delta": {"type": kind, field: text}}
        return event("content_block_delta", fields)


def _input(text: str) -> dict[str, Any]:
    """A call's input; one that is no JSON object (the answer was cut) is shown as it is."""
    try:
        value = strict_json(text)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": text}


class MessagesGeneration(SplitGeneration):
    """One sample, answered as a message."""

    blocks: Blocks

    async def first_events(self) -> list[TokenEvent]:
        """As elsewhere. What they say of the prefix cache is for the stream's opening."""
        events = await super().first_events()
        sample = self.choices[0].sample
        sample.cached_tokens = max([sample.cached_tokens, *(e.cached_tokens for e in events)])
        return events

    def _opening(self) -> bytes:
        self.blocks = Blocks()
        return event("message_start", {"message": self._message(started=True)})

    def _written(self, choice: Choice, delta: Delta) -> bytes:
        return self.blocks.write(self.split(choice, delta))

    def _closing(self) -> bytes:
        reason, sequence = self._stop()
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        out = self.blocks.close() + event(
            "message_delta", {"delta": delta, "usage": self._final_usage()}
        )
        return out + event("message_stop", {})

    def failed(self, error: ApiError) -> bytes:
        """What ends a stream that `error` cuts short."""
        return event("error", {"error": error.anthropic_fields()})

    def answer(self) -> bytes:
        """The whole message once `collect` is done."""
        self.blocks = Blocks()
        self.blocks.write(self._answers[0].events)
        self.blocks.close()
        return objects.to_json(self._message())

    def _message(self, *, started: bool = False) -> dict[str, Any]:
        reason, sequence = (None, None) if started else self._stop()
        return {
            "id": self._identity.id,
            "type": "message",
            "role": "assistant",
            "model": self._identity.model,
            "system_fingerprint": self._identity.fingerprint,
            "content": self.blocks.blocks,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": self._message_usage() if started else self._final_usage(),
        }

    def _stop(self) -> tuple[str, str | None]:
        """stop_reason and stop_sequence; ApiError for an end that they have no word for."""
        choice, answer = self.choices[0], self._answers[0]
        if answer.finish_reason == FINISH_ABORT:
            raise errors.aborted()
        if answer.finish_reason == FINISH_LENGTH:
            return "max_tokens", None
        if answer.splitter.calls:
            return "tool_use", None
        if isinstance(choice.stop_reason, str):
            return "stop_sequence", choice.stop_reason
        return "end_turn", None

    def _final_usage(self) -> dict[str, Any]:
        return self._message_usage() | self.timing(self.choices[0].sample.cached_tokens)

    def _message_usage(self) -> dict[str, int]:
        sample, prompt = self.choices[0].sample, len(self.choices[0].prompt.ids)
        return {
            "input_tokens": prompt - sample.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": sample.cached_tokens,
            "output_tokens": sample.completion_tokens,
        }
