"""How a parameter leaf is put together from a checkpoint's tensors."""

from dataclasses import dataclass

Path = tuple[str | int, ...]
"""Keys from the top of the parameter tree to a leaf."""

Index = tuple[int | slice, ...]


@dataclass(frozen=True)
class Piece:
    """One checkpoint tensor and the part of a leaf that it fills.

    leaf[place] = transpose(repeat(reshape(tensor)))

    Attributes:
        name: of the tensor.
        shape: as stored; anything else is refused.
        place: index into the leaf; () is all of it.
        reshape: shape to view the tensor as; None leaves it.
        repeat: copies of each entry of the first axis after reshaping, next to each other.
        transpose: order of the axes after that; None leaves it.
    """

    name: str
    shape: tuple[int, ...]
    place: Index = ()
    reshape: tuple[int, ...] | None = None
    repeat: int = 1
    transpose: tuple[int, ...] | None = None
