"""Clip rules: values, gradients and counts at, inside and outside of the limits."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from bapo_megatron.algorithm.clipping import (
    BapoClip,
    FixedClip,
    NoClip,
    clipped_surrogate,
    make_clip_rule,
)
from bapo_megatron.config.schema import AlgorithmConfig, FixedClipConfig
from bapo_megatron.ops.contributions import accumulate
from bapo_megatron.types import ClipBounds

BOUNDS = ClipBounds(low=0.5, high=1.5, positive_share_start=0.5, positive_share=0.5, exit="start")


def textbook(ratio_T: Tensor, advantage_T: Tensor, dual_clip: float | None) -> Tensor:
    """min(rA, clip(r)A), limited from below by dual_clip·A for negative A, as papers print it."""
    value_T = torch.minimum(ratio_T * advantage_T, ratio_T.clamp(0.5, 1.5) * advantage_T)
    if dual_clip is None:
        return value_T
    limited_T = torch.maximum(value_T, dual_clip * advantage_T)
    return torch.where(advantage_T < 0, limited_T, value_T)


@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_values_and_gradients_equal_the_textbook_formula_away_from_ties(
    dual_clip: float | None,
) -> None:
    generator = torch.Generator().manual_seed(0)
    ratio_T = (5 * torch.rand(500, generator=generator, dtype=torch.float64)).requires_grad_()
    advantage_T = torch.randn(500, generator=generator, dtype=torch.float64)
    ours = clipped_surrogate(ratio_T, advantage_T, BOUNDS, dual_clip).value_T
    wanted = textbook(ratio_T, advantage_T, dual_clip)
    assert torch.equal(ours, wanted)
    (our_grad,) = torch.autograd.grad(ours.sum(), ratio_T)
    (wanted_grad,) = torch.autograd.grad(wanted.sum(), ratio_T)
    assert torch.equal(our_grad, wanted_grad)


@pytest.mark.parametrize("ratio", [0.5, 1.5])
@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_on_a_bound_the_gradient_passes_as_in_the_textbook_formula(
    ratio: float, advantage: float
) -> None:
    ratio_T = torch.tensor([ratio], requires_grad=True)
    advantage_T = torch.tensor([advantage])
    ours = clipped_surrogate(ratio_T, advantage_T, BOUNDS, None)
    (our_grad,) = torch.autograd.grad(ours.value_T.sum(), ratio_T)
    (wanted,) = torch.autograd.grad(textbook(ratio_T, advantage_T, None).sum(), ratio_T)
    assert our_grad.item() == wanted.item() == advantage
    assert not (ours.high_T | ours.low_T).any()


def test_on_the_dual_clip_the_gradient_passes() -> None:
    ratio_T = torch.tensor([3.0], requires_grad=True)
    ours = clipped_surrogate(ratio_T, torch.tensor([-1.0]), BOUNDS, 3.0)
    (grad,) = torch.autograd.grad(ours.value_T.sum(), ratio_T)
    assert grad.item() == -1.0
    assert not ours.dual_T.any()


def test_limits_hold_only_the_side_that_they_are_made_for() -> None:
    ratio_T = torch.tensor([0.4, 0.4, 1.6, 1.6, 4.0, 4.0, 1.0], requires_grad=True)
    advantage_T = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 0.0])
    ours = clipped_surrogate(ratio_T, advantage_T, BOUNDS, 3.0)
    expected = [0.4, -0.5, 1.5, -1.6, 1.5, -3.0, 0.0]
    assert ours.value_T.tolist() == pytest.approx(expected, abs=1e-6)
    assert ours.high_T.tolist() == [False, False, True, False, True, False, False]
    assert ours.low_T.tolist() == [False, True, False, False, False, False, False]
    assert ours.dual_T.tolist() == [False, False, False, False, False, True, False]
    (grad,) = torch.autograd.grad(ours.value_T.sum(), ratio_T)
    assert grad.tolist() == [1.0, 0.0, 0.0, -1.0, 0.0, 0.0, 0.0]


def test_no_clip_leaves_the_ratio_alone() -> None:
    rule = NoClip()
    bounds = rule.bounds(rule.new_table())
    ratio_T, advantage_T = torch.tensor([1e-9, 1e8]), torch.tensor([-2.0, 3.0])
    ours = rule.surrogate(ratio_T, advantage_T, bounds)
    assert torch.equal(ours.value_T, ratio_T * advantage_T)
    assert not (ours.high_T | ours.low_T | ours.dual_T).any()


def test_fixed_bounds_are_those_of_the_configuration() -> None:
    rule = FixedClip(FixedClipConfig(low=0.8, high=1.28))
    bounds = rule.bounds(rule.new_table())
    assert (bounds.low, bounds.high, bounds.exit) == (0.8, 1.28, "fixed")
    assert math.isnan(bounds.positive_share)


def test_bapo_bounds_come_from_the_table() -> None:
    config = AlgorithmConfig.model_validate(
        {
            "bapo": {
                "lower": {"start": 0.75, "max": 1.0, "step": 0.25},
                "upper": {"start": 1.0, "max": 1.25, "step": 0.25},
                "target": 0.45,
            }
        }
    )
    rule = make_clip_rule(config)
    table = rule.new_table()
    assert table is not None
    logprob_T = torch.tensor([2.0, 0.5]).log()
    accumulate(table, logprob_T, torch.zeros(2), torch.tensor([1.0, -2.0]), torch.ones(2))
    bounds = rule.bounds(table)
    assert (bounds.low, bounds.high, bounds.exit) == (0.75, 1.25, "met")
    with pytest.raises(ValueError, match="needs a contribution table"):
        rule.bounds(None)


@pytest.mark.parametrize(
    ("clip", "kind"), [("bapo", BapoClip), ("fixed", FixedClip), ("none", NoClip)]
)
def test_the_configuration_names_the_rule_and_its_dual_clip(clip: str, kind: type) -> None:
    rule = make_clip_rule(AlgorithmConfig.model_validate({"clip": clip, "dual_clip": 2.5}))
    assert isinstance(rule, kind)
    assert rule.dual_clip == 2.5
