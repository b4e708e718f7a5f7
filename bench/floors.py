"""The least time a device could take: what must be read over its read rate, what must be computed
over its matrix rate. A share is floor over measured time.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it loads jax, which a client of a server need not have
    from octavo.model.config import ModelConfig


@dataclass(frozen=True)
class Ceilings:
    """What one device was measured to do at best: bytes read and FLOP (bfloat16 products) a s."""

    read: float
    matrix: float


CEILINGS = {"NVIDIA H200": Ceilings(read=4.48e12, matrix=812e12)}
"""By device kind. A device that is not here gets no floor."""


@dataclass(frozen=True)
class ModelCost:
    """What a model's steps read and compute.

    Attributes:
        weight_bytes: read by a decode step.
        weights: parameters in products with every token, the output head apart.
        head: parameters of the output head.
        token_bytes: keys and values of one token, over all layers.
    """

    config: "ModelConfig"
    weight_bytes: int
    weights: int
    head: int
    token_bytes: int

    def decode_floor(self, device: Ceilings, rows: int, context: float) -> float:
        """Seconds of a decode step at a mean context: weights (or their products) and keys."""
        products = 2 * (self.weights + self.head) * rows / device.matrix
        cache = rows * context * self.token_bytes / device.read
        return max(self.weight_bytes / device.read, products) + cache

    def prefill_floor(self, device: Ceilings, tokens: int) -> float:
        """Seconds to compute one prompt and the logits of its last token."""
        operations = 2 * self.weights * tokens + 2 * self.head + self.attention_operations(tokens)
        return max(self.weight_bytes / device.read, operations / device.matrix)

    def attention_operations(self, tokens: int) -> int:
        """Of both attention products over the keys that each query sees, in all layers."""
        config, total = self.config, 0
        for layer in config.layers:
            window = min(layer.window or tokens, tokens)
            seen = window * (window + 1) // 2 + (tokens - window) * window
            total += 4 * config.num_heads * config.head_dim * seen
        return total
