"""What a user gets wrong ends in one clear line, a non-zero exit and nothing half-written."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from bapo_megatron.data.dump import read_batch, write_batch
from bapo_megatron.telemetry.sinks import read_metrics
from tests.launch import run, torchrun
from tests.trainer.dumps import write_dumps

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow


def _first_line(arguments: list[str], ranks: int = 1) -> tuple[int, str]:
    given = ["train", *arguments]
    result = run(given) if ranks == 1 else torchrun(given, ranks=ranks)
    found = (re.search("bapo-megatron: .*", line) for line in result.stderr.splitlines())
    lines = [match[0] for match in found if match]
    assert lines, result.stderr
    assert "Traceback" not in result.stderr
    return result.returncode, lines[0]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "algorithm.objektive=clip",
            "unknown key 'algorithm.objektive'; did you mean 'algorithm.objective'?",
        ),
        ("rollout.top_k=100", "'rollout.top_k' must be -1"),
        ("parallel.tensor=2", "parallel.tensor: must divide the number of ranks"),
    ],
)
def test_wrong_settings_are_refused_before_anything_starts(
    replay_config: Path, tmp_path: Path, override: str, expected: str
) -> None:
    run_dir = tmp_path / "run"
    status, line = _first_line([str(replay_config), f"run_dir={run_dir}", override])
    assert status == 2
    assert expected in line
    assert not run_dir.exists()


def test_an_unreadable_data_row_is_named(replay_config: Path, tmp_path: Path) -> None:
    data = tmp_path / "train.jsonl"
    data.write_text('{"prompt": "1+1=?", "answer": "2"}\n{"prompt": "1+2=?"}\n')
    status, line = _first_line(
        [
            str(replay_config),
            f"run_dir={tmp_path / 'run'}",
            "replay.dumps=null",
            "rollout.engine=local",
            f"data.train.path={data}",
            "rollout.max_response_tokens=16",
            "data.max_prompt_tokens=64",
        ]
    )
    assert status != 0
    assert "train.jsonl" in line
    assert "answer" in line


def test_an_existing_run_is_not_overwritten(replay_config: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "metrics.jsonl").write_text('{"step": 0}\n')
    status, line = _first_line([str(replay_config), f"run_dir={run_dir}"])
    assert status == 1
    assert "already holds a run; continue it with resume=true" in line
    assert (run_dir / "metrics.jsonl").read_text() == '{"step": 0}\n'


@pytest.fixture(scope="module")
def nan_dumps(tmp_path_factory: pytest.TempPathFactory, random_model: Path) -> Path:
    """Two steps; in the second, one log-prob of sample 2 of group 5 is NaN at position 4."""
    directory = write_dumps(tmp_path_factory.mktemp("nan"), random_model, steps=2)
    path = directory / "step_000002.parquet"
    batch = read_batch(path)
    sample = batch.groups[1].samples[2]
    logprobs = np.array(sample.behaviour_logprobs)
    logprobs[4] = np.nan
    broken = replace(sample, behaviour_logprobs=logprobs)
    group = batch.groups[1]
    samples = (*group.samples[:2], broken, *group.samples[3:])
    groups = (batch.groups[0], replace(group, samples=samples), *batch.groups[2:])
    path.unlink()
    write_batch(path, replace(batch, groups=groups))
    return directory


@pytest.mark.distributed
@pytest.mark.parametrize("scope", ["update", "micro_batch"])
def test_nan_logprobs_are_reported_with_sample_and_position(
    replay_config: Path, nan_dumps: Path, tmp_path: Path, scope: str
) -> None:
    status, line = _first_line(
        [
            str(replay_config),
            f"run_dir={tmp_path / 'run'}",
            f"replay={nan_dumps}",
            "train.steps=2",
            f"algorithm.bapo.scope={scope}",
        ]
    )
    assert status == 1
    assert "step 2: sample 2 of group 5" in line
    assert "response token 4: behaviour log-prob is nan" in line


@pytest.mark.distributed
def test_every_rank_knows_the_place_of_a_nan(
    replay_config: Path, nan_dumps: Path, tmp_path: Path
) -> None:
    run_dir = f"run_dir={tmp_path / 'run'}"
    result = run(
        ["train", str(replay_config), run_dir, f"replay={nan_dumps}", "train.steps=2"], ranks=2
    )
    assert result.returncode != 0
    assert "Traceback" not in result.stderr
    # The first rank that ends may end the other before it has told.
    lines = re.findall(r"^(?:\[rank 1\] )?bapo-megatron: (.*)$", result.stderr, re.MULTILINE)
    assert len(set(lines)) == 1
    assert lines[0].startswith("step 2: sample 2 of group 5")


@pytest.mark.distributed
def test_updates_with_nan_are_skipped_if_asked(
    replay_config: Path, nan_dumps: Path, tmp_path: Path
) -> None:
    result = run(
        [
            "train",
            str(replay_config),
            f"run_dir={tmp_path / 'run'}",
            f"replay={nan_dumps}",
            "algorithm.on_nonfinite=skip_update",
            "train.steps=2",
            "checkpoint.at_end=false",
        ],
        ranks=2,
    )
    assert result.returncode == 0, result.stderr
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["train/skipped_updates"] for row in rows] == [0.0, 1.0]
    assert [row["train/nonfinite_tokens"] for row in rows] == [0.0, 1.0]
    assert rows[1]["train/packing_share"] > 0  # its micro-batches were computed


@pytest.mark.distributed
@pytest.mark.parametrize(("scope", "ranks"), [("update", 1), ("micro_batch", 1), ("update", 2)])
def test_advantages_beyond_the_exact_sums_are_refused(
    replay_config: Path, random_model: Path, tmp_path: Path, scope: str, ranks: int
) -> None:
    """Of two pipeline stages, the first one does not know why."""
    directory = write_dumps(tmp_path / "dumps", random_model, steps=1)
    path = directory / "step_000001.parquet"
    batch = read_batch(path)
    # Without a division by the group's deviation, advantages are ± 500.
    groups = tuple(
        replace(group, samples=tuple(replace(s, reward=1000 * s.reward) for s in group.samples))
        for group in batch.groups
    )
    path.unlink()
    write_batch(path, replace(batch, groups=groups))
    status, line = _first_line(
        [
            str(replay_config),
            f"run_dir={tmp_path / 'run'}",
            f"replay={directory}",
            "train.steps=1",
            "algorithm.advantage=grpo_no_std",
            f"algorithm.bapo.scope={scope}",
            f"parallel.pipeline={ranks}",
        ],
        ranks,
    )
    assert status == 1
    assert "step 1: " in line
    assert "tokens have |weight · advantage| >= 256" in line
    assert "scale the rewards down" in line
