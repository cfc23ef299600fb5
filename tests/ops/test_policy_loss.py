"""The policy loss as autograd sees it, with the reference and the compiled kernels.

Shape legend: T = response tokens.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from bapo_megatron.ops import compiled, reference
from bapo_megatron.ops.backend import Kernels
from bapo_megatron.ops.contributions import constant_bounds
from bapo_megatron.ops.policy_loss import LOSS_SUMS, clipped_policy_loss
from tests.oracles import policy_loss as oracle

pytestmark = pytest.mark.parametrize(
    "kernels", [reference.KERNELS, compiled.CPU], ids=lambda kernels: kernels.name
)

LOW, HIGH, DUAL_CLIP = 0.75, 1.25, 3.0


def bounds(low: float = LOW, high: float = HIGH) -> Tensor:
    return constant_bounds(low, high, torch.device("cpu"))


def random_batch(num_tokens: int = 200, seed: int = 0) -> dict[str, Tensor]:
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


def with_gradient(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same values in tensors of their own; log-prob and entropy require a gradient."""
    learnt = ("logprob_T", "entropy_T")
    return {name: t.clone().requires_grad_(name in learnt) for name, t in batch.items()}


def tokens(ratios: list[float], advantages: list[float], mask: float = 1.0) -> dict[str, Tensor]:
    num_tokens = len(ratios)
    return {
        "logprob_T": torch.tensor(ratios).log().requires_grad_(),
        "behaviour_logprob_T": torch.zeros(num_tokens),
        "advantage_T": torch.tensor(advantages),
        "mask_T": torch.full((num_tokens,), mask),
        "loss_weight_T": torch.ones(num_tokens),
    }


def by_name(sums: Tensor) -> dict[str, float]:
    return dict(zip(LOSS_SUMS, sums.tolist(), strict=True))


@pytest.mark.parametrize("scale", [1.0, 64.0])
@pytest.mark.parametrize("dual_clip", [None, DUAL_CLIP])
@pytest.mark.parametrize("entropy_coefficient", [0.0, 0.01])
def test_loss_and_gradients_equal_float64_autograd(
    kernels: Kernels, entropy_coefficient: float, dual_clip: float | None, scale: float
) -> None:
    batch = random_batch()
    ours, exact = with_gradient(batch), with_gradient(batch)
    loss, sums = clipped_policy_loss(
        **ours,
        bounds=bounds(),
        dual_clip=dual_clip,
        entropy_coefficient=entropy_coefficient,
        kernels=kernels,
    )
    (loss * scale).backward()
    wanted = oracle.policy_loss(
        **exact,
        low=LOW,
        high=HIGH,
        dual_clip=dual_clip,
        entropy_coefficient=entropy_coefficient,
    )
    (wanted.loss * scale).backward()
    assert loss.item() == pytest.approx(wanted.loss.item(), abs=1e-6)
    torch.testing.assert_close(ours["logprob_T"].grad, exact["logprob_T"].grad, rtol=1e-6, atol=0)
    if entropy_coefficient:
        torch.testing.assert_close(
            ours["entropy_T"].grad, exact["entropy_T"].grad, rtol=1e-6, atol=0
        )
    else:
        assert ours["entropy_T"].grad is None
    reported = by_name(sums)
    assert reported["clipped_high"] == wanted.clipped_high > 0
    assert reported["clipped_low"] == wanted.clipped_low > 0
    assert reported["clipped_dual"] == wanted.clipped_dual
    assert (wanted.clipped_dual > 0) == (dual_clip is not None)


