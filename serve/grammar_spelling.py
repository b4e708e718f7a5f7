"""What a grammar forces, in tokens that it takes. No jax.

Where a single text may follow, llguidance allows the one token with which the model's tokenizer
would begin it. One that normalises texts, puts a space before them or has a tag as one token gives
tokens of other bytes than the text's, none of which the grammar takes: every request that comes
there would fail. Such a text is spelled by a byte until the library's token fits again.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


class Spelling:
    """Looks at what the library forces. `tokenizer` gives the model's tokens."""

    def __init__(self, tokenizer: Callable[[], "LLTokenizer"]) -> None:
        self._tokenizer = tokenizer

    def forced(self, matcher: "LLMatcher") -> Sequence[int]:
        """Tokens that must follow, one by one the only ones allowed."""
        tokens = matcher.compute_ff_tokens()
        if not tokens:
            return ()
        fit = matcher.validate_tokens(tokens)
        return tokens[:fit] or self._first_byte(matcher)

    def correct(self, matcher: "LLMatcher", mask: np.ndarray) -> None:
        """Have a mask u32[words] of one token allow another, where the grammar takes that alone."""
        word = int(mask.argmax())
        token = word * 32 + int(mask[word]).bit_length() - 1
        if matcher.validate_tokens([token]):
            return
        for other in self._first_byte(matcher):
            mask[word] = 0
            mask[other // 32] = np.uint32(1 << other % 32)

    def _first_byte(self, matcher: "LLMatcher") -> tuple[int, ...]:
        """The token of the forced text's first byte; none if there is no such text or token."""
        text = matcher.compute_ff_bytes()
        token = self._bytes.get(text[:1])
        return () if token is None else (token,)

    @cached_property
    def _bytes(self) -> dict[bytes, int]:
        """Tokens of one byte."""
        tokenizer = self._tokenizer()
        texts = ((tokenizer.decode_bytes([token]), token) for token in range(tokenizer.vocab_size))
        return {text: token for text, token in texts if len(text) == 1}
