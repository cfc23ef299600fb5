"""The clipped objectives, alone and as the trainer's loss of a micro-batch.

Shape legend: T = response tokens.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bapo_megatron.algorithm.bapo import Bapo
from bapo_megatron.algorithm.clip import FixedClip
from bapo_megatron.algorithm.load_objective import load_objective
from bapo_megatron.algorithm.objective import Objective, TokenBatch, TokenGradient, differentiate
from bapo_megatron.config.schema import AlgorithmConfig, OpsConfig
from bapo_megatron.distributed import ProcessGroups
from bapo_megatron.ops import compiled, reference
from bapo_megatron.ops.backend import Kernels
from bapo_megatron.ops.chunked import OutputHead
from bapo_megatron.ops.contributions import ContributionTable, search_path
from bapo_megatron.ops.logprob import TokenLogprobs
from bapo_megatron.ops.ratio import importance_ratio
from bapo_megatron.trainer.loss import LossStage, PolicyOutput, UpdateContext
from bapo_megatron.trainer.records import TokenReport
from bapo_megatron.types import MicroBatch
from tests.fakes.given_tokens import CONTEXT, make_micro_batch, make_stage, make_tokens, one_rank
from tests.ops import chunked_problem
from tests.oracles import policy_loss as oracle
from tests.oracles.bound_search import Tokens, exact_search
from tests.oracles.token_batches import logprob_for_ratio, paper_rule, random_tokens

both_kernels = pytest.mark.parametrize(
    "kernels", [reference.KERNELS, compiled.CPU], ids=lambda kernels: kernels.name
)
both_backends = pytest.mark.parametrize("backend", ["reference", "cpu"])

LOW, HIGH, DUAL_CLIP = 0.75, 1.25, 3.0

CLIP = {"objective": "clip", "fixed": {"low": LOW, "high": HIGH}}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "clip": CLIP,
    "bapo": {"objective": "bapo"},
    "bapo of micro-batches": {"objective": "bapo", "bapo": {"scope": "micro_batch"}},
}
every_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)

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


def random_batch(num_tokens: int = 200, seed: int = 0) -> dict[str, Tensor]:
    """More negative than positive advantages, so that a search has to move the bounds."""
    generator = torch.Generator().manual_seed(seed)
    behaviour_T = -torch.rand(num_tokens, generator=generator)
    return {
        "logprob_T": behaviour_T + 0.7 * torch.randn(num_tokens, generator=generator),
        "behaviour_logprob_T": behaviour_T,
        "advantage_T": torch.randn(num_tokens, generator=generator) - 0.2,
        "mask_T": (torch.rand(num_tokens, generator=generator) < 0.8).float(),
        "loss_weight_T": torch.full((num_tokens,), 1 / max(1, num_tokens)),
        "entropy_T": torch.rand(num_tokens, generator=generator),
    }


def with_gradient(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same values in tensors of their own; log-prob and entropy require a gradient."""
    learnt = ("logprob_T", "entropy_T")
    return {name: t.clone().requires_grad_(name in learnt) for name, t in batch.items()}


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
    if stage.collects:
        known = TokenLogprobs(*(values_T.detach() for values_T in policy))
        collected = stage.collect([known], [micro_batch], context, num_samples=1)
        (micro_batch,), decision = collected.micro_batches, collected.decision
    return stage.loss(policy, micro_batch, decision=decision, context=context)


def sums_by_name(stage: LossStage, report: TokenReport) -> dict[str, float]:
    names = (name.removeprefix("report: clip/fraction_") for name in stage.numbers.sum_names)
    return dict(zip(names, report.sums.tolist(), strict=True))


def tokens_of(ratios: list[float], advantages: list[float]) -> TokenBatch:
    logprob_T = torch.tensor(ratios).log()
    return make_tokens(logprob_T, torch.zeros_like(logprob_T), torch.tensor(advantages))


def gradient_of(objective: Objective, tokens: TokenBatch, kernels: Kernels) -> TokenGradient:
    """With weights 1."""
    return differentiate(objective, tokens, torch.ones(len(tokens)), kernels)


