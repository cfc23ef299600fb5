"""SwiGLU without Transformer Engine: silu(gate) · up; the backward pass keeps its input alone.

Autograd would keep silu(gate) and up as well, and concatenate the gradients of the two halves.

Shape legend: N = tokens, F = channels of the MLP.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def swiglu(gate_up_N2F: Tensor, *_: Any) -> Tensor:
    """Return silu(gate) · up, [N, F]; also in place of Megatron's ``bias_swiglu_impl``."""
    output: Tensor = _SwiGlu.apply(gate_up_N2F)
    return output


def weighted_swiglu(gate_up_N2F: Tensor, _bias: None, weights_N1: Tensor, *_: Any) -> Tensor:
    """Return silu(gate) · up · weight, in place of Megatron's ``weighted_bias_swiglu_impl``."""
    return (swiglu(gate_up_N2F) * weights_N1).to(gate_up_N2F.dtype)


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up_N2F: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up_N2F)
        gate_NF, up_NF = gate_up_N2F.chunk(2, dim=-1)
        return F.silu(gate_NF).mul_(up_NF)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_NF: Tensor) -> Tensor:
        (gate_up_N2F,) = ctx.saved_tensors
        gate_NF, up_NF = gate_up_N2F.chunk(2, dim=-1)
        gradient_N2F = torch.empty_like(gate_up_N2F)
        of_gate_NF, of_up_NF = gradient_N2F.chunk(2, dim=-1)
        torch.mul(gradient_NF, F.silu(gate_NF), out=of_up_NF)
        torch.ops.aten.silu_backward.grad_input(gradient_NF * up_NF, gate_NF, grad_input=of_gate_NF)
        return gradient_N2F