def test_sums_of_a_batch_computed_by_hand(kernels: Kernels) -> None:
    loss, sums = clipped_policy_loss(
        torch.tensor([2.0, 0.5, 4.0, 1.0, 2.0]).log(),
        behaviour_logprob_T=torch.zeros(5),
        advantage_T=torch.tensor([1.0, -1.0, -1.0, 1.0, 1.0]),
        mask_T=torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0]),
        loss_weight_T=torch.full((5,), 0.25),
        bounds=bounds(),
        dual_clip=DUAL_CLIP,
        entropy_T=torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]),
        entropy_coefficient=0.5,
        kernels=kernels,
    )
    # −1.25 + 0.75 + 3 − 1 = 1.5, a quarter of it; entropy 10 · 0.25 · 0.5
    assert loss.item() == pytest.approx(0.375 - 1.25, abs=1e-6)
    reported = by_name(sums)
    # r − 1 − log r: (1 − ln 2) + (−0.5 + ln 2) + (3 − 2 ln 2) + 0
    assert reported.pop("kl_behaviour") == pytest.approx(3.5 - 2 * math.log(2), abs=1e-6)
    assert reported == {
        "tokens": 4,
        "positive_tokens": 2,
        "signed_tokens": 4,
        "policy_loss": pytest.approx(0.375, abs=1e-6),
        "weighted_entropy": 2.5,
        "entropy": 10,
        "clipped_high": 1,
        "clipped_low": 1,
        "clipped_dual": 1,
        "nonfinite_tokens": 0,
    }


@pytest.mark.parametrize(
    ("ratio", "advantage", "low", "high", "dual_clip"),
    [
        (1.0, 1.0, 0.5, 1.0, None),
        (1.0, -1.0, 1.0, 1.5, None),
        (2.0, 1.0, 0.5, 2.0, None),
        (2.0, -1.0, 0.5, 1.5, 2.0),
    ],
)
def test_at_a_ratio_equal_to_a_limit_the_gradient_passes(
    kernels: Kernels,
    ratio: float,
    advantage: float,
    low: float,
    high: float,
    dual_clip: float | None,
) -> None:
    batch = tokens([ratio, ratio], [advantage, advantage])
    loss, sums = clipped_policy_loss(
        **batch, bounds=bounds(low, high), dual_clip=dual_clip, kernels=kernels
    )
    loss.backward()
    assert batch["logprob_T"].grad is not None
    assert batch["logprob_T"].grad.tolist() == pytest.approx([-advantage * ratio] * 2, rel=1e-6)
    reported = by_name(sums)
    assert reported["clipped_high"] == reported["clipped_low"] == reported["clipped_dual"] == 0


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "gradient"),
    [
        (20.5, -1.0, 0.0),  # no bound of the clip holds it
        (-20.5, 1.0, 0.0),
        (20.0, -1.0, math.exp(20)),
        (-20.0, 1.0, -math.exp(-20)),
    ],
)
def test_beyond_the_clamp_of_the_log_ratio_there_is_no_gradient(
    kernels: Kernels, log_ratio: float, advantage: float, gradient: float
) -> None:
    batch = tokens([1.0], [advantage])
    batch["logprob_T"] = torch.tensor([log_ratio], requires_grad=True)
    loss, _ = clipped_policy_loss(**batch, bounds=bounds(), dual_clip=None, kernels=kernels)
    loss.backward()
    limited = math.exp(max(-20.0, min(20.0, log_ratio)))
    assert loss.item() == pytest.approx(-advantage * limited, rel=1e-6)
    assert batch["logprob_T"].grad is not None
    assert batch["logprob_T"].grad.item() == pytest.approx(gradient, rel=1e-6)


@pytest.mark.parametrize("rubbish", [math.nan, math.inf, -math.inf])
def test_masked_tokens_have_no_value_and_no_gradient_whatever_they_hold(
    kernels: Kernels, rubbish: float
) -> None:
    batch = random_batch()
    options = {"bounds": bounds(), "dual_clip": DUAL_CLIP, "entropy_coefficient": 0.1}
    clean_loss, clean_sums = clipped_policy_loss(**batch, **options, kernels=kernels)
    masked_T = batch["mask_T"] == 0
    dirty = {name: value.clone() for name, value in batch.items()}
    for name in ("logprob_T", "behaviour_logprob_T", "advantage_T", "loss_weight_T", "entropy_T"):
        dirty[name][masked_T] = rubbish
    dirty = with_gradient(dirty)
    loss, sums = clipped_policy_loss(**dirty, **options, kernels=kernels)
    assert torch.equal(loss, clean_loss)
    assert torch.equal(sums, clean_sums)
    loss.backward()
    for name in ("logprob_T", "entropy_T"):
        grad_T = dirty[name].grad
        assert grad_T is not None
        assert torch.count_nonzero(grad_T[masked_T]) == 0
        assert bool(torch.isfinite(grad_T).all())