def clipped_tokens(objective: Objective, tokens: TokenBatch) -> dict[str, int]:
    return {
        name.removeprefix("clip/fraction_"): int(value_T.sum())
        for name, value_T in objective.report(tokens).items()
    }


def oracle_bounds(algorithm: str, batch: dict[str, Tensor]) -> tuple[float, float]:
    """The configured bounds, or those that exact arithmetic finds for the batch."""
    if algorithm == "clip":
        return LOW, HIGH
    names = ("logprob_T", "behaviour_logprob_T", "advantage_T", "mask_T")
    found = exact_search(Tokens(*(batch[name].numpy() for name in names)), paper_rule())
    assert found.exit == "met"
    assert found.clip_high > 1.25
    return found.clip_low, found.clip_high


@pytest.mark.parametrize("scale", [1.0, 64.0])
@pytest.mark.parametrize("dual_clip", [None, DUAL_CLIP])
@pytest.mark.parametrize("entropy_coefficient", [0.0, 0.01])
@every_algorithm
@both_backends
def test_the_trainers_loss_and_gradients_equal_float64_autograd(
    groups: ProcessGroups,
    backend: str,
    algorithm: str,
    entropy_coefficient: float,
    dual_clip: float | None,
    scale: float,
) -> None:
    batch = random_batch()
    low, high = oracle_bounds(algorithm, batch)
    settings = {"dual_clip": dual_clip, "entropy_coefficient": entropy_coefficient}
    stage = make_stage(groups, ALGORITHMS[algorithm] | settings, backend)
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


@pytest.mark.parametrize("dual_clip", [None, DUAL_CLIP])
@pytest.mark.parametrize("searched", [False, True])
@both_kernels
def test_an_objective_equals_float64_autograd(
    kernels: Kernels, searched: bool, dual_clip: float | None
) -> None:
    batch = random_batch()
    tokens = make_tokens(
        *(batch[name] for name in ("logprob_T", "behaviour_logprob_T", "advantage_T", "mask_T"))
    )
    objective: Objective = FixedClip(LOW, HIGH, dual_clip)
    low, high = oracle_bounds("bapo" if searched else "clip", batch)
    if searched:
        config = AlgorithmConfig.model_validate({}).bapo
        objective = Bapo(config, dual_clip, ContributionTable(config, dual_clip, kernels=kernels))
        tokens = replace(tokens, decision=objective.decide(objective.statistics(tokens)))
    weight_T = batch["mask_T"] * batch["loss_weight_T"]
    found = differentiate(objective, tokens, weight_T, kernels)
    exact = with_gradient(batch)
    del exact["entropy_T"]
    wanted = oracle.policy_loss(**exact, low=low, high=high, dual_clip=dual_clip)
    wanted.loss.backward()
    loss = (weight_T.double() * found.loss_T.double()).sum()
    assert loss.item() == pytest.approx(wanted.loss.item(), abs=1e-6)
    torch.testing.assert_close(found.logprob_T, exact["logprob_T"].grad, rtol=1e-6, atol=0)
    assert found.entropy_T is None
    trained = tokens.select(torch.nonzero(batch["mask_T"]).squeeze(1))
    assert clipped_tokens(objective, trained) == {
        "high": wanted.clipped_high,
        "low": wanted.clipped_low,
        "dual": wanted.clipped_dual,
    }
    assert not any(t.requires_grad for t in (found.ratio_T, found.loss_T, found.logprob_T))


