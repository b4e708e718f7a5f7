"""How long each stage of an engine's start took."""

import time
from collections.abc import Callable


class Timeline:
    """Seconds of one stage after the other, and how the programs came to be.

    Attributes:
        imports: seconds that the imports took before the start.
        seconds: of each stage, in order: device (jax meets its devices), weights (on their
            devices), sizes (temporaries measured, cache allocated), programs (loaded or compiled).
        compiled, loaded: numbers of programs.
    """

    def __init__(self, imports: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.imports = imports
        self.seconds: dict[str, float] = {}
        self.compiled = self.loaded = 0
        self._clock = clock
        self._last = clock()

    def ended(self, stage: str) -> None:
        """A stage ends now; the next begins."""
        now = self._clock()
        self.seconds[stage] = now - self._last
        self._last = now

    def __str__(self) -> str:
        """One line, for the log."""
        stages = ", ".join(f"{name} {seconds:.2f}" for name, seconds in self.seconds.items())
        return (
            f"ready in {sum(self.seconds.values()):.2f} s after {self.imports:.2f} s of imports: "
            f"{stages} ({self.compiled} compiled, {self.loaded} loaded)"
        )
