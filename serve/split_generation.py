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
from octavo.serve.client import EngineClient
from octavo.serve.detokenize import TokenTable
from octavo.serve.generation import Choice, Generation, Wanted
from octavo.serve.metrics import Recorder
from octavo.serve.output import Delta
from octavo.serve.prompts import Prompt
from octavo.serve.responses import Identity
from octavo.serve.timing import Visit
from octavo.serve.types import FINISH_STOP, Request, TokenEvent

FINISH_TOOL_CALLS = "tool_calls"


@dataclass(slots=True)
class SplitAnswer:
    """What came out of one sample so far.

    Attributes:
        reasoning_tokens: tokens read while the splitter was inside a think block.
        finish_reason: as the client is told, once the sample has ended.
    """

    splitter: AnswerSplitter
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    reasoning_tokens: int = 0
    finish_reason: str | None = None

    def keep(self, events: list[AnswerEvent]) -> None:
        """Add events to the answer."""
        for event in events:
            match event:
                case ContentDelta(text):
                    self.content.append(text)
                case ReasoningDelta(text):
                    self.reasoning.append(text)
                case CallStart(_, id_, name):
                    function = {"name": name, "arguments": ""}
                    self.calls.append({"id": id_, "type": "function", "function": function})
                case CallArguments(index, text):
                    self.calls[index]["function"]["arguments"] += text


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

    def split(self, choice: Choice, delta: Delta) -> list[AnswerEvent]:
        """The events of a delta. Ends the sample once nothing that follows counts."""
        answer = self._answers[choice.index]
        inside = answer.splitter.reasoning
        events = answer.splitter.push(delta.text, last=delta.finish_reason is not None)
        answer.reasoning_tokens += inside or answer.splitter.reasoning
        reason = delta.finish_reason
        if reason is None and answer.splitter.done:
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
        answer.keep(self.split(choice, delta))

    def _render(self, event: TokenEvent) -> bytes:
        body = b""
        for choice, delta in self._advance(event):
            answer = self._answers[choice.index]
            if answer.finish_reason is not None:
                continue
            if choice.index not in self._greeted:
                body += self._greet(choice)
            body += self._chunk(choice, delta, self.split(choice, delta))
        return body

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
        message["content"] = "".join(answer.content)
        if answer.calls:
            message["tool_calls"] = answer.calls
            message["content"] = message["content"] or None
        if self._plan.reasoning:
            message["reasoning_content"] = "".join(answer.reasoning) or None
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
    """The `delta` of a chat chunk that carries `events`."""
    fields: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for event in events:
        match event:
            case ContentDelta(text):
                fields["content"] = fields.get("content", "") + text
            case ReasoningDelta(text):
                fields["reasoning_content"] = fields.get("reasoning_content", "") + text
            case CallStart(index, id_, name):
                function = {"name": name, "arguments": ""}
                calls[index] = {
                    "index": index,
                    "id": id_,
                    "type": "function",
                    "function": function,
                }
            case CallArguments(index, text):
                call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                call["function"]["arguments"] += text
    if calls:
        fields["tool_calls"] = list(calls.values())
    return fields