@pytest.mark.parametrize("dual_clip", [None, DUAL_CLIP])
@pytest.mark.parametrize("searched", [False, True])
def test_the_loss_in_float64_has_the_derivative_of_finite_differences(
    searched: bool, dual_clip: float | None
) -> None:
    batch = {name: value_T.double() for name, value_T in random_batch(60, seed=2).items()}
    tokens = make_tokens(batch["logprob_T"], batch["behaviour_logprob_T"], batch["advantage_T"])
    objective: Objective = FixedClip(LOW, HIGH, dual_clip)
    if searched:
        config = AlgorithmConfig.model_validate({}).bapo
        objective = Bapo(config, dual_clip, ContributionTable(config, dual_clip))
        tokens = replace(tokens, decision=objective.decide(objective.statistics(tokens)))

    def loss_T(logprob_T: Tensor) -> Tensor:
        ratio_T = importance_ratio(logprob_T, tokens.behaviour_logprob)
        return objective.loss(replace(tokens, logprob=logprob_T, ratio=ratio_T))

    leaf_T = tokens.logprob.clone().requires_grad_()
    assert loss_T(leaf_T).dtype == torch.float64
    assert torch.autograd.gradcheck(loss_T, [leaf_T], raise_exception=True)
    by_autograd_T = torch.autograd.grad(loss_T(leaf_T).sum(), leaf_T)[0]
    found = differentiate(objective, tokens, torch.ones(60, dtype=torch.float64))
    torch.testing.assert_close(found.logprob_T, by_autograd_T, rtol=0, atol=0)


@both_backends
def test_what_a_batch_computed_by_hand_reports(groups: ProcessGroups, backend: str) -> None:
    stage = make_stage(groups, CLIP | {"dual_clip": DUAL_CLIP, "entropy_coefficient": 0.5}, backend)
    loss, report = trainers_loss(
        stage,
        {
            "logprob_T": torch.tensor([2.0, 0.5, 4.0, 1.0, 2.0]).log(),
            "behaviour_logprob_T": torch.zeros(5),
            "advantage_T": torch.tensor([1.0, -1.0, -1.0, 1.0, 1.0]),
            "mask_T": torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0]),
            "loss_weight_T": torch.full((5,), 0.25),
            "entropy_T": torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]),
            "version_T": torch.tensor([5, 4, 3, 5, 0]),
        },
        UpdateContext(num_updates=5, rollout_version=5),
    )
    # −1.25 + 0.75 + 3 − 1 = 1.5, a quarter of it; entropy 10 · 0.25 · 0.5
    assert loss.item() == pytest.approx(0.375 - 1.25, abs=1e-6)
    reported = sums_by_name(stage, report)
    # r − 1 − log r: (1 − ln 2) + (−0.5 + ln 2) + (3 − 2 ln 2) + 0
    assert reported.pop("kl_behaviour") == pytest.approx(3.5 - 2 * math.log(2), abs=1e-6)
    # |ln r| of the first and the fourth token
    assert reported.pop("mismatch_abs") == pytest.approx(math.log(2), abs=1e-6)
    assert reported == {
        "tokens": 4,
        "positive_tokens": 2,
        "negative_tokens": 2,
        "policy_loss": pytest.approx(0.375, abs=1e-6),
        "positive_contribution": pytest.approx(1.25 + 1, abs=1e-6),
        "negative_contribution": pytest.approx(0.75 + 4, abs=1e-6),
        "positive_clipped": 1,
        "negative_clipped": 2,
        "entropy": 10,
        "staleness": 1 + 2,
        "mismatch_tokens": 2,
        "nonfinite_tokens": 0,
        "nonfinite_losses": 0,
        "high": 1,
        "low": 1,
        "dual": 1,
    }
    assert dict(zip(stage.numbers.max_names, report.maxima.tolist(), strict=True)) == {
        "rollout/staleness_max": 2,
        "mismatch/logprob_abs_max": pytest.approx(math.log(2), abs=1e-6),
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
@both_kernels
def test_at_a_ratio_equal_to_a_limit_the_gradient_passes(
    kernels: Kernels,
    ratio: float,
    advantage: float,
    low: float,
    high: float,
    dual_clip: float | None,
) -> None:
    objective = FixedClip(low, high, dual_clip)
    tokens = tokens_of([ratio, ratio], [advantage, advantage])
    gradient = gradient_of(objective, tokens, kernels)
    assert gradient.logprob_T.tolist() == pytest.approx([-advantage * ratio] * 2, rel=1e-6)
    assert clipped_tokens(objective, tokens) == {"high": 0, "low": 0, "dual": 0}


@pytest.mark.parametrize(("bound", "advantage"), [("low", -1.0), ("high", 1.0)])
@both_kernels
def test_a_searched_bound_clips_from_the_next_float_on(
    kernels: Kernels, bound: str, advantage: float
) -> None:
    """The search compares the same float32 numbers."""
    low, high = float(np.float32(0.6 + 7 * 0.02)), float(np.float32(1.2 + 3 * 0.05))
    limit = {"low": low, "high": high}[bound]
    config = AlgorithmConfig.model_validate({}).bapo
    objective = Bapo(config, None, ContributionTable(config, kernels=kernels))
    logprob_T = torch.tensor([float(logprob_for_ratio(limit, step)) for step in range(-3, 4)])
    tokens = make_tokens(
        logprob_T,
        torch.zeros(7),
        torch.full((7,), advantage),
        decision=torch.tensor([low, high, 0, 0, 1, 0, 0, 7], dtype=torch.float64),
    )
    ratio_T = np.exp(logprob_T.double().numpy()).astype(np.float32)
    outside_T = ratio_T < limit if bound == "low" else ratio_T > limit
    assert 0 < outside_T.sum() < 7
    gradient = gradient_of(objective, tokens, kernels)
    assert (gradient.logprob_T == 0).tolist() == outside_T.tolist()
    assert clipped_tokens(objective, tokens) == {"high": 0, "low": 0, "dual": 0} | {
        bound: outside_T.sum()
    }


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "gradient"),
    [
        (20.5, -1.0, 0.0),  # no bound of the clip holds it
        (-20.5, 1.0, 0.0),
        (20.0, -1.0, math.exp(20)),
        (-20.0, 1.0, -math.exp(-20)),
    ],
)
@both_kernels
def test_beyond_the_clamp_of_the_log_ratio_there_is_no_gradient(
    kernels: Kernels, log_ratio: float, advantage: float, gradient: float
) -> None:
    tokens = make_tokens(torch.tensor([log_ratio]), torch.zeros(1), torch.tensor([advantage]))
    found = gradient_of(FixedClip(LOW, HIGH), tokens, kernels)
    limited = math.exp(max(-20.0, min(20.0, log_ratio)))
    assert found.loss_T.item() == pytest.approx(-advantage * limited, rel=1e-6)
    assert found.logprob_T.item() == pytest.approx(gradient, rel=1e-6)


