"""Ctrl-C between engine steps instead of in the middle of one."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Hold a KeyboardInterrupt back until the block is done; a second Ctrl-C comes at once.

    An interrupt inside a step would leave a dispatched batch without its commit. Does nothing
    outside the main thread or where the program has its own handler.
    """
    default = signal.default_int_handler
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not default:
        yield
        return
    caught = False

    def note(signum: int, frame: FrameType | None) -> None:
        nonlocal caught
        if caught:
            raise KeyboardInterrupt
        caught = True

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, default)
    if caught:
        raise KeyboardInterrupt
