"""Clipping without Transformer Engine and apex: Megatron's bits, and no wait per tensor."""

from unittest import mock

import pytest
import torch
from megatron.core.optimizer import clip_grads
from megatron.core.utils import local_multi_tensor_l2_norm, local_multi_tensor_scale
from torch import Tensor

from bapo_megatron.policy.optimizer import use_torch_kernels
from tests.gpu.test_no_host_sync import _RefuseReads


@pytest.fixture
def gradients() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator) for size in (1, 31, 4097, 70_001)]


@pytest.fixture(autouse=True)
def _restored() -> object:
    names = ("l2_norm_impl", "multi_tensor_scale_impl")
    with mock.patch.multiple(clip_grads, **{name: getattr(clip_grads, name) for name in names}):
        use_torch_kernels()
        yield


def test_the_norm_has_the_bits_of_megatron_s(gradients: list[Tensor]) -> None:
    # It asks for CUDA memory for the result.
    with mock.patch.object(torch, "tensor", lambda values, **_: torch.as_tensor(values)):
        expected, _ = local_multi_tensor_l2_norm(0, None, [gradients], False)
    norm, _ = clip_grads.l2_norm_impl(0, None, [gradients], False)
    assert norm.shape == (1,)
    assert torch.equal(norm, expected)


def test_the_norm_is_not_read_on_the_host(gradients: list[Tensor]) -> None:
    with _RefuseReads():
        clip_grads.l2_norm_impl(0, None, [gradients], False)
    with pytest.raises(AssertionError, match="reads the device"), _RefuseReads():
        local_multi_tensor_l2_norm(0, None, [gradients], False)


def test_gradients_are_scaled_in_place_to_the_bits_of_megatron_s(gradients: list[Tensor]) -> None:
    expected, places = [g.clone() for g in gradients], [g.data_ptr() for g in gradients]
    local_multi_tensor_scale(0, None, [expected, expected], 0.123456789)
    clip_grads.multi_tensor_scale_impl(0, None, [gradients, gradients], 0.123456789)
    assert all(torch.equal(g, e) for g, e in zip(gradients, expected, strict=True))
    assert [g.data_ptr() for g in gradients] == places


def test_a_stage_that_trains_nothing_scales_nothing() -> None:
    clip_grads.multi_tensor_scale_impl(0, None, [[], []], 0.5)
