"""Generation without a trainer, as a user starts it."""

from __future__ import annotations

import json
import signal
import statistics
import time
from typing import TYPE_CHECKING

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest
import yaml

from bapo_megatron.commands.generate import generate_batches
from bapo_megatron.config.load import load_config
from bapo_megatron.data.dump import encode_batch, read_batch, texts_path
from bapo_megatron.errors import RolloutError
from bapo_megatron.telemetry.sinks import read_metrics
from bapo_megatron.types import (
    EncodedBatch,
    FinishReason,
    Group,
    PromptTokens,
    RolloutBatch,
    Sample,
    VersionSpan,
)
from tests.fakes.fake_sglang import FakeSglang
from tests.launch import run, start
from tests.reward.forking import digest

if TYPE_CHECKING:
    from pathlib import Path

    from bapo_megatron.config.schema import RunConfig

SAMPLE = Sample(
    group_id=0,
    index=0,
    prompt=PromptTokens("train.jsonl:0", np.array([1, 2], np.int32)),
    response_token_ids=np.zeros(1, np.int32),
    behaviour_logprobs=np.zeros(1, np.float32),
    versions=(VersionSpan(0, 1),),
    finish_reason=FinishReason.STOP,
)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, random_model: Path) -> Path:
    """Four groups of three; its layout and packing would fit no trainer."""
    directory = tmp_path_factory.mktemp("generate")
    rows = [{"prompt": f"{a}+{b}=?", "answer": str(a + b)} for a in range(6) for b in range(6)]
    (directory / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = directory / "run.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "name": "generate",
                "run_dir": str(directory / "run"),
                "model": {"path": str(random_model), "dtype": "float32"},
                "parallel": {"tensor": 7},
                "data": {
                    "train": {"path": str(directory / "train.jsonl")},
                    "max_prompt_tokens": 32,
                },
                "rollout": {
                    "groups_per_step": 4,
                    "samples_per_group": 3,
                    "max_response_tokens": 40,
                    "oversample_groups": 2,
                    "server": {"max_total_tokens": 8192, "mem_fraction": 0.3},
                },
                "reward": {"workers": 1},
                "train": {"steps": 1, "max_tokens_per_micro_batch": 8},
            }
        )
    )
    return path


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["local", "sglang"])
def test_batches_are_dumped_and_counted(config: Path, tmp_path: Path, engine: str) -> None:
    run_dir = tmp_path / "run"
    arguments = ["generate", str(config), f"run_dir={run_dir}", f"rollout.engine={engine}"]
    with FakeSglang(stop_at=60, token_interval_s=0.005) as fake:
        if engine == "sglang":
            arguments.append(f"rollout.servers=['{fake.address}']")
        result = run([*arguments, "--steps", "2"])
    assert result.returncode == 0, result.stdout + result.stderr
    batches = [read_batch(run_dir / "rollouts" / f"step_{step:06d}.parquet") for step in (1, 2)]
    names = ["step_000001.parquet", "step_000002.parquet"]
    rollouts = run_dir / "rollouts"
    assert sorted(path.name for path in rollouts.iterdir()) == [*names, "texts"]
    assert sorted(path.name for path in (rollouts / "texts").iterdir()) == names
    samples = [sample for batch in batches for sample in batch.samples]
    assert {span.version for sample in samples for span in sample.versions} == {0}
    assert len({group.group_id for batch in batches for group in batch.groups}) == 8
    assert len(samples) == 24
    for step, (row, batch) in enumerate(
        zip(read_metrics(run_dir / "metrics.jsonl"), batches, strict=True), 1
    ):
        lengths = [len(sample.response_token_ids) for sample in batch.samples]
        assert row["step"] == step
        assert row["rollout/response_tokens_mean"] == pytest.approx(statistics.fmean(lengths))
        assert row["rollout/response_tokens_max"] == max(lengths)
        assert row["rollout/generated_tokens"] == batch.stats.generated_tokens
        assert row["time/rollout_s"] > 0
        assert f"{step}/2" in result.stdout

    again = run(arguments)
    assert again.returncode == 1
    assert f"{run_dir} already holds a run; change run_dir" in again.stderr


