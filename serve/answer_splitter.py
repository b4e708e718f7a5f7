"""An answer to content, reasoning and calls: the reasoning parser in front of the tool parser."""

from octavo.serve.answer_parser import AnswerEvent, AnswerParser, ContentDelta, ReasoningDelta
from octavo.serve.reasoning import ThinkParser
from octavo.serve.required_calls import RequiredCalls


class AnswerSplitter:
    """One answer going through the parsers it needs; without either it is all content."""

    def __init__(
        self,
        think: ThinkParser | None,
        tools: AnswerParser | RequiredCalls | None,
        *,
        keep_reasoning: bool = True,
    ) -> None:
        """`keep_reasoning`: reasoning is reported, not only taken out."""
        self._think = think
        self._tools = tools
        self._keep_reasoning = keep_reasoning
        self._start = self._passed = 0  # of the content, and how much of it has been passed on

    @property
    def done(self) -> bool:
        """Nothing that follows counts."""
        return self._tools is not None and self._tools.done

    @property
    def calls(self) -> int:
        """Tool calls begun."""
        return self._tools.calls if self._tools is not None else 0

    @property
    def reasoning(self) -> bool:
        """The text now read is reasoning."""
        return self._think is not None and self._think.reasoning

    def push(self, text: str, *, last: bool = False) -> list[AnswerEvent]:
        """Events that are certain once `text` is known; all that remain when it is the last."""
        if self._think is None:
            return self._to_tools(text, last)
        events = self._think.push(text)
        if last:
            events += self._think.finish()
        content = [event for event in events if isinstance(event, ContentDelta)]
        if content and not self._passed:
            self._start = content[0].start  # behind the reasoning it goes on without a gap
        kept = [event for event in events if isinstance(event, ReasoningDelta)]
        found = self._to_tools("".join(event.text for event in content), last)
        return [*(kept if self._keep_reasoning else ()), *found]

    def _to_tools(self, text: str, last: bool) -> list[AnswerEvent]:
        at, self._passed = self._start + self._passed, self._passed + len(text)
        if self._tools is None:
            return [ContentDelta(text, at)] if text else []
        events = self._tools.push(text)
        events += self._tools.finish() if last else []
        for event in events:
            if isinstance(event, ContentDelta):
                event.start += self._start
        return events
