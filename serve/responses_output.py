"""Output items of /v1/responses: built from answer events, and told as a stream of events."""

import uuid
from collections.abc import Callable, Iterable
from typing import Any

from octavo.serve import objects
from octavo.serve.answer_parser import (
    AnswerEvent,
    CallArguments,
    CallStart,
    ContentDelta,
    ReasoningDelta,
)
from octavo.serve.output import TokenText
from octavo.serve.responses_tokens import SpelledTokens

type Shown = Callable[[list[TokenText]], list[dict[str, Any]]]
"""Tokens to the objects that tell of their log-probabilities."""


class EventWriter:
    """Server-sent events, numbered from 0."""

    def __init__(self) -> None:
        self._next = 0

    def write(self, kind: str, **fields: Any) -> bytes:
        """The event `response.KIND`."""
        number, self._next = self._next, self._next + 1
        return objects.event(f"response.{kind}", {**fields, "sequence_number": number})


class OutputItems:
    """Items in the making: message, reasoning and function_call, in the order they came.

    Attributes:
        items: as the response object lists them; the last one is not whole before `close`.
    """

    def __init__(self, writer: EventWriter, shown: Shown) -> None:
        self.items: list[dict[str, Any]] = []
        self._writer = writer
        self._shown = shown
        self._tokens = SpelledTokens()
        self._texts: list[str] | None = None

    def write(self, events: list[AnswerEvent], tokens: Iterable[TokenText] = ()) -> bytes:
        """Take events; the bytes that tell a stream of them.

        `tokens` are those whose text is settled now, where their log-probabilities are wanted: each
        is told of with a delta of the message that it is a token of.
        """
        self._tokens.feed(tokens)
        out = b""
        for event in events:
            match event:
                case ContentDelta(text, start):
                    out += self._part_of("message")
                    out += self._delta(text, self._tokens.spell(text, start))
                case ReasoningDelta(text):
                    out += self._part_of("reasoning") + self._delta(text)
                case CallStart(_, id_, name):
                    fields = {"call_id": id_, "name": name, "arguments": ""}
                    out += self._open("function_call", fields)
                case CallArguments(_, text):
                    out += self._delta(text)
        return out

    def close(self, status: str = "completed") -> bytes:
        """End the item that is open; its text becomes part of it."""
        if self._texts is None:
            return b""
        item, place = self.items[-1], self._place()
        late = self._tokens.late() if item["type"] == "message" else []
        out = self._delta("", late) if late else b""
        text, self._texts = "".join(self._texts), None
        item["status"] = status
        if item["type"] == "function_call":
            item["arguments"] = text
            fields = {"name": item["name"], "arguments": text}
            out += self._writer.write("function_call_arguments.done", **place, **fields)
        else:
            (part,) = item["content"]
            part["text"] = text
            fields = {key: value for key, value in part.items() if key in ("text", "logprobs")}
            out += self._writer.write(f"{part['type']}.done", **place, **fields)
            out += self._writer.write("content_part.done", **place, part=part)
        return out + self._whole("done")

    def _part_of(self, kind: str) -> bytes:
        """Have an item of this kind open, with its one part of text."""
        if self._texts is not None and self.items[-1]["type"] == kind:
            return b""
        if kind == "message":
            out = self._open(kind, {"role": "assistant", "content": []})
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        else:
            out = self._open(kind, {"summary": [], "content": [], "encrypted_content": None})
            part = {"type": "reasoning_text", "text": ""}
        self.items[-1]["content"].append(part)
        return out + self._writer.write("content_part.added", **self._place(), part=part)

    def _open(self, kind: str, fields: dict[str, Any]) -> bytes:
        out = self.close()
        name = f"{_PREFIXES[kind]}_{uuid.uuid4().hex}"
        self.items.append({"id": name, "type": kind, "status": "in_progress", **fields})
        self._texts = []
        return out + self._whole("added")

    def _delta(self, text: str, tokens: list[TokenText] | None = None) -> bytes:
        """More text of the open item; of a message with its tokens."""
        assert self._texts is not None
        self._texts.append(text)
        item, extra = self.items[-1], {}
        if tokens is not None:
            extra["logprobs"] = self._shown(tokens)
            item["content"][0]["logprobs"] += extra["logprobs"]
        name = f"{_TEXTS[item['type']]}.delta"
        return self._writer.write(name, **self._place(), delta=text, **extra)

    def _whole(self, what: str) -> bytes:
        index = len(self.items) - 1
        return self._writer.write(f"output_item.{what}", output_index=index, item=self.items[-1])

    def _place(self) -> dict[str, Any]:
        """What every event of the open item repeats."""
        item = self.items[-1]
        place = {"item_id": item["id"], "output_index": len(self.items) - 1}
        return place if item["type"] == "function_call" else {**place, "content_index": 0}


_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_TEXTS = {
    "message": "output_text",
    "reasoning": "reasoning_text",
    "function_call": "function_call_arguments",
}