@both_kernels
def test_infinite_bounds_clip_nothing(kernels: Kernels) -> None:
    objective = load_objective(AlgorithmConfig.model_validate({"objective": "none"})).objective
    tokens = tokens_of([1e8, 1e-8], [1.0, -1.0])
    gradient = gradient_of(objective, tokens, kernels)
    assert gradient.loss_T.tolist() == pytest.approx([-1e8, 1e-8], rel=1e-6)
    assert gradient.logprob_T.tolist() == pytest.approx([-1e8, 1e-8], rel=1e-6)
    assert clipped_tokens(objective, tokens) == {"high": 0, "low": 0, "dual": 0}


@pytest.mark.parametrize("rubbish", [math.nan, math.inf, -math.inf])
@every_algorithm
@both_backends
def test_masked_tokens_have_no_value_and_no_gradient_whatever_they_hold(
    groups: ProcessGroups, backend: str, algorithm: str, rubbish: float
) -> None:
    settings = {"dual_clip": DUAL_CLIP, "entropy_coefficient": 0.1}
    stage = make_stage(groups, ALGORITHMS[algorithm] | settings, backend)
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
    for name in ("logprob_T", "entropy_T"):
        grad_T = dirty[name].grad
        assert grad_T is not None
        assert torch.count_nonzero(grad_T[masked_T]) == 0
        assert torch.count_nonzero(grad_T) > 0
        assert bool(torch.isfinite(grad_T).all())