@pytest.mark.parametrize("rubbish", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["logprob_T", "behaviour_logprob_T", "advantage_T"])
def test_a_nonfinite_token_is_counted_and_has_no_value_and_no_gradient(
    kernels: Kernels, name: str, rubbish: float
) -> None:
    batch = random_batch(num_tokens=6)
    batch["mask_T"].fill_(1.0)
    others = {key: value[1:] for key, value in batch.items()}
    batch[name][0] = rubbish
    batch["entropy_T"][0] = rubbish
    batch = with_gradient(batch)
    options = {"bounds": bounds(), "dual_clip": DUAL_CLIP, "entropy_coefficient": 0.1}
    loss, sums = clipped_policy_loss(**batch, **options, kernels=kernels)
    other_loss, other_sums = clipped_policy_loss(**others, **options, kernels=kernels)
    assert loss.item() == pytest.approx(other_loss.item(), rel=1e-6)
    expected = {**by_name(other_sums), "tokens": 6, "nonfinite_tokens": 1}
    assert by_name(sums) == pytest.approx(expected, rel=1e-12)  # the order of a sum may change
    loss.backward()
    for learnt in ("logprob_T", "entropy_T"):
        grad_T = batch[learnt].grad
        assert grad_T is not None
        assert grad_T[0] == 0
        assert bool(torch.isfinite(grad_T).all())
        assert torch.count_nonzero(grad_T[1:]) > 0


def test_a_tiny_divergence_is_not_lost_to_rounding(kernels: Kernels) -> None:
    batch = tokens([1.0], [0.0])
    batch["logprob_T"] = torch.tensor([1e-4])
    _, sums = clipped_policy_loss(
        **batch, bounds=bounds(0.0, math.inf), dual_clip=None, kernels=kernels
    )
    # x²/2 + x³/6
    assert by_name(sums)["kl_behaviour"] == pytest.approx(5.0001667e-9, rel=1e-5)


def test_infinite_bounds_clip_nothing(kernels: Kernels) -> None:
    batch = tokens([1e8, 1e-8], [1.0, -1.0])
    loss, sums = clipped_policy_loss(
        **batch, bounds=bounds(0.0, math.inf), dual_clip=None, kernels=kernels
    )
    assert loss.item() == pytest.approx(-1e8, rel=1e-6)
    assert by_name(sums)["clipped_high"] == by_name(sums)["clipped_low"] == 0


def test_no_tokens_give_a_loss_of_zero_that_can_be_differentiated(kernels: Kernels) -> None:
    batch = with_gradient(random_batch(num_tokens=0))
    loss, sums = clipped_policy_loss(**batch, bounds=bounds(), dual_clip=None, kernels=kernels)
    loss.backward()
    assert loss.item() == 0
    assert sums.tolist() == [0.0] * 11


@pytest.mark.parametrize("entropy_coefficient", [0.0, 0.1])
def test_the_loss_is_a_float32_scalar_of_its_own_and_the_sums_have_no_gradient(
    kernels: Kernels, entropy_coefficient: float
) -> None:
    batch = with_gradient(random_batch())
    loss, sums = clipped_policy_loss(
        **batch,
        bounds=bounds(),
        dual_clip=None,
        entropy_coefficient=entropy_coefficient,
        kernels=kernels,
    )
    assert (loss.dtype, loss.shape, loss.requires_grad) == (torch.float32, (), True)
    assert not loss._is_view()
    assert loss.untyped_storage().data_ptr() != sums.untyped_storage().data_ptr()
    assert (sums.dtype, sums.shape, sums.requires_grad) == (torch.float64, (11,), False)


def test_entropy_is_optional_and_then_counts_as_zero(kernels: Kernels) -> None:
    batch = random_batch()
    del batch["entropy_T"]
    _, sums = clipped_policy_loss(**batch, bounds=bounds(), dual_clip=None, kernels=kernels)
    assert by_name(sums)["entropy"] == by_name(sums)["weighted_entropy"] == 0


def test_an_entropy_bonus_without_entropy_is_refused(kernels: Kernels) -> None:
    batch = {**random_batch(), "entropy_T": None}
    with pytest.raises(ValueError, match=r"entropy_coefficient is 0\.1 but no entropy"):
        clipped_policy_loss(
            **batch, bounds=bounds(), dual_clip=None, entropy_coefficient=0.1, kernels=kernels
        )
