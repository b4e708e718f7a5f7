"""The short list of padded shapes that programs are compiled for, and the choice among them."""

from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise

HALVED_FROM, QUARTERED = 256, (512, 1024)
"""Powers of 2 from which a class lies between each and the next, and those where three do."""


FEWEST_DECODE_ROWS = 8
"""Smallest class of decode rows on a GPU: a step of fewer takes as long."""

LEAST_COST = 256
"""Tokens that a step costs at the least: reading the weights takes as long as computing so many."""


@dataclass(frozen=True, order=True)
class Bucket:
    """Padded shape of a step: T tokens, S rows, P pages a row, longest query of a row.

    max_query_len 1 is a decode step, where token r belongs to row r and tokens == rows.
    """

    tokens: int
    rows: int
    pages: int
    max_query_len: int

    @property
    def is_decode(self) -> bool:
        """Whether every row of the bucket holds one token."""
        return self.max_query_len == 1

    @property
    def label(self) -> str:
        """Kind and token places, for metrics: pages and rows pad no tokens."""
        return f"{'decode' if self.is_decode else 'mixed'}-{self.tokens}"


@dataclass(frozen=True)
class Buckets:
    """Classes of each dimension, ascending; the last of each is the engine's limit.

    Attributes:
        decode_rows: rows of a decode step.
        mixed_tokens: tokens of a step that holds prefill chunks.
        pages: pages of a row's block table (context classes).
        decode_pages: those of a decode step.
        max_num_seqs: rows of a step.
    """

    decode_rows: tuple[int, ...]
    mixed_tokens: tuple[int, ...]
    pages: tuple[int, ...]
    decode_pages: tuple[int, ...]
    max_num_seqs: int

    def decode(self, rows: int, pages: int) -> Bucket:
        """Smallest decode bucket for `rows` rows of up to `pages` pages."""
        size = _at_least(self.decode_rows, rows)
        return Bucket(size, size, _at_least(self.decode_pages, pages), 1)

    def mixed(self, tokens: int, rows: int, pages: int) -> Bucket:
        """Smallest mixed bucket for `tokens` tokens in `rows` rows of up to `pages` pages."""
        size = _at_least(self.mixed_tokens, max(tokens, rows))
        return Bucket(size, min(size, self.max_num_seqs), _at_least(self.pages, pages), size)

    def worthwhile(self, tokens: int, least: int, rows: int) -> int:
        """How many of `tokens` a mixed step should compute, `least` or more.

        Fewer than all if a smaller class holds all but a few, and these cost less in the next step,
        beside the `rows` that decode there anyway, than the padding of the larger class would.
        """
        smaller = self.mixed_tokens[: bisect_left(self.mixed_tokens, tokens)]
        if not smaller or smaller[-1] < least:
            return tokens
        rest = min(tokens - smaller[-1] + rows, self.mixed_tokens[-1])
        apart = smaller[-1] + max(_at_least(self.mixed_tokens, rest), LEAST_COST)
        return smaller[-1] if apart < _at_least(self.mixed_tokens, tokens) else tokens

    def all(self) -> list[Bucket]:
        """Every bucket, decode first: what warm-up compiles."""
        decode = [Bucket(s, s, p, 1) for p in self.decode_pages for s in self.decode_rows]
        mixed = [
            Bucket(t, min(t, self.max_num_seqs), p, t)
            for p in self.pages
            for t in self.mixed_tokens
        ]
        return list(dict.fromkeys(decode + mixed))  # one token a step is both


def make_buckets(
    max_num_seqs: int,
    max_batch_tokens: int,
    max_pages: int,
    *,
    fine: bool,
    short: int | None = None,
) -> Buckets:
    """Classes up to the engine's limits.

    `fine` (GPU) doubles up to HALVED_FROM; beyond, where a step's time grows with its tokens, one
    class lies between each power of 2 and the next, and of tokens three where a server's usual
    mixed steps are: some hundred rows that decode, and a prompt or two. Coarse (CPU, where a bucket
    costs seconds of compile) quadruples. A class of pages is a program more for each class of
    tokens, and unused pages cost next to no work: one that saves less than a quarter of the next is
    left out. `short`, if given, is what decode steps have a class for where all other classes are
    larger: rows of so few pages are attended to with less work.
    """
    classes = _fine if fine else _coarse
    tokens = classes(min(32, max_batch_tokens), max_batch_tokens)
    pages = _classes(128, max_pages, 8)
    pages = tuple(a for a, b in pairwise(pages) if 4 * a <= 3 * b) + pages[-1:]
    return Buckets(
        decode_rows=classes(FEWEST_DECODE_ROWS if fine else 1, max_num_seqs),
        mixed_tokens=tuple(sorted({*tokens, *_quarters(tokens, fine=fine)})),
        pages=pages,
        decode_pages=(short, *pages) if short and short < pages[0] else pages,
        max_num_seqs=max_num_seqs,
    )


def _fine(first: int, last: int) -> tuple[int, ...]:
    sizes = _classes(first, last, 2)
    between = (size * 3 // 2 for size in sizes if size >= HALVED_FROM)
    return tuple(sorted({*sizes, *(size for size in between if size < last)}))


def _quarters(classes: tuple[int, ...], *, fine: bool) -> set[int]:
    sizes = {size * part // 4 for size in classes if size in QUARTERED for part in (5, 7)}
    return {size for size in sizes if size < classes[-1]} if fine else set()


def _coarse(first: int, last: int) -> tuple[int, ...]:
    return _classes(first, last, 4)


def _classes(first: int, last: int, factor: int) -> tuple[int, ...]:
    sizes = [min(first, last)]
    while sizes[-1] < last:
        sizes.append(min(sizes[-1] * factor, last))
    return tuple(sizes)


def _at_least(classes: tuple[int, ...], value: int) -> int:
    index = bisect_left(classes, value)
    if index == len(classes):
        raise ValueError(f"{value} exceeds the largest class {classes[-1]}")
    return classes[index]
