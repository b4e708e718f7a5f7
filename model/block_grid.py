"""What the blocks of `mosaic_block`'s kernel share: barriers, and the deal of items."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from octavo.attention.mosaic_decode import Ref
from octavo.model.block_plan import TILE, Product


class Grid(NamedTuple):
    """The barriers over all blocks, by the arrivals at each, which are counted in global memory.

    Each has its own count, for a block without items in a phase arrives at the next barriers
    while others are still on their way. Under the interpreter `barriers` are those of a cluster,
    and `arrivals` is not used.
    """

    arrivals: Ref  # i32 [barriers], 0 before the launch
    expected: int  # arrivals: every multiplying warpgroup of every block
    barriers: Ref | None = None

    def arrive(self, barrier: int) -> None:
        """What this warpgroup wrote to global memory is there for whoever waits."""
        if self.barriers is not None:
            plgpu.barrier_arrive(self.barriers.at[barrier])
            return

        def signal(_: Any, arrivals: Any) -> None:
            _fence_copies()
            mgpu_utils.warpgroup_barrier()
            _semaphore(arrivals, barrier).signal(1, memory_scope="gpu")

        self._inline(signal)

    def wait(self, barrier: int) -> None:
        """Until every block has arrived."""
        if self.barriers is not None:
            plgpu.barrier_wait(self.barriers.at[barrier])
            return

        def poll(_: Any, arrivals: Any) -> None:
            semaphore = _semaphore(arrivals, barrier)
            semaphore.wait(self.expected, decrement=False, memory_scope="gpu")
            _fence_copies()

        self._inline(poll)

    def _inline(self, body: Callable[[Any, Any], None]) -> None:
        """Calls body(context, arrivals) where the kernel is lowered, once for every thread.

        Pallas has semaphores in global memory, but zeroes them by a kernel before every launch.
        """
        inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
        inline(body)(self.arrivals)


def _semaphore(arrivals: Any, barrier: int) -> mgpu_utils.SemaphoreRef:
    return mgpu_utils.SemaphoreRef(
        mgpu_utils.memref_ptr(mgpu_utils.memref_slice(arrivals, barrier))
    )


def _fence_copies() -> None:
    """Orders plain reads and writes with TMA's: results of a norm are stored plainly."""
    mgpu_utils.inline_ptx("fence.proxy.async;", has_side_effects=True)


class Items(NamedTuple):
    """The items of a product that a block has: block, block + num_blocks, ..."""

    product: Product
    block: Array
    num_blocks: int

    def total(self) -> Array:
        """How many they are."""
        left = self.product.items - self.block + (self.num_blocks - 1)
        return lax.div(left, jnp.int32(self.num_blocks))

    def place(self, index: Array) -> tuple[Array, Array]:
        """Column of items and split of the index-th."""
        at = self.block + index * self.num_blocks
        columns = jnp.int32(self.product.columns)
        return lax.rem(at, columns), lax.div(at, columns)

    def walk(self, visit: Callable[..., Array], carry: Array) -> Array:
        """Calls carry = visit(step, carry, column, split) for every step of every item."""

        def one(index: Array, carry: Array) -> Array:
            column, split = self.place(index)
            step = partial(visit, column=column, split=split)
            return lax.fori_loop(0, self.product.steps, step, carry)

        return lax.fori_loop(0, self.total(), one, carry)

    def tile_column(self, column: Array, tile: int) -> Array:
        """First of the matrix's columns that a tile has."""
        product = self.product
        if not product.gated:
            return (column * product.tiles + tile) * TILE
        half = product.tiles // 2
        first = (column * half + tile % half) * TILE
        return first + (tile // half) * (product.width // 2)
