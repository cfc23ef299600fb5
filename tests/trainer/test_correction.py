"""Corrections and the staleness mask in a whole update: against transformers, and over layouts.

Shape legend: R = response tokens of one sample.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bapo_megatron.data.dump import read_batch, write_batch
from bapo_megatron.data.staleness import spans_of, token_versions
from bapo_megatron.types import RolloutBatch, Sample
from tests.distributed_launch import run_ranks
from tests.trainer.exact_policy import ExactPolicy
from tests.trainer.one_update import (
    Case,
    Updates,
    assert_same_gradients,
    make_updates,
    make_updates_in_layouts,
)
from tests.trainer.runs import train

pytestmark = pytest.mark.distributed

RECOMPUTED = {"behaviour": "recomputed"}
LIMITS = {"cap": 1.05, "low": 0.97, "high": 1.1}
MASKED_TOKENS = {"measure": "token", "max_age": 3, "action": "mask"}
MASKED_RESPONSES = {"measure": "mean", "max_age": 1, "action": "mask"}


def _correction(kind: str) -> dict[str, Any]:
    return {**RECOMPUTED, "correction": {"kind": kind, **LIMITS}}


COUNTS = ("corrected_tokens", "correction_capped", "correction_masked")

OUTSIDE = {**RECOMPUTED, "correction": {"kind": "icepop", "low": 1.0, "high": 1.0}}
"""A range that nothing is in: it leaves the entropy bonus alone."""
KINDS = ("token", "sequence", "icepop", "geometric")
CASES = {
    "none": Case(RECOMPUTED),
    **{kind: Case(_correction(kind)) for kind in KINDS},
    "masked tokens": Case(staleness=MASKED_TOKENS),
    "masked responses": Case({"loss_aggregation": "sequence_mean"}, MASKED_RESPONSES),
    "sequence, masked tokens": Case(_correction("sequence"), MASKED_TOKENS),
    "bonus": Case(OUTSIDE),
    "nothing": Case({**OUTSIDE, "entropy_coefficient": 1e-9}),
}
DIVIDED = ("icepop", "geometric", "masked responses", "sequence, masked tokens")
"""What a layout could get wrong: limits per token and per response, and both masks."""


@pytest.fixture(scope="module")
def stale_dump(
    tmp_path_factory: pytest.TempPathFactory, mixed_dumps: Path, random_model: Path
) -> Path:
    """A batch of version 9 that the weights of three versions sampled, with noisy log-probs."""
    batch = read_batch(mixed_dumps / "step_000001.parquet")
    rng = np.random.default_rng(3)
    exact = _exact_logprobs(ExactPolicy(random_model, batch))
    for number, (sample, exact_R) in enumerate(zip(batch.samples, exact, strict=True)):
        length = len(exact_R)
        noisy_R = exact_R + rng.normal(0, 0.1, length)
        sample.behaviour_logprobs = noisy_R.astype(np.float32)
        versions_R = np.full(length, 9)
        if number % 3:  # two of three responses began with older weights
            versions_R[: length * (number % 5) // 4] = 7
            versions_R[: length // 3] = 4
        sample.versions = spans_of(versions_R)
    path = tmp_path_factory.mktemp("stale") / "step_000001.parquet"
    write_batch(path, RolloutBatch(step=1, version=9, groups=batch.groups))
    return path


@pytest.fixture(scope="module")
def one_rank(random_model: Path, stale_dump: Path) -> Updates:
    return run_ranks(make_updates, 1, random_model, stale_dump, {}, CASES)[0]


@pytest.fixture(scope="module")
def exact(random_model: Path, stale_dump: Path) -> list[tuple[Sample, np.ndarray, float]]:
    """Each sample of the batch, with its exact log-probs [R] and its advantage."""
    batch = read_batch(stale_dump)
    policy = ExactPolicy(random_model, batch)
    return list(zip(batch.samples, _exact_logprobs(policy), policy.advantages, strict=True))


def _exact_logprobs(policy: ExactPolicy) -> list[np.ndarray]:
    """Log-probs of each response [R] in float64."""
    return [logprob_R.detach().numpy() for logprob_R in policy.logprobs]


def _assert_same_update(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual["bounds"] == expected["bounds"]
    assert actual["sums"].keys() == expected["sums"].keys()
    for name in {"tokens", *COUNTS} & expected["sums"].keys():
        assert actual["sums"][name] == expected["sums"][name], name
    for name in {"policy_loss", "entropy", "correction_weight"} & expected["sums"].keys():
        assert actual["sums"][name] == pytest.approx(expected["sums"][name], rel=2e-5), name
    assert actual["maxima"] == pytest.approx(expected["maxima"], rel=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_weighed_as_defined(one_rank: Updates, exact: list[Any], kind: str) -> None:
    # The first update has ratio 1, so its loss is minus the mean of w · A.
    loss, weights, raw = 0.0, [], []
    for sample, exact_R, advantage in exact:
        log_R = exact_R - sample.behaviour_logprobs.astype(np.float64)
        whole = {"sequence": log_R.sum(), "geometric": log_R.mean()}
        raw_R = np.exp(np.full_like(log_R, whole[kind]) if kind in whole else log_R)
        weight_R = np.minimum(raw_R, LIMITS["cap"])
        if kind in ("icepop", "geometric"):
            kept = raw_R if kind == "icepop" else 1
            weight_R = np.where((raw_R < LIMITS["low"]) | (raw_R > LIMITS["high"]), 0, kept)
        loss -= advantage * weight_R.sum()
        weights.append(weight_R)
        raw.append(raw_R)
    weight_T, raw_T = np.concatenate(weights), np.concatenate(raw)
    sums = one_rank[kind]["sums"]
    assert sums["policy_loss"] == pytest.approx(loss / len(weight_T), abs=1e-5)
    assert sums["corrected_tokens"] == sums["tokens"] == len(weight_T)
    assert sums["correction_weight"] == pytest.approx(weight_T.sum(), rel=1e-4)
    largest = one_rank[kind]["maxima"]["correction/weight_max"]
    assert largest == pytest.approx(raw_T.max(), rel=1e-4)
    masked, capped = np.count_nonzero(weight_T == 0), np.count_nonzero(weight_T == LIMITS["cap"])
    assert (sums["correction_masked"], sums["correction_capped"]) == (masked, capped)
    assert 0 < masked + capped < len(weight_T)


@pytest.mark.parametrize("kind", KINDS)
def test_a_correction_changes_neither_bounds_nor_entropy(one_rank: Updates, kind: str) -> None:
    plain, corrected = one_rank["none"], one_rank[kind]
    assert corrected["bounds"] == plain["bounds"]
    for name in ("entropy", "kl_behaviour", "tokens"):
        assert corrected["sums"][name] == plain["sums"][name], name
    assert not set(COUNTS) & plain["sums"].keys()
    name = "lm_head.weight"
    assert not torch.allclose(corrected["gradients"][name], plain["gradients"][name], rtol=1e-3)


def test_tokens_that_icepop_leaves_out_keep_their_entropy_bonus(one_rank: Updates) -> None:
    name = "lm_head.weight"
    assert one_rank["bonus"]["sums"]["policy_loss"] == 0.0
    gradients = [one_rank[case]["gradients"][name] for case in ("bonus", "nothing")]
    bonus, nothing = (float(gradient.abs().max()) for gradient in gradients)
    assert bonus > 1e4 * nothing > 0


@pytest.mark.parametrize("name", ["masked tokens", "masked responses"])
def test_masked_tokens_are_in_no_sum(one_rank: Updates, exact: list[Any], name: str) -> None:
    low, high = one_rank[name]["bounds"]
    kept, losses, staleness = 0, [], 0.0
    for sample, exact_R, advantage in exact:
        age_R = 9 - token_versions(sample.versions)
        trains_R = age_R <= 3 if name == "masked tokens" else np.full(len(age_R), age_R.mean() <= 1)
        ratio_R = np.exp(exact_R - sample.behaviour_logprobs)[trains_R]
        clipped_R = np.minimum(ratio_R, high) if advantage > 0 else np.maximum(ratio_R, low)
        staleness += age_R[trains_R].sum()
        kept += len(ratio_R)
        if len(ratio_R):
            losses.append((-advantage * clipped_R.sum(), len(ratio_R)))
    if name == "masked tokens":
        expected = sum(loss for loss, _ in losses) / kept
    else:
        expected = sum(loss / length for loss, length in losses) / len(losses)
        assert len(losses) < len(exact)
    sums = one_rank[name]["sums"]
    total = sum(len(exact_R) for _, exact_R, _ in exact)
    assert 0 < kept < total
    assert sums["tokens"] == kept
    assert (sums["response_tokens"], sums["masked_tokens"]) == (total, total - kept)
    assert sums["staleness"] == staleness
    assert sums["policy_loss"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.exhaustive
def test_layouts_weigh_and_mask_alike(
    one_rank: Updates, random_model: Path, stale_dump: Path
) -> None:
    cases = {name: CASES[name] for name in DIVIDED}
    sizes = {"CP 2": {"context": 2}, "TP 2": {"tensor": 2}, "PP 2": {"pipeline": 2}, "DP 2": {}}
    layouts = {name: (size, cases) for name, size in sizes.items()}
    ranks = run_ranks(make_updates_in_layouts, 2, random_model, stale_dump, layouts)
    for layout in layouts:
        for updates in ranks[:1] if layout == "PP 2" else ranks:
            for name in DIVIDED:
                _assert_same_update(updates[layout][name], one_rank[name])
        for name in DIVIDED:
            gradients = ranks[0][layout][name]["gradients"]
            assert_same_gradients(gradients, one_rank[name]["gradients"])


def test_ages_grow_with_every_update_that_a_batch_serves(
    replay_config: Path, stale_dump: Path, tmp_path: Path
) -> None:
    settings = [f"replay={stale_dump.parent}", "train.steps=1", "checkpoint.at_end=false"]
    settings += ["algorithm.updates_per_batch=2", "algorithm.epochs=2"]
    (row,) = train(replay_config, tmp_path, *settings)
    halves = [
        np.concatenate([9 - token_versions(s.versions) for group in groups for s in group.samples])
        for batch in [read_batch(stale_dump)]
        for groups in (batch.groups[:2], batch.groups[2:])
    ]
    ages = np.concatenate(halves)
    trained = np.concatenate([halves[number % 2] + number for number in range(4)])
    assert row["rollout/staleness_max"] == trained.max() == 8
    assert row["rollout/staleness_mean"] == pytest.approx(trained.mean())
    assert row["rollout/age_max"] == 5.0
    assert row["rollout/age_mean"] == pytest.approx(ages.mean())
    assert row["rollout/stale_token_share"] == pytest.approx(np.mean(ages > 0))
    assert row["rollout/masked_token_share"] == 0.0
