"""Many small host arrays as one int32 buffer: one transfer a dispatch instead of a dozen.

A transfer costs about 85 us whatever its size up to 64 KiB, so a program's inputs travel as one
buffer and are sliced apart on the device; floats and unsigned words travel as their bits.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod

import numpy as np

KINDS = {"i32": np.int32, "f32": np.float32, "u32": np.uint32}


@dataclass(frozen=True)
class Field:
    """One array of a packed buffer: its name, static shape and element kind (i32, f32, u32)."""

    name: str
    shape: tuple[int, ...]
    kind: str = "i32"

    @cached_property
    def size(self) -> int:
        """Words the array takes."""
        return prod(self.shape)


ALIGN = 64
"""Every array starts at a multiple of 256 bytes: XLA may hand a kernel the buffer's own bytes, and
Mosaic-GPU kernels refuse an operand that starts elsewhere."""


@dataclass(frozen=True)
class PackLayout:
    """The arrays of one program's input, in order."""

    fields: tuple[Field, ...]

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """First word of each array, and the size of the whole buffer in words."""
        padded = [-(-field.size // ALIGN) * ALIGN for field in self.fields]
        return tuple(accumulate(padded, initial=0))

    @property
    def size(self) -> int:
        """Words of the whole buffer, padding included."""
        return self.starts[-1]

    def blank(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """A buffer of zeros, int32 [size], and its arrays by name, to be filled in place."""
        buffer = np.zeros(self.size, np.int32)
        arrays = {}
        for field, start in zip(self.fields, self.starts):
            words = buffer[start : start + field.size]
            arrays[field.name] = words.view(KINDS[field.kind]).reshape(field.shape)
        return buffer, arrays

    def pack(self, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        """One int32 buffer [size]. Each array must have its field's shape and kind."""
        buffer, places = self.blank()
        for field in self.fields:
            array = arrays[field.name]
            if array.shape != field.shape or array.dtype != KINDS[field.kind]:
                raise ValueError(f"{field} was given {array.dtype}{array.shape}")
            places[field.name][...] = array
        return buffer
