"""A device without a model: its cache cells hash the prefix they were computed from.

A cell's content is a hash of the previous cell (read through the row's block table) and the cell's
token, so wrong pages, stale pages and wrong positions all change the tokens drawn later.
A token is a function of that hash and of the tokens drawn before it as the slot's state holds them.
"""

from collections import deque
from dataclasses import dataclass, field

from octavo.serve.scheduler import Scheduler
from octavo.serve.types import (
    Request,
    RowResult,
    ScheduledBatch,
    ScheduledRow,
    TokenEvent,
    TokenLogprob,
)

VOCAB = 17
ROOT = 1


def mix(*values: int) -> int:
    """A 61-bit hash that does not depend on the process."""
    state = 0x1234567
    for value in values:
        state = (state * 6364136223846793005 + value * 1442695040888963407 + 1) % (2**61 - 1)
        state ^= state >> 29
    return state


def draw(request: Request, cell: int, drawn: list[int]) -> int:
    """The next token after `cell`, never a stop id before min_tokens."""
    value = mix(cell, request.params.seed or 0, request.sample_index, *drawn)
    for attempt in range(1000):
        token = mix(value, attempt) % VOCAB
        if len(drawn) >= request.params.min_tokens or token not in request.stop_ids:
            return token
    raise AssertionError("every token is a stop id")


def prompt_logprob(token: int, cell: int) -> TokenLogprob:
    """What the cell before a prompt token says of it."""
    return TokenLogprob(token, -float(mix(cell, token) % 1000), 1)


@dataclass
class Answer:
    """A request's whole result."""

    tokens: list[int] = field(default_factory=list)
    reason: str | None = None
    prompt_logprobs: tuple | None = None


def alone(request: Request, epoch: int = 0) -> Answer:
    """What the request must yield, computed without pages, batches or a scheduler."""
    cell = ROOT + epoch
    logprobs: list[TokenLogprob | None] = [None]
    for index, token in enumerate(request.prompt):
        if index:
            logprobs.append(prompt_logprob(token, cell))
        cell = mix(cell, token)
    answer = Answer(reason="length")
    if request.params.prompt_logprobs is not None:
        answer.prompt_logprobs = tuple(logprobs)
    while len(answer.tokens) < request.params.max_tokens:
        token = draw(request, cell, answer.tokens)
        answer.tokens.append(token)
        if token in request.stop_ids:
            answer.reason = "stop"
            break
        cell = mix(cell, token)
    return answer


@dataclass
class Slot:
    """Device state of a row slot."""

    drawn: list[int] = field(default_factory=list)
    stopped: bool = False


