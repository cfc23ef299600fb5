from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from bapo_megatron.data.micro_batch import (
    build_micro_batch,
    context_positions,
    on_device,
    shard_context,
)
from bapo_megatron.data.packing import PackingRules, SequenceFlops
from bapo_megatron.data.staleness import token_versions
from bapo_megatron.types import MicroBatch
from tests.data.samples import add_branch, make_episode, make_sample, with_columns

FLOPS = SequenceFlops(per_token=1, per_pair=0)


def padded(total_multiple, sequence_multiple=1):
    """Rules of which building needs the multiples alone."""
    return PackingRules(1, 10_000, FLOPS, sequence_multiple, total_multiple)


def naive_tokens(samples, indices):
    """One tuple per sampled token, by plain loops over the packed sequence."""
    tokens, packed = [], []
    for i in indices:
        sample = samples[i]
        written = {start + k for start, length in sample.written for k in range(length)}
        logprobs = iter(sample.behaviour_logprobs.tolist())
        versions = iter(token_versions(sample.versions).tolist())
        packed += sample.prompt.token_ids.tolist()
        for j, token in enumerate(sample.response_token_ids.tolist()):
            if j not in written:
                tokens.append((len(packed) - 1, token, next(logprobs), i, j, next(versions)))
            packed.append(token)
        assert [*logprobs, *versions] == []
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


def test_sequences_of_an_episode_are_apart_and_count_as_one_response():
    samples = [make_sample(1, 1), make_episode(2, (1, 2, 2), index=1)]
    add_branch(samples[1], (2, 1, 1), shared_tokens=3)
    add_branch(samples[1], (1,))
    sequences = [sequence for sample in samples for sequence in sample.sequences]
    masks = [np.array(m, bool) for m in ([1], [1, 0, 1], [1, 1, 0], [1])]

    built = build_micro_batch(sequences, [3, 0, 2], [1.0, -2.0], [0.5, 0.25], padded(1), masks)

    # The third branch's prompt of 2 tokens, the first sample's of 1, and the second's 2 + 3.
    assert built.cu_seqlens.tolist() == [0, 3, 5, 14]
    assert built.rows_T.tolist() == [1, 3, 9, 10, 12]
    assert built.sample_T.tolist() == [1, 0, 1, 1, 1]
    # Before them the episode has 5 tokens, and before the last branch 5 + 4.
    assert built.position_T.tolist() == [9, 0, 5, 6, 8]
    assert built.mask_T.tolist() == [1.0, 1.0, 1.0, 1.0, 0.0]
    assert built.mask_T.dtype == torch.float32
    assert built.response_tokens_T.tolist() == [5.0, 1.0, 5.0, 5.0, 5.0]
    assert built.advantage_T.tolist() == [-2.0, 1.0, -2.0, -2.0, -2.0]
    assert built.loss_weight_T.tolist() == [0.25, 0.5, 0.25, 0.25, 0.0]
    assert built.reward_T.tolist() == [1.0, 0.0, 1.0, 1.0, 1.0]


def test_every_tensor_has_the_documented_type():
    built = build_micro_batch([make_sample(2, 3)], [0], [1.0], [1.0], padded(1))

    values = {name: getattr(built, name) for name in built.__slots__}  # a slot per field
    assert values.pop("columns") == {}
    names_of: dict[torch.dtype | None, set[str]] = {}
    for name, value in values.items():
        names_of.setdefault(None if value is None else value.dtype, set()).add(name)
    assert names_of == {
        torch.int32: {"cu_seqlens"},
        torch.int64: {
            *("token_ids_N", "position_ids_N", "rows_T", "target_T"),
            *("sample_T", "position_T", "version_T"),
        },
        torch.float32: {
            *("behaviour_logprob_T", "rollout_logprob_T", "advantage_T", "reward_T", "mask_T"),
            *("importance_T", "loss_weight_T", "response_tokens_T"),
        },
        # The loss stage fills these in where the objective asks for it.
        None: {"entropy_T", "response_sum_T", "selected_T", "routes"},
    }


def test_an_empty_micro_batch_is_one_padding_sequence_without_response_tokens():
    built = build_micro_batch([], [], [], [], padded(4))

    assert built.token_ids_N.tolist() == [0, 0, 0, 0]
    assert built.position_ids_N.tolist() == [0, 1, 2, 3]
    assert built.cu_seqlens.tolist() == [0, 4]
    assert len(built.target_T) == 0
    assert built.reward_T.numel() == built.response_tokens_T.numel() == 0


# --- the division over context-parallel ranks ---


def test_a_rank_holds_a_chunk_from_the_start_and_one_from_the_end():
    assert context_positions(8, 0, 2).tolist() == [0, 1, 6, 7]
    assert context_positions(8, 1, 2).tolist() == [2, 3, 4, 5]
    assert context_positions(12, 1, 3).tolist() == [2, 3, 8, 9]
    assert context_positions(5, 0, 1).tolist() == [0, 1, 2, 3, 4]


def micro_batch():
    """Two samples of 5 and 2 tokens, padded to 8 and 4."""
    samples = [make_sample(2, 3), make_sample(1, 1, group_id=1)]
    samples[0].reward, samples[1].reward = 0.5, 0.75
    return build_micro_batch(samples, [0, 1], [1.0, -2.0], [0.25, 0.5], padded(4, 4))


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


