"""What a parallel layout pads packed tokens to."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from bapo_megatron.config.megatron import MegatronConfig, ParallelConfig

FP8_MULTIPLE = 128
"""Tokens of a micro-batch on one rank with 8-bit products: their scaling blocks have 128 rows."""


class PackingMultiples(NamedTuple):
    """Lengths are padded to multiples of these; tokens are those of all context-parallel ranks."""

    per_sequence: int
    """Each sequence; divides ``total``."""
    total: int
    """Each micro-batch."""


def packing_multiples(parallel: ParallelConfig, megatron: MegatronConfig) -> PackingMultiples:
    """Return what TP × CP × sequence parallelism and 8-bit products need."""
    # Context-parallel ranks hold two chunks of every sequence each.
    per_sequence = 2 * parallel.context if parallel.context > 1 else 1
    per_rank = math.lcm(
        parallel.tensor if parallel.sequence else 1,
        FP8_MULTIPLE if megatron.fp8 != "none" else 1,
    )
    return PackingMultiples(per_sequence, math.lcm(per_sequence, per_rank * parallel.context))
