"""Tier A of the study: the task's exact values, the update's gradient, shards and statistics."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from examples.study import shards, tier_a, tier_a_run
from examples.study.report import Results, final, tables
from examples.study.shards import read_shards
from examples.study.task import LONGEST, RIGHT, SLOPPY, STAGES, make_task
from examples.study.tier_a_run import History, Setting, train


def test_the_expected_reward_by_hand():
    """Only right actions of probability p: P(at least D of T draws) of a binomial."""
    task = make_task(0)
    probability = 0.25
    policy = np.where(task.kind_CDA == RIGHT, probability, 0.0)
    idle = (task.kind_CDA == 0).sum(-1, keepdims=True)
    policy += np.where(task.kind_CDA == 0, (1 - probability) / idle, 0.0)
    with np.errstate(divide="ignore"):
        actual = task.expected_reward(np.log(policy))
    n, p = LONGEST, probability
    below = sum(
        float(np.prod([(n - i) / (i + 1) for i in range(k)])) * p**k * (1 - p) ** (n - k)
        for k in range(STAGES)
    )
    assert actual == pytest.approx(1 - below, rel=1e-12)
    sloppy = np.where(task.kind_CDA == SLOPPY, 1.0, 0.0)
    with np.errstate(divide="ignore"):
        assert task.expected_reward(np.log(sloppy)) == 0


def test_the_gradient_of_an_update_is_autograd_s():
    """Of PPO's clipped loss over all tokens of the update, written out with torch."""
    task, run = make_task(1), History()
    behaviour = task.log_policy(task.start_DKA)
    samples = task.sample(behaviour, tier_a_run.GROUP_SIZE, np.random.default_rng(5))
    (batch,) = tier_a_run.batches(samples, behaviour, 1)
    moved = task.start_DKA + np.random.default_rng(6).normal(0, 0.3, task.start_DKA.shape)

    class Keep(tier_a_run.Adam):
        def step(self, gradient_DKA):
            self.gradient = gradient_DKA
            return 0.0

    keep = Keep(moved, 0.1)
    objective = tier_a_run.load_objective(Setting("grpo").algorithm()).objective
    tier_a_run._update(batch, objective, Setting("grpo"), task.features_CK, keep, run)

    weight = torch.tensor(moved, requires_grad=True)
    logits = torch.einsum("ck,dka->cda", torch.tensor(task.features_CK), weight)
    prompt = torch.tensor(batch.prompts[batch.prompt_T])
    logprob = logits.log_softmax(-1)[prompt, batch.stage_T, batch.action_T]
    ratio, advantage = (logprob - torch.tensor(batch.behaviour_T)).exp(), batch.advantage_T
    advantage = torch.tensor(advantage)
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    (-surrogate.sum() / samples.length_B.sum()).backward()
    assert 0.01 < float((ratio > 1.2).double().mean()) < 0.9
    np.testing.assert_allclose(keep.gradient, weight.grad.numpy(), rtol=1e-4, atol=1e-7)


def test_yoked_bounds_are_another_seed_s_in_another_order():
    setting = Setting("bapo", lag=2, steps=4)
    same, other = (train(setting, 0, seed).bounds for seed in (0, 1))
    yoked = train(replace(setting, arm="yoked"), 0, 0).bounds
    assert set(yoked) <= set(other)
    assert yoked != other
    assert not set(yoked) <= set(same)


def test_a_run_repeats_bit_for_bit_and_its_lag_is_of_whole_steps():
    stale = [train(Setting("bapo", lag=2, steps=5), 0, 0) for _ in range(2)]
    assert stale[0] == stale[1]
    fresh = train(Setting("bapo", lag=0, steps=5), 0, 0)
    assert fresh.expected_reward[1] == stale[0].expected_reward[1]
    assert fresh.expected_reward[3] != stale[0].expected_reward[3]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tier_a")
    with pytest.MonkeyPatch.context() as patch:  # a process takes seconds to start
        patch.setattr(shards, "ProcessPoolExecutor", lambda jobs, *_: ThreadPoolExecutor(jobs))
        tier_a.run_plan(tier_a.SMALL, out, jobs=1)
    return out


def test_a_lost_shard_comes_again(small: Path, capsys: pytest.CaptureFixture[str]):
    path = small / "report" / "bapo_lag2_updates16_lr0.1.parquet"
    before, others = pq.read_table(path), len(read_shards(small / "report"))
    path.unlink()
    tier_a.run_plan(tier_a.SMALL, small, jobs=1)
    assert "1 to compute" in capsys.readouterr().out
    assert pq.read_table(path).equals(before)
    assert len(read_shards(small / "report")) == others
    manifest = json.loads((small / "manifest.json").read_text())
    assert manifest["plan"]["tuning_tasks"] == [100]
    assert torch.__version__.startswith(manifest["made_with"][0]["torch"])


def test_the_report_tells_the_contrasts(small: Path):
    results = Results(small)
    text = tables(results)
    bapo = results.values(results.rows("bapo", 2), final)
    yoked = results.values(results.rows("yoked", 2), final)
    assert bapo.shape == (2, 2)
    assert f"| yoked BAPO | {(bapo - yoked).mean():+.3f} |" in text
    assert "GRPO [0.8, 1.2], dual clip 3" in text
