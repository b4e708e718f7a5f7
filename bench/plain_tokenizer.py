"""A tokenizer for random weights: as many made-up words as the shape has ids.

Random weights have no tokenizer of their own, and a server without one sends no text. With this one
every token is text, so that detokenising and one event a token are part of what is measured.
"""

import json
from pathlib import Path
from string import ascii_lowercase

BYTES = [*range(33, 127), *range(161, 173), *range(174, 256)]
"""Bytes that stand for themselves in byte-level vocabularies; the others move above 255."""


def write_tokenizer(folder: Path, size: int) -> None:
    """A byte-level tokenizer.json of `size` entries: the bytes, then words with a space before."""
    if size < 256:
        raise ValueError(f"a byte-level vocabulary has at least 256 entries, not {size}")
    others = [256 + i for i in range(256 - len(BYTES))]
    names = [chr(code) for code in (*BYTES, *others)]
    names += ["Ġ" + word(i) for i in range(size - 256)]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    model = {"type": "BPE", "vocab": {name: i for i, name in enumerate(names)}, "merges": []}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {**level, "use_regex": True},
        "decoder": {**level, "use_regex": True},
        "model": model,
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")


def word(i: int) -> str:
    """The i-th made-up word, of three letters or more."""
    i += 26**2
    letters = ""
    while i:
        i, letter = divmod(i, 26)
        letters = ascii_lowercase[letter] + letters
    return letters