class FakeDevice:
    """Runs batches in order; results are ready at once, the loop decides when to read them."""

    def __init__(self, page_size: int, epoch: int = 0) -> None:
        self.page_size = page_size
        self.epoch = epoch
        self.cells: dict[tuple[int, int], int] = {}
        self.slots: dict[int, Slot] = {}
        self.poisoned: set[str] = set()
        self.computed = 0

    def run(self, batch: ScheduledBatch) -> list[RowResult]:
        """Execute one dispatch."""
        rows = batch.rows
        assert len({row.slot for row in rows}) == len(rows)
        assert len({row.request_id for row in rows}) == len(rows)
        assert batch.num_steps == max(row.num_steps for row in rows)
        assert batch.num_steps == 1 or batch.is_decode
        results = [self._first_step(row) for row in rows]
        for step in range(1, batch.num_steps):
            for row, result in zip(rows, results):
                if step < row.num_steps and not self.slots[row.slot].stopped:
                    self._decode(row, row.start + step, result)
        for row, result in zip(rows, results):
            if row.request_id in self.poisoned:
                result.token_ids, result.error = (), "NaN logits"
        return results

    def _first_step(self, row: ScheduledRow) -> RowResult:
        self._check_row(row)
        if row.reset:
            self.slots[row.slot] = Slot(list(row.emitted))
        slot, result = self.slots[row.slot], RowResult()
        if slot.stopped:
            # It stopped in the dispatch before: rubbish on its own pages, for nobody.
            self.cells[self._place(row, row.start)] = -1
            result.token_ids = (0,)
            return result
        if row.from_previous:
            self._decode(row, row.start, result)
            return result
        prompt, wanted = row.request.prompt, row.request.params.prompt_logprobs is not None
        entries = []
        for position, token in enumerate(row.tokens, row.start):
            cell = self._write(row, position, token)
            if wanted and position + 1 < len(prompt):
                entries.append(prompt_logprob(prompt[position + 1], cell))
        result.prompt_logprobs = tuple(entries)
        if row.samples:
            assert len(slot.drawn) == row.generated
            self._sample(row, cell, result)
        return result

    def _decode(self, row: ScheduledRow, position: int, result: RowResult) -> None:
        self._sample(row, self._write(row, position, self.slots[row.slot].drawn[-1]), result)

    def _sample(self, row: ScheduledRow, cell: int, result: RowResult) -> None:
        slot = self.slots[row.slot]
        token = draw(row.request, cell, slot.drawn)
        slot.drawn.append(token)
        slot.stopped = slot.stopped or token in row.request.stop_ids
        result.token_ids += (token,)
        result.logprobs += (TokenLogprob(token, -1.0, 1),)

    def _write(self, row: ScheduledRow, position: int, token: int) -> int:
        cell = mix(self._cell(row, position - 1) if position else ROOT + self.epoch, token)
        self.cells[self._place(row, position)] = cell
        self.computed += 1
        return cell

    def _cell(self, row: ScheduledRow, position: int) -> int:
        return self.cells[self._place(row, position)]

    def _place(self, row: ScheduledRow, position: int) -> tuple[int, int]:
        return int(row.block_table[position // self.page_size]), position % self.page_size

    def _check_row(self, row: ScheduledRow) -> None:
        last = row.start + row.query_len + row.num_steps - 2
        assert len(row.block_table) > last // self.page_size
        assert (row.block_table > 0).all()
        assert row.query_len > 0
        assert row.num_steps > 0
        assert row.prompt_len == len(row.request.prompt)
        assert row.samples or row.num_steps == 1
        if row.from_previous:
            assert row.tokens == ()
            assert not row.reset


class Loop:
    """The engine's loop over a scheduler and a fake device, with every event collected."""

    def __init__(self, scheduler: Scheduler, epoch: int = 0) -> None:
        self.scheduler = scheduler
        self.device = FakeDevice(scheduler.config.page_size, epoch)
        self.requests: dict[str, Request] = {}
        self.answers: dict[str, Answer] = {}
        self.last: dict[str, TokenEvent] = {}
        self.batches: list[ScheduledBatch] = []
        self.order: list[str] = []
        self.now = 0.0
        self._in_flight: deque = deque()

    def add(self, request: Request) -> None:
        self.scheduler.add(request, self.now)
        self.requests[request.request_id] = request
        self.answers[request.request_id] = Answer()

    def step(self) -> list[TokenEvent]:
        """One dispatch, and one commit if the pipe is full or nothing could be dispatched."""
        batch = self.scheduler.schedule(self.now)
        if batch is not None:
            self.batches.append(batch)
            self._in_flight.append((batch, self.device.run(batch)))
        if not self._in_flight:
            return []
        if batch is not None and len(self._in_flight) < self.scheduler.config.max_in_flight:
            return []
        events = self.scheduler.commit(*self._in_flight.popleft(), self.now)
        for event in events:
            self._take(event)
        return events

    def abort(self, request_id: str) -> None:
        event = self.scheduler.abort(request_id)
        if event is not None:
            self._take(event)

    def drain(self, limit: int = 10_000) -> dict[str, Answer]:
        """Step until nothing is live; the answers of all requests so far."""
        for _ in range(limit):
            if not self.scheduler.has_work():
                return self.answers
            self.step()
        raise AssertionError(f"work is left after {limit} steps")

    def _take(self, event: TokenEvent) -> None:
        answer = self.answers[event.request_id]
        assert answer.reason is None, "news of an ended request"
        if event.prompt_logprobs is not None:
            assert answer.prompt_logprobs is None
            assert not answer.tokens
            answer.prompt_logprobs = event.prompt_logprobs
        assert [entry.token_id for entry in event.logprobs] == list(event.token_ids)
        answer.tokens.extend(event.token_ids)
        answer.reason = event.finish_reason
        self.last[event.request_id] = event
        if event.finish_reason is not None:
            self.order.append(event.request_id)
