"""Generation without a trainer, as a user starts it."""

from __future__ import annotations

import dataclasses
import json
import signal
import statistics
import time
from typing import TYPE_CHECKING

import numpy as np
import psutil
import pytest
import yaml

from bapo_megatron.commands.generate import generate_batches, summarise, totals_of
from bapo_megatron.config.load import load_config
from bapo_megatron.data.dump import encode_batch, read_batch, texts_path
from bapo_megatron.errors import RolloutError
from bapo_megatron.types import (
    EncodedBatch,
    FinishReason,
    Group,
    PromptTokens,
    RolloutBatch,
    RolloutStats,
    Sample,
    VersionSpan,
)
from tests.fakes.fake_sglang import FakeSglang
from tests.launch import run, start

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from bapo_megatron.config.schema import RunConfig

PROMPT = PromptTokens("train.jsonl:0", np.array([1, 2], np.int32))


def make_group(group_id: int, lengths: Sequence[int], rewards: Sequence[float]) -> Group:
    """A group whose samples of 10 tokens are truncated."""
    samples = [
        Sample(
            group_id=group_id,
            index=index,
            prompt=PROMPT,
            response_token_ids=np.zeros(length, np.int32),
            behaviour_logprobs=np.zeros(length, np.float32),
            versions=(VersionSpan(0, length),),
            finish_reason=FinishReason.LENGTH if length == 10 else FinishReason.STOP,
            reward=reward,
            answer_found=length != 10,
        )
        for index, (length, reward) in enumerate(zip(lengths, rewards, strict=True))
    ]
    return Group(group_id, tuple(samples))


def test_the_summary_weighs_samples_not_batches() -> None:
    first = RolloutBatch(0, 0, (make_group(0, [10, 2], [0, 1]), make_group(1, [4, 4], [1, 1])))
    second = RolloutBatch(1, 0, (make_group(2, [10, 6], [0, 0]),))
    stats = [
        RolloutStats(
            generated_tokens=30,
            generation_s=2.0,
            resumed_samples=1,
            unfinished_samples=3,
            dropped_groups={"stale": 1, "carried": 2},
            lost_requests=2,
        ),
        RolloutStats(
            generated_tokens=20, generation_s=3.0, unfinished_samples=1, reward_timeouts=1
        ),
    ]
    batches = [
        dataclasses.replace(first, stats=stats[0]),
        dataclasses.replace(second, stats=stats[1]),
    ]
    assert summarise([totals_of(batch) for batch in batches], wall_s=7.0) == {
        "steps": 2,
        "groups": 3,
        "samples": 6,
        "response_tokens_mean": 6.0,
        "response_tokens_max": 10,
        "truncated_share": pytest.approx(1 / 3),
        "answer_found_share": pytest.approx(2 / 3),
        "reward_mean": 0.5,
        "solved_groups_share": pytest.approx(1 / 3),
        "mixed_groups_share": pytest.approx(1 / 3),
        "generated_tokens": 50,
        "generation_s": 5.0,
        "generated_tokens_per_s": 10.0,
        "wall_s": 7.0,
        "resumed_samples": 1,
        "unfinished_samples": 1,
        "dropped_groups": 3,
        "lost_requests": 2,
        "reward_timeouts": 1,
    }


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
                    "timeline": True,
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
def test_batches_are_dumped_counted_and_drawn_as_a_timeline(
    config: Path, tmp_path: Path, engine: str
) -> None:
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
    found = json.loads((run_dir / "generate.json").read_text())
    assert (found["steps"], found["groups"], found["samples"]) == (2, 8, 24)
    lengths = [len(sample.response_token_ids) for sample in samples]
    assert found["response_tokens_mean"] == pytest.approx(statistics.fmean(lengths))
    assert found["response_tokens_max"] == max(lengths)
    assert found["generated_tokens"] == sum(b.stats.generated_tokens for b in batches)
    assert 0 < found["generation_s"] <= found["wall_s"]
    assert "groups (samples)" in result.stdout
    assert "8 (24)" in result.stdout

    events = json.loads((run_dir / "timeline" / "step_000001.json").read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    decoded = {e["args"]["label"] for e in slices if e["name"].startswith("decode")}
    assert len(decoded) >= 12  # every sample of the batch, by its label
    tokens = sum(e["args"].get("tokens", 0) for e in slices if e["name"].startswith("decode"))
    assert tokens <= batches[0].stats.generated_tokens

    again = run(arguments)
    assert again.returncode == 1
    assert f"{run_dir / 'rollouts'} already holds rollouts; change run_dir" in again.stderr


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
    assert not (run_dir / "generate.json").exists()


class FailingSource:
    """Stands for the collector's client: its servers restart once, then they are gone for good."""

    def __init__(self, config: RunConfig) -> None:
        self.steps = config.train.steps
        self.replayed_batches = config.replay.batches
        self.calls: list[str] = []

    def start(self) -> None:
        self.calls.append("start")

    def ensure_weights(self) -> None:
        self.calls.append("ensure_weights")

    def sync_weights(self, model_dir: Path, version: int) -> None:
        self.calls.append(f"sync_weights {model_dir.name} {version}")

    def collect(self, step: int) -> EncodedBatch | None:
        self.calls.append(f"collect {step}")
        if step == 1:
            batch = RolloutBatch(step, 0, (make_group(0, [1], [0]),))
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
        "start",
        "ensure_weights",
        "collect 1",
        "collect 2",
        f"sync_weights {run_config.model.path.name} 0",
        "collect 2",
        "close",
    ]
    assert source.steps == 3  # and not those of a training: nothing is generated beyond them
    assert source.replayed_batches == 0  # a group would be in several dumps
    assert not (tmp_path / "run" / "generate.json").exists()
