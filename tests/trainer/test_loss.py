"""The trainer's loss of a micro-batch, by given log-probs; ``test_updates.py`` has whole updates.

Shape legend: T = response tokens.
"""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from bapo_megatron.ops.logprob import TokenLogprobs
from bapo_megatron.runtime.distributed import ProcessGroups
from bapo_megatron.trainer.loss import LossStage, SafeTokens, UpdateContext
from bapo_megatron.trainer.records import TokenReport
from bapo_megatron.types import MicroBatch
from tests.algorithm.batches import CLIP, DUAL_CLIP, oracle_bounds, random_batch, with_gradient
from tests.fakes.given_tokens import CONTEXT, make_micro_batch, make_stage, one_rank
from tests.oracles import policy_loss as oracle

ALGORITHMS: dict[str, dict[str, Any]] = {
    "clip": CLIP,
    "bapo": {"objective": "bapo"},
    "bapo of micro-batches": {"objective": "bapo", "bapo": {"scope": "micro_batch"}},
}
every_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)

CORRECTED = CLIP | {"behaviour": "recomputed", "correction": {"kind": "token", "cap": 4.0}}
OTHERS: dict[str, dict[str, Any]] = {
    "corrected": CORRECTED,
    **{name: {"objective": name} for name in ("ce_gppo", "dcpo", "gspo", "opsm")},
    "m2po of high entropy": {"objective": "m2po", "entropy_share": 0.5},
}
"""Further objectives, of every kind."""

FLOATS = (
    "behaviour_logprob_T",
    "rollout_logprob_T",
    "advantage_T",
    "importance_T",
    "loss_weight_T",
)
"""Fields of a micro-batch that a masked token may hold anything in."""


@pytest.fixture(scope="module")
def groups() -> Iterator[ProcessGroups]:
    with one_rank() as groups:
        yield groups


def micro_batch_of(batch: dict[str, Tensor]) -> MicroBatch:
    return make_micro_batch(
        **{name: t for name, t in batch.items() if name not in ("logprob_T", "entropy_T")}
    )


def trainers_loss(
    stage: LossStage, batch: dict[str, Tensor], context: UpdateContext = CONTEXT
) -> tuple[Tensor, TokenReport]:
    """The loss of one micro-batch that is the whole update, after its collection pass."""
    micro_batch, decision = micro_batch_of(batch), None
    policy: Any = TokenLogprobs(batch["logprob_T"], batch["entropy_T"])
    if stage.loaded.collects:
        known = TokenLogprobs(*(values_T.detach() for values_T in policy))
        collected = stage.collect([known], [micro_batch], context)
        (micro_batch,), decision = collected.micro_batches, collected.decision
    return stage.loss(policy, micro_batch, decision=decision, context=context)


def bonus_stage(groups: ProcessGroups, algorithm: str) -> LossStage:
    settings = {"dual_clip": DUAL_CLIP, "entropy_coefficient": 0.1}
    return make_stage(groups, (ALGORITHMS | OTHERS)[algorithm] | settings)


def assert_only_others_learn(batch: dict[str, Tensor], left_out_T: Tensor) -> None:
    for name in ("logprob_T", "entropy_T"):
        grad_T = batch[name].grad
        assert grad_T is not None
        assert torch.count_nonzero(grad_T[left_out_T]) == 0
        assert torch.count_nonzero(grad_T) > 0
        assert bool(torch.isfinite(grad_T).all())


def sums_by_name(stage: LossStage, report: TokenReport) -> dict[str, float]:
    names = (name.removeprefix("report: clip/fraction_") for name in stage.numbers.sum_names)
    return dict(zip(names, report.sums.tolist(), strict=True))


