"""The event loop that servers and their clients run in."""

import asyncio


def loop_factory() -> type[asyncio.AbstractEventLoop]:
    """uvloop's event loop where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.SelectorEventLoop
    return uvloop.Loop
