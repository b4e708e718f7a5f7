"""Logging that can't take the server down: lines are written by a thread, and may be lost.

A full disk, a closed pipe or a reader that has stalled costs lines and nothing else: the queue to
the writing thread is bounded, and what doesn't fit or can't be written is counted and dropped.
Lines go to the file descriptor itself: a text stream keeps what it could not write, and Python
fails or blocks on that at exit.
"""

import contextlib
import logging
import os
import queue
import threading

STDOUT, STDERR = 1, 2
QUEUE_LINES = 4096
FLUSH_SECONDS = 1.0

CHATTY = ("jax._src.xla_bridge", "absl")
"""At info these tell of every kind of device that isn't there, and of each stage of Orbax."""


class OneLine(logging.Formatter):
    """A message is one line, whatever came into it: a path may hold line breaks and escape codes.

    A traceback follows on lines of its own.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line, its control characters spelled out."""
        return super().formatMessage(record).translate(_SPELLED)


_SPELLED = {i: repr(chr(i))[1:-1] for i in (*range(32), *range(127, 160), 0x2028, 0x2029)}


class LossyHandler(logging.Handler):
    """Hands formatted lines to a thread that writes them to the file descriptor `fd`.

    Attributes:
        lost: lines that could not be queued or written.
    """

    def __init__(self, fd: int) -> None:
        super().__init__()
        self.lost = 0
        self._fd = fd
        self._lines: queue.Queue[str | None] = queue.Queue(QUEUE_LINES)
        self._thread = threading.Thread(target=self._write, name="log-writer", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a line; never blocks, never raises."""
        try:
            self._lines.put_nowait(self.format(record))
        except Exception:  # a full queue, or a record that can't be formatted
            self.lost += 1

    def close(self) -> None:
        """Write what is queued, for FLUSH_SECONDS at most."""
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(None)
            self._thread.join(FLUSH_SECONDS)
        super().close()

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            if not write_line(self._fd, line):
                self.lost += 1


def configure(level: str) -> None:
    """Send this process's log records of `level` and above to standard error."""
    handler = LossyHandler(STDERR)
    handler.setFormatter(OneLine("%(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    if root.level >= logging.INFO:
        for name in CHATTY:
            logging.getLogger(name).setLevel(max(root.level, logging.WARNING))


def write_line(fd: int, text: str) -> bool:
    """Write a line; False when that is impossible (disk full, pipe closed)."""
    data = (text + "\n").encode(errors="backslashreplace")
    try:
        while data:
            data = data[os.write(fd, data) :]
    except OSError:
        return False
    return True