@pytest.mark.parametrize("scale", [1.0, 64.0])
@pytest.mark.parametrize("dual_clip", [None, DUAL_CLIP])
@pytest.mark.parametrize("entropy_coefficient", [0.0, 0.01])
@every_algorithm
def test_the_trainers_loss_and_gradients_equal_float64_autograd(
    groups: ProcessGroups,
    algorithm: str,
    entropy_coefficient: float,
    dual_clip: float | None,
    scale: float,
) -> None:
    batch = random_batch()
    low, high = oracle_bounds(algorithm, batch)
    settings = {"dual_clip": dual_clip, "entropy_coefficient": entropy_coefficient}
    stage = make_stage(groups, ALGORITHMS[algorithm] | settings)
    ours, exact = with_gradient(batch), with_gradient(batch)
    loss, report = trainers_loss(stage, ours)
    (loss * scale).backward()
    wanted = oracle.policy_loss(
        **exact,
        low=low,
        high=high,
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
    reported = sums_by_name(stage, report)
    assert reported["high"] == wanted.clipped_high > 0
    assert reported["low"] == wanted.clipped_low > 0
    assert reported["dual"] == wanted.clipped_dual
    assert (wanted.clipped_dual > 0) == (dual_clip is not None)
    if algorithm != "clip":
        assert report.decision[:2].tolist() == [low, high]


def test_what_a_batch_computed_by_hand_reports(groups: ProcessGroups) -> None:
    stage = make_stage(groups, CORRECTED | {"dual_clip": DUAL_CLIP, "entropy_coefficient": 0.5})
    loss, report = trainers_loss(
        stage,
        {
            "logprob_T": torch.tensor([2.0, 0.5, 4.0, 1.0, 1.0, 2.0]).log(),
            "behaviour_logprob_T": torch.zeros(6),
            "advantage_T": torch.tensor([1.0, -1.0, -1.0, 1.0, 0.0, 1.0]),
            "mask_T": torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 0.0]),
            "loss_weight_T": torch.full((6,), 0.25),
            "importance_T": torch.tensor([1.0, 8.0, 2.0, 0.5, 1.0, 9.0]),  # at most 4
            "entropy_T": torch.tensor([1.0, 2.0, 3.0, 4.0, 0.0, 5.0]),
            "version_T": torch.tensor([5, 4, 3, 5, 5, 0]),
        },
        UpdateContext(num_updates=5, rollout_version=5, num_samples=16),
    )
    # −1.25 · 1 + 0.75 · 4 + 3 · 2 − 1 · 0.5 = 7.25, a quarter of it; entropy 10 · 0.25 · 0.5
    assert loss.item() == pytest.approx(1.8125 - 1.25, abs=1e-6)
    reported = sums_by_name(stage, report)
    # r − 1 − log r: (1 − ln 2) + (−0.5 + ln 2) + (3 − 2 ln 2) + 0
    assert reported.pop("kl_behaviour") == pytest.approx(3.5 - 2 * math.log(2), abs=1e-6)
    # |ln r| of the first token; that of the fourth and fifth is 0
    assert reported.pop("mismatch_abs") == pytest.approx(math.log(2), abs=1e-6)
    assert reported == {
        "tokens": 5,
        "positive_tokens": 2,
        "negative_tokens": 2,
        "policy_loss": pytest.approx(1.8125, abs=1e-6),
        "positive_contribution": pytest.approx(1.25 + 1, abs=1e-6),
        "negative_contribution": pytest.approx(0.75 + 4, abs=1e-6),
        "positive_clipped": 1,
        "negative_clipped": 2,
        "negative_doubled": 1,
        "entropy": 10,
        "staleness": 1 + 2,
        "mismatch_tokens": 3,
        "nonfinite_tokens": 0,
        "nonfinite_losses": 0,
        "corrected_tokens": 5,
        "correction_weight": 1 + 4 + 2 + 0.5 + 1,
        "correction_capped": 1,
        "correction_masked": 0,
        "high": 1,
        "low": 1,
        "dual": 1,
    }
    assert dict(zip(stage.numbers.max_names, report.maxima.tolist(), strict=True)) == {
        "rollout/staleness_max": 2,
        "mismatch/logprob_abs_max": pytest.approx(math.log(2), abs=1e-6),
        "correction/weight_max": 8,
    }


@pytest.mark.parametrize("rubbish", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("algorithm", [*ALGORITHMS, *OTHERS])
def test_masked_tokens_have_no_value_and_no_gradient_whatever_they_hold(
    groups: ProcessGroups, algorithm: str, rubbish: float
) -> None:
    stage = bonus_stage(groups, algorithm)
    batch = random_batch()
    batch |= {name: torch.ones(200) for name in FLOATS if name not in batch}
    clean_loss, clean = trainers_loss(stage, batch)
    masked_T = batch["mask_T"] == 0
    dirty = {name: value.clone() for name, value in batch.items()}
    for name in ("logprob_T", "entropy_T", *FLOATS):
        dirty[name][masked_T] = rubbish
    dirty = with_gradient(dirty)
    loss, report = trainers_loss(stage, dirty)
    assert torch.equal(loss, clean_loss)
    assert torch.equal(report.sums, clean.sums)
    assert torch.equal(report.maxima, clean.maxima)
    assert torch.equal(report.decision, clean.decision)
    assert bool(torch.isfinite(report.sums).all())
    loss.backward()
    assert_only_others_learn(dirty, masked_T)


@pytest.mark.parametrize("rubbish", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["logprob_T", "behaviour_logprob_T", "advantage_T"])
@pytest.mark.parametrize("algorithm", [*ALGORITHMS, "ce_gppo", "dcpo", "m2po of high entropy"])
def test_a_nonfinite_token_is_counted_and_has_no_value_and_no_gradient(
    groups: ProcessGroups, algorithm: str, name: str, rubbish: float
) -> None:
    stage = bonus_stage(groups, algorithm)
    batch = random_batch(num_tokens=6)
    batch["mask_T"].fill_(1.0)
    others = {key: value[1:] for key, value in batch.items()}
    batch[name][0] = rubbish
    batch["entropy_T"][0] = rubbish
    batch = with_gradient(batch)
    loss, report = trainers_loss(stage, batch)
    other_loss, other = trainers_loss(stage, others)
    assert loss.item() == pytest.approx(other_loss.item(), rel=1e-6)
    expected = {**sums_by_name(stage, other), "tokens": 6, "nonfinite_tokens": 1}
    # The order of a sum may change.
    assert sums_by_name(stage, report) == pytest.approx(expected, rel=1e-12)
    assert torch.equal(report.decision, other.decision)
    loss.backward()
    assert_only_others_learn(batch, torch.arange(6) == 0)


@pytest.mark.parametrize("rubbish", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["logprob_T", "behaviour_logprob_T", "advantage_T"])
def test_the_collection_pass_counts_what_is_not_finite(
    groups: ProcessGroups, name: str, rubbish: float
) -> None:
    stage = make_stage(groups, {"objective": "bapo"})
    batch = random_batch(num_tokens=6)
    batch["mask_T"] = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 1.0])
    batch[name][1:3] = rubbish
    batch["entropy_T"][1] = rubbish
    policy = TokenLogprobs(batch["logprob_T"], batch["entropy_T"])
    micro_batch = micro_batch_of(batch)
    collected = stage.collect([policy], [micro_batch], CONTEXT)
    assert collected.faults is not None
    assert collected.faults[0].item() == 1
    assert collected.decision is not None
    assert bool(torch.isfinite(collected.decision).all())
    (known,) = collected.micro_batches
    assert known.entropy_T is not None
    kept_T = torch.where(torch.tensor([True, False, False, True, True, True]), 1.0, 0.0)
    expected_T = torch.where(kept_T > 0, batch["entropy_T"], 0.0)
    assert torch.equal(known.entropy_T, expected_T)


