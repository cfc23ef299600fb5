"""policy_loss against autograd in float64.

Shape legend: T = tokens.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from tests.ops.kernel_calls import threads
from tests.oracles.policy_loss import policy_loss as oracle

SUMS = (
    "tokens",
    "positive_tokens",
    "signed_tokens",
    "policy_loss",
    "weighted_entropy",
    "entropy",
    "kl_behaviour",
    "clipped_high",
    "clipped_low",
    "clipped_dual",
    "nonfinite_tokens",
)
LOW, HIGH, DUAL = 0.75, 1.25, 3.0


class Batch(NamedTuple):
    """Arguments of the op up to the bounds; each [T] float32."""

    logprob: Tensor
    entropy: Tensor | None
    behaviour_logprob: Tensor
    advantage: Tensor
    mask: Tensor
    weight: Tensor


def random_batch(num_tokens: int, *, seed: int = 0, spread: float = 0.7) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    normal = lambda: torch.randn(num_tokens, generator=generator)  # noqa: E731
    uniform = lambda: torch.rand(num_tokens, generator=generator)  # noqa: E731
    behaviour_T = -3 * uniform()
    advantage_T = normal()
    advantage_T[uniform() < 0.1] = 0.0
    return Batch(
        behaviour_T + spread * normal(),
        3 * uniform(),
        behaviour_T,
        advantage_T,
        (uniform() < 0.8).float(),
        uniform() / max(num_tokens, 1),
    )


def bounds(low: float = LOW, high: float = HIGH) -> Tensor:
    nan = math.nan
    return torch.tensor([low, high, nan, nan, 0, 0, 0, 0], dtype=torch.float64)


def run(
    batch: Batch, *, low: float = LOW, high: float = HIGH, dual_clip: float | None = DUAL
) -> tuple[dict[str, float], Tensor]:
    """Named sums and the coefficients."""
    sums, coefficient_T = torch.ops.bapo.policy_loss(*batch, bounds(low, high), dual_clip)
    return dict(zip(SUMS, sums.tolist(), strict=True)), coefficient_T


def one_token(
    ratio: float, advantage: float, *, mask: float = 1.0, weight: float = 0.5, entropy: float = 0.0
) -> Batch:
    values = [math.log(ratio), entropy, 0.0, advantage, mask, weight]
    return Batch(*(torch.tensor([value], dtype=torch.float32) for value in values))


@pytest.mark.parametrize("dual_clip", [None, DUAL])
@pytest.mark.parametrize("num_tokens", [0, 1, 31, 32, 33, 4097, 10_000])
def test_sums_and_coefficients_match_autograd(num_tokens: int, dual_clip: float | None) -> None:
    batch = random_batch(num_tokens)
    sums, coefficient_T = run(batch, dual_clip=dual_clip)
    logprob_T = batch.logprob.double().requires_grad_()
    expected = oracle(
        logprob_T,
        batch.behaviour_logprob,
        batch.advantage,
        batch.mask,
        batch.weight,
        low=LOW,
        high=HIGH,
        dual_clip=dual_clip,
    )
    expected.loss.backward()
    assert sums["policy_loss"] == pytest.approx(expected.loss.item(), rel=1e-7, abs=1e-12)
    torch.testing.assert_close(coefficient_T.double(), logprob_T.grad, rtol=1e-6, atol=0)
    assert sums["clipped_high"] == expected.clipped_high
    assert sums["clipped_low"] == expected.clipped_low
    assert sums["clipped_dual"] == expected.clipped_dual

    keep_T = batch.mask == 1
    assert batch.entropy is not None
    entropy_T = batch.entropy.double()
    difference_T = (batch.logprob - batch.behaviour_logprob).double()
    kl_T = difference_T.exp() - 1 - difference_T
    assert sums["tokens"] == int(keep_T.sum())
    assert sums["positive_tokens"] == int((keep_T & (batch.advantage > 0)).sum())
    assert sums["signed_tokens"] == int((keep_T & (batch.advantage != 0)).sum())
    assert sums["entropy"] == pytest.approx(entropy_T[keep_T].sum().item(), rel=1e-12)
    weighted = (batch.weight.double() * entropy_T)[keep_T].sum().item()
    assert sums["weighted_entropy"] == pytest.approx(weighted, rel=1e-12)
    assert sums["kl_behaviour"] == pytest.approx(kl_T[keep_T].sum().item(), rel=1e-12)
    assert sums["nonfinite_tokens"] == 0


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "coefficient", "held"),
    [
        (1.0, 2.0, -1.0, -1.0, None),
        (1.1, 2.0, -1.1, -1.1, None),
        (1.5, 2.0, -1.25, 0.0, "clipped_high"),
        (0.1, 2.0, -0.1, -0.1, None),
        (1.0, -2.0, 1.0, 1.0, None),
        (0.5, -2.0, 0.75, 0.0, "clipped_low"),
        (2.0, -2.0, 2.0, 2.0, None),
        (4.0, -2.0, 3.0, 0.0, "clipped_dual"),
        (1.5, 0.0, 0.0, 0.0, None),
    ],
)
def test_one_token_by_hand(
    ratio: float, advantage: float, loss: float, coefficient: float, held: str | None
) -> None:
    # weight 0.5: loss = -0.5 A clamp(r), coefficient = -0.5 A r where r is not held.
    sums, coefficient_T = run(one_token(ratio, advantage))
    assert sums["policy_loss"] == pytest.approx(loss, rel=1e-6)
    assert coefficient_T.item() == pytest.approx(coefficient, rel=1e-6)
    for name in ("clipped_high", "clipped_low", "clipped_dual"):
        assert sums[name] == (1 if name == held else 0)


@pytest.mark.parametrize(("advantage", "low", "high"), [(1.0, 0.5, 1.0), (-1.0, 1.0, 2.0)])
def test_the_gradient_passes_at_a_ratio_equal_to_the_bound(
    advantage: float, low: float, high: float
) -> None:
    sums, coefficient_T = run(one_token(1.0, advantage), low=low, high=high)
    assert coefficient_T.item() == -0.5 * advantage
    assert sums["clipped_high"] == sums["clipped_low"] == 0


@pytest.mark.parametrize("log_ratio", [21.0, -21.0])
def test_beyond_a_log_ratio_of_twenty_the_loss_is_flat(log_ratio: float) -> None:
    batch = one_token(1.0, 1.0)._replace(logprob=torch.tensor([log_ratio]))
    sums, coefficient_T = run(batch, low=0.0, high=math.inf, dual_clip=None)
    end = math.copysign(20.0, log_ratio)
    assert sums["policy_loss"] == pytest.approx(-0.5 * math.exp(end), rel=1e-7)
    assert coefficient_T.item() == 0.0
    assert sums["kl_behaviour"] == pytest.approx(math.expm1(end) - end, rel=1e-12)


def test_masked_tokens_are_skipped_whatever_they_hold() -> None:
    batch = random_batch(9)._replace(mask=torch.ones(9))
    wanted, wanted_coefficient_T = run(batch)
    batch.mask[4] = 0.0
    others = [index for index in range(9) if index != 4]
    assert batch.entropy is not None
    for tensor_T in (batch.logprob, batch.entropy, batch.behaviour_logprob, batch.advantage):
        tensor_T[4] = math.nan
    batch.weight[4] = math.inf
    sums, coefficient_T = run(batch)
    without = Batch(*(t[others].clone() for t in batch if t is not None))
    assert sums == run(without)[0]
    assert sums["tokens"] == wanted["tokens"] - 1
    assert coefficient_T[4] == 0.0
    assert torch.equal(coefficient_T[others], wanted_coefficient_T[others])


def test_every_masked_out_token_leaves_zeros() -> None:
    sums, coefficient_T = run(random_batch(40)._replace(mask=torch.zeros(40)))
    assert set(sums.values()) == {0.0}
    assert not coefficient_T.any()


@pytest.mark.parametrize("field", ["logprob", "behaviour_logprob", "advantage"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_token_that_is_not_finite_is_counted_and_nothing_else(bad: float, field: str) -> None:
    batch = random_batch(9)._replace(mask=torch.ones(9))
    getattr(batch, field)[4] = bad
    others = [index for index in range(9) if index != 4]
    without = Batch(*(t[others].clone() for t in batch if t is not None))
    sums, coefficient_T = run(batch)
    assert sums == {**run(without)[0], "tokens": 9.0, "nonfinite_tokens": 1.0}
    assert coefficient_T[4] == 0.0


def test_without_entropy_its_sums_are_zero_and_the_rest_is_the_same() -> None:
    batch = random_batch(100)
    sums, coefficient_T = run(batch)
    bare_sums, bare_coefficient_T = run(batch._replace(entropy=None))
    assert bare_sums == {**sums, "entropy": 0.0, "weighted_entropy": 0.0}
    assert torch.equal(coefficient_T, bare_coefficient_T)


def test_one_thread_and_eight_give_the_same_bits() -> None:
    batch = random_batch(100_003)
    with threads(1):
        alone = run(batch)
    with threads(8):
        shared = run(batch)
    assert alone[0] == shared[0]
    assert torch.equal(alone[1], shared[1])


@pytest.mark.parametrize("dual_clip", [None, DUAL])
def test_the_op_is_registered_as_torch_wants_it(dual_clip: float | None) -> None:
    opcheck(torch.ops.bapo.policy_loss.default, (*random_batch(7), bounds(), dual_clip))
    without = random_batch(7)._replace(entropy=None)
    opcheck(torch.ops.bapo.policy_loss.default, (*without, bounds(), dual_clip))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logprob": torch.zeros(2, 2)}, r"logprob must have shape \[T\], got \[2, 2\]"),
        ({"logprob": torch.zeros(4).double()}, "logprob must be float32, got float64"),
        ({"entropy": torch.zeros(3)}, r"entropy must have shape \[4\], got \[3\]"),
        (
            {"behaviour_logprob": torch.zeros(4).half()},
            "behaviour_logprob must be float32, got float16",
        ),
        ({"advantage": torch.zeros(8)[::2]}, "advantage must be contiguous, got stride 2"),
        ({"mask": torch.ones(4).bool()}, "mask must be float32, got Bool"),
        ({"weight": torch.zeros(5)}, r"weight must have shape \[4\], got \[5\]"),
        ({"bounds": torch.zeros(8)}, "bounds must be float64, got float32"),
        ({"bounds": torch.zeros(2).double()}, r"bounds must have shape \[8\], got \[2\]"),
        ({"dual_clip": 1.0}, "dual_clip must be > 1 and finite, got 1"),
        ({"dual_clip": math.inf}, "dual_clip must be > 1 and finite, got inf"),
    ],
)
def test_bad_input_is_refused_with_its_name(changes: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        **random_batch(4)._asdict(),
        "bounds": bounds(),
        "dual_clip": DUAL,
    }
    with pytest.raises(RuntimeError, match=message):
        torch.ops.bapo.policy_loss(**{**arguments, **changes})
