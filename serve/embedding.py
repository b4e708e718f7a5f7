"""Pooled hidden states as embeddings. No jax."""

import numpy as np
from numpy.typing import NDArray

from octavo.sampling.params import SamplingParams
from octavo.sampling.shown import shown
from octavo.serve.config import POOLINGS

PROMPT_ONLY = SamplingParams(temperature=0.0, max_tokens=0)
"""What a request for an embedding samples: nothing."""


def check_pooling(name: str) -> None:
    """ValueError unless `name` is a way to pool."""
    if name not in POOLINGS:
        raise ValueError(f"pooling must be one of {', '.join(POOLINGS)}, not {shown(name)}")


def unit_vector(embedding: bytes) -> NDArray[np.float32]:
    """f32[E] of length 1 from an event's bytes; a zero vector stays zero."""
    vector = np.frombuffer(embedding, "<f4").astype(np.float64)
    return (vector / max(float(np.linalg.norm(vector)), 1e-30)).astype(np.float32)
