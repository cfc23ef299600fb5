"""Tier B of the study: one step of BAPO and of its yoked control, through the real command."""

import json
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import pytest

from bapo_megatron import cli
from examples.study import tier_b
from examples.study.tier_b import Plan, Setting, compute
from tests import distributed_launch
from tests.distributed_launch import start_fork
from tests.reward.own_functions import EVEN_LENGTH
from tests.rollout.forked_collector import forked_collectors
from tests.trainer.dumps import make_random_model

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def call(out: Path, *arguments: str) -> None:
    """Run a command of the project; it and its collector are forks, which start sooner."""
    process = start_fork(_run, arguments, out / "log")
    process.join()
    assert process.exitcode == 0, (out / "log").read_text()


def _run(arguments: tuple[str, ...], log: Path) -> None:
    distributed_launch.forks_of_this_process()
    with log.open("w") as out, redirect_stdout(out), redirect_stderr(out), forked_collectors():
        cli.app(arguments[1:], standalone_mode=False)  # after ``python -m bapo_megatron``


def test_the_yoked_run_has_the_bounds_of_another_seed_s_bapo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_b, "_call", call)
    reward = f"reward.functions=[{json.dumps(EVEN_LENGTH)}]"
    plan = Plan(lags=(0,), rates=(1e-3,), seeds=(0, 1), steps=1, overrides=(reward,))
    rows = [{"prompt": f"{a}+{b}=?", "answer": str(a + b)} for a in range(9) for b in range(9)]
    for seed in plan.seeds:
        tiny = tmp_path / "tiny" / f"seed{seed}"
        make_random_model(tiny / "model")
        for name, part in (("train", rows[:60]), ("heldout", rows[60:64])):
            (tiny / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    (bapo,) = compute(Setting("bapo", 0, 1e-3, 1, 1), plan, tmp_path)
    path = tmp_path / "bounds" / "bapo_lag0_lr0.001_seed1.json"
    pairs = [json.loads(line)[1:] for line in path.read_text().splitlines()][-16:]
    assert len(pairs) == 16
    assert bapo["low"][0] == pytest.approx(np.mean([low for low, _ in pairs]))
    assert bapo["high"][0] == pytest.approx(np.mean([high for _, high in pairs]))
    path.write_text("[0, 1.0, 1.0]\n")
    (yoked,) = compute(Setting("yoked", 0, 1e-3, 0, 1), plan, tmp_path)
    assert yoked["seed"] == 0
    clipped = [row["clipped_low"][0] + row["clipped_high"][0] for row in (bapo, yoked)]
    assert clipped[0] < 0.2 < 0.3 < clipped[1]
    assert not (tmp_path / "runs" / "yoked_lag0_lr0.001_seed0").exists()
