"""Which tokens of a packed micro-batch each context-parallel rank holds.

A sequence of 2C equal chunks is divided over C ranks so that all have the same causal attention to
compute: rank c holds chunk c and, of the chunks, the c-th from the end. Transformer Engine expects
this division.

Shape legend: N = packed tokens of the whole micro-batch, T = its response tokens.
"""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import pairwise

import numpy as np
import torch

from bapo_megatron.types import MicroBatch

TOKEN_FIELDS = tuple(f.name for f in fields(MicroBatch) if f.name.endswith("_T"))
"""The fields with one entry per response token."""


def context_positions(length: int, rank: int, size: int) -> np.ndarray:
    """Positions within a sequence that a rank holds, ascending, [length / size] int64.

    Args:
        length: Tokens of the sequence; a multiple of 2 · ``size``, or anything for ``size`` 1.
        rank: Context-parallel rank.
        size: Context-parallel size, C.
    """
    if size == 1:
        return np.arange(length, dtype=np.int64)
    chunk, rest = divmod(length, 2 * size)
    assert rest == 0, f"a sequence of {length} tokens has no {2 * size} equal chunks"
    own = np.arange(chunk, dtype=np.int64)
    return np.concatenate([own + rank * chunk, own + (2 * size - 1 - rank) * chunk])


def shard_context(micro_batch: MicroBatch, rank: int, size: int) -> MicroBatch:
    """Return the part of a micro-batch that one context-parallel rank holds.

    Tokens, positions and response tokens are the rank's own, with ``rows_T`` counted in its part;
    a response token belongs to the rank whose row predicts it. ``cu_seqlens`` stays that of the
    whole: attention needs it.
    """
    if size == 1:
        return micro_batch
    offsets = micro_batch.cu_seqlens.tolist()
    parts = [start + context_positions(end - start, rank, size) for start, end in pairwise(offsets)]
    own_N = torch.from_numpy(np.concatenate(parts))
    place_N = torch.full((micro_batch.num_tokens,), -1, dtype=torch.int64)
    place_N[own_N] = torch.arange(len(own_N))
    row_T = place_N[micro_batch.rows_T]
    own_T = row_T >= 0
    values = {name: getattr(micro_batch, name) for name in TOKEN_FIELDS}
    kept = {name: value[own_T] for name, value in values.items() if value is not None}
    return replace(
        micro_batch,
        token_ids_N=micro_batch.token_ids_N[own_N],
        position_ids_N=micro_batch.position_ids_N[own_N],
        **kept | {"rows_T": row_T[own_T]},
    )
