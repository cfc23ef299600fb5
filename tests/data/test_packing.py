from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_megatron.data.packing import (
    build_micro_batch,
    build_micro_batches,
    plan_update,
    split_updates,
)
from tests.data.samples import make_batch, make_sample


def sizes(plan, samples):
    """Tokens of each micro-batch, rank by rank."""
    return [
        [
            sum(len(samples[i].prompt.token_ids) + len(samples[i].response_token_ids) for i in k)
            for k in rank
        ]
        for rank in plan.ranks
    ]


def test_updates_are_whole_groups_in_order():
    batch = make_batch(num_groups=4, group_size=2)

    assert split_updates(batch, updates_per_batch=2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert split_updates(batch, updates_per_batch=4) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_groups_that_do_not_divide_are_refused():
    with pytest.raises(
        ValueError,
        match=r"algorithm\.updates_per_batch is 2 but the batch of step 5 has 3 groups",
    ):
        split_updates(make_batch(num_groups=3), updates_per_batch=2)


def test_the_longest_samples_go_to_the_emptiest_micro_batches():
    # 9 + 1, 8 + 2, 7 + 3 and 6 + 4 fill four micro-batches of ten exactly.
    samples = [make_sample(1, length - 1) for length in (1, 2, 3, 4, 6, 7, 8, 9)]

    plan = plan_update(samples, range(8), data_parallel=2, max_tokens_per_micro_batch=10)

    assert sizes(plan, samples) == [[10, 10], [10, 10]]
    assert (plan.real_tokens, plan.slots, plan.utilisation_share) == (40, 40, 1.0)


def test_fewer_samples_than_ranks_give_an_empty_micro_batch():
    samples = [make_sample(2, 3)]

    plan = plan_update(
        samples, [0], data_parallel=2, max_tokens_per_micro_batch=8, pad_to_multiple=4
    )

    assert plan.ranks == (((0,),), ((),))
    assert (plan.real_tokens, plan.slots) == (5, 12)


def test_a_sample_beyond_the_budget_is_named_with_the_keys_to_change():
    samples = [make_sample(2, 3), make_sample(4, 6, group_id=8, index=1)]

    with pytest.raises(ValueError, match=r"sample 1 of group 8 \(train.jsonl:8\) has 10 tokens"):
        plan_update(samples, [0, 1], 1, 9)
    with pytest.raises(ValueError, match=r"train.max_tokens_per_micro_batch holds 8"):
        plan_update(samples, [0, 1], 1, 11, pad_to_multiple=4)


def test_an_update_without_samples_is_refused():
    with pytest.raises(ValueError, match="at least one sample"):
        plan_update([], [], 1, 8)


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 40)), min_size=1, max_size=40),
    data_parallel=st.integers(1, 5),
    budget=st.integers(60, 200),
    multiple=st.sampled_from([1, 2, 8, 16]),
    order=st.randoms(use_true_random=False),
)
def test_a_plan_holds_every_sample_once_within_the_budget(
    lengths, data_parallel, budget, multiple, order
):
    budget = max(budget, -(-60 // multiple) * multiple)
    samples = [make_sample(p, r, group_id=i) for i, (p, r) in enumerate(lengths)]
    chosen = list(range(0, len(samples), 2))

    plan = plan_update(samples, chosen, data_parallel, budget, multiple)

    assert sorted(i for rank in plan.ranks for k in rank for i in k) == chosen
    assert len(plan.ranks) == data_parallel
    assert len({len(rank) for rank in plan.ranks}) == 1
    built = [
        build_micro_batch(samples, k, np.zeros(len(samples)), np.zeros(len(samples)), multiple)
        for rank in plan.ranks
        for k in rank
    ]
    assert all(0 < b.num_tokens <= budget and b.num_tokens % multiple == 0 for b in built)
    assert plan.slots == sum(b.num_tokens for b in built)
    assert plan.real_tokens == sum(sum(lengths[i]) for i in chosen)
    order.shuffle(chosen)
    assert plan_update(samples, chosen, data_parallel, budget, multiple) == plan


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 30), min_size=4, max_size=60),
    data_parallel=st.integers(1, 4),
)
def test_ranks_differ_by_at_most_the_longest_sample(lengths, data_parallel):
    samples = [make_sample(1, length - 1) for length in lengths]

    loads = [
        sum(rank)
        for rank in sizes(plan_update(samples, range(len(samples)), data_parallel, 30), samples)
    ]

    assert max(loads) - min(loads) <= max(lengths)


