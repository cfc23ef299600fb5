"""The policy loss against float64 autograd, by hand, and over any split into micro-batches."""

from __future__ import annotations

import math
from dataclasses import astuple

import pytest
import torch
from torch import Tensor

from bapo_megatron.algorithm.clipping import FixedClip, NoClip
from bapo_megatron.algorithm.loss import (
    Denominators,
    policy_loss,
    token_weights,
)
from bapo_megatron.config.schema import FixedClipConfig

RULE = FixedClip(FixedClipConfig(low=0.75, high=1.25), dual_clip=3.0)
BOUNDS = RULE.bounds(None)


def random_batch(seed: int = 0, num_tokens: int = 200) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    behaviour_T = -torch.rand(num_tokens, generator=generator)
    return {
        "logprob_T": behaviour_T + 0.7 * torch.randn(num_tokens, generator=generator),
        "behaviour_logprob_T": behaviour_T,
        "advantage_T": torch.randn(num_tokens, generator=generator),
        "mask_T": (torch.rand(num_tokens, generator=generator) < 0.8).float(),
        "loss_weight_T": torch.full((num_tokens,), 1 / max(1, num_tokens)),
        "entropy_T": torch.rand(num_tokens, generator=generator),
    }


def reference_loss(batch: dict[str, Tensor], entropy_coefficient: float) -> Tensor:
    """The definition in float64 through autograd's own clamp, min and max."""
    exact = {
        name: value.double() if name != "logprob_T" else value for name, value in batch.items()
    }
    advantage_T = exact["advantage_T"]
    ratio_T = (batch["logprob_T"] - exact["behaviour_logprob_T"]).clamp(-20, 20).exp()
    value_T = torch.minimum(ratio_T * advantage_T, ratio_T.clamp(0.75, 1.25) * advantage_T)
    dual_T = torch.maximum(value_T, 3.0 * advantage_T)
    loss_T = -torch.where(advantage_T < 0, dual_T, value_T)
    loss_T = loss_T - entropy_coefficient * exact["entropy_T"]
    return (exact["mask_T"] * exact["loss_weight_T"] * loss_T).sum()


@pytest.mark.parametrize("entropy_coefficient", [0.0, 0.01])
def test_loss_and_gradient_equal_float64_autograd(entropy_coefficient: float) -> None:
    batch = random_batch()
    ours = {name: value.clone().requires_grad_() for name, value in batch.items()}
    result = policy_loss(**ours, rule=RULE, bounds=BOUNDS, entropy_coefficient=entropy_coefficient)
    result.loss.backward()
    exact = {**batch, "logprob_T": batch["logprob_T"].double().requires_grad_()}
    wanted = reference_loss(exact, entropy_coefficient)
    (wanted_grad,) = torch.autograd.grad(wanted, exact["logprob_T"])
    assert result.loss.item() == pytest.approx(wanted.item(), abs=1e-6)
    assert ours["logprob_T"].grad is not None
    assert torch.allclose(ours["logprob_T"].grad.double(), wanted_grad, rtol=1e-6, atol=1e-9)
    if entropy_coefficient:
        entropy_grad = -entropy_coefficient * batch["mask_T"] * batch["loss_weight_T"]
        assert ours["entropy_T"].grad is not None
        assert torch.allclose(ours["entropy_T"].grad, entropy_grad)
    else:
        assert ours["entropy_T"].grad is None


def test_on_a_bound_the_gradient_of_the_loss_passes() -> None:
    # Bounds that are exactly the ratios of the tokens.
    zero_T = torch.zeros(2)
    for advantage in (1.0, -1.0):
        logprob_T = zero_T.clone().requires_grad_()
        rule = FixedClip(FixedClipConfig(low=1.0, high=1.0))
        result = policy_loss(
            logprob_T,
            behaviour_logprob_T=zero_T,
            advantage_T=torch.full((2,), advantage),
            mask_T=torch.ones(2),
            loss_weight_T=torch.ones(2),
            rule=rule,
            bounds=rule.bounds(None),
        )
        result.loss.backward()
        assert logprob_T.grad is not None
        assert logprob_T.grad.tolist() == [-advantage] * 2
        assert result.sums.clipped_high.item() == result.sums.clipped_low.item() == 0


