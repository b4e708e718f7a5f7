"""Which pages hold the keys of which token prefixes, so that equal prefixes share them. No jax."""

import hashlib
from collections.abc import Sequence

import numpy as np

from octavo.cache.blocks import BlockPool

_DIGEST_BYTES = 32


class PageChain:
    """Digests of a token sequence's full pages, each made of the one before and its page's ids.

    256-bit digests stand for the tokens themselves: no collision is known or expected, so a hit
    needs no comparison of ids. Digests are computed once, when first needed.

    Attributes:
        digests: of the pages hashed so far, in order.
        epoch: weights epoch that the chain belongs to.
    """

    __slots__ = ("_page_size", "_root", "digests", "epoch")

    def __init__(self, root: bytes, page_size: int, epoch: int) -> None:
        self._root = root
        self._page_size = page_size
        self.epoch = epoch
        self.digests: list[bytes] = []

    def extend(self, tokens: Sequence[int], count: int) -> Sequence[bytes]:
        """Digests of the first `count` pages of `tokens`, which must hold that many full pages."""
        size, first = self._page_size, len(self.digests)
        if count <= first:
            return self.digests[:count]
        if count * size > len(tokens):
            raise ValueError(f"{count} full pages of {size} asked of {len(tokens)} tokens")
        data = np.asarray(tokens[first * size : count * size], "<i8").tobytes()
        width = 8 * size
        previous = self.digests[-1] if self.digests else self._root
        for start in range(0, len(data), width):
            digest = hashlib.blake2b(previous, digest_size=_DIGEST_BYTES)
            digest.update(data[start : start + width])
            previous = digest.digest()
            self.digests.append(previous)
        return self.digests


class PrefixIndex:
    """Digest of a full page's whole prefix -> the page that holds its keys and values.

    Full pages are immutable, so a page found here may be shared without copying. A page stays
    indexed after its holders have gone, until the pool evicts it. An equal prefix that was
    computed twice keeps its first page.

    Attributes:
        epoch: weights epoch; part of every key.
    """

    def __init__(
        self, pool: BlockPool, page_size: int, cache_dtype: str = "", epoch: int = 0
    ) -> None:
        self.epoch = epoch
        self._pool = pool
        self._page_size = page_size
        self._cache_dtype = cache_dtype
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        pool.on_evict = self._on_evict

    def __len__(self) -> int:
        return len(self._page_of)

    def chain(self, salt: str = "", lora: str = "") -> PageChain:
        """An empty chain for a sequence under this salt and LoRA id, at the present epoch."""
        root = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        for part in (salt, lora, self._cache_dtype, str(self.epoch), str(self._page_size)):
            data = part.encode("utf-8", "surrogatepass")
            root.update(len(data).to_bytes(8, "little"))
            root.update(data)
        return PageChain(root.digest(), self._page_size, self.epoch)

    def lookup(self, chain: PageChain, tokens: Sequence[int]) -> list[int]:
        """Pages of the longest indexed prefix of `tokens`, not yet held for the caller.

        They cover at most (len(tokens) - 1) // page_size pages: the last token is always
        computed, since its logits are wanted.
        """
        pages: list[int] = []
        for digest in chain.extend(tokens, (len(tokens) - 1) // self._page_size):
            page = self._page_of.get(digest)
            if page is None:
                break
            pages.append(page)
        return pages

    def insert(self, digest: bytes, page: int) -> bool:
        """Index a held, full page; False if the prefix already has one."""
        if digest in self._page_of:
            return False
        if page in self._digest_of:
            raise ValueError(f"page {page} is indexed under another prefix")
        self._page_of[digest] = page
        self._digest_of[page] = digest
        self._pool.mark_cached(page)
        return True

    def drop(self, digests: Sequence[bytes]) -> None:
        """Forget these prefixes (their keys are suspect); holders keep their pages."""
        for digest in digests:
            page = self._page_of.pop(digest, None)
            if page is not None:
                del self._digest_of[page]
                self._pool.unmark_cached(page)

    def reset(self, epoch: int) -> None:
        """Forget everything and key what comes by `epoch`; chains made before are stale."""
        self.drop(list(self._page_of))
        self.epoch = epoch

    def check(self) -> None:
        """Assert that both maps agree with each other and with the pool's marks."""
        inverse = {page: digest for digest, page in self._page_of.items()}
        assert inverse == self._digest_of, "the index's two maps disagree"
        assert set(inverse) == self._pool.cached_pages(), "index and pool disagree on pages"

    def _on_evict(self, page: int) -> None:
        del self._page_of[self._digest_of.pop(page)]
