"""Gated MLPs with our own backward pass have the bits of what autograd derives, and keep less."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bapo_megatron.policy.local_layers import geglu, swiglu, weighted_swiglu

SIZES = [(0, 8), (1, 1), (31, 33), (257, 96)]


def by_autograd(gate_up: Tensor, activate: Callable[[Tensor], Tensor] = F.silu) -> Tensor:
    """Megatron's formula without fusion."""
    gate, up = gate_up.chunk(2, dim=-1)
    return activate(gate) * (up + 0.0)


def draw(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize(
    ("gated", "activate"), [(swiglu, F.silu), (geglu, partial(F.gelu, approximate="tanh"))]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "channels"), SIZES)
def test_value_and_gradient_have_autograd_s_bits(
    tokens: int, channels: int, dtype: torch.dtype, gated: Any, activate: Any
) -> None:
    gate_up = draw(tokens, 1, 2 * channels, dtype=dtype).requires_grad_()
    gradient = draw(tokens, 1, channels, dtype=dtype)
    expected, output = by_autograd(gate_up, activate), gated(gate_up, None)
    assert torch.equal(output, expected)
    (derived,) = torch.autograd.grad(expected, gate_up, gradient)
    (written,) = torch.autograd.grad(output, gate_up, gradient)
    assert torch.equal(written, derived)


def test_rows_with_a_stride_are_read_where_they_are() -> None:
    wide = draw(5, 20, dtype=torch.float32).requires_grad_()
    (derived,) = torch.autograd.grad(by_autograd(wide[:, :12]).square().sum(), wide)
    (written,) = torch.autograd.grad(swiglu(wide[:, :12]).square().sum(), wide)
    assert torch.equal(written, derived)


def test_the_gradient_is_the_derivative() -> None:
    gate_up = draw(3, 10, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(swiglu, (gate_up,))


def test_weights_of_experts_are_applied_in_float32_and_have_gradients() -> None:
    gate_up = draw(7, 12, dtype=torch.bfloat16)
    weights = draw(7, 1, dtype=torch.float32).requires_grad_()
    output = weighted_swiglu(gate_up, None, weights, False)
    assert output.dtype == torch.bfloat16
    assert torch.equal(output, (by_autograd(gate_up).float() * weights).bfloat16())
    output.backward(torch.ones_like(output))
    assert torch.equal(weights.grad, by_autograd(gate_up).float().sum(dim=1, keepdim=True))


def test_only_the_input_is_kept_for_the_backward_pass() -> None:
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.untyped_storage().data_ptr())
        return tensor

    gate_up = draw(4, 6, dtype=torch.float32).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        swiglu(gate_up)
    assert kept == [gate_up.untyped_storage().data_ptr()]
