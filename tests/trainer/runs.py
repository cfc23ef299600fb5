"""Runs as a user starts them: their settings, their errors, and whether two are the same."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import yaml
from safetensors.torch import load_file
from torch import Tensor

from bapo_megatron.config.schema import RunConfig
from bapo_megatron.telemetry.sinks import read_metrics
from bapo_megatron.trainer.stopping import Stopping
from tests.launch import Launched, run
from tests.reward.own_functions import EVEN_LENGTH

UNREPEATABLE = re.compile(
    "time/|ranks/|collector/|throughput/|weight_sync/.*_s$|eval/.*(wall_s|tokens_per_s)$"
    # Measured times decide whether predicted bounds are used; a new process begins without any.
    "|train/prediction_|train/forward_.*_flops"
    # Counted in the process that asked, for episodes of later batches too.
    "|rollout/environment_.*_per_response$"
)
"""Metrics that depend on the clock."""


def sampling_settings(directory: Path, model_dir: Path, **sections: Any) -> dict[str, Any]:
    """Settings of a run that samples answers to sums of two digits, of which it makes the files.

    ``sections`` change some of the values, or add to them. A random model answers nothing: it is
    rewarded for a response of even length.
    """
    rows = [{"prompt": f"{a}+{b}=?", "answer": str(a + b)} for a in range(9) for b in range(9)]
    for name, part in (("train", rows[:60]), ("heldout", rows[60:])):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in part))
    settings: dict[str, Any] = {
        "name": "sums",
        "run_dir": str(directory / "run"),
        "model": {"path": str(model_dir), "dtype": "float32"},
        "data": {"train": {"path": str(directory / "train.jsonl")}, "max_prompt_tokens": 32},
        "rollout": {
            "groups_per_step": 4,
            "samples_per_group": 4,
            "max_response_tokens": 24,
            "temperature": 0.6,
        },
        "algorithm": {"entropy_coefficient": 0.01},
        "optimizer": {"lr": 1e-3},
        "reward": {"workers": 1, "functions": [EVEN_LENGTH]},
        "train": {"steps": 2, "max_tokens_per_micro_batch": 512},
        "eval": {
            "sets": [{"path": str(directory / "heldout.jsonl"), "name": "sums"}],
            "samples_per_prompt": 2,
            "max_response_tokens": 24,
        },
    }
    for name, section in sections.items():
        is_partial = isinstance(section, dict) and name in settings
        settings[name] = settings[name] | section if is_partial else section
    return settings


def write_run(directory: Path, model_dir: Path, **sections: Any) -> Path:
    """Write ``sampling_settings`` of a run without TensorBoard; returns the file."""
    settings = sampling_settings(
        directory, model_dir, **{"log": {"tensorboard": False}, **sections}
    )
    (directory / "run.yaml").write_text(yaml.safe_dump(settings))
    return directory / "run.yaml"


def run_of_short_turns(
    directory: Path,
    model_dir: Path,
    rollout: dict[str, Any],
    *functions: dict[str, str],
    **sections: Any,
) -> Path:
    """The configuration of four steps of episodes, one ahead, with a checkpoint after each.

    One token in sixteen ends a turn of their model, which is a copy. ``functions`` reward them.
    """
    model = directory / "model"
    shutil.copytree(model_dir, model)
    ends = {"eos_token_id": [1, *range(9, 260, 16)]}
    (model / "generation_config.json").write_text(json.dumps(ends))
    defaults: dict[str, Any] = {
        "rollout": {"engine": "local", "async_steps": 1, "oversample_groups": 2, **rollout},
        "algorithm": {"updates_per_batch": 2},
        "reward": {"functions": list(functions), "workers": 1},
        "train": {"steps": 4},
        "checkpoint": {"every_steps": 1},
        "eval": {"sets": []},
    }
    return write_run(directory, model, **(defaults | sections))


def train(
    config: Path,
    run_dir: Path,
    *overrides: str,
    ranks: int = 1,
    environment: dict[str, str] | None = None,
) -> list[dict[str, float]]:
    """Train to the end; returns the rows of metrics."""
    arguments = ["train", str(config), f"run_dir={run_dir}", *overrides]
    result = run(arguments, ranks=ranks, environment=environment, timeout_s=400)
    assert result.returncode == 0, result.stdout + result.stderr
    return read_metrics(run_dir / "metrics.jsonl")


def refusal(
    arguments: list[str], *, ranks: int = 1, environment: dict[str, str] | None = None
) -> tuple[int, str]:
    """Run a command that fails; returns its exit status and the first line of its own errors."""
    process = Launched(arguments, ranks=ranks, environment=environment)
    stderr, status = process.communicate()[1], process.poll()
    lines = re.findall(r"bapo-megatron: (.*)", stderr)
    assert lines, stderr
    assert "Traceback" not in stderr
    assert status
    return status, lines[0]


def train_whole_run(config: RunConfig, stopping: Stopping | None = None) -> None:
    """Train as the command does, in a process that has imported everything already.

    Without ``stopping`` no signal is heard.
    """
    from bapo_megatron.trainer import loop, opening
    from bapo_megatron.trainer.stopping import Stopping

    stopping = stopping or Stopping(config.train)
    with opening.open_run(config, stopping) as opened:
        loop.train(config, stopping, opened)


def exported_weights(run_dir: Path) -> dict[str, Tensor]:
    """Weights of the model that a run has exported."""
    return load_file(run_dir / "hf" / "model.safetensors")


def repeatable_rows(run_dir: Path) -> list[dict[str, float]]:
    """The metrics without what depends on the clock."""
    return [
        {name: value for name, value in row.items() if not UNREPEATABLE.match(name)}
        for row in read_metrics(run_dir / "metrics.jsonl")
    ]


def assert_same_training(run_dir: Path, expected: Path) -> None:
    """Compare the metrics and the exported weights of two runs, bit for bit."""
    assert repeatable_rows(run_dir) == repeatable_rows(expected)
    assert not differing_weights(run_dir, exported_weights(expected))


def differing_weights(run_dir: Path, reference: dict[str, Tensor]) -> list[str]:
    """Names of the exported weights that are not those of the reference, bit for bit."""
    weights = exported_weights(run_dir)
    assert weights.keys() == reference.keys()
    return [name for name, weight in weights.items() if not weight.equal(reference[name])]
