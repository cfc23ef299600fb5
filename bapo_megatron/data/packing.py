"""Which samples share a forward pass: a batch divided into updates, ranks and micro-batches.

A batch is split into optimizer updates of whole groups, and the sequences of an update are divided
over data-parallel ranks and micro-batches so that their FLOPs are balanced. Every function is
deterministic: all ranks compute the same packing from the same batch.

Shape legend: L = sequences of the batch.
"""

import heapq
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from bapo_megatron.types import RolloutBatch, Sample


@dataclass(frozen=True, slots=True)
class SequenceFlops:
    """FLOPs of a forward pass over one sequence of L tokens: per_token · L + per_pair · L²."""

    per_token: int
    """FLOPs of the GEMMs with weights, per token."""
    per_pair: int
    """FLOPs of causal attention, over the square of the length."""

    def of(self, num_tokens: int) -> int:
        """Count the FLOPs for a sequence of this length."""
        return self.per_token * num_tokens + self.per_pair * num_tokens**2


@dataclass(frozen=True, slots=True)
class PackingRules:
    """Constraints on micro-batches. Tokens are those of all context-parallel ranks."""

    data_size: int
    """Data-parallel ranks."""
    max_tokens: int
    """Limit of a micro-batch, padding included."""
    flops: SequenceFlops
    sequence_multiple: int = 1
    """Every sequence is padded to a multiple of this (context parallelism divides each)."""
    total_multiple: int = 1
    """Every micro-batch is padded to a multiple of this, itself one of ``sequence_multiple``."""
    count_multiple: int = 1
    """The number of micro-batches is a multiple of this (interleaved pipelines need it)."""

    @property
    def budget(self) -> int:
        """Largest micro-batch that is a multiple of ``total_multiple``."""
        return self.max_tokens - self.max_tokens % self.total_multiple

    def slots(self, num_tokens: int) -> int:
        """Count the positions that a sequence of this length takes."""
        return -(-num_tokens // self.sequence_multiple) * self.sequence_multiple

    def padded_total(self, slots: int) -> int:
        """Count the positions of a micro-batch; never 0, since a forward pass needs a token."""
        return max(-(-slots // self.total_multiple), 1) * self.total_multiple


@dataclass(frozen=True, slots=True)
class UpdatePacking:
    """Which sequences each rank packs into each micro-batch of one optimizer update."""

    ranks: tuple[tuple[tuple[int, ...], ...], ...]
    """``ranks[d][k]``: ascending indices, into the batch's sequences, of the k-th micro-batch of
    data-parallel rank d. All ranks have equally many micro-batches; some may be empty."""
    real_tokens: int
    """Prompt and response tokens of the update, over all ranks."""
    slots: int
    """Positions that the packed micro-batches of all ranks hold, padding included."""
    rank_flops: tuple[int, ...]
    """FLOPs of each data-parallel rank in a forward pass over its sequences."""


def split_updates(batch: RolloutBatch, updates_per_batch: int) -> list[list[int]]:
    """Divide the indices of ``batch.samples``, in order, into equal updates of whole groups.

    Raises:
        ValueError: The groups cannot be divided equally.
    """
    num_groups = len(batch.groups)
    if num_groups == 0 or num_groups % updates_per_batch:
        raise ValueError(
            f"algorithm.updates_per_batch is {updates_per_batch} but the batch of step "
            f"{batch.step} has {num_groups} groups; choose a divisor of the number of groups"
        )
    starts = list(accumulate((len(group.samples) for group in batch.groups), initial=0))
    edges = starts[:: num_groups // updates_per_batch]
    return [list(range(start, end)) for start, end in pairwise(edges)]


def pack_update(
    sequences: Sequence[Sample], indices: Sequence[int], rules: PackingRules
) -> UpdatePacking:
    """Divide some of the [L] sequences over ranks and micro-batches, balanced by FLOPs.

    The number of micro-batches is the smallest that a bisection finds. They go, longest first,
    to the micro-batch with the least to compute that has room (LPT); micro-batches of about equal
    cost then stand at the same position k on all ranks, the heavier ones on the ranks that have the
    least to compute so far.

    Raises:
        ValueError: A sequence alone exceeds the budget.
    """
    assert indices, "an update needs at least one sequence"
    lengths = {i: sequences[i].sequence_tokens for i in indices}
    longest_first = sorted(lengths, key=lambda i: (-lengths[i], i))
    longest = sequences[longest_first[0]]
    if rules.slots(lengths[longest_first[0]]) > rules.budget:
        raise ValueError(
            f"{longest.place} ({longest.prompt.prompt_id}) has "
            f"{lengths[longest_first[0]]} tokens but train.max_tokens_per_micro_batch × "
            f"parallel.context holds {rules.budget}; raise one of them, or lower "
            "data.max_prompt_tokens or rollout.max_response_tokens"
        )
    items = [(i, rules.slots(lengths[i]), rules.flops.of(lengths[i])) for i in longest_first]
    # Every rank gets as many. One sequence per micro-batch always fits, so the upper end of the
    # bisection is feasible.
    step = rules.data_size * rules.count_multiple
    lowest = -(-sum(slots for _, slots, _ in items) // (rules.budget * step))

    def fill(num_rounds: int) -> list[_Bin] | None:
        return _fill_bins(items, num_rounds * step, rules.budget)

    bins = fill(lowest)
    if bins is None:
        rounds = range(lowest + 1, -(-len(items) // step))
        num_more = bisect_left(rounds, True, key=lambda num_rounds: fill(num_rounds) is not None)
        bins = fill(rounds.start + num_more)
    assert bins is not None
    ranks = _assign_to_ranks(bins, rules.data_size)
    return UpdatePacking(
        ranks=tuple(tuple(tuple(sorted(b.indices)) for b in rank) for rank in ranks),
        real_tokens=sum(lengths.values()),
        slots=sum(rules.padded_total(b.slots) for b in bins),
        rank_flops=tuple(sum(b.flops for b in rank) for rank in ranks),
    )


@dataclass(slots=True)
class _Bin:
    """One micro-batch that is being filled."""

    slots: int = 0
    flops: int = 0
    indices: list[int] = field(default_factory=list)


def _fill_bins(
    items: Sequence[tuple[int, int, int]], num_bins: int, budget: int
) -> list[_Bin] | None:
    """Put sequences (index, slots, flops) into the cheapest bin with room; None if one lacks it.

    They come longest first.
    """
    bins = [_Bin() for _ in range(num_bins)]
    cheapest = [(0, number) for number in range(num_bins)]
    # Slots and number of bins that lacked room. They only get shorter, so a bin that has room
    # again keeps it until it gets one more: no sequence makes more than one bin move here.
    full: list[tuple[int, int]] = []
    for index, slots, flops in items:
        while full and full[0][0] + slots <= budget:
            number = heapq.heappop(full)[1]
            heapq.heappush(cheapest, (bins[number].flops, number))
        while cheapest and bins[cheapest[0][1]].slots + slots > budget:
            number = heapq.heappop(cheapest)[1]
            heapq.heappush(full, (bins[number].slots, number))
        if not cheapest:
            return None
        number = cheapest[0][1]
        cheapest_bin = bins[number]
        cheapest_bin.slots += slots
        cheapest_bin.flops += flops
        cheapest_bin.indices.append(index)
        heapq.heapreplace(cheapest, (cheapest_bin.flops, number))
    return bins


def _assign_to_ranks(bins: Sequence[_Bin], data_size: int) -> list[list[_Bin]]:
    """Deal bins, heaviest first, one round per micro-batch, to the ranks with the least so far."""
    by_load = sorted(bins, key=lambda b: (-b.flops, b.indices))
    loads = [0] * data_size
    ranks: list[list[_Bin]] = [[] for _ in range(data_size)]
    for first in range(0, len(by_load), data_size):
        least_first = sorted(range(data_size), key=lambda rank: (loads[rank], rank))
        round_bins = by_load[first : first + data_size]
        for rank, next_bin in zip(least_first, round_bins, strict=True):
            loads[rank] += next_bin.flops
            ranks[rank].append(next_bin)
    return ranks
