"""Engine events to text: what one sample gained, with stop strings and log-probabilities settled.

Used by `octavo.LLM` and by the server. A stop string is seen here and nowhere else, so the caller
must abort the request in the engine when a sample ends here first (`OutputProcessor.process` and
`SampleOutput.ended_early` tell).
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from octavo.sampling.params import SamplingParams
from octavo.serve.detokenize import Detokenizer, StopMatcher, TextDecoder, TokenTable
from octavo.serve.types import FINISH_STOP, Request, TokenEvent, TokenLogprob


@dataclass(slots=True)
class TokenText:
    """One generated token beside the slice of the output text it stands for.

    The slices of all tokens joined are the output text: a token that ends inside a character has
    "" and the one that completes it has the whole; a token cut by a stop string has what is left.

    Attributes:
        token_id: the token.
        text: its slice of the output.
        start: where the slice starts, in characters from the start of the output.
        logprob: when asked for.
    """

    token_id: int
    text: str
    start: int
    logprob: TokenLogprob | None


@dataclass(slots=True)
class Delta:
    """What a sample gained by one token, and how it ended if it did.

    Attributes:
        text: new characters that no stop string can take back.
        tokens: tokens whose text is settled, when tracked; all are reported by the end.
        finish_reason: "stop", "length", "abort", "error" or None.
        stop_reason: the stop string, or the stop id that isn't an end-of-sequence id.
        error: message when finish_reason is "error".
    """

    text: str = ""
    tokens: list[TokenText] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None


class SampleOutput:
    """State of one sample between engine events.

    Attributes:
        completion_tokens: tokens billed: those up to the end, stop token included.
        cached_tokens: prompt tokens that came from the prefix cache.
        prompt_logprobs: of the prompt's tokens, once the engine reported them.
        finish_reason: set when the sample has ended.
        ended_early: a stop string ended it, so the engine still runs it.
    """

    def __init__(
        self,
        params: SamplingParams,
        table: TokenTable | None,
        *,
        track: bool = False,
        eos_ids: Iterable[int] = (),
        shown: frozenset[int] = frozenset(),
    ) -> None:
        skip = params.skip_special_tokens
        self._detokenizer = (
            Detokenizer(table, skip_special_tokens=skip, shown=shown) if table else None
        )
        self._matcher = StopMatcher(params.stop) if params.stop else None
        self._params = params
        self._track = track
        self._eos_ids = frozenset(eos_ids)
        self._fed = 0
        self._held = ""
        self._waiting: deque[TokenText] = deque()
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.preemptions = 0
        self.prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
        self.finish_reason: str | None = None
        self.ended_early = False

    def push(self, event: TokenEvent) -> list[Delta]:
        """The deltas of one event, one a token; tokens past a stop string are dropped."""
        if self.finish_reason is not None:
            return []
        self.cached_tokens = max(self.cached_tokens, event.cached_tokens)
        self.preemptions = event.preemptions
        if event.prompt_logprobs is not None:
            self.prompt_logprobs = event.prompt_logprobs
        deltas: list[Delta] = []
        last = len(event.token_ids) - 1
        for i, token_id in enumerate(event.token_ids):
            logprob = event.logprobs[i] if event.logprobs else None
            ending = event if i == last and event.finish_reason is not None else None
            deltas.append(self._token(token_id, logprob, ending))
            if self.finish_reason is not None:
                return deltas
        if event.finish_reason is not None:
            deltas.append(self._end(self._flush(), event))
        return deltas

    def _token(
        self, token_id: int, logprob: TokenLogprob | None, ending: TokenEvent | None
    ) -> Delta:
        self.completion_tokens += 1
        stops = ending is not None and ending.stop_token is not None
        text = ""
        if self._detokenizer and not (stops and not self._params.include_stop_str_in_output):
            text = self._detokenizer.push(token_id)
        if ending is not None:
            text += self._flush()
        if self._track:
            self._waiting.append(TokenText(token_id, text, self._fed, logprob))
        if ending is not None:
            return self._end(text, ending)
        return self._grow(text)

    def _flush(self) -> str:
        return self._detokenizer.flush() if self._detokenizer else ""

    def _grow(self, text: str) -> Delta:
        if self._matcher is None:
            self._fed += len(text)
            return Delta(text, self._release(self._fed) if self._track else [])
        match = self._search(text)
        if match is not None:
            return self._cut(*match)
        safe = self._fed - self._matcher.held
        return Delta(self._take(safe), self._release(safe) if self._track else [])

    def _end(self, text: str, event: TokenEvent) -> Delta:
        match = self._search(text)
        if match is not None:
            delta = self._cut(*match)
            self.ended_early = False
            return delta
        self.finish_reason = event.finish_reason
        stop = None if event.stop_token in self._eos_ids else event.stop_token
        rest = self._take(self._fed)
        return Delta(rest, self._release(None), event.finish_reason, stop, event.error)

    def _search(self, text: str) -> tuple[int, int, str] | None:
        """Account for new text; a stop string counts only behind the first min_tokens tokens."""
        self._held += text
        self._fed += len(text)
        if self._matcher is None:
            return None
        if self.completion_tokens <= self._params.min_tokens:
            self._matcher = StopMatcher(self._params.stop, self._fed)
            return None
        return self._matcher.feed(text)

    def _cut(self, start: int, end: int, stop: str) -> Delta:
        """End at a stop string; everything behind the cut is dropped."""
        self.finish_reason = FINISH_STOP
        self.ended_early = True
        cut = end if self._params.include_stop_str_in_output else start
        text = self._take(cut)
        return Delta(text, self._release(None, cut), FINISH_STOP, stop)

    def _take(self, upto: int) -> str:
        """Move held text up to offset `upto` out."""
        count = upto - (self._fed - len(self._held))
        text, self._held = self._held[:count], self._held[count:]
        return text

    def _release(self, upto: int | None, cut: int | None = None) -> list[TokenText]:
        """Tokens whose text lies before `upto` (None: all of them, shortened to `cut`)."""
        out: list[TokenText] = []
        while self._waiting:
            token = self._waiting[0]
            if upto is not None and token.start + len(token.text) > upto:
                break
            if cut is not None:
                token.text = token.text[: max(0, cut - token.start)]
                token.start = min(token.start, cut)
            out.append(self._waiting.popleft())
        return out


class OutputProcessor:
    """Samples by request id: feed it every event of the engine, abort what it names."""

    def __init__(self, tokenizer: TextDecoder | None) -> None:
        self._table = TokenTable(tokenizer) if tokenizer else None
        self._samples: dict[str, SampleOutput] = {}

    def add(self, request: Request, *, track: bool | None = None) -> SampleOutput:
        """Follow `request`. Tokens are tracked when asked, by default when it wants logprobs.

        Raises ValueError for stop strings without a tokenizer: they could never be seen.
        """
        params = request.params
        if params.stop and self._table is None:
            raise ValueError("stop: stop strings need a tokenizer, and this model has none")
        if track is None:
            track = params.logprobs is not None
        sample = SampleOutput(params, self._table, track=track, eos_ids=request.eos_ids)
        self._samples[request.request_id] = sample
        return sample

    def follows(self, request_id: str) -> bool:
        """Whether the request has neither ended nor been discarded."""
        return request_id in self._samples

    def discard(self, request_id: str) -> None:
        """Forget a request; its later events are ignored."""
        self._samples.pop(request_id, None)

    def process(self, events: Iterable[TokenEvent]) -> tuple[list[tuple[str, Delta]], list[str]]:
        """Deltas in order with their request ids, and the ids that the engine must abort now."""
        deltas: list[tuple[str, Delta]] = []
        aborts: list[str] = []
        for event in events:
            sample = self._samples.get(event.request_id)
            if sample is None:
                continue
            deltas.extend((event.request_id, delta) for delta in sample.push(event))
            if sample.finish_reason is not None:
                self.discard(event.request_id)
                if sample.ended_early:
                    aborts.append(event.request_id)
        return deltas, aborts