def test_a_single_rank_keeps_the_micro_batch_as_it_is():
    whole = micro_batch()

    assert shard_context(whole, 0, 1) is whole


def test_a_sequence_that_cannot_be_divided_is_a_defect():
    with pytest.raises(AssertionError, match="a sequence of 6 tokens has no 4 equal chunks"):
        context_positions(6, 0, 2)


def test_a_part_without_response_tokens_is_empty_but_typed():
    samples = [make_sample(1, 1)]
    second = shard_context(build_micro_batch(samples, [0], [1.0], [1.0], padded(4, 4)), 1, 2)

    assert second.num_tokens == 2
    assert second.rows_T.dtype == torch.int64
    assert second.rows_T.numel() == second.advantage_T.numel() == 0


# --- columns of scorers ---


def test_columns_are_packed_as_the_tokens_are_and_default_where_a_sample_has_none() -> None:
    samples = [make_sample(2, 1), with_columns(make_sample(2, 3, index=1))]
    built = build_micro_batch(samples, [1, 0], [0.0, 0.0], [1.0, 1.0], padded(8))
    assert built.columns.keys() == {"teacher_logprob", "teacher_top_ids"}
    logprob_T, ids_TK = built.columns["teacher_logprob"], built.columns["teacher_top_ids"]
    assert (logprob_T.dtype, ids_TK.dtype) == (torch.float32, torch.int32)
    assert logprob_T[:3].tolist() == [-0.5, -1.5, -2.5]
    assert logprob_T[3].isnan()
    assert ids_TK.tolist() == [[0, 1], [2, 3], [4, 5], [-1, -1]]


def test_every_micro_batch_of_a_batch_has_the_same_columns() -> None:
    samples = [make_sample(2, 1), with_columns(make_sample(2, 3, index=1))]
    for indices in ([], [0]):
        built = build_micro_batch(samples, indices, [0.0, 0.0], [1.0, 1.0], padded(8))
        assert built.columns.keys() == {"teacher_logprob", "teacher_top_ids"}


def test_context_ranks_hold_the_columns_of_their_tokens() -> None:
    samples = [with_columns(make_sample(3, 5))]
    whole = build_micro_batch(samples, [0], [0.0], [1.0], padded(8, sequence_multiple=4))
    parts = [shard_context(whole, rank, 2) for rank in range(2)]
    for name, value in whole.columns.items():
        order = torch.cat([part.position_T for part in parts]).argsort()
        assert torch.cat([part.columns[name] for part in parts])[order].equal(value)
        assert all(len(part.columns[name]) == len(part.target_T) for part in parts)


# --- the copy to the device ---

GPU = torch.device("cuda", 0)
"""Stands for one; nothing is on it."""


class PretendedGpu(TorchFunctionMode):
    """Takes what goes to the GPU as it is, and notes what was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.pinned_bytes: list[int] = []
        self.copied: list[tuple[torch.dtype, int, bool]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.pop("pin_memory", False):
            self.pinned_bytes.append(args[0])
        if func is torch.Tensor.to and args[1:] == (GPU,):
            self.copied.append((args[0].dtype, len(args[0]), kwargs["non_blocking"]))
            return args[0].clone()
        return func(*args, **kwargs)


def _micro_batch(sample_indices: list[int]) -> MicroBatch:
    samples = [with_columns(make_sample(2, 3)), with_columns(make_sample(1, 1, index=1))]
    return build_micro_batch(samples, sample_indices, [0.5, -1.0], [0.25, 0.25], padded(8))


def _tensors(micro_batch: MicroBatch) -> dict[str, torch.Tensor | None]:
    values = {field.name: getattr(micro_batch, field.name) for field in fields(MicroBatch)}
    columns = values.pop("columns")
    assert sorted(columns) == ["teacher_logprob", "teacher_top_ids"]
    return values | columns


@pytest.mark.parametrize("sample_indices", [[0, 1], []], ids=["two samples", "no sample"])
def test_all_tensors_come_in_one_copy_from_pinned_memory(sample_indices: list[int]) -> None:
    micro_batch = replace(
        _micro_batch(sample_indices), selected_T=torch.ones(4 * bool(sample_indices), dtype=bool)
    )
    with PretendedGpu() as gpu:
        there = on_device(micro_batch, GPU)
    (num_bytes,) = gpu.pinned_bytes
    assert gpu.copied == [(torch.uint8, num_bytes, True)]
    assert num_bytes % 16 == 0
    tensors = _tensors(there)
    for name, here in _tensors(micro_batch).items():
        copied = tensors[name]
        assert (here is None) == (copied is None)
        if here is not None:
            assert copied.dtype == here.dtype
            assert copied.equal(here)
            assert copied.untyped_storage().nbytes() == num_bytes  # views of the one copy


def test_what_is_on_the_device_stays_as_it_is() -> None:
    device = torch.device("meta")
    logprob_T = torch.empty(4, device=device)
    micro_batch = replace(_micro_batch([0, 1]), behaviour_logprob_T=logprob_T)
    with PretendedGpu():
        there = on_device(micro_batch, device)
        assert on_device(there, device) is there
    assert there.behaviour_logprob_T is logprob_T
    assert {v.device for v in _tensors(there).values() if v is not None} == {device}
    here = _micro_batch([0, 1])
    assert on_device(here, torch.device("cpu")) is here
