"""How many tokens a step holds in which requests decode. No jax, no clock."""

from bisect import bisect_right
from collections.abc import Callable, Sequence

FULL_ROWS = 256
"""Decoding rows from which on a step holds no more than `MixedSteps.least`."""

STEP_OPERATIONS = 9.6e12
"""FLOP of such a step: about 14 ms of one H200, two to three decode steps of an 8B model."""


class MixedSteps:
    """Keeps steps short that many requests decode in.

    A step's time grows with its tokens, from some hundred on in proportion: a longer step gets no
    more done in a second, and every row that decodes gets one token of it all the same. With
    FULL_ROWS rows a step therefore holds `least` tokens; the fewer wait for it the more it may
    hold, in inverse proportion, and prompts are through sooner. It is a class of tokens, as
    others would be padded, and at most two thirds of it are rows that decode.

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
        wanted = max(self.least, self.least * FULL_ROWS // decode_rows, decode_rows * 3 // 2)
        return self._classes[max(bisect_right(self._classes, wanted) - 1, 0)] - decode_rows


def least_tokens(weights: int, devices: int) -> int:
    """`least` for a model of so many parameters in its layers' products, shared by `devices`."""
    return int(STEP_OPERATIONS * devices / (2 * weights))
