"""Panics of native libraries as ordinary errors."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def panics_are_errors(whose: str) -> Iterator[None]:
    """A panic of `whose` Rust code inside the block is raised as a RuntimeError.

    pyo3's PanicException is no Exception, so that nothing which keeps one request's failure from
    the others would stop it; nor can its type be imported.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise RuntimeError(f"{whose} failed: {error}") from error
