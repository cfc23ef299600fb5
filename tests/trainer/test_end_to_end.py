"""The main job with a real SGLang server and real Megatron-core, as a user starts it."""

from __future__ import annotations

import json
import signal
import socket
from typing import TYPE_CHECKING

import psutil
import pytest
import yaml

from bapo_megatron.evaluation.report import read_results
from bapo_megatron.telemetry.sinks import read_metrics
from tests.launch import free_port, run, start
from tests.policy.tiny_models import load_reference
from tests.trainer.chaos import servers, steps, wait_for

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.sglang, pytest.mark.distributed]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, random_model: Path) -> Path:
    """Two steps of one update each, sampled at temperature 0.6."""
    directory = tmp_path_factory.mktemp("end_to_end")
    rows = [{"prompt": f"{a}+{b}=?", "answer": str(a + b)} for a in range(9) for b in range(9)]
    for name, part in (("train", rows[:60]), ("heldout", rows[60:])):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in part))
    path = directory / "run.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "name": "end-to-end",
                "run_dir": str(directory / "run"),
                "model": {"path": str(random_model), "dtype": "float32"},
                "data": {
                    "train": {"path": str(directory / "train.jsonl")},
                    "max_prompt_tokens": 32,
                },
                "rollout": {
                    "groups_per_step": 4,
                    "samples_per_group": 4,
                    "max_response_tokens": 24,
                    "temperature": 0.6,
                    "oversample_groups": 2,
                    "server": {"max_total_tokens": 8192, "mem_fraction": 0.3},
                },
                "algorithm": {"entropy_coefficient": 0.01},
                "optimizer": {"lr": 1e-3},
                "train": {"steps": 3, "max_tokens_per_micro_batch": 512},
                "eval": {
                    "sets": [{"path": str(directory / "heldout.jsonl"), "name": "sums"}],
                    "samples_per_prompt": 2,
                    "max_response_tokens": 24,
                },
            }
        )
    )
    return path


@pytest.fixture(scope="module")
def finished(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a finished run on two tensor-parallel ranks."""
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    result = run(
        ["train", str(config), f"run_dir={run_dir}", "parallel.tensor=2"], ranks=2, timeout_s=400
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return run_dir


def test_trainer_and_engine_agree_on_every_token_of_every_step(finished: Path) -> None:
    rows = steps(finished)
    assert len(rows) == 3
    for row in rows:
        # Fresh tokens of every step, so also of weights that were synchronised in between.
        assert 0 < row["mismatch/logprob_abs_max"] <= 1e-4
        assert row["policy/grad_norm"] > 0


def test_the_run_reports_what_it_did(finished: Path) -> None:
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["num_prompts"] == 21
    assert 0 <= summary["accuracy_before"] <= 1
    assert 0 <= summary["accuracy_after"] <= 1
    assert summary["generated_tokens_per_s"] > 0
    assert {"rollout", "training", "weight_sync", "evaluation"} <= summary["phase_s"].keys()
    rows = read_metrics(finished / "metrics.jsonl")
    assert "eval/sums/pass_at_k" in rows[0]
    assert rows[0]["step"] == 0
    assert "eval/sums/pass_at_k" in rows[-1]
    (scored,) = read_results(finished / "eval" / "step_000003.json")
    assert (scored.name, scored.num_prompts, scored.samples_per_prompt) == ("sums", 21, 2)
    last = {score.name: score for score in scored.scores}
    assert rows[-1]["eval/sums/avg_at_k"] == last["avg@2"].value == summary["accuracy_after"]
    assert rows[-1]["eval/sums/maj_at_k_high"] == last["maj@2"].high
    assert rows[-1]["eval/sums/pass_at_1"] == last["pass@1"].value
    assert len((finished / "eval" / "start_sums.jsonl").read_text().splitlines()) == 42
    assert (finished / "rollouts" / "step_000003.parquet").exists()
    assert not (finished / "weights").exists()


def test_the_exported_model_loads_in_transformers(finished: Path, random_model: Path) -> None:
    trained = load_reference("qwen2", finished / "hf").state_dict()
    original = load_reference("qwen2", random_model).state_dict()
    assert trained.keys() == original.keys()
    assert any(not trained[name].equal(original[name]) for name in trained)
    assert (finished / "hf" / "tokenizer_config.json").exists()
    assert (finished / "hf" / "generation_config.json").exists()


def test_the_dumps_of_a_run_replay_to_the_same_losses(
    config: Path, finished: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    result = run(["train", str(config), f"run_dir={run_dir}", f"replay={finished / 'rollouts'}"])
    assert result.returncode == 0, result.stderr
    for row, reference in zip(steps(run_dir), steps(finished), strict=True):
        for name in ("loss/policy", "policy/grad_norm", "mismatch/logprob_abs_max"):
            assert row[name] == pytest.approx(reference[name], rel=1e-4, abs=2e-5), name


def test_a_resumed_run_pushes_its_weights_and_continues_the_versions(
    config: Path, finished: Path
) -> None:
    result = run(
        [
            "train",
            str(config),
            f"run_dir={finished}",
            "parallel.tensor=2",
            "resume=true",
            "train.steps=4",
            "rollout.temperature=1.0",
        ],
        ranks=2,
        timeout_s=400,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    row = read_metrics(finished / "metrics.jsonl")[-1]
    assert row["step"] == 4
    # With the base weights in the server this would be far off.
    assert row["mismatch/logprob_abs_max"] <= 1e-4


def test_a_server_that_dies_in_the_middle_is_started_again_and_the_run_goes_on(
    config: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    fresh_only = "rollout.oversample_groups=0"  # no token of an earlier version in any batch
    arguments = ["train", str(config), f"run_dir={run_dir}", "train.steps=1000", fresh_only]
    process = start([*arguments, "parallel.tensor=2"], ranks=2)
    wait_for(process, lambda: bool(steps(run_dir)), "the first step")
    (server,) = servers(process)
    server.kill()
    num_before = len(steps(run_dir))
    wait_for(process, lambda: len(steps(run_dir)) >= num_before + 3, "steps with the new server")
    # It has the trainer's weights, not those it started with, and every step was made once.
    rows = steps(run_dir)
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert max(row["mismatch/logprob_abs_max"] for row in rows) < 1e-4
    started = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "died (SIGKILL); it is started again (" in err
    assert not psutil.wait_procs(started, timeout=30)[1]
    assert not list(run_dir.rglob("*.tmp"))


def test_a_server_that_never_starts_ends_the_run_with_its_last_lines(
    config: Path, tmp_path: Path
) -> None:
    arguments = ["train", str(config), f"run_dir={tmp_path / 'run'}"]
    extra = "rollout.server.extra_args=[--no-such-argument]"
    result = run([*arguments, extra, "parallel.tensor=2"], ranks=2)
    assert result.returncode == 1
    ours, _, shown = result.stderr.partition("the last lines of")
    assert "bapo-megatron: the SGLang server at http://127.0.0.1:" in ours
    # Nothing of ours comes before it; torchrun's own report follows.
    assert "Traceback" not in ours
    assert "unrecognized arguments: --no-such-argument" in shown


def test_a_port_in_use_is_refused_before_the_server_starts(config: Path, tmp_path: Path) -> None:
    port = free_port()
    with socket.socket() as occupant:
        occupant.bind(("127.0.0.1", port))
        occupant.listen()
        result = run(
            [
                "train",
                str(config),
                f"run_dir={tmp_path / 'run'}",
                f"rollout.server.port={port}",
            ]
        )
    assert result.returncode == 1
    assert str(port) in result.stderr
    assert "in use" in result.stderr
    assert "Traceback" not in result.stderr