@pytest.mark.parametrize("rubbish", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["logprob_T", "behaviour_logprob_T", "advantage_T"])
@every_algorithm
@both_backends
def test_a_nonfinite_token_is_counted_and_has_no_value_and_no_gradient(
    groups: ProcessGroups, backend: str, algorithm: str, name: str, rubbish: float
) -> None:
    settings = {"dual_clip": DUAL_CLIP, "entropy_coefficient": 0.1}
    stage = make_stage(groups, ALGORITHMS[algorithm] | settings, backend)
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
    for learnt in ("logprob_T", "entropy_T"):
        grad_T = batch[learnt].grad
        assert grad_T is not None
        assert grad_T[0] == 0
        assert bool(torch.isfinite(grad_T).all())
        assert torch.count_nonzero(grad_T[1:]) > 0


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
    collected = stage.collect([policy], [micro_batch], CONTEXT, num_samples=1)
    assert collected.faults[0].item() == 1
    assert collected.decision is not None
    assert bool(torch.isfinite(collected.decision).all())
    (known,) = collected.micro_batches
    assert known.entropy_T is not None
    kept_T = torch.where(torch.tensor([True, False, False, True, True, True]), 1.0, 0.0)
    expected_T = torch.where(kept_T > 0, batch["entropy_T"], 0.0)
    assert torch.equal(known.entropy_T, expected_T)


@both_backends
def test_a_tiny_divergence_is_not_lost_to_rounding(groups: ProcessGroups, backend: str) -> None:
    stage = make_stage(groups, {"objective": "none"}, backend)
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
@both_backends
def test_no_tokens_give_a_loss_of_zero_that_can_be_differentiated(
    groups: ProcessGroups, backend: str, algorithm: str
) -> None:
    stage = make_stage(groups, ALGORITHMS[algorithm], backend)
    batch = with_gradient(random_batch(num_tokens=0))
    loss, report = trainers_loss(stage, batch)
    loss.backward()
    assert loss.item() == 0
    assert report.sums.tolist() == [0.0] * 18
    assert report.maxima.tolist() == [0.0] * 2
    if algorithm != "clip":
        # The start of both ranges; no tokens were searched.
        assert report.decision[:2].tolist() == pytest.approx([0.6, 1.2], abs=1e-7)
        assert report.decision[-1] == 0


@pytest.mark.parametrize("entropy_coefficient", [0.0, 0.1])
@both_backends
def test_the_loss_is_a_float32_scalar_of_its_own_and_the_report_has_no_gradient(
    groups: ProcessGroups, backend: str, entropy_coefficient: float
) -> None:
    stage = make_stage(groups, CLIP | {"entropy_coefficient": entropy_coefficient}, backend)
    loss, report = trainers_loss(stage, with_gradient(random_batch()))
    assert (loss.dtype, loss.shape, loss.requires_grad) == (torch.float32, (), True)
    assert not loss._is_view()
    for values, size in ((report.sums, 18), (report.maxima, 2), (report.decision, 0)):
        assert loss.untyped_storage().data_ptr() != values.untyped_storage().data_ptr()
        assert (values.dtype, values.shape) == (torch.float64, (size,))
        assert not values.requires_grad
    assert not report.policy.logprob_T.requires_grad
    assert not report.policy.entropy_T.requires_grad


def problem_stage(
    groups: ProcessGroups, head: OutputHead | None, backend: str, chunk_tokens: int
) -> LossStage:
    ops = OpsConfig.model_validate({"backend": backend, "logits_chunk_tokens": chunk_tokens})
    output = PolicyOutput(
        ops,
        vocab_size=chunked_problem.VOCAB_SIZE,
        temperature=chunked_problem.TEMPERATURE,
        groups=groups,
        head=head,
    )
    settings = {"dual_clip": DUAL_CLIP, "entropy_coefficient": 0.03}
    return LossStage(AlgorithmConfig.model_validate(CLIP | settings), output, groups)


