"""Where the shapes of models lie that benchmarks run with random weights."""

from pathlib import Path

import octavo.configs

FOLDER = Path(octavo.configs.__path__[0]) / "shapes"
NEAR = Path("configs/shapes")
"""The same folder for who stands in a checkout's root: recorded lines need no machine's paths."""


def shape(name: str) -> str:
    """Path of a shape, from wherever the program runs."""
    near = NEAR / name
    return str(near if near.is_dir() else FOLDER / name)
