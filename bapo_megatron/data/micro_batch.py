"""Packs sequences into the tensors of one forward pass, and copies these to the device.

A packed sequence is the prompt and the response; its last row predicts nothing. Response token j of
a sequence that starts at offset o with P prompt tokens is predicted by row o + P − 1 + j; tokens
that an environment wrote have no such row. Padding tokens are 0. At the end of a sequence they
change nothing before them, since attention is causal; at the end of the micro-batch they are a
sequence of their own. A micro-batch without others is such a sequence, T = 0.

Context parallelism divides a sequence of 2C equal chunks over C ranks so that all have the same
causal attention to compute: rank c holds chunk c and, counted from the end, chunk c again.
Transformer Engine expects this division.

Shape legend: B = samples of the batch, L = their sequences, Q = tokens of a sequence that the
policy sampled, N = packed tokens of a micro-batch (prompts, responses and padding), T = those of
them that the policy sampled, S = sequences of a micro-batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from bapo_megatron.data import token_columns
from bapo_megatron.data.packing import PackingRules
from bapo_megatron.data.routes import FREE, BatchRoutes
from bapo_megatron.data.staleness import token_versions
from bapo_megatron.types import MicroBatch, Sample

TOKEN_FIELDS = tuple(f.name for f in fields(MicroBatch) if f.name.endswith("_T"))
"""The fields with one entry per sampled token."""

_ALIGNMENT = 16
"""In bytes, of each tensor in the copy to the device."""


def build_micro_batch(
    sequences: Sequence[Sample],
    indices: Sequence[int],
    advantages_B: ArrayLike,
    loss_weights_B: ArrayLike,
    rules: PackingRules,
    masks_L: Sequence[np.ndarray] | None = None,
    routes: BatchRoutes | None = None,
) -> MicroBatch:
    """Pack sequences into the tensors of one forward pass.

    Both log-probs of the tokens are the engine's; with ``behaviour: recomputed`` the caller
    replaces ``behaviour_logprob_T``.

    Args:
        sequences: ``RolloutBatch.sequences``, [L], as ``dump.decode_batch`` checked them.
        indices: The sequences to pack, in this order; may be empty.
        advantages_B: [B] advantage of each sample, for all its tokens.
        loss_weights_B: [B] weight of each token that trains: 1 over the global denominator.
        rules: What sequences and micro-batches are padded to.
        masks_L: For each sequence, which of its tokens train, [Q] bool; None: all of them.
        routes: The experts that the engine chose; None: those that the routers choose.

    Raises:
        ValueError: Routes are impossible.
    """
    chosen = [sequences[i] for i in indices]
    index_S = np.asarray(indices, dtype=np.int64)
    sample_S = np.cumsum([s.number == 0 for s in sequences], dtype=np.int64)[index_S] - 1
    firsts_S = [i - s.number for i, s in zip(indices, chosen, strict=True)]
    token_ids_N, slots_S, first_row_S = _lay_out(chosen, rules)
    sampled_S = np.array([s.num_sampled for s in chosen], dtype=np.int64)
    position_T = _ranges(np.array([len(s.response_token_ids) for s in chosen], dtype=np.int64))
    if any(s.written for s in chosen):
        position_T = position_T[np.concatenate([s.loss_mask for s in chosen])]
    rows_T = np.repeat(first_row_S, sampled_S) + position_T
    start_S = [
        sum(len(s.response_token_ids) for s in sequences[first:i])
        for first, i in zip(firsts_S, indices, strict=True)
    ]
    mask_T = torch.ones(len(rows_T), dtype=torch.float32)
    if masks_L is not None:
        mask_T = _tensor([masks_L[i] for i in indices], np.float32)

    def num_trained(first: int) -> int:
        if masks_L is None:
            return sequences[first].episode_sampled
        masks = masks_L[first : first + len(sequences[first].sequences)]
        return sum(int(np.count_nonzero(mask_Q)) for mask_Q in masks)

    logprob_T = _tensor([s.behaviour_logprobs for s in chosen], np.float32)

    def per_token(values_S: ArrayLike, dtype: type) -> Tensor:
        return torch.from_numpy(np.repeat(np.asarray(values_S).astype(dtype), sampled_S))

    return MicroBatch(
        token_ids_N=torch.from_numpy(token_ids_N),
        position_ids_N=torch.from_numpy(_ranges(slots_S)),
        cu_seqlens=torch.from_numpy(np.append(0, np.cumsum(slots_S)).astype(np.int32)),
        rows_T=torch.from_numpy(rows_T),
        target_T=_tensor([s.sampled_token_ids for s in chosen], np.int64),
        behaviour_logprob_T=logprob_T,
        rollout_logprob_T=logprob_T,
        advantage_T=per_token(np.asarray(advantages_B)[sample_S], np.float32),
        reward_T=per_token([sequences[first].reward for first in firsts_S], np.float32),
        mask_T=mask_T,
        importance_T=torch.ones_like(mask_T),
        loss_weight_T=per_token(np.asarray(loss_weights_B)[sample_S], np.float32) * mask_T,
        sample_T=per_token(sample_S, np.int64),
        response_tokens_T=per_token([num_trained(first) for first in firsts_S], np.float32),
        position_T=torch.from_numpy(position_T + np.repeat(start_S, sampled_S).astype(np.int64)),
        version_T=torch.from_numpy(token_versions([span for s in chosen for span in s.versions])),
        columns={
            column.name: torch.from_numpy(token_columns.concatenated(column, chosen))
            for column in token_columns.present(sequences)
        },
        routes=None
        if routes is None
        else _lay_out_routes(chosen, index_S, first_row_S, routes, len(token_ids_N)),
    )


def _lay_out_routes(
    chosen: Sequence[Sample],
    index_S: np.ndarray,
    first_row_S: np.ndarray,
    routes: BatchRoutes,
    num_tokens: int,
) -> Tensor:
    """Return [N, M, K] routes (``data.routes``) of a micro-batch's tokens, free in padding."""
    parts = [routes.of(index) for index in index_S.tolist()]
    files = routes.files
    size = (num_tokens, len(files.layers), files.per_token)
    laid_out = np.full(size, FREE, parts[0].dtype if parts else np.int8)
    for sample, first_row, part in zip(chosen, first_row_S.tolist(), parts, strict=True):
        start = first_row + 1 - len(sample.prompt.token_ids)
        laid_out[start : start + len(part)] = part
    return torch.from_numpy(laid_out)


