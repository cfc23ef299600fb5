"""The main job with a real SGLang server and real Megatron-core, as a user starts it."""

import json
from pathlib import Path

import pytest
import yaml

from bapo_megatron.engine.sglang.server import SglangServer
from bapo_megatron.evaluation.results import read_results
from bapo_megatron.telemetry.sinks import read_metrics
from tests.docs.metric_names import unlisted
from tests.engine.sglang.servers import lent
from tests.launch import torchrun
from tests.trainer.chaos import steps
from tests.trainer.runs import sampling_settings, train

PROGRESS = (
    "reading the prompts",
    "waiting for 1 of 1 servers",
    "loading weights",
    "evaluation",
    "rollout",
)
"""What a run says of its progress where that takes long; libraries say nothing."""

pytestmark = [pytest.mark.sglang, pytest.mark.distributed]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, model_dir: Path, server: SglangServer) -> Path:
    """Two steps of one update each, sampled at temperature 0.6."""
    directory = tmp_path_factory.mktemp("end_to_end")
    settings = sampling_settings(
        directory,
        model_dir,
        rollout={"oversample_groups": 2, "servers": [server.address]},
        eval={"max_prompts": 6},
        # With the usual epsilon Adam's first step is the sign of each gradient: rounding would
        # decide where two layouts move the weights.
        optimizer={"eps": 1e-4},
    )
    path = directory / "run.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


@pytest.fixture(scope="module")
def finished(
    config: Path, model_dir: Path, server: SglangServer, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The run directory of a finished run on two tensor-parallel ranks."""
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    # By torchrun, so that what libraries say while they are imported is seen too.
    arguments = ["train", str(config), f"run_dir={run_dir}", "parallel.tensor=2"]
    with lent(server, model_dir) as keys:
        result = torchrun(arguments, ranks=2, environment=keys)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stderr.splitlines()
    assert [line for line in lines if not line.startswith(PROGRESS)] == []
    return run_dir


def test_trainer_and_engine_agree_on_every_token_of_every_step(finished: Path) -> None:
    rows = steps(finished)
    assert len(rows) == 2
    for row in rows:
        # Fresh tokens of every step, so also of weights that were synchronised in between.
        assert 0 < row["mismatch/logprob_abs_max"] <= 1e-4
        assert row["policy/grad_norm"] > 0


def test_the_run_reports_what_it_did(finished: Path) -> None:
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["num_prompts"] == 6
    assert 0 <= summary["accuracy_before"] <= 1
    assert 0 <= summary["accuracy_after"] <= 1
    assert summary["generated_tokens_per_s"] > 0
    assert {"rollout", "training", "weight_sync", "evaluation"} <= summary["phase_s"].keys()
    rows = read_metrics(finished / "metrics.jsonl")
    assert unlisted(name for row in rows for name in row) == {"step"}
    assert "eval/sums/pass_at_k" in rows[0]
    assert rows[0]["step"] == 0
    assert "eval/sums/pass_at_k" in rows[-1]
    (scored,) = read_results(finished / "eval" / "step_000002.json")
    assert (scored.name, scored.num_prompts, scored.samples_per_prompt) == ("sums", 6, 2)
    last = {score.name: score for score in scored.scores}
    assert rows[-1]["eval/sums/avg_at_k"] == last["avg@2"].value == summary["accuracy_after"]
    assert rows[-1]["eval/sums/pass_at_k_high"] == last["pass@2"].high
    assert "eval/sums/maj_at_k" not in rows[-1]  # the reward returns only a number
    assert rows[-1]["eval/sums/pass_at_1"] == last["pass@1"].value
    assert len((finished / "eval" / "start_sums.jsonl").read_text().splitlines()) == 12
    assert (finished / "rollouts" / "step_000002.parquet").exists()
    assert not (finished / "weights").exists()


def test_the_dumps_of_a_run_replay_to_the_same_losses_in_another_layout(
    config: Path, finished: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    train(config, run_dir, f"replay={finished / 'rollouts'}")
    for row, reference in zip(steps(run_dir), steps(finished), strict=True):
        assert reference["policy/grad_norm"] > 0.1  # more than the entropy's alone
        for name in ("loss/policy", "policy/grad_norm", "mismatch/logprob_abs_max"):
            assert row[name] == pytest.approx(reference[name], rel=1e-4, abs=2e-5), name
