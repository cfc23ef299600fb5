from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_megatron.data.micro_batch import build_micro_batch
from bapo_megatron.data.packing import PackingRules, SequenceFlops
from bapo_megatron.data.staleness import token_versions
from tests.data.samples import make_episode, make_sample

FLOPS = SequenceFlops(per_token=1, per_pair=0)


def padded(total_multiple, sequence_multiple=1):
    """Rules of which building needs the multiples alone."""
    return PackingRules(1, 10_000, FLOPS, sequence_multiple, total_multiple)


def naive_tokens(samples, indices):
    """One tuple per sampled token, by plain loops over the packed sequence."""
    tokens, position = [], 0
    packed = []
    for i in indices:
        sample = samples[i]
        written = {start + k for start, length in sample.written for k in range(length)}
        num_sampled = 0
        for token in sample.prompt.token_ids:
            packed.append(token)
            position += 1
        for j, token in enumerate(sample.response_token_ids):
            if j not in written:
                tokens.append(
                    (
                        position - 1,
                        int(token),
                        float(sample.behaviour_logprobs[num_sampled]),
                        i,
                        j,
                        int(token_versions(sample.versions)[num_sampled]),
                    )
                )
                num_sampled += 1
            packed.append(int(token))
            position += 1
        assert num_sampled == len(sample.behaviour_logprobs)
    return packed, tokens


responses = st.one_of(
    st.integers(0, 6).map(lambda length: (length,)),
    st.sampled_from([3, 5]).flatmap(lambda n: st.tuples(*[st.integers(1, 4)] * n)),
)
"""Tokens of a response, by turns: of one turn, or of two or three with what was written between."""


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 5), responses), max_size=8),
    multiple=st.sampled_from([1, 4, 7]),
)
def test_packed_tensors_equal_a_loop_over_tokens(lengths, multiple):
    samples = [make_episode(p, r, group_id=i, index=i % 3) for i, (p, r) in enumerate(lengths)]
    indices = list(range(len(samples)))[::-2]
    advantages = np.array([0.5 * i - 1 for i in range(len(samples))])
    weights = np.array([1 / (3 + i) for i in range(len(samples))])

    built = build_micro_batch(samples, indices, advantages, weights, padded(multiple))

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
    assert built.reward_T.tolist() == [samples[t[3]].reward for t in tokens]
    lengths = [len(samples[t[3]].behaviour_logprobs) for t in tokens]
    assert built.response_tokens_T.tolist() == lengths
    assert built.mask_T.tolist() == [1.0] * len(tokens)
    assert built.importance_T.tolist() == [1.0] * len(tokens)
    offsets = built.cu_seqlens.tolist()
    positions = [p for a, b in pairwise(offsets) for p in range(b - a)]
    assert built.position_ids_N.tolist() == positions
    assert offsets[-1] == built.num_tokens


def test_what_an_environment_wrote_is_packed_and_is_no_token_to_train():
    # Three turns of 2, 1 and 1 tokens with 3 and 2 tokens between them, and a response of one turn.
    samples = [make_episode(2, (2, 3, 1, 2, 1)), make_sample(1, 2, group_id=1)]

    built = build_micro_batch(samples, [1, 0], [1.0, -2.0], [0.25, 0.5], padded(16, 4))

    assert built.token_ids_N.tolist() == [
        *(2000, 2050, 2051, 0),
        *(1000, 1001, 1050, 1051, 1052, 1053, 1054, 1055, 1056, 1057, 1058, 0),
    ]
    assert built.cu_seqlens.tolist() == [0, 4, 16]
    assert built.target_T.tolist() == [2050, 2051, 1050, 1051, 1055, 1058]
    # The rows of 2000, 2050; 1001, 1050; 1054 and 1057, which the environment wrote last.
    assert built.rows_T.tolist() == [0, 1, 5, 6, 10, 13]
    assert built.position_T.tolist() == [0, 1, 0, 1, 5, 8]
    assert built.sample_T.tolist() == [1, 1, 0, 0, 0, 0]
    assert built.version_T.tolist() == [0, 0, 0, 0, 1, 1]
    assert built.advantage_T.tolist() == [-2.0, -2.0, 1.0, 1.0, 1.0, 1.0]
    assert built.loss_weight_T.tolist() == [0.5, 0.5, 0.25, 0.25, 0.25, 0.25]
    assert built.response_tokens_T.tolist() == [2.0, 2.0, 4.0, 4.0, 4.0, 4.0]
    f32 = np.float32
    of_first, of_second = f32([-1, -2, -3, -4]) / f32(1001), f32([-1, -2]) / f32(2001)
    assert built.rollout_logprob_T.tolist() == [*of_second.tolist(), *of_first.tolist()]


def test_masked_tokens_have_no_weight_and_masks_an_entry_for_each_sampled_token():
    samples = [make_episode(2, (1, 2, 2)), make_sample(1, 1, group_id=1), make_sample(1, 2)]
    masks = [np.array([False, True, True]), np.array([True]), np.zeros(2, dtype=bool)]

    built = build_micro_batch(
        samples, [1, 0, 2], [1.0, -2.0, 3.0], [0.25, 0.5, 1.0], padded(1), masks
    )

    assert built.target_T.tolist() == [2050, 1050, 1053, 1054, 1050, 1051]
    assert built.mask_T.tolist() == [1.0, 0.0, 1.0, 1.0, 0.0, 0.0]
    assert built.mask_T.dtype == torch.float32
    assert built.loss_weight_T.tolist() == [0.5, 0.0, 0.25, 0.25, 0.0, 0.0]
    assert built.advantage_T.tolist() == [-2.0, 1.0, 1.0, 1.0, 3.0, 3.0]
    assert built.response_tokens_T.tolist() == [1.0, 2.0, 2.0, 2.0, 0.0, 0.0]


def test_every_tensor_has_the_documented_type():
    built = build_micro_batch([make_sample(2, 3)], [0], [1.0], [1.0], padded(1))

    values = {name: getattr(built, name) for name in built.__slots__}  # a slot per field
    types = {name: None if value is None else value.dtype for name, value in values.items()}
    assert types == {
        "token_ids_N": torch.int64,
        "position_ids_N": torch.int64,
        "cu_seqlens": torch.int32,
        "rows_T": torch.int64,
        "target_T": torch.int64,
        "behaviour_logprob_T": torch.float32,
        "rollout_logprob_T": torch.float32,
        "advantage_T": torch.float32,
        "reward_T": torch.float32,
        "mask_T": torch.float32,
        "importance_T": torch.float32,
        "loss_weight_T": torch.float32,
        "sample_T": torch.int64,
        "response_tokens_T": torch.float32,
        "position_T": torch.int64,
        "version_T": torch.int64,
        # The loss stage fills these in where the objective asks for it.
        "entropy_T": None,
        "response_sum_T": None,
        "selected_T": None,
    }


def test_an_empty_micro_batch_is_one_padding_sequence_without_response_tokens():
    built = build_micro_batch([], [], [], [], padded(4))

    assert built.token_ids_N.tolist() == [0, 0, 0, 0]
    assert built.position_ids_N.tolist() == [0, 1, 2, 3]
    assert built.cu_seqlens.tolist() == [0, 4]
    assert built.num_response_tokens == 0
    assert built.reward_T.numel() == built.response_tokens_T.numel() == 0
