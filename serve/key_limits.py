"""What the holders of API keys may use: requests a minute, and at once.

A key's use is counted in one place. With several API processes that is their parent: a process
asks it for each request and tells it when the request is over, and what a process holds that dies
is given back, however it died. Time is the monotonic clock's, which the date's changes don't move.
"""

import asyncio
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from octavo.serve import errors

CONCURRENCY_RETRY_SECONDS = 1.0
ANSWER_SECONDS = 5.0
"""How long the parent, which does little else, may take for an answer."""

type Leave = Callable[[], None]
"""To be called when the request that was let in is over."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key. `per_minute` and `concurrency` are its requests at most; 0 is no limit."""

    name: str
    digest: bytes
    per_minute: int = 0
    concurrency: int = 0


class Ask(msgspec.Struct, tag="ask"):
    """May a request with this key in? `ticket` is its number in the process that asks."""

    ticket: int
    name: str
    per_minute: int
    concurrency: int


class Over(msgspec.Struct, tag="over"):
    """The request with this ticket is over, or its process has stopped waiting for a verdict."""

    ticket: int


class Verdict(msgspec.Struct, tag="verdict"):
    """The answer to an Ask: refused for the reason `text`, or let in where that is empty."""

    ticket: int
    text: str = ""
    retry_after: float = 0.0


class _Use:
    """What one key's holder is using: requests that run, and those spent of a minute's."""

    def __init__(self, now: float) -> None:
        self.running = 0
        self.spent = 0.0
        self.since = now


class KeyLimits:
    """Counts requests in and out. A minute's requests may come at once; they refill evenly."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._uses: dict[str, _Use] = {}

    def enter(self, ask: Ask) -> Verdict:
        """Count a request in, if the limits that come with it allow that now."""
        now = self._clock()
        use = self._uses.setdefault(ask.name, _Use(now))
        if ask.concurrency and use.running >= ask.concurrency:
            text = f"API key {ask.name!r} has {use.running} requests running, its limit"
            return Verdict(ask.ticket, text, CONCURRENCY_RETRY_SECONDS)
        if ask.per_minute:
            rate = ask.per_minute / 60
            use.spent = max(0.0, use.spent - max(0.0, now - use.since) * rate)
            use.since = now
            if use.spent + 1 > ask.per_minute:
                text = f"API key {ask.name!r} may send {ask.per_minute} requests a minute"
                return Verdict(ask.ticket, text, (use.spent + 1 - ask.per_minute) / rate)
            use.spent += 1
        use.running += 1
        return Verdict(ask.ticket)

    def leave(self, name: str) -> None:
        """A request that was let in is over."""
        self._uses[name].running -= 1


class Holder:
    """What one process has been let in with, so that it can be given back with the process."""

    def __init__(self, limits: KeyLimits) -> None:
        self._limits = limits
        self._held: dict[int, str] = {}

    def enter(self, ask: Ask) -> Verdict:
        """As KeyLimits."""
        verdict = self._limits.enter(ask)
        if not verdict.text:
            self._held[ask.ticket] = ask.name
        return verdict

    def over(self, ticket: int) -> None:
        """A request is over; nothing if it was not let in."""
        name = self._held.pop(ticket, None)
        if name is not None:
            self._limits.leave(name)

    def close(self) -> None:
        """The process has ended."""
        for ticket in list(self._held):
            self.over(ticket)


class Doorman:
    """Lets requests in by the verdict of whoever `send` reaches; `answered` takes the verdicts."""

    def __init__(self, send: Callable[[Ask | Over], None]) -> None:
        self._send = send
        self._tickets = itertools.count()
        self._waiting: dict[int, asyncio.Future[Verdict]] = {}

    async def enter(self, key: ApiKey) -> Leave:
        """Let a request in; ApiError 429 when its key's limits don't allow it now.

        ApiError 503 when no verdict comes within ANSWER_SECONDS. A key without limits is counted,
        in case it gets some, and not waited for.
        """
        ticket = next(self._tickets)
        ask = Ask(ticket, key.name, key.per_minute, key.concurrency)
        if not key.per_minute and not key.concurrency:
            self._send(ask)
            return lambda: self._send(Over(ticket))
        self._waiting[ticket] = asyncio.get_running_loop().create_future()
        try:
            self._send(ask)
            async with asyncio.timeout(ANSWER_SECONDS):
                verdict = await self._waiting[ticket]
        except TimeoutError:
            self._send(Over(ticket))
            raise errors.unavailable("the limits of API keys can't be looked up") from None
        except BaseException:
            self._send(Over(ticket))
            raise
        finally:
            del self._waiting[ticket]
        if verdict.text:
            raise errors.overloaded(verdict.text, verdict.retry_after)
        return lambda: self._send(Over(ticket))

    def answered(self, verdict: Verdict) -> None:
        """A verdict has come; nobody may wait for it any more."""
        waiting = self._waiting.get(verdict.ticket)
        if waiting is not None and not waiting.done():
            waiting.set_result(verdict)


def alone(clock: Callable[[], float]) -> Doorman:
    """A doorman of a process that counts for itself."""
    holder = Holder(KeyLimits(clock))

    def send(message: Ask | Over) -> None:
        if isinstance(message, Ask):
            doorman.answered(holder.enter(message))
        else:
            holder.over(message.ticket)

    doorman = Doorman(send)
    return doorman
