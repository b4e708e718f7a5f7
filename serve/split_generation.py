"""Chat answers that hold tool calls or reasoning: `Generation` with a splitter a sample."""

from dataclasses import dataclass, field
from typing import Any

from octavo.serve.answer_parser import (
    AnswerEvent,
    CallArguments,
    CallStart,
    ContentDelta,
    ReasoningDelta,
)
from octavo.serve.answer_splitter import AnswerSplitter
from octavo.serve.chat_formats import AnswerPlan
from octavo.serve.choice import Choice, Wanted
from octavo.serve.client import EngineClient
from octavo.serve.detokenize import TokenTable
from octavo.serve.generation import Generation
from octavo.serve.metrics import Recorder
from octavo.serve.objects import Identity
from octavo.serve.output import Delta
from octavo.serve.prompts import Prompt
from octavo.serve.timing import Visit
from octavo.serve.types import FINISH_LENGTH, FINISH_STOP, Request, TokenEvent

FINISH_TOOL_CALLS = "tool_calls"


@dataclass(slots=True)
class SplitAnswer:
    """What came out of one sample so far.

    Attributes:
        events: what was kept for an answer that isn't streamed.
        tokens: tokens read.
        reasoning_tokens: of them, those read while the splitter was inside a think block.
        finish_reason: as the client is told, once the sample has ended.
    """

    splitter: AnswerSplitter
    events: list[AnswerEvent] = field(default_factory=list)
    tokens: int = 0
    reasoning_tokens: int = 0
    finish_reason: str | None = None


class SplitGeneration(Generation):
    """Runs choices whose text is taken apart."""

    def __init__(
        self,
        client: EngineClient,
        recorder: Recorder,
        table: TokenTable | None,
        identity: Identity,
        wanted: Wanted,
        visit: Visit,
        plan: AnswerPlan,
    ) -> None:
        super().__init__(client, recorder, table, identity, wanted, visit)
        self._plan = plan
        self._answers: list[SplitAnswer] = []

    def add(self, prompt: Prompt, request: Request) -> None:
        """One more sample; index is the order of adding."""
        super().add(prompt, request)
        self._answers.append(SplitAnswer(self._plan.splitter()))

    def _forget(self, choice: Choice) -> None:
        super()._forget(choice)
        self._answers[choice.index] = SplitAnswer(self._plan.splitter())

    def split(self, choice: Choice, delta: Delta) -> list[AnswerEvent]:
        """The events of a delta. Ends the sample once nothing that follows counts.

        Tokens that came together with the last that counts are as if they had not been drawn.
        """
        answer = self._answers[choice.index]
        answer.tokens += 1
        inside = answer.splitter.reasoning
        events = answer.splitter.push(delta.text, last=delta.finish_reason is not None)
        answer.reasoning_tokens += inside or answer.splitter.reasoning
        reason = delta.finish_reason
        if answer.splitter.done and reason in (None, FINISH_LENGTH):
            sample = choice.sample
            sample.completion_tokens = min(sample.completion_tokens, answer.tokens)
            self._end(choice)
            reason = FINISH_STOP
        called = answer.splitter.calls > 0 and not self._plan.forced
        answer.finish_reason = FINISH_TOOL_CALLS if reason == FINISH_STOP and called else reason
        return events

    def _end(self, choice: Choice) -> None:
        """End a sample whose calls are complete, unless it ended by itself in the same event."""
        if self._running.pop(choice.request.request_id, None) is None:
            return
        assert self.call is not None
        self.call.finish(choice.request.request_id)
        self._settle(choice, FINISH_STOP)

    def _keep(self, choice: Choice, delta: Delta) -> None:
        answer = self._answers[choice.index]
        if answer.finish_reason is not None:
            return
        super()._keep(choice, delta)
        answer.events += self.split(choice, delta)

    def _render(self, event: TokenEvent) -> bytes:
        body = b""
        for choice, delta in self._advance(event):
            if self._answers[choice.index].finish_reason is None:
                body += self._written(choice, delta)
        return body

    def _written(self, choice: Choice, delta: Delta) -> bytes:
        """What a stream says of a delta of a sample that goes on."""
        greeting = b"" if choice.index in self._greeted else self._greet(choice)
        return greeting + self._chunk(choice, delta, self.split(choice, delta))

    def _chunk(self, choice: Choice, delta: Delta, events: list[AnswerEvent]) -> bytes:
        writer, reason = self._writers[choice.index], self._answers[choice.index].finish_reason
        fields = delta_fields(events)
        if not fields and reason is None and not delta.tokens:
            return b""
        if reason is None and not delta.tokens and fields.keys() == {"content"}:
            return writer.text(fields["content"])
        return writer.delta(
            fields,
            finish_reason=reason,
            stop_reason=delta.stop_reason,
            **self._detail(choice, delta),
        )

    def _chat_choice(self, choice: Choice) -> dict[str, Any]:
        out = super()._chat_choice(choice)
        answer = self._answers[choice.index]
        message = out["message"]
        fields = delta_fields(answer.events)
        message["content"] = fields.get("content", None if "tool_calls" in fields else "")
        if "tool_calls" in fields:
            for call in fields["tool_calls"]:
                del call["index"]
            message["tool_calls"] = fields["tool_calls"]
        if self._plan.reasoning:
            message["reasoning_content"] = fields.get("reasoning_content")
        out["finish_reason"] = answer.finish_reason
        return out

    def usage(self) -> dict[str, Any]:
        """As elsewhere; with the tokens of reasoning if it is taken out."""
        out = super().usage()
        if self._plan.reasoning:
            count = sum(answer.reasoning_tokens for answer in self._answers)
            out["completion_tokens_details"] = {"reasoning_tokens": count}
        return out


def delta_fields(events: list[AnswerEvent]) -> dict[str, Any]:
    """The `delta` of a chat chunk that carries `events`; of all events, the message."""
    texts: dict[str, list[str]] = {}
    calls: dict[int, dict[str, Any]] = {}
    arguments: dict[int, list[str]] = {}
    for event in events:
        match event:
            case ContentDelta(text):
                texts.setdefault("content", []).append(text)
            case ReasoningDelta(text):
                texts.setdefault("reasoning_content", []).append(text)
            case CallStart(index, id_, name):
                calls[index] = {"index": index, "id": id_, "type": "function"}
                calls[index]["function"] = {"name": name}
                arguments[index] = []
            case CallArguments(index, text):
                calls.setdefault(index, {"index": index, "function": {}})
                arguments.setdefault(index, []).append(text)
    for index, parts in arguments.items():
        calls[index]["function"]["arguments"] = "".join(parts)
    fields: dict[str, Any] = {name: "".join(parts) for name, parts in texts.items()}
    return fields | ({"tool_calls": list(calls.values())} if calls else {})
