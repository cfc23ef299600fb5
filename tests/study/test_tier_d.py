"""Tier D of the study: the centred gradient, the sampler's rounding, shards and tables."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from examples.study import shards, tier_d, tier_d_long
from examples.study.shards import read_shards
from examples.study.task import make_task
from examples.study.tier_a_run import GROUP_SIZE, batches
from examples.study.tier_d_report import Results, language_lines, tables
from examples.study.tier_d_run import ARMS, Setting, gradient_of, rounded, train
from tests.launch import REPOSITORY

DOCS = REPOSITORY / "docs" / "study"

BOUNDS = {"grpo": (0.8, 1.2), "corner": (0.9, 3.0)}


def _weight(name, ratio, advantage):
    """f(r) by tensors, each formula written out."""
    if name == "reinforce":
        return torch.ones_like(ratio)
    if name == "truncated":
        return ratio.clamp(max=2)
    if name == "masked":
        return ratio * ((ratio >= 0.5) & (ratio <= 5))
    low, high = BOUNDS.get(name, (0.7, 1.5))
    return ratio * (ratio < high if advantage > 0 else ratio > low)


@pytest.mark.parametrize("arm", ARMS)
def test_the_gradient_is_autograd_s_of_the_centred_loss(arm):
    """−A (sg(w_a) log p_a − Σ_v sg(q_v w_v) log p_v), token by token."""
    task, rng = make_task(1), np.random.default_rng(6)
    sampler = task.log_policy(rounded(task.start_DKA, 4))
    samples = task.sample(sampler, GROUP_SIZE, np.random.default_rng(5))
    batch = next(b for b in batches(samples, sampler, 16) if len(b.response_T))
    moved = task.start_DKA + rng.normal(0, 0.3, task.start_DKA.shape)
    policy = task.log_policy(moved)[batch.prompts].transpose(1, 0, 2)
    sampler = sampler[batch.prompts].transpose(1, 0, 2)
    name = arm.removesuffix("_centered")
    plain, drift = gradient_of(batch, arm, BOUNDS.get(name, (0.7, 1.5)), policy, sampler)

    logits = torch.tensor(policy, requires_grad=True)
    q, loss = torch.tensor(sampler).exp(), torch.zeros((), dtype=torch.float64)
    where = zip(batch.stage_T, batch.prompt_T, batch.action_T, batch.advantage_T, strict=True)
    limits = 0
    for stage, prompt, action, advantage in where:
        logprob = logits[stage, prompt].log_softmax(-1)
        weight = _weight(name, (logprob.exp() / q[stage, prompt]).detach(), advantage)
        limits += int((weight == 0).sum())
        term = weight[action] * logprob[action]
        if name != arm:
            term = term - (q[stage, prompt] * weight * logprob).sum()
        loss = loss - advantage * term / batch.num_tokens
    loss.backward()
    np.testing.assert_allclose(plain + drift, logits.grad.numpy(), rtol=1e-9, atol=1e-14)
    assert np.any(drift) == (name != arm)
    assert (limits > 0) == (name not in ("reinforce", "truncated"))


def test_centering_vanishes_without_a_mismatch():
    """With q = p the drift of every weight with f(1) = 1 is Σ p_v s_v = 0."""
    task = make_task(1)
    policy = task.log_policy(task.start_DKA)
    samples = task.sample(policy, GROUP_SIZE, np.random.default_rng(5))
    batch = next(b for b in batches(samples, policy, 16) if len(b.response_T))
    policy = policy[batch.prompts].transpose(1, 0, 2)
    for arm in ("reinforce_centered", "truncated_centered", "masked_centered"):
        plain, drift = gradient_of(batch, arm, None, policy, policy)
        assert np.abs(drift).max() < 1e-15 < 1e-4 < np.abs(plain).max()


def test_rounding_leaves_integers_of_the_bits_times_a_scale_per_output():
    weight = np.array([0.7, -0.44, 0.26, 0.0])[None, :, None]
    assert rounded(weight, 4)[0, :, 0] == pytest.approx([0.7, -0.4, 0.3, 0.0], abs=1e-15)
    assert np.array_equal(rounded(weight, 0), weight)
    assert np.array_equal(rounded(np.zeros((1, 3, 2)), 8), np.zeros((1, 3, 2)))


def test_a_biased_sampler_differs_from_the_policy_without_lag():
    """The first update of a step has q = p for an exact sampler."""
    exact, eight, four = (train(Setting("reinforce", bits=b, steps=1), 0, 0) for b in (0, 8, 4))
    assert exact.kl[0] == pytest.approx(0, abs=1e-12)
    assert 1e-6 < eight.kl[0] < 1e-3 < four.kl[0]


def test_a_run_repeats_and_arms_differ_by_their_weight_alone():
    runs = [train(Setting("masked_centered", 1, 4, steps=2), 0, 0) for _ in range(2)]
    assert runs[0] == runs[1]
    assert train(Setting("masked", 1, 4, steps=2), 0, 0) != runs[0]


def test_the_report_tells_the_contrasts_of_the_shards(tmp_path, monkeypatch):
    pool = lambda jobs, *_: ThreadPoolExecutor(jobs)  # noqa: E731 - a process takes seconds
    monkeypatch.setattr(shards, "ProcessPoolExecutor", pool)
    tier_d.run_plan(tier_d.SMALL, tmp_path, jobs=1)
    results = Results(tmp_path)
    text = tables(results)
    tuning = [row for row in read_shards(tmp_path / "tuning") if row["arm"] == "masked"]
    by_rate = {
        row["learning_rate"]: row["expected_reward"][-1]
        for row in tuning
        if (row["bits"], row["lag"]) == (4, 0)
    }
    assert results.rate("masked", (4, 0)) == max(by_rate, key=by_rate.get)
    assert len(by_rate) == 2
    finals = {
        (row["arm"], row["task"], row["seed"]): row["expected_reward"][-1]
        for row in read_shards(tmp_path / "report")
        if (row["bits"], row["lag"]) == (4, 0)
    }
    pairs = [(16, 0), (16, 1), (17, 0), (17, 1)]
    difference = np.mean([finals["bapo", *pair] - finals["grpo", *pair] for pair in pairs])
    row = next(line for line in text.splitlines() if line.startswith("| biased | bapo − grpo"))
    assert row.split(" | ")[2].strip("*") == f"{difference:+.3f}"
    assert text.count("\n| stale | ") == text.count("\n| both | ") == 9


def test_what_docs_study_says_of_tier_d_is_what_its_shards_say():
    directory = REPOSITORY / "docs/study/tier_d"
    assert (directory / "tables.md").read_text() == tables(Results(directory))
    rows = read_shards(directory / "long")
    assert (directory / "long.md").read_text() == tier_d_long.tables(rows)


def test_the_language_model_s_contrasts_are_those_of_its_runs():
    lines = language_lines(Results(DOCS / "tier_d"))
    text = (DOCS / "tier_d.md").read_text().partition("\n## A language model\n")[2]
    assert "\n".join(lines) in text
    # +17.0, +12.7 and +19.3 points of three seeds: t = 16.3 / 1.95 with two degrees of freedom.
    assert lines[4].startswith("| truncated-centered − BAPO | +16.3 | +7.9 … +24.7 | 0.084")
