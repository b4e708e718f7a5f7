"""How many tokens a step holds in which requests decode. No jax, no clock."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence

from octavo.serve.buckets import LEAST_COST

FULL_ROWS = 256
"""Decoding rows from which on a step holds no more than `MixedSteps.least`."""

ROWS_SHARE = 0.8
"""Of a step's tokens, at most; all but the largest class leave prompts the rest."""

STEP_OPERATIONS = 9.6e12
"""FLOP of such a step: about 14 ms of one H200, two to three decode steps of an 8B model."""


class MixedSteps:
    """Keeps steps short that many requests decode in.

    A step's time grows with its tokens, from some hundred on in proportion: a longer step gets no
    more done in a second, and every row that decodes gets one token of it all the same. With
    FULL_ROWS rows a step therefore holds `least` tokens; the fewer wait for it the more it may
    hold, in inverse proportion, and prompts are through sooner. It is a class of tokens, as
    others would be padded, and at most ROWS_SHARE of it are rows that decode: prompts come through
    however small `least` is.

    Offline nobody waits for a token, but all wait for the last. Steps are short only while a row
    that decodes has more to go than any that has yet to begin: then these can be fitted in beside
    it. Otherwise what has yet to begin is what the end waits for, and begins as soon as it can.

    Args:
        least: tokens of a step of FULL_ROWS decoding rows or more.
        classes: token counts that steps are padded to, ascending.
        serving: whether somebody waits for each token.
    """

    def __init__(self, least: int, classes: Sequence[int], *, serving: bool) -> None:
        self.least = least
        self._classes, self._serving = tuple(classes), serving

    def prefill_tokens(self, decode_rows: int, lead: Callable[[], int]) -> int:
        """Prompt tokens for a step with so many decode rows; `lead` is `Rows.lead`."""
        if decode_rows == 0 or not (self._serving or lead() > 0):
            return self._classes[-1]
        wanted = max(self.least, self.least * FULL_ROWS // decode_rows)
        allowed = bisect_right(self._classes, wanted) - 1
        needed = bisect_left(self._classes, decode_rows / ROWS_SHARE)
        return self._classes[min(max(allowed, needed), len(self._classes) - 1)] - decode_rows


def least_tokens(weights: int, devices: int) -> int:
    """`least` for a model of so many parameters in its layers' products, shared by `devices`.

    Fewer than LEAST_COST would not shorten the step.
    """
    return max(int(STEP_OPERATIONS * devices / (2 * weights)), LEAST_COST)