@pytest.mark.slow
def test_an_interrupt_leaves_complete_dumps_and_no_process(config: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    arguments = ["generate", str(config), f"run_dir={run_dir}", "rollout.engine=local"]
    process = start([*arguments, "--steps", "100000"])
    deadline_s = time.monotonic() + 240
    while not list((run_dir / "rollouts").glob("step_*.parquet")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline_s, "no batch was made"
        time.sleep(0.2)
    started = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "bapo-megatron: interrupted" in err
    assert not psutil.wait_procs(started, timeout=30)[1]
    rollouts = run_dir / "rollouts"
    assert {path.suffix for path in rollouts.rglob("*") if path.is_file()} == {".parquet"}
    files = list(rollouts.glob("*.parquet"))
    assert all(texts_path(path).exists() for path in files)
    for path in files:
        assert len(read_batch(path).groups) == 4


class FailingSource:
    """Stands for the collector's client: its servers restart once, then they are gone for good."""

    def __init__(self, config: RunConfig) -> None:
        self.steps = config.train.steps
        self.replayed_batches = config.replay.batches
        self.calls: list[str] = []

    def launch(self) -> None:
        self.calls.append("launch")

    def ensure_weights(self) -> None:
        self.calls.append("ensure_weights")

    def sync_weights(self, model_dir: Path, version: int) -> None:
        self.calls.append(f"sync_weights {model_dir.name} {version}")

    def collect(self, step: int) -> EncodedBatch | None:
        self.calls.append(f"collect {step}")
        if step == 1:
            batch = RolloutBatch(step, 0, (Group(0, (SAMPLE,)),))
            return EncodedBatch("made", bytearray(encode_batch(batch)))
        if self.calls[-2] == "collect 1":
            return None
        raise RolloutError("no server is left")

    def close(self) -> None:
        self.calls.append("close")


def test_weights_are_loaded_before_the_first_batch_and_into_servers_that_restarted(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = []

    def open_source(config: RunConfig, on_progress: object) -> FailingSource:
        sources.append(FailingSource(config))
        return sources[-1]

    monkeypatch.setattr("bapo_megatron.commands.generate.CollectorClient", open_source)
    run_config = load_config(config, [f"run_dir={tmp_path / 'run'}", "replay.batches=4"])
    with pytest.raises(RolloutError, match="no server is left"):
        generate_batches(run_config, steps=3)
    (source,) = sources
    assert source.calls == [
        "launch",
        "ensure_weights",
        "collect 1",
        "collect 2",
        f"sync_weights {run_config.model.path.name} 0",
        "collect 2",
        "close",
    ]
    assert source.steps == 3  # and not those of a training: nothing is generated beyond them
    assert source.replayed_batches == 0  # a group would be in several dumps
    assert [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [1]


@pytest.mark.slow
def test_rewards_in_a_dump_are_those_of_their_texts_where_the_function_forks(
    config: Path, tmp_path: Path
) -> None:
    overrides = {
        "run_dir": tmp_path / "run",
        "rollout.engine": "local",
        "rollout.oversample_groups": 0,
        "rollout.samples_per_group": 12,
        "reward.workers": 2,
        "reward.functions": "[{name: text, function: 'tests.reward.forking:of_a_text'}]",
    }
    arguments = [f"{key}={value}" for key, value in overrides.items()]
    result = run(["generate", str(config), *arguments])
    assert result.returncode == 0, result.stderr
    assert "a process that it forked came back from the call" in result.stderr
    dump = tmp_path / "run" / "rollouts" / "step_000001.parquet"
    rewards = {
        (row["group_id"], row["index"]): row["reward"] for row in pq.read_table(dump).to_pylist()
    }
    texts = pq.read_table(texts_path(dump)).to_pylist()
    assert len(texts) == 48
    assert rewards == {
        (row["group_id"], row["index"]): pytest.approx(digest(row["response_text"]))
        for row in texts
    }
