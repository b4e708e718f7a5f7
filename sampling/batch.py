"""The sampling parameters of a step's rows, as a pytree of device arrays."""

from dataclasses import dataclass
from functools import partial
from typing import Self

import jax
from jaxtyping import Array, Float32, Int32, UInt32

from octavo.sampling.flags import SamplingFlags as SamplingFlags
from octavo.sampling.pack import COLUMN, FLOAT_FIELDS, PARAM_FIELDS

_FIELDS = (*PARAM_FIELDS, "seed", "sample_index", "position", "slot", "generated", "stop_ids")


@partial(jax.tree_util.register_dataclass, data_fields=[*_FIELDS, "mask"], meta_fields=[])
@dataclass(frozen=True)
class SamplingBatch:
    """How each row of a step samples.

    Attributes:
        temperature: 0 is greedy.
        top_p, min_p, presence, frequency, repetition, top_k, min_tokens: as SamplingParams.
        stateful: 1 if the row's slot in RowState was reset for its request; rows with 0 take no
            bias or bans from it, so a slot's former owner cannot reach them.
        seed, sample_index, position: key of the draw; position is the drawn token's own.
        slot: row slot in RowState; beyond it for padding rows.
        generated: tokens drawn before.
        stop_ids: ids that end the sample, -1 padded; banned while generated < min_tokens.
        mask: bit t % 32 of word t // 32 says whether a row's grammar allows token t; all ones
            for rows without one. None if no row has a grammar.
    """

    temperature: Float32[Array, " S"]
    top_p: Float32[Array, " S"]
    min_p: Float32[Array, " S"]
    presence: Float32[Array, " S"]
    frequency: Float32[Array, " S"]
    repetition: Float32[Array, " S"]
    top_k: Int32[Array, " S"]
    min_tokens: Int32[Array, " S"]
    stateful: Int32[Array, " S"]
    seed: UInt32[Array, "S 2"]
    sample_index: Int32[Array, " S"]
    position: Int32[Array, " S"]
    slot: Int32[Array, " S"]
    generated: Int32[Array, " S"]
    stop_ids: Int32[Array, "S W"]
    mask: UInt32[Array, "S words"] | None = None

    @classmethod
    def from_matrix(cls, matrix: Int32[Array, "S F"]) -> Self:
        """Takes apart what `pack.pack_matrix` put together; inside jit it costs nothing."""
        columns = {name: matrix[:, i] for name, i in COLUMN.items()}
        fields = {name: columns[name] for name in _FIELDS if name in columns}
        for name in FLOAT_FIELDS:
            fields[name] = jax.lax.bitcast_convert_type(fields[name], "float32")
        seed = matrix[:, COLUMN["seed_0"] : COLUMN["seed_1"] + 1]
        fields["seed"] = jax.lax.bitcast_convert_type(seed, "uint32")
        fields["stop_ids"] = matrix[:, COLUMN["stop_ids"] :]
        return cls(**fields)