def test_what_is_known_of_tokens_is_what_they_are_with_the_behaviour_log_probs(
    groups: ProcessGroups,
) -> None:
    stage = make_stage(groups, {"objective": "bapo"})
    batch = random_batch(num_tokens=6)
    batch["mask_T"] = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 1.0])
    batch["behaviour_logprob_T"][1] = math.nan
    batch["advantage_T"][3] = math.inf
    micro_batch = micro_batch_of(batch)
    safe = SafeTokens(stage._config, micro_batch, None, CONTEXT, groups.device)
    known = safe.as_sampled()
    counts_T = torch.tensor([True, False, False, False, True, True])
    assert known.mask.equal(counts_T.float())
    assert known.ratio.equal(torch.ones(6))
    assert known.entropy.equal(torch.zeros(6))
    assert known.advantage.equal(torch.where(counts_T, batch["advantage_T"], 0.0))
    assert known.logprob.equal(known.behaviour_logprob)
    assert known.logprob[counts_T].equal(batch["behaviour_logprob_T"][counts_T])
    known_UK = stage.known_statistics([[micro_batch], [], [micro_batch]], CONTEXT)
    (total_K,) = known_UK[:1]
    assert known_UK.equal(torch.stack([total_K, torch.zeros_like(total_K), total_K]))
    assert total_K.any()


def test_a_tiny_divergence_is_not_lost_to_rounding(groups: ProcessGroups) -> None:
    stage = make_stage(groups, {"objective": "none"})
    batch = {
        "logprob_T": torch.tensor([1e-4]),
        "behaviour_logprob_T": torch.zeros(1),
        "advantage_T": torch.zeros(1),
        "entropy_T": torch.zeros(1),
    }
    _, report = trainers_loss(stage, batch)
    # x²/2 + x³/6
    assert sums_by_name(stage, report)["kl_behaviour"] == pytest.approx(5.0001667e-9, rel=1e-5)


@every_algorithm
def test_no_tokens_give_a_loss_of_zero_that_can_be_differentiated(
    groups: ProcessGroups, algorithm: str
) -> None:
    stage = make_stage(groups, ALGORITHMS[algorithm])
    batch = with_gradient(random_batch(num_tokens=0))
    loss, report = trainers_loss(stage, batch)
    loss.backward()
    assert loss.item() == 0
    assert report.sums.tolist() == [0.0] * 19
    assert report.maxima.tolist() == [0.0] * 2
    if algorithm != "clip":
        # The start of both ranges; no tokens were searched.
        assert report.decision[:2].tolist() == pytest.approx([0.6, 1.2], abs=3e-7)
        assert report.decision[-1] == 0


@pytest.mark.parametrize("entropy_coefficient", [0.0, 0.1])
def test_the_loss_is_a_float32_scalar_of_its_own_and_the_report_has_no_gradient(
    groups: ProcessGroups, entropy_coefficient: float
) -> None:
    stage = make_stage(groups, CLIP | {"entropy_coefficient": entropy_coefficient})
    loss, report = trainers_loss(stage, with_gradient(random_batch()))
    assert (loss.dtype, loss.shape, loss.requires_grad) == (torch.float32, (), True)
    assert not loss._is_view()
    for values, size in ((report.sums, 19), (report.maxima, 2), (report.decision, 0)):
        assert loss.untyped_storage().data_ptr() != values.untyped_storage().data_ptr()
        assert (values.dtype, values.shape) == (torch.float64, (size,))
        assert not values.requires_grad
    assert not report.policy.logprob_T.requires_grad
    assert not report.policy.entropy_T.requires_grad
