"""From a batch of samples to packed micro-batches.

A batch is split into optimizer updates of whole groups, the samples of an update are divided over
data-parallel ranks and micro-batches so that all carry about the same number of tokens, and each
micro-batch becomes the packed tensors of one forward pass. Every function is deterministic, so
each rank computes the same plan from the same batch and no rank has to be told.

Shape legend: B = samples of the batch, N = packed tokens of a micro-batch (prompts, responses and
padding), T = response tokens of a micro-batch, S = sequences of a micro-batch.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from bapo_megatron.types import MicroBatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike

    from bapo_megatron.types import RolloutBatch, Sample


@dataclass(frozen=True, slots=True)
class UpdatePlan:
    """Which samples each rank packs into each micro-batch of one optimizer update."""

    ranks: tuple[tuple[tuple[int, ...], ...], ...]
    """``ranks[d][k]``: ascending indices, into the batch's samples, of the k-th micro-batch of
    data-parallel rank d. All ranks have equally many micro-batches; some may be empty."""
    real_tokens: int
    """Prompt and response tokens of the update, over all ranks."""
    slots: int
    """Positions that the packed micro-batches of all ranks hold, padding included."""

    @property
    def utilisation_share(self) -> float:
        """Share of the positions that hold a real token."""
        return self.real_tokens / self.slots


def split_updates(batch: RolloutBatch, updates_per_batch: int) -> list[list[int]]:
    """Divide a batch into equal updates of whole groups, in the batch's order.

    Args:
        batch: The step's batch.
        updates_per_batch: Updates that one pass over the batch is divided into.

    Returns:
        ``updates_per_batch`` lists of ascending indices into ``batch.samples``, which together
        hold every sample exactly once.

    Raises:
        ValueError: The groups cannot be divided equally.
    """
    num_groups = len(batch.groups)
    if num_groups == 0 or num_groups % updates_per_batch:
        raise ValueError(
            f"algorithm.updates_per_batch is {updates_per_batch} but the batch of step "
            f"{batch.step} has {num_groups} groups; choose a divisor of the number of groups"
        )
    sizes = np.array([len(group.samples) for group in batch.groups])
    ends = np.cumsum(sizes)[num_groups // updates_per_batch - 1 :: num_groups // updates_per_batch]
    return [
        list(range(start, end))
        for start, end in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True)
    ]


def plan_update(
    samples: Sequence[Sample],
    sample_indices: Sequence[int],
    data_parallel: int,
    max_tokens_per_micro_batch: int,
    pad_to_multiple: int = 1,
) -> UpdatePlan:
    """Divide the samples of one update over ranks and micro-batches, balanced by tokens.

    The number of micro-batches is the smallest that a bisection finds. Samples go, longest first,
    to the emptiest micro-batch (LPT); micro-batches of about equal size then stand at the same
    position k on all ranks, the heavier ones on the ranks that have the fewest tokens so far.

    Args:
        samples: All samples of the batch, [B].
        sample_indices: The update's samples; at least one.
        data_parallel: Number of data-parallel ranks.
        max_tokens_per_micro_batch: Largest number of positions, padding included.
        pad_to_multiple: As given to ``build_micro_batch``.

    Raises:
        ValueError: A sample alone exceeds the budget, or there is no sample.
    """
    if not sample_indices:
        raise ValueError("an update needs at least one sample")
    budget = max_tokens_per_micro_batch - max_tokens_per_micro_batch % pad_to_multiple
    lengths = {i: _num_tokens(samples[i]) for i in sample_indices}
    longest = max(sample_indices, key=lambda i: (lengths[i], -i))
    if lengths[longest] > budget:
        sample = samples[longest]
        raise ValueError(
            f"sample {sample.index} of group {sample.group_id} ({sample.prompt.prompt_id}) has "
            f"{lengths[longest]} tokens but train.max_tokens_per_micro_batch holds {budget}; "
            "raise it, or lower data.max_prompt_tokens or rollout.max_response_tokens"
        )
    items = sorted(lengths.items(), key=lambda item: (-item[1], item[0]))
    real_tokens = sum(lengths.values())

    # One sample per micro-batch always fits, so the upper end of the bisection is feasible.
    lowest = -(-real_tokens // (budget * data_parallel))
    highest = -(-len(items) // data_parallel)
    bins = _fill_bins(items, highest * data_parallel, budget)
    while lowest < highest:
        middle = (lowest + highest) // 2
        attempt = _fill_bins(items, middle * data_parallel, budget)
        if attempt is None:
            lowest = middle + 1
        else:
            highest, bins = middle, attempt
    assert bins is not None
    ranks = _assign_to_ranks(bins, data_parallel)
    slots = sum(_padded(load, pad_to_multiple) for load, _ in bins)
    return UpdatePlan(ranks, real_tokens, slots)


def build_micro_batch(
    samples: Sequence[Sample],
    sample_indices: Sequence[int],
    advantages_B: ArrayLike,
    loss_weights_B: ArrayLike,
    pad_to_multiple: int = 1,
) -> MicroBatch:
    """Pack samples into the tensors of one forward pass.

    Both log-probs of the tokens are the engine's; with ``behaviour: recomputed`` the caller
    replaces ``behaviour_logprob_T``. Response token j of a sequence that starts at offset o with P
    prompt tokens is predicted by row o + P − 1 + j. The last response token predicts nothing that
    is used; it stays in, so that a packed sequence is simply the prompt and the response.

    Args:
        samples: All samples of the batch, [B].
        sample_indices: The samples to pack, in this order; may be empty.
        advantages_B: [B] advantage of each sample, for all its tokens.
        loss_weights_B: [B] weight of each token of the sample: 1 over the global denominator.
        pad_to_multiple: N becomes a multiple of this by one padding sequence of zeros at the end; a
            micro-batch without samples is one padding sequence of this length, with T = 0.

    Raises:
        ValueError: A prompt is empty, or the arrays of a sample differ in length.
    """
    chosen = [samples[i] for i in sample_indices]
    for sample in chosen:
        _check_sample(sample)

    index_S = np.asarray(sample_indices, dtype=np.int64)
    prompt_S = np.array([len(s.prompt.token_ids) for s in chosen], dtype=np.int64)
    response_S = np.array([len(s.response_token_ids) for s in chosen], dtype=np.int64)
    length_S = prompt_S + response_S
    total = int(length_S.sum())
    padding = _padded(total, pad_to_multiple) - total
    if padding:
        length_S = np.append(length_S, padding)
    offset_S = np.cumsum(length_S) - length_S

    token_parts: list[ArrayLike] = []
    for sample in chosen:
        token_parts += [sample.prompt.token_ids, sample.response_token_ids]
    token_ids_N = _concatenate([*token_parts, np.zeros(padding)], np.int64)
    rollout_logprob_T = _concatenate([s.behaviour_logprobs for s in chosen], np.float32)
    position_T = _ranges(response_S)
    first_row_S = offset_S[: len(chosen)] + prompt_S - 1

    def per_token(values_S: ArrayLike, dtype: type) -> torch.Tensor:
        return torch.from_numpy(np.repeat(np.asarray(values_S).astype(dtype), response_S))

    return MicroBatch(
        token_ids_N=torch.from_numpy(token_ids_N),
        position_ids_N=torch.from_numpy(_ranges(length_S)),
        cu_seqlens=torch.from_numpy(np.append(0, np.cumsum(length_S)).astype(np.int32)),
        rows_T=torch.from_numpy(np.repeat(first_row_S, response_S) + position_T),
        target_T=torch.from_numpy(_concatenate([s.response_token_ids for s in chosen], np.int64)),
        behaviour_logprob_T=torch.from_numpy(rollout_logprob_T),
        rollout_logprob_T=torch.from_numpy(rollout_logprob_T),
        advantage_T=per_token(np.asarray(advantages_B)[index_S], np.float32),
        mask_T=torch.ones(len(position_T), dtype=torch.float32),
        loss_weight_T=per_token(np.asarray(loss_weights_B)[index_S], np.float32),
        sample_T=per_token(index_S, np.int64),
        position_T=torch.from_numpy(position_T),
        version_T=torch.from_numpy(_concatenate([s.versions for s in chosen], np.int64)),
    )


def build_micro_batches(
    samples: Sequence[Sample],
    plan: UpdatePlan,
    data_parallel_rank: int,
    advantages_B: ArrayLike,
    loss_weights_B: ArrayLike,
    pad_to_multiple: int = 1,
) -> list[MicroBatch]:
    """Build all micro-batches of one data-parallel rank; arguments as in ``build_micro_batch``."""
    return [
        build_micro_batch(samples, indices, advantages_B, loss_weights_B, pad_to_multiple)
        for indices in plan.ranks[data_parallel_rank]
    ]


def _num_tokens(sample: Sample) -> int:
    return len(sample.prompt.token_ids) + len(sample.response_token_ids)


def _padded(num_tokens: int, multiple: int) -> int:
    """Length of a micro-batch after padding; never 0, since a forward pass needs a token."""
    return max(-(-num_tokens // multiple), 1) * multiple


def _fill_bins(
    items: Sequence[tuple[int, int]], num_bins: int, budget: int
) -> list[tuple[int, list[int]]] | None:
    """Put (index, length) items, longest first, into the emptiest bin; none where one overflows.

    Returns:
        One (tokens, sample indices) pair per bin.
    """
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    heap = [(0, number) for number in range(num_bins)]
    for index, length in items:
        load, number = heap[0]
        if load + length > budget:
            return None
        heapq.heapreplace(heap, (load + length, number))
        bins[number].append(index)
    return [(load, bins[number]) for load, number in sorted(heap, key=lambda entry: entry[1])]


def _assign_to_ranks(
    bins: Sequence[tuple[int, list[int]]], data_parallel: int
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Deal bins, heaviest first, one round per micro-batch, to the ranks with the fewest tokens."""
    by_load = sorted(bins, key=lambda entry: (-entry[0], entry[1]))
    loads = [0] * data_parallel
    ranks: list[list[tuple[int, ...]]] = [[] for _ in range(data_parallel)]
    for first in range(0, len(by_load), data_parallel):
        emptiest_first = sorted(range(data_parallel), key=lambda rank: (loads[rank], rank))
        dealt = by_load[first : first + data_parallel]
        for rank, (load, indices) in zip(emptiest_first, dealt, strict=True):
            loads[rank] += load
            ranks[rank].append(tuple(sorted(indices)))
    return tuple(tuple(rank) for rank in ranks)


def _check_sample(sample: Sample) -> None:
    place = f"sample {sample.index} of group {sample.group_id} ({sample.prompt.prompt_id})"
    if not sample.prompt.token_ids:
        raise ValueError(f"{place}: the prompt has no tokens, so nothing predicts the response")
    lengths = (len(sample.response_token_ids), len(sample.behaviour_logprobs), len(sample.versions))
    if len(set(lengths)) != 1:
        raise ValueError(
            f"{place}: {lengths[0]} response tokens but {lengths[1]} behaviour log-probs and "
            f"{lengths[2]} versions; the rollout that made this sample is faulty"
        )


def _concatenate(parts: Sequence[ArrayLike], dtype: type) -> np.ndarray:
    """Concatenate into one array of ``dtype``; no parts give an empty array."""
    return np.concatenate([np.empty(0, dtype), *(np.asarray(part, dtype) for part in parts)])


def _ranges(length_S: np.ndarray) -> np.ndarray:
    """``0 … length − 1`` for each length, one after the other, as int64."""
    starts = np.cumsum(length_S) - length_S
    total = int(length_S.sum())
    return np.arange(total, dtype=np.int64) - np.repeat(starts, length_S).astype(np.int64)
