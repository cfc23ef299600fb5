"""A layer's experts without Transformer Engine: a grouped product in place of one product each.

Shape legend: N = tokens of this rank's experts, expert by expert; E = experts of this rank, I and
O = input and output channels of a linear, F = channels of an expert.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor

from bapo_megatron.ops.chunked import placeholder_gradient
from bapo_megatron.policy.local_layers import (
    squared_relu,
    weighted_clamped_swiglu,
    weighted_swiglu,
)

_ALIGNMENT_BYTES = 16
"""Of the rows of every factor of a grouped product."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class GroupedExperts(SequentialMLP):
    """Megatron's sequential experts, with their parameters and checkpoints, computed together.

    They are computed one by one for a ``loop_reason``, and when they have no token.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for linear in self._linears("linear_fc2"):
            # Without: a reduction over one rank, to whose output Megatron cannot add a bias.
            linear.explicit_expert_comm = True

    def forward(
        self, hidden_NI: Tensor, tokens_per_expert: Tensor, probs_N: Tensor
    ) -> tuple[Tensor, None]:
        """Return the outputs, [N, I], weighted by ``probs_N``, and no bias."""
        if len(hidden_NI) == 0 or self.loop_reason(hidden_NI.dtype):
            return super().forward(hidden_NI, tokens_per_expert, probs_N)[0], None
        sizes = tokens_per_expert.tolist()
        ends_E = tokens_per_expert.cumsum(0).to(hidden_NI.device, torch.int32, non_blocking=True)
        config, weights_N1 = self.config, probs_N[:, None]
        inner = self._multiply("linear_fc1", hidden_NI, ends_E, sizes)
        if not config.gated_linear_unit:
            inner_NF = (squared_relu(inner) * weights_N1).to(inner.dtype)
        elif config.activation_func_clamp_value is None:
            inner_NF = weighted_swiglu(inner, None, weights_N1)
        else:
            offset, limit = config.glu_linear_offset, config.activation_func_clamp_value
            inner_NF = weighted_clamped_swiglu(inner, None, weights_N1, False, offset, limit)
        return self._multiply("linear_fc2", inner_NF, ends_E, sizes, weights_N1), None

    def loop_reason(self, dtype: torch.dtype) -> str:
        """Return why experts of ``dtype`` are computed one by one; empty if they are not."""
        if self.num_local_experts == 1:
            return "a single expert"
        if dtype not in _DTYPES:
            return f"{dtype}"
        expert = self.local_experts[0]
        widths = expert.linear_fc1.weight.shape + expert.linear_fc2.weight.shape
        if any(width * dtype.itemsize % _ALIGNMENT_BYTES for width in widths):
            return f"widths that are no multiples of {_ALIGNMENT_BYTES} bytes"
        if any(linear._forward_hooks for linear in self._linears("linear_fc1", "linear_fc2")):
            return "adapters"
        return ""

    def _linears(self, *names: str) -> list[Any]:
        return [getattr(expert, name) for name in names for expert in self.local_experts]

    def _multiply(
        self,
        name: str,
        hidden_NI: Tensor,
        ends_E: Tensor,
        sizes: list[int],
        weights_N1: Tensor | None = None,
    ) -> Tensor:
        """Return products with biases, which are multiplied by ``weights_N1``."""
        linears = self._linears(name)
        for linear in linears:
            for hook in linear._forward_pre_hooks.values():
                hook(linear, (hidden_NI,))  # Megatron waits for the gathered weights of each
        weights = [linear.weight for linear in linears]
        product_NO: Tensor = _GroupedLinear.apply(
            hidden_NI, ends_E, sizes, linears[0].gradient_accumulation_fusion, *weights
        )
        if linears[0].bias is None:
            return product_NO
        factors = [1.0] * len(sizes) if weights_N1 is None else weights_N1.split(sizes)
        parts = zip(product_NO.split(sizes), linears, factors, strict=True)
        return torch.cat([(part + lin.bias * factor).to(part.dtype) for part, lin, factor in parts])


class _GroupedLinear(torch.autograd.Function):
    """Multiply the tokens of each expert by its weight.

    The gradients that autograd derives would be strided views, one per weight, and rounded before
    they are added to those of earlier micro-batches (``gradient_accumulation_fusion``).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NI: Tensor,
        ends_E: Tensor,
        sizes: list[int],
        accumulates: bool,
        *weights: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(hidden_NI, *weights)
        ctx.ends_E, ctx.sizes, ctx.accumulates = ends_E, sizes, accumulates
        return F.grouped_mm(hidden_NI, torch.stack(weights).transpose(1, 2), offs=ends_E)

    @staticmethod
    def backward(ctx: Any, gradient_NO: Tensor) -> tuple[Any, ...]:
        hidden_NI, *weights = ctx.saved_tensors
        ends_E, gradient_NO = ctx.ends_E, gradient_NO.contiguous()
        of_hidden: Tensor | None = None
        if ctx.needs_input_grad[0]:
            of_hidden = F.grouped_mm(gradient_NO, torch.stack(weights), offs=ends_E)
        of_weights: Sequence[Tensor | None] = [None] * len(weights)
        if ctx.needs_input_grad[-1]:
            if ctx.accumulates:
                parts = zip(
                    weights, hidden_NI.split(ctx.sizes), gradient_NO.split(ctx.sizes), strict=True
                )
                of_weights = [_accumulate(*part) for part in parts]
            else:
                of_weights = F.grouped_mm(gradient_NO.T, hidden_NI, offs=ends_E).unbind()
        return of_hidden, None, None, None, *of_weights


def _accumulate(weight: Any, hidden_NI: Tensor, gradient_NO: Tensor) -> Tensor:
    """Add a gradient to its float32 sum, as Megatron's layers do; returns its placeholder."""
    layers.fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32(
        hidden_NI, gradient_NO, weight.main_grad
    )
    return placeholder_gradient(weight)
