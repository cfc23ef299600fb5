"""A layer's experts, computed together, are what they are one by one."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional as F

from bapo_megatron.policy.experts import GroupedExperts
from tests.distributed_launch import joined, run_ranks

SIZES = ([3, 0, 5, 2], [0, 0, 0, 10], [1, 1, 1, 1], [0, 0, 0, 0])
REASONS: dict[str, tuple[dict[str, Any], torch.dtype]] = {
    "": ({}, torch.bfloat16),
    "a single expert": ({"experts": 1}, torch.float32),
    "torch.float64": ({}, torch.float64),
    "widths that are no multiples of 16 bytes": ({"inner": 6}, torch.float32),
}


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases, clamped": {
        "add_bias_linear": True,
        "activation_func": quick_gelu,
        "activation_func_clamp_value": 0.5,
        "glu_linear_offset": 1.0,
    },
}


def make(experts: int = 4, inner: int = 8, hidden: int = 16, **options: Any) -> GroupedExperts:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=hidden,
        num_attention_heads=2,
        num_moe_experts=experts,
        moe_ffn_hidden_size=inner,
        gated_linear_unit=True,
        use_cpu_initialization=True,
        **{"add_bias_linear": False, "activation_func": F.silu, **options},
    )
    world = torch.distributed.group.WORLD
    groups: Any = SimpleNamespace(ep=world, expt_tp=world, expt_dp=world)
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    return GroupedExperts(experts, config, submodules=linears, pg_collection=groups)


def outputs_and_gradients(forward: Any, experts: GroupedExperts, sizes: list[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, probs, gradient = (
        torch.randn(sum(sizes), *shape, generator=generator) for shape in ((16,), (), (16,))
    )
    leaves = [hidden.requires_grad_(), probs.requires_grad_(), *experts.parameters()]
    output, bias = forward(experts, hidden, torch.tensor(sizes), probs)
    assert bias is None
    return [output, *torch.autograd.grad(output, leaves, gradient)]


def compare() -> dict[str, Any]:
    with joined():
        hooked: list[Any] = []
        results = {}
        for kind, options in KINDS.items():
            experts = make(**options)
            for expert in experts.local_experts:
                expert.linear_fc2.register_forward_pre_hook(lambda linear, _: hooked.append(linear))
            for bias in (p for p in experts.parameters() if p.dim() == 1):
                torch.nn.init.normal_(bias)
            assert not experts.loop_reason(torch.float32)
            for sizes in SIZES:
                results[f"{kind} {sizes}"] = [
                    outputs_and_gradients(cls.forward, experts, sizes)
                    for cls in (GroupedExperts, SequentialMLP)
                ]
        reasons = {
            reason: make(**options).loop_reason(dtype)
            for reason, (options, dtype) in REASONS.items()
        }
        adapted = make()
        adapted.local_experts[1].linear_fc1.register_forward_hook(lambda *_: None)
        reasons["adapters"] = adapted.loop_reason(torch.float32)
        return {"results": results, "reasons": reasons, "hooked": len(hooked)}


@pytest.fixture(scope="module")
def compared() -> dict[str, Any]:
    results: dict[str, Any] = run_ranks(compare, 1)[0]
    return results


@pytest.mark.distributed
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_are_those_of_experts_one_by_one(
    compared: dict[str, Any], kind: str, sizes: list[int]
) -> None:
    grouped, looped = compared["results"][f"{kind} {sizes}"]
    for ours, expected in zip(grouped, looped, strict=True):
        assert ours.is_contiguous()
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.distributed
def test_experts_are_computed_one_by_one_for_a_reason(compared: dict[str, Any]) -> None:
    assert compared["reasons"] == {reason: reason for reason in [*REASONS, "adapters"]}


@pytest.mark.distributed
def test_weights_that_are_still_being_gathered_are_waited_for(compared: dict[str, Any]) -> None:
    # Once per expert and pass, whether grouped or not.
    assert compared["hooked"] == 2 * 4 * len(SIZES) * len(KINDS)
