"""Ctrl-C between engine steps instead of in the middle of one."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Deferral:
    """Ctrl-C that is held back.

    Attributes:
        count: how often it came.
    """

    def __init__(self) -> None:
        self.count = 0
        self._urgent = False

    @contextmanager
    def urgent(self) -> Iterator[None]:
        """In here a second Ctrl-C comes at once: what runs may take long."""
        self._urgent = True
        try:
            yield
        finally:
            self._urgent = False

    def note(self, signum: int, frame: FrameType | None) -> None:
        """Signal handler."""
        self.count += 1
        if self.count > 1 and self._urgent:
            self._urgent = False
            raise KeyboardInterrupt


@contextmanager
def interrupts_deferred() -> Iterator[Deferral]:
    """Hold KeyboardInterrupt back until the block is done.

    An interrupt inside would leave a batch without its commit or a request half admitted. Does
    nothing outside the main thread or where the program has its own handler.
    """
    default = signal.default_int_handler
    in_main = threading.current_thread() is threading.main_thread()
    deferral = Deferral()
    if not in_main or signal.getsignal(signal.SIGINT) is not default:
        yield deferral
        return
    signal.signal(signal.SIGINT, deferral.note)
    try:
        yield deferral
    finally:
        signal.signal(signal.SIGINT, default)
    if deferral.count:
        raise KeyboardInterrupt