def naive_tokens(samples, indices):
    """One tuple per response token, by plain loops over the packed sequence."""
    tokens, position = [], 0
    packed = []
    for i in indices:
        sample = samples[i]
        for token in sample.prompt.token_ids:
            packed.append(token)
            position += 1
        for j, token in enumerate(sample.response_token_ids):
            tokens.append(
                (
                    position - 1,
                    int(token),
                    float(sample.behaviour_logprobs[j]),
                    i,
                    j,
                    int(sample.versions[j]),
                )
            )
            packed.append(int(token))
            position += 1
    return packed, tokens


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6)), max_size=8),
    multiple=st.sampled_from([1, 4, 7]),
)
def test_packed_tensors_equal_a_loop_over_tokens(lengths, multiple):
    samples = [make_sample(p, r, group_id=i) for i, (p, r) in enumerate(lengths)]
    indices = list(range(len(samples)))[::-2]
    advantages = np.array([0.5 * i - 1 for i in range(len(samples))])
    weights = np.array([1 / (3 + i) for i in range(len(samples))])

    built = build_micro_batch(samples, indices, advantages, weights, multiple)

    packed, tokens = naive_tokens(samples, indices)
    assert built.token_ids_N[: len(packed)].tolist() == packed
    assert built.token_ids_N[len(packed) :].tolist() == [0] * (built.num_tokens - len(packed))
    assert built.num_tokens - len(packed) < multiple or not packed
    names = ("rows_T", "target_T", "rollout_logprob_T", "sample_T", "position_T", "version_T")
    columns = [getattr(built, name).tolist() for name in names]
    assert list(zip(*columns, strict=True)) == tokens
    assert torch.equal(built.behaviour_logprob_T, built.rollout_logprob_T)
    f32 = np.float32
    assert built.advantage_T.tolist() == [float(f32(advantages[t[3]])) for t in tokens]
    assert built.loss_weight_T.tolist() == [float(f32(weights[t[3]])) for t in tokens]
    assert built.mask_T.tolist() == [1.0] * len(tokens)
    offsets = built.cu_seqlens.tolist()
    positions = [p for a, b in pairwise(offsets) for p in range(b - a)]
    assert built.position_ids_N.tolist() == positions
    assert offsets[-1] == built.num_tokens


def test_a_packed_micro_batch_by_hand():
    samples = [make_sample(2, 3), make_sample(1, 1, group_id=1)]

    built = build_micro_batch(samples, [0, 1], [1.0, -2.0], [0.25, 0.5], pad_to_multiple=8)

    assert built.token_ids_N.tolist() == [1000, 1001, 1050, 1051, 1052, 2000, 2050, 0]
    assert built.position_ids_N.tolist() == [0, 1, 2, 3, 4, 0, 1, 0]
    assert built.cu_seqlens.tolist() == [0, 5, 7, 8]
    assert built.rows_T.tolist() == [1, 2, 3, 5]
    assert built.target_T.tolist() == [1050, 1051, 1052, 2050]
    assert built.advantage_T.tolist() == [1.0, 1.0, 1.0, -2.0]
    assert built.loss_weight_T.tolist() == [0.25, 0.25, 0.25, 0.5]
    assert built.sample_T.tolist() == [0, 0, 0, 1]
    assert built.position_T.tolist() == [0, 1, 2, 0]
    assert built.version_T.tolist() == [0, 0, 1, 0]


def test_every_tensor_has_the_documented_type():
    built = build_micro_batch([make_sample(2, 3)], [0], [1.0], [1.0])

    types = {
        name: getattr(built, name).dtype
        for name in built.__slots__  # a slot per field
    }
    assert types == {
        "token_ids_N": torch.int64,
        "position_ids_N": torch.int64,
        "cu_seqlens": torch.int32,
        "rows_T": torch.int64,
        "target_T": torch.int64,
        "behaviour_logprob_T": torch.float32,
        "rollout_logprob_T": torch.float32,
        "advantage_T": torch.float32,
        "mask_T": torch.float32,
        "loss_weight_T": torch.float32,
        "sample_T": torch.int64,
        "position_T": torch.int64,
        "version_T": torch.int64,
    }


def test_an_empty_micro_batch_is_one_padding_sequence_without_response_tokens():
    built = build_micro_batch([], [], [], [], pad_to_multiple=4)

    assert built.token_ids_N.tolist() == [0, 0, 0, 0]
    assert built.position_ids_N.tolist() == [0, 1, 2, 3]
    assert built.cu_seqlens.tolist() == [0, 4]
    assert built.num_response_tokens == 0


def test_a_rank_gets_its_own_micro_batches():
    samples = [make_sample(1, 4, group_id=i) for i in range(4)]
    plan = plan_update(samples, range(4), data_parallel=2, max_tokens_per_micro_batch=5)

    ranks = [
        build_micro_batches(samples, plan, rank, np.zeros(4), np.zeros(4)) for rank in range(2)
    ]

    assert [len(rank) for rank in ranks] == [2, 2]
    seen = [set(m.sample_T.tolist()) for rank in ranks for m in rank]
    assert sorted(i for s in seen for i in s) == [0, 1, 2, 3]


def test_a_sample_with_too_few_log_probs_is_named():
    sample = make_sample(2, 3, group_id=4, index=1)
    sample.behaviour_logprobs = sample.behaviour_logprobs[:2]

    with pytest.raises(ValueError, match=r"sample 1 of group 4 .*3 response tokens but 2 behav"):
        build_micro_batch([sample], [0], [1.0], [1.0])


def test_a_prompt_without_tokens_is_refused():
    with pytest.raises(ValueError, match="the prompt has no tokens"):
        build_micro_batch([make_sample(0, 3)], [0], [1.0], [1.0])