def test_masked_tokens_have_no_value_and_no_gradient_whatever_they_hold() -> None:
    batch = random_batch()
    clean = policy_loss(**batch, rule=RULE, bounds=BOUNDS, entropy_coefficient=0.1)
    dirty = {name: value.clone() for name, value in batch.items()}
    masked_T = batch["mask_T"] == 0
    for name in ("logprob_T", "behaviour_logprob_T", "advantage_T", "entropy_T"):
        dirty[name][masked_T] = math.nan
    dirty["logprob_T"].requires_grad_()
    result = policy_loss(**dirty, rule=RULE, bounds=BOUNDS, entropy_coefficient=0.1)
    assert result.loss.item() == clean.loss.item()
    assert astuple(result.sums) == astuple(clean.sums)
    result.loss.backward()
    assert dirty["logprob_T"].grad is not None
    assert torch.count_nonzero(dirty["logprob_T"].grad[masked_T]) == 0
    assert bool(torch.isfinite(dirty["logprob_T"].grad).all())


def test_sums_of_a_batch_computed_by_hand() -> None:
    ratio_T = torch.tensor([2.0, 0.5, 4.0, 1.0, 2.0])
    result = policy_loss(
        ratio_T.log(),
        behaviour_logprob_T=torch.zeros(5),
        advantage_T=torch.tensor([1.0, -1.0, -1.0, 1.0, 1.0]),
        mask_T=torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0]),
        loss_weight_T=torch.full((5,), 0.25),
        rule=RULE,
        bounds=BOUNDS,
        entropy_T=torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]),
        entropy_coefficient=0.5,
    )
    sums = result.sums
    # −1.25 + 0.75 + 3 − 1 = 1.5, a quarter of it; entropy 10 · 0.25 · 0.5
    assert sums.policy_loss.item() == pytest.approx(0.375, abs=1e-6)
    assert result.loss.item() == pytest.approx(0.375 - 1.25, abs=1e-6)
    assert sums.tokens.item() == 4
    assert sums.positive_tokens.item() == 2
    assert (sums.clipped_high.item(), sums.clipped_low.item(), sums.clipped_dual.item()) == (
        1,
        1,
        1,
    )
    assert sums.entropy.item() == 10
    # r − 1 − log r: (1 − ln 2) + (−0.5 + ln 2) + (3 − 2 ln 2) + 0
    assert sums.kl_behaviour.item() == pytest.approx(3.5 - 2 * math.log(2), abs=1e-6)


def test_a_tiny_divergence_is_not_lost_to_rounding() -> None:
    result = policy_loss(
        torch.tensor([1e-4]),
        behaviour_logprob_T=torch.zeros(1),
        advantage_T=torch.zeros(1),
        mask_T=torch.ones(1),
        loss_weight_T=torch.ones(1),
        rule=NoClip(),
        bounds=NoClip().bounds(None),
    )
    # x²/2 + x³/6
    assert result.sums.kl_behaviour.item() == pytest.approx(5.0001667e-9, rel=1e-5)


def test_no_tokens_give_a_loss_of_zero_that_can_be_differentiated() -> None:
    batch = random_batch(num_tokens=0)
    batch["logprob_T"].requires_grad_()
    result = policy_loss(**batch, rule=RULE, bounds=BOUNDS)
    result.loss.backward()
    assert result.loss.item() == 0
    assert [float(value) for value in astuple(result.sums)] == [0.0] * 8


def test_an_entropy_bonus_without_entropy_is_refused() -> None:
    batch = {**random_batch(), "entropy_T": None}
    with pytest.raises(ValueError, match=r"entropy_coefficient is 0\.1 but no entropy"):
        policy_loss(**batch, rule=RULE, bounds=BOUNDS, entropy_coefficient=0.1)