def _lay_out(
    chosen: Sequence[Sample], rules: PackingRules
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lay sequences out one after another.

    Returns the token ids [N], the positions of each sequence [S], with the padding at the end as
    one more, and the row that predicts the first response token of each sample.
    """
    prompt_S = np.array([len(s.prompt.token_ids) for s in chosen], dtype=np.int64)
    response_S = np.array([len(s.response_token_ids) for s in chosen], dtype=np.int64)
    slots_S = np.array([rules.slots(n) for n in (prompt_S + response_S).tolist()], dtype=np.int64)
    offset_S = np.cumsum(slots_S) - slots_S
    used = int(slots_S.sum())
    token_ids_N = np.zeros(rules.padded_total(used), dtype=np.int64)
    for offset, sample in zip(offset_S.tolist(), chosen, strict=True):
        ids = np.concatenate([sample.prompt.token_ids, sample.response_token_ids])
        token_ids_N[offset : offset + len(ids)] = ids
    if len(token_ids_N) > used:
        slots_S = np.append(slots_S, len(token_ids_N) - used)
    return token_ids_N, slots_S, offset_S + prompt_S - 1


def _tensor(parts: Sequence[np.ndarray], dtype: type) -> Tensor:
    """Concatenate into one tensor; no parts give an empty one."""
    flat: np.ndarray = np.concatenate([np.empty(0, dtype), *parts], dtype=dtype, casting="unsafe")
    return torch.from_numpy(flat)


def _ranges(length_S: np.ndarray) -> np.ndarray:
    """``0 … length − 1`` for each length in turn, as int64."""
    starts = np.cumsum(length_S) - length_S
    total = int(length_S.sum())
    return np.arange(total, dtype=np.int64) - np.repeat(starts, length_S).astype(np.int64)


def shard_context(micro_batch: MicroBatch, rank: int, size: int) -> MicroBatch:
    """Return the part of a micro-batch that one context-parallel rank holds.

    Tokens, positions and sampled tokens are the rank's own, with ``rows_T`` counted in its part; a
    sampled token belongs to the rank whose row predicts it. ``cu_seqlens`` stays that of the whole:
    attention needs it.
    """
    if size == 1:
        return micro_batch
    offsets = micro_batch.cu_seqlens.tolist()
    parts = [start + context_positions(end - start, rank, size) for start, end in pairwise(offsets)]
    local_N = torch.from_numpy(np.concatenate(parts))
    place_N = torch.full((micro_batch.num_tokens,), -1, dtype=torch.int64)
    place_N[local_N] = torch.arange(len(local_N))
    row_T = place_N[micro_batch.rows_T]
    is_local_T = row_T >= 0
    values = {name: getattr(micro_batch, name) for name in TOKEN_FIELDS}
    local = {name: value[is_local_T] for name, value in values.items() if value is not None}
    return replace(
        micro_batch,
        token_ids_N=micro_batch.token_ids_N[local_N],
        position_ids_N=micro_batch.position_ids_N[local_N],
        **local | {"rows_T": row_T[is_local_T]},
        columns={name: value[is_local_T] for name, value in micro_batch.columns.items()},
        routes=None if micro_batch.routes is None else micro_batch.routes[local_N],
    )


def context_positions(length: int, rank: int, size: int) -> np.ndarray:
    """Return the positions of a sequence that a rank holds, ascending, [length / size] int64.

    ``length`` is a multiple of 2 · ``size``, or anything for ``size`` 1.
    """
    if size == 1:
        return np.arange(length, dtype=np.int64)
    chunk, rest = divmod(length, 2 * size)
    assert rest == 0, f"a sequence of {length} tokens has no {2 * size} equal chunks"
    offsets = np.arange(chunk, dtype=np.int64)
    return np.concatenate([offsets + rank * chunk, offsets + (2 * size - 1 - rank) * chunk])


def on_device(micro_batch: MicroBatch, device: torch.device) -> MicroBatch:
    """Return the micro-batch with every tensor on ``device``, copying only the others.

    A copy from pageable memory synchronizes host and stream. One copy from pinned memory is queued
    among the kernels instead, while the host prepares what follows.
    """
    values = {f.name: getattr(micro_batch, f.name) for f in fields(micro_batch)}
    values |= values.pop("columns")  # no column has the name of a field
    elsewhere = {n: v for n, v in values.items() if v is not None and v.device != device}
    if not elsewhere:
        return micro_batch
    copied = _copied(elsewhere, device)
    columns = {name: copied.pop(name, value) for name, value in micro_batch.columns.items()}
    return replace(micro_batch, **copied, columns=columns)


def _copied(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Copy host tensors in one transfer; return views of the copy."""
    slots = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors.values()]
    pinned = torch.empty(sum(slots), dtype=torch.uint8, pin_memory=True)
    for name, view in _views(tensors, pinned.split_with_sizes(slots)).items():
        view.copy_(tensors[name])
    # torch keeps the pinned memory until the copy has finished.
    return _views(tensors, pinned.to(device, non_blocking=True).split_with_sizes(slots))


def _views(tensors: Mapping[str, Tensor], pieces: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """View each piece, uint8, as a tensor of the same type and shape."""
    return {
        name: piece[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for (name, tensor), piece in zip(tensors.items(), pieces, strict=True)
    }
