"""The division of sequences over context-parallel ranks."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bapo_megatron.data.micro_batch import build_micro_batch, context_positions, shard_context
from bapo_megatron.data.packing import PackingRules, SequenceFlops
from bapo_megatron.types import MicroBatch
from tests.data.samples import make_episode, make_sample


def test_a_rank_holds_a_chunk_from_the_start_and_one_from_the_end():
    assert context_positions(8, 0, 2).tolist() == [0, 1, 6, 7]
    assert context_positions(8, 1, 2).tolist() == [2, 3, 4, 5]
    assert context_positions(12, 1, 3).tolist() == [2, 3, 8, 9]
    assert context_positions(5, 0, 1).tolist() == [0, 1, 2, 3, 4]


@given(chunk=st.integers(1, 9), size=st.integers(2, 8))
def test_ranks_divide_causal_attention_equally(chunk, size):
    length = 2 * size * chunk
    parts = [context_positions(length, rank, size) for rank in range(size)]

    assert sorted(np.concatenate(parts).tolist()) == list(range(length))
    pairs = {int((part + 1).sum()) for part in parts}  # position p sees p + 1 keys
    assert pairs == {length * (length + 1) // 2 // size}


def micro_batch():
    """Two samples of 5 and 2 tokens, padded to 8 and 4."""
    samples = [make_sample(2, 3), make_sample(1, 1, group_id=1)]
    samples[0].reward, samples[1].reward = 0.5, 0.75
    rules = PackingRules(1, 100, SequenceFlops(1, 0), sequence_multiple=4, total_multiple=4)
    return build_micro_batch(samples, [0, 1], [1.0, -2.0], [0.25, 0.5], rules)


def test_a_part_by_hand():
    first, second = (shard_context(micro_batch(), rank, 2) for rank in range(2))

    # Positions 0, 1, 6, 7 of the first sequence and 0, 3 of the second; rows 1 and 8 of the whole.
    assert first.token_ids_N.tolist() == [1000, 1001, 0, 0, 2000, 0]
    assert first.position_ids_N.tolist() == [0, 1, 6, 7, 0, 3]
    assert (first.rows_T.tolist(), first.target_T.tolist()) == ([1, 4], [1050, 2050])
    # Positions 2, 3, 4, 5 and 1, 2; rows 2 and 3.
    assert second.token_ids_N.tolist() == [1050, 1051, 1052, 0, 2050, 0]
    assert (second.rows_T.tolist(), second.target_T.tolist()) == ([0, 1], [1051, 1052])
    assert first.cu_seqlens.tolist() == second.cu_seqlens.tolist() == [0, 8, 12]
    # Of the whole response, whatever part of it the rank holds.
    assert first.response_tokens_T.tolist() == [3.0, 1.0]
    assert second.response_tokens_T.tolist() == [3.0, 3.0]
    assert first.reward_T.tolist() == [0.5, 0.75]
    assert second.reward_T.tolist() == [0.5, 0.5]


COLLECTED = {
    "entropy_T": torch.tensor([0.1, 0.2, 0.3, 0.4]),
    "response_sum_T": torch.tensor([6.0, 6.0, 6.0, 7.0], dtype=torch.float64),
    "selected_T": torch.tensor([True, False, True, True]),
}
"""What the loss stage adds to the four response tokens."""


@pytest.mark.parametrize("collected", [{}, COLLECTED], ids=["built", "collected"])
def test_every_response_token_is_on_one_rank_with_all_its_values(collected):
    whole = replace(micro_batch(), **collected)
    parts = [shard_context(whole, rank, 2) for rank in range(2)]
    names = [f.name for f in fields(MicroBatch) if f.name.endswith("_T") and f.name != "rows_T"]
    missing = {name for name in names if getattr(whole, name) is None}
    assert missing == COLLECTED.keys() - collected.keys()
    assert all(getattr(part, name) is None for part in parts for name in missing)
    names = [name for name in names if name not in missing]

    def rows(batch):
        return list(zip(*(getattr(batch, name).tolist() for name in names), strict=True))

    assert sorted(rows(whole)) == sorted(rows(parts[0]) + rows(parts[1]))
    assert len(names) == 12 + len(collected)


@given(
    episodes=st.lists(st.tuples(*[st.integers(1, 9)] * 5), min_size=1, max_size=4),
    size=st.sampled_from([2, 4]),
)
def test_ranks_hold_every_sampled_token_of_episodes_once(episodes, size):
    samples = [make_episode(3, parts, group_id=i) for i, parts in enumerate(episodes)]
    rules = PackingRules(1, 1000, SequenceFlops(1, 0), 2 * size, 2 * size)
    ones = np.ones(len(samples))
    whole = build_micro_batch(samples, range(len(samples)), ones, ones, rules)

    held = []
    for rank in range(size):
        part = shard_context(whole, rank, size)
        tokens = list(zip(part.sample_T.tolist(), part.position_T.tolist(), strict=True))
        held += tokens
        # The row is that of the token before, wherever the token itself is held.
        sequences = [[*s.prompt.token_ids, *s.response_token_ids] for s in samples]
        predecessors = [sequences[i][3 + j - 1] for i, j in tokens]
        assert part.token_ids_N[part.rows_T].tolist() == predecessors

    sampled = [(i, int(j)) for i, s in enumerate(samples) for j in np.flatnonzero(s.loss_mask)]
    assert sorted(held) == sampled
    assert len(held) == sum(sum(parts[::2]) for parts in episodes)


def test_a_single_rank_keeps_the_micro_batch_as_it_is():
    whole = micro_batch()

    assert shard_context(whole, 0, 1) is whole


def test_a_sequence_that_cannot_be_divided_is_a_defect():
    with pytest.raises(AssertionError, match="a sequence of 6 tokens has no 4 equal chunks"):
        context_positions(6, 0, 2)


def test_a_part_without_response_tokens_is_empty_but_typed():
    samples = [make_sample(1, 1)]
    rules = PackingRules(1, 100, SequenceFlops(1, 0), sequence_multiple=4, total_multiple=4)
    second = shard_context(build_micro_batch(samples, [0], [1.0], [1.0], rules), 1, 2)

    assert second.num_tokens == 2
    assert second.rows_T.dtype == torch.int64
    assert second.rows_T.numel() == second.advantage_T.numel() == 0
