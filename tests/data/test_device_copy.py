"""A micro-batch reaches the device in one piece, from pinned memory."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from bapo_megatron.data.micro_batch import build_micro_batch, on_device
from bapo_megatron.data.packing import PackingRules, SequenceFlops
from bapo_megatron.types import MicroBatch
from tests.data.samples import make_sample

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
    samples = [make_sample(2, 3), make_sample(1, 1, index=1)]
    rules = PackingRules(1, 100, SequenceFlops(per_token=1, per_pair=0), total_multiple=8)
    return build_micro_batch(samples, sample_indices, [0.5, -1.0], [0.25, 0.25], rules)


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
    for field in fields(MicroBatch):
        here, copied = getattr(micro_batch, field.name), getattr(there, field.name)
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
    assert {v.device for f in fields(there) if (v := getattr(there, f.name)) is not None} == {
        device
    }
    here = _micro_batch([0, 1])
    assert on_device(here, torch.device("cpu")) is here