# Three responses with 2, 0 and 1 training tokens out of 3, 1 and 2.
RESPONSE_MASK_T = torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0, 0.0])
RESPONSE_TOKENS_T = torch.tensor([2.0, 2.0, 2.0, 0.0, 1.0, 1.0])
DENOMINATORS = Denominators(tokens=3, responses=2)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token_mean", [1 / 3, 1 / 3, 0, 0, 1 / 3, 0]),
        ("sequence_mean", [1 / 4, 1 / 4, 0, 0, 1 / 2, 0]),
        ("token_sum_norm", [1 / 20, 1 / 20, 0, 0, 1 / 20, 0]),
    ],
)
def test_token_weights_by_hand(aggregation: str, expected: list[float]) -> None:
    weight_T = token_weights(
        RESPONSE_MASK_T, RESPONSE_TOKENS_T, aggregation, DENOMINATORS, constant=10.0
    )
    assert weight_T.tolist() == pytest.approx(expected, rel=1e-6)
    assert weight_T.dtype == torch.float32


def test_denominators_count_tokens_and_responses_that_train() -> None:
    assert Denominators.count(torch.tensor([2, 0, 1])) == DENOMINATORS


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "token_sum_norm"])
def test_an_update_without_training_tokens_has_zero_weights(aggregation: str) -> None:
    weight_T = token_weights(torch.zeros(3), torch.zeros(3), aggregation, Denominators(0, 0))
    assert weight_T.tolist() == [0.0, 0.0, 0.0]


def test_unknown_aggregations_and_constants_are_refused() -> None:
    ones = torch.ones(1)
    with pytest.raises(ValueError, match="or token_sum_norm, got 'mean'"):
        token_weights(ones, ones, "mean", DENOMINATORS)
    with pytest.raises(ValueError, match="must be > 0, got 0"):
        token_weights(ones, ones, "token_mean", DENOMINATORS, constant=0.0)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "token_sum_norm"])
@pytest.mark.parametrize("num_parts", [2, 5, 40])
def test_loss_and_gradient_do_not_depend_on_the_split_into_micro_batches(
    aggregation: str, num_parts: int
) -> None:
    batch = random_batch(3, num_tokens=240)
    response_T = torch.arange(240) // 7
    tokens_R = torch.zeros(int(response_T.max()) + 1).index_add(0, response_T, batch["mask_T"])
    batch["loss_weight_T"] = token_weights(
        batch["mask_T"], tokens_R[response_T], aggregation, Denominators.count(tokens_R), 32.0
    )
    whole_T = batch["logprob_T"].clone().requires_grad_()
    whole = policy_loss(**{**batch, "logprob_T": whole_T}, rule=RULE, bounds=BOUNDS)
    whole.loss.backward()

    split_T = batch["logprob_T"].clone().requires_grad_()
    permutation = torch.randperm(240, generator=torch.Generator().manual_seed(1))
    total, parts = 0.0, []
    for part in permutation.chunk(num_parts):
        piece = {name: value[part] for name, value in {**batch, "logprob_T": split_T}.items()}
        result = policy_loss(**piece, rule=RULE, bounds=BOUNDS)
        result.loss.backward()
        total += result.loss.item()
        parts.append([float(value) for value in astuple(result.sums)])
    assert total == pytest.approx(whole.loss.item(), abs=1e-6)
    assert whole_T.grad is not None
    assert split_T.grad is not None
    assert torch.allclose(split_T.grad, whole_T.grad, rtol=1e-6, atol=1e-9)
    summed = [sum(values) for values in zip(*parts, strict=True)]
    assert summed == pytest.approx([float(value) for value in astuple(whole.sums)], rel=1e-6)


def test_sequence_mean_equals_the_mean_of_response_means() -> None:
    batch = random_batch(4, num_tokens=30)
    response_T = torch.arange(30) // 6
    batch["mask_T"][6:12] = 0  # the second response does not train
    tokens_R = torch.zeros(5).index_add(0, response_T, batch["mask_T"])
    weight_T = token_weights(
        batch["mask_T"], tokens_R[response_T], "sequence_mean", Denominators.count(tokens_R)
    )
    value_T = torch.arange(30.0)
    means = [
        value_T[(response_T == r) & (batch["mask_T"] == 1)].double().mean().item()
        for r in (0, 2, 3, 4)
    ]
    assert (weight_T * value_T).sum().item() == pytest.approx(sum(means) / 4, rel=1e-6)