def run_problem(
    groups: ProcessGroups, problem: chunked_problem.Problem, backend: str, chunk_tokens: int
) -> tuple[LossStage, TokenReport, dict[str, Tensor]]:
    """Loss, sums and gradients of a problem by the trainer's loss; 0: all logits at once."""
    hidden_NH, weight_VH = chunked_problem.leaves(problem)
    head = OutputHead(weight_VH) if chunk_tokens else None
    stage = problem_stage(groups, head, backend, chunk_tokens)
    output = hidden_NH.view_as(hidden_NH) if chunk_tokens else hidden_NH @ weight_VH.t()
    tokens = problem.tokens
    micro_batch = make_micro_batch(**{name: getattr(tokens, name) for name in vars(tokens)})
    loss, report = stage.loss(output, micro_batch, decision=None, context=CONTEXT)
    loss.backward()
    assert hidden_NH.grad is not None
    assert weight_VH.grad is not None
    results = {"loss": loss.detach(), "hidden": hidden_NH.grad, "weight": weight_VH.grad}
    return stage, report, results


@pytest.mark.parametrize("chunk_tokens", [1, 7, 64, 1000])
@both_backends
def test_with_chunks_the_trainer_reports_and_learns_the_same(
    groups: ProcessGroups, backend: str, chunk_tokens: int
) -> None:
    problem = chunked_problem.make_problem()
    stage, whole, wanted = run_problem(groups, problem, backend, 0)
    _, report, found = run_problem(groups, problem, backend, chunk_tokens)
    for name, value in wanted.items():
        assert chunked_problem.relative_error(found[name], value) < 1e-6, name
    torch.testing.assert_close(report.sums, whole.sums, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(report.maxima, whole.maxima, rtol=1e-5, atol=1e-5)
    reported = sums_by_name(stage, report)
    assert reported["tokens"] == 51  # 61, less every sixth
    assert min(reported[name] for name in ("high", "low", "kl_behaviour")) > 0


@pytest.mark.parametrize("chunk_tokens", [0, 16])
@both_backends
def test_from_the_models_output_a_token_that_is_not_finite_moves_nothing(
    groups: ProcessGroups, backend: str, chunk_tokens: int
) -> None:
    problem = chunked_problem.make_problem()
    problem.tokens.behaviour_logprob_T[7] = torch.nan
    stage, report, found = run_problem(groups, problem, backend, chunk_tokens)
    problem.tokens.behaviour_logprob_T[7] = 0.0
    problem.tokens.mask_T[7] = 0.0
    _, _, wanted = run_problem(groups, problem, backend, chunk_tokens)
    assert sums_by_name(stage, report)["nonfinite_tokens"] == 1
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize(
    ("algorithm", "low", "high", "reported"),
    [
        (
            {"objective": "clip", "fixed": {"low": 0.8, "high": 1.28}},
            0.8,
            1.28,
            {"bapo/clip_low": 0.8, "bapo/clip_high": 1.28},
        ),
        ({"objective": "none"}, 0.0, math.inf, {}),
    ],
)
def test_a_constant_clip_searches_nothing(
    algorithm: dict[str, object], low: float, high: float, reported: dict[str, float]
) -> None:
    loaded = load_objective(AlgorithmConfig.model_validate(algorithm))
    assert loaded.objective.needs == "token"
    assert (loaded.statistic_size, loaded.decision_size) == (0, 0)
    bounds = loaded.objective.bounds(tokens_of([1.0], [1.0]))
    assert bounds is not None
    assert [bound.item() for bound in bounds] == pytest.approx([low, high], rel=1e-7)
    assert loaded.objective.report_decision(()) == reported
    assert loaded.objective.refuses(torch.zeros(0)) is None


def test_bapo_bounds_come_from_the_statistics() -> None:
    config = AlgorithmConfig.model_validate(
        {
            "bapo": {
                "lower": {"start": 0.75, "max": 1.0, "step": 0.25},
                "upper": {"start": 1.0, "max": 1.25, "step": 0.25},
                "target": 0.45,
            }
        }
    )
    objective = load_objective(config).objective
    assert objective.needs == "update"
    # P is 1 at c_high 1 and 1.25 at 1.25; N is 2 · 0.75.
    tokens = tokens_of([2.0, 0.5], [1.0, -2.0])
    decision = objective.decide(objective.statistics(tokens))
    assert objective.report_decision(decision.tolist()) == {
        "bapo/clip_low": 0.75,
        "bapo/clip_high": 1.25,
        "bapo/positive_share_start": pytest.approx(1 / 2.5),
        "bapo/positive_share": pytest.approx(1.25 / 2.75),
        "bapo/exit_start_share": 0.0,
        "bapo/exit_met_share": 1.0,
        "bapo/exit_exhausted_share": 0.0,
    }
    refused = objective.refuses(decision)
    assert refused is not None
    assert not bool(refused)
    bounds = objective.bounds(replace(tokens, decision=decision))
    assert bounds is not None
    assert [bound.item() for bound in bounds] == [0.75, 1.25]


@pytest.mark.parametrize(
    ("number", "shares"),
    [(0, (1, 0, 0)), (1, (0, 1, 0)), (2, (0, 0, 1)), (4, (0, 0, 0))],
)
def test_the_exit_of_a_search_is_reported(number: int, shares: tuple[int, ...]) -> None:
    objective = load_objective(AlgorithmConfig.model_validate({})).objective
    decision = [0.8, 1.2, 0.4, 0.5, number, 1, 2, 3]
    reported = objective.report_decision(decision)
    names = ("start", "met", "exhausted")
    assert tuple(reported[f"bapo/exit_{name}_share"] for name in names) == shares
    refused = objective.refuses(torch.tensor(decision, dtype=torch.float64))
    assert refused is not None
    assert bool(refused) == (number == 4)


@pytest.mark.parametrize("seed", range(20))
@both_kernels
def test_statistics_of_parts_add_up_to_the_bounds_of_exact_arithmetic(
    kernels: Kernels, seed: int
) -> None:
    rule = paper_rule()
    tokens = random_tokens(np.random.default_rng(seed), 300, rule)
    logprob_T, behaviour_T, advantage_T, mask_T = map(torch.from_numpy, tokens.arrays())
    config = AlgorithmConfig.model_validate({}).bapo
    objective = Bapo(config, None, ContributionTable(config, kernels=kernels))
    batch = make_tokens(logprob_T, behaviour_T, advantage_T, mask_T)
    whole_K = objective.statistics(batch)
    total_K = torch.zeros_like(whole_K)
    for part_T in torch.randperm(300).chunk(7):
        total_K += objective.statistics(batch.select(part_T))
    assert whole_K.dtype == torch.int64
    assert torch.equal(total_K, whole_K)
    found = exact_search(tokens, rule)
    decision = objective.decide(total_K).tolist()
    assert decision[:2] == [found.clip_low, found.clip_high]
    exits = {"start": 0, "met": 1, "exhausted": 2}
    signed = int(((mask_T > 0) & (advantage_T != 0)).sum())
    assert (decision[4], decision[-1]) == (exits[found.exit], signed)


@pytest.mark.parametrize(
    ("advantage", "mask", "reason"),
    [(256.0, 1.0, "1 tokens have .* scale the rewards down"), (1.0, 0.5, "a mask other than 0")],
)
def test_tokens_beyond_the_exact_sums_are_refused_with_a_remedy(
    advantage: float, mask: float, reason: str
) -> None:
    objective = load_objective(AlgorithmConfig.model_validate({})).objective
    zero_T = torch.zeros(2)
    tokens = make_tokens(zero_T, zero_T, torch.tensor([1.0, advantage]), torch.tensor([1.0, mask]))
    decision = objective.decide(objective.statistics(tokens))
    refused = objective.refuses(decision)
    assert refused is not None
    assert bool(refused)
    assert re.search(reason, objective.explain_refusal(decision.tolist()))


def test_the_recipe_preset_searches_every_micro_batch_and_clips_twice() -> None:
    config = AlgorithmConfig.model_validate({"bapo": {"preset": "recipe"}})
    loaded = load_objective(config)
    assert isinstance(loaded.objective, Bapo)
    assert loaded.objective.needs == "micro_batch"
    assert loaded.objective.dual_clip == 3.0
    assert loaded.decision_size == 8
    table = loaded.objective.table
    assert len(search_path(table, table.config).candidates) == 21
