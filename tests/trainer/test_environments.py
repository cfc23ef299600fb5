"""Runs with an environment of the user, from a file outside the package, as a user starts them."""

import json
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from pyarrow.parquet import read_table

from bapo_megatron.config.data import DataConfig
from bapo_megatron.data.chat import ChatRenderer, load_tokenizer
from bapo_megatron.data.dump import read_batch, texts_path
from bapo_megatron.engine.base import sample_seed
from bapo_megatron.engine.sglang.server import SglangServer
from bapo_megatron.evaluation.samples import iterate_samples
from bapo_megatron.rollout.saved import read_saved
from bapo_megatron.types import FinishReason, RolloutBatch
from tests.engine.sglang.servers import lent
from tests.fakes.fake_sglang import FakeSglang
from tests.launch import run
from tests.trainer.chaos import steps
from tests.trainer.runs import assert_same_training, refusal, sampling_settings, train

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SEED, STEPS, LONGEST = 7, 3, 32
HANGING = ("6+6=?", "6+7=?")
"""Questions of the evaluation over which the environment ``Bad`` hangs."""
MODULE = r'''
import re
import time

from bapo_megatron.environment.base import Step


class Again:
    """Asks a second time, with the length of what it heard."""

    def start(self, task):
        return {"digit": int(re.search(r"\d", task.prompt).group()), "heard": []}

    def step(self, state, turn):
        state["heard"].append(len(turn.token_ids))
        if turn.number == 1:
            return Step(state, is_done=True)
        return Step(state, messages=[{"role": "user", "content": f"{state['heard'][0]}+1=?"}])


class Bad:
    """Hangs over two questions, and fails in every other way by its episode's seed.

    The others end after one turn.
    """

    def start(self, task):
        if any(question in task.prompt for question in HANGING):
            return "hangs"
        if task.seed % 8 == 0:
            raise RuntimeError("cannot begin")
        return task.seed % 8

    def step(self, state, turn):
        if state == "hangs":
            time.sleep(60)
        if state == 1:
            raise RuntimeError("cannot go on")
        if state == 2:
            return Step(state, token_ids=[5, 9999])
        if state == 3:
            return Step(state, token_ids=[5] * 10_000)
        if state == 4:
            return {"done": True}
        return Step(state, is_done=True)


class Raises(Bad):
    def start(self, task):
        return 1


def even(turns, state, sample):
    """Whether the last turn and what the state holds are even together."""
    assert sample.num_turns == 1 + len(turns) // 2
    seen = state["digit"] + sum(state["heard"]) if isinstance(state, dict) else 0
    return {"reward": float((len(turns[-1]) + seen) % 2 == 0), "turns": sample.num_turns}


def best(rewards, states):
    """A bonus for the best of a group."""
    return [0.25 * (reward == max(rewards)) for reward in rewards]
'''
REWARD = {
    "functions": [
        {"name": "even", "function": "own_world:even"},
        {"name": "best", "function": "own_world:best"},
    ],
    "workers": 1,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Path:
    """The random model; one token in sixteen ends a turn."""
    path = tmp_path_factory.mktemp("model") / "random"
    shutil.copytree(model_dir, path)
    config = path / "generation_config.json"
    changed = json.loads(config.read_text()) if config.exists() else {}
    config.write_text(json.dumps({**changed, "eos_token_id": [1, *range(9, 260, 16)]}))
    return path


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """Three steps of two updates, generated one step ahead, saved at every step."""
    directory = tmp_path_factory.mktemp("environments")
    (directory / "own").mkdir()
    (directory / "own" / "own_world.py").write_text(f"HANGING = {HANGING!r}\n{MODULE}")
    settings = sampling_settings(
        directory,
        model,
        seed=SEED,
        rollout={
            "engine": "local",
            "environment": "own_world:Again",
            "episodes": {"workers": 2, "max_turns": 2},
            "max_response_tokens": LONGEST,
            "temperature": 0.8,
            "async_steps": 1,
            "oversample_groups": 2,
            "local": {"decode_steps_ahead": 11},
        },
        algorithm={"updates_per_batch": 2},
        reward=REWARD,
        train={"steps": STEPS},
        checkpoint={"every_steps": 1, "keep_last": 9},
        eval={"max_prompts": 6, "max_response_tokens": LONGEST, "every_steps": 1},
        log={"tensorboard": False},
    )
    path = directory / "run.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def _search_path(config: Path) -> dict[str, str]:
    return {"PYTHONPATH": str(config.parent / "own")}


def _train(config: Path, run_dir: Path, *overrides: str) -> None:
    train(config, run_dir, *overrides, environment=_search_path(config))


def _on_servers(config: Path, **rollout: Any) -> Path:
    """The configuration on SGLang servers, with other fields of ``rollout``."""
    settings = yaml.safe_load(config.read_text())
    del settings["rollout"]["local"]
    settings["rollout"] |= {"engine": "sglang", **rollout}
    path = config.parent / "served.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def _batches(run_dir: Path) -> list[RolloutBatch]:
    return [read_batch(path) for path in sorted((run_dir / "rollouts").glob("step_*.parquet"))]


@pytest.fixture(scope="module")
def finished(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of an uninterrupted run."""
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    _train(config, run_dir)
    return run_dir


def _check_samples(
    batches: list[RolloutBatch], run_dir: Path, renderer: ChatRenderer, longest: int = LONGEST
) -> None:
    """What was written is what the environment says, and the texts are those of the tokens."""
    samples = [sample for batch in batches for sample in batch.samples]
    assert any(sample.written for sample in samples)
    for sample in samples:
        first, *others = sample.segments()
        if others:
            question = [{"role": "user", "content": f"{len(first)}+1=?"}]
            assert others[0].tolist() == list(renderer.continuation(question))
            assert sample.written == ((len(first), len(others[0])),)
        assert len(sample.response_token_ids) <= longest
        assert len(sample.behaviour_logprobs) == sample.num_sampled
        assert sample.num_turns == 2 or sample.finish_reason is FinishReason.LENGTH
    texts = read_table(texts_path(run_dir / "rollouts" / "step_000001.parquet")).to_pylist()
    for sample, text in zip(batches[0].samples, texts, strict=True):
        decoded = [renderer.decode(ids.tolist(), skips_special=True) for ids in sample.segments()]
        assert text["response_text"] == decoded[-1]
        assert text["turns"] == (decoded if len(decoded) > 1 else [])


@pytest.mark.exhaustive
def test_a_run_keeps_turns_apart_and_trains_on_what_the_policy_wrote(
    finished: Path, model: Path
) -> None:
    batches, rows = _batches(finished), steps(finished)
    _check_samples(batches, finished, ChatRenderer(load_tokenizer(model), DataConfig()))
    for batch, row in zip(batches, rows, strict=True):
        assert (row["rollout/turns_max"], row["rollout/environment_errors"]) == (2, 0)
        for group in batch.groups:
            even = [sample.reward_components["even"] for sample in group.samples]
            assert [sample.reward for sample in group.samples] == [
                reward + 0.25 * (reward == max(even)) for reward in even
            ]
    # By fresh weights, so that the trainer must find the log-probs of the engine in every turn.
    fresh = [row for row in rows if row["rollout/age_max"] == 0]
    assert fresh
    for row in fresh:
        assert 0 < row["mismatch/logprob_abs_max"] <= 1e-4


def test_an_evaluation_plays_whole_episodes_and_is_graded_again_to_the_same(
    config: Path, finished: Path, tmp_path: Path
) -> None:
    path = finished / "eval" / "start_sums.jsonl"
    samples = list(iterate_samples(path))
    assert len(samples) == 6 * 2
    assert {len(sample.turns) for sample in samples} == {0, 3}
    for sample in samples:
        assert (sample.num_environment_tokens > 0) == (len(sample.turns) == 3)
        assert sample.num_tokens + sample.num_environment_tokens <= LONGEST
        num_asked, num_turns = len(sample.state["heard"]), 1 + len(sample.turns) // 2
        if sample.finish_reason is FinishReason.STOP:
            assert num_asked == num_turns == 2
        else:  # in the middle of a turn, or without room for another one
            assert num_asked in (num_turns - 1, num_turns)
        if sample.turns:
            assert sample.turns[-1] == sample.response
    assert {sample.reward for sample in samples} == {0.0, 1.0}
    again = tmp_path / "again"
    result = run(
        ["eval", str(config), "--from", str(path), "--out", str(again)],
        environment=_search_path(config),
    )
    assert result.returncode == 0, result.stderr
    assert "regraded 12 samples, 0 rewards changed" in result.stderr
    by_key = {sample.key: sample for sample in iterate_samples(again / path.name)}
    assert by_key == {sample.key: sample for sample in samples}


def test_what_is_sampled_ahead_is_older(finished: Path) -> None:
    rows = steps(finished)
    # Each step has two updates: tokens are 0 or 1 updates old when the batch is trained, and older
    # where they were sampled before the last push.
    assert any(row["rollout/age_max"] >= 2 for row in rows)
    assert any(row["rollout/resumed_samples"] > 0 for row in rows)


def test_a_run_that_was_stopped_and_killed_equals_another_one_bit_for_bit(
    config: Path, finished: Path, tmp_path: Path
) -> None:
    # Checkpoints with an unfinished episode in its second turn.
    assert any(
        len(episode.record.calls) > 1
        for number in range(1, STEPS)
        for group in read_saved(
            finished / "checkpoints" / f"step_{number}" / "rollout.parquet"
        ).buffer
        for episode in group.episodes
        if not episode.is_finished
    )
    run_dir, children = tmp_path / "run", tmp_path / "children"
    advantage = "algorithm.advantage=tests.trainer.stub_runs:"
    _train(config, run_dir, f"{advantage}grpo_and_stop")
    assert (run_dir / "stopped").read_text() == "stopped by SIGTERM\n"
    assert steps(run_dir) == []  # it came before the evaluation of its step
    killed = run(
        ["train", str(config), f"run_dir={run_dir}", "--resume", f"{advantage}grpo_and_be_killed"],
        environment={**_search_path(config), "CHILDREN": str(children)},
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    pids = json.loads(children.read_text())
    assert pids
    alive = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    assert psutil.wait_procs(alive, timeout=30)[1] == []
    dumps = sorted((run_dir / "rollouts").glob("step_*.parquet"))
    # Whatever has its final name is whole.
    assert [len(read_batch(dump).groups) for dump in dumps] == [4, 4, 4]
    _train(config, run_dir, "resume=true")
    assert_same_training(run_dir, finished)


@pytest.fixture(scope="module")
def outlasted(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a run whose environment fails, which only ends its episodes."""
    run_dir = tmp_path_factory.mktemp("outlasted") / "run"
    _train(
        config,
        run_dir,
        "rollout.environment=own_world:Bad",
        "rollout.episodes.on_error=mask",
        "rollout.episodes.step_timeout_s=3",
        "eval.every_steps=0",
        "eval.at_end=false",
        "checkpoint.every_steps=0",
        "checkpoint.at_end=false",
    )
    return run_dir


def test_what_a_failing_environment_did_is_counted_and_the_run_goes_on(outlasted: Path) -> None:
    batches, rows = _batches(outlasted), steps(outlasted)
    assert len(batches) == len(rows) == STEPS
    samples = [sample for batch in batches for sample in batch.samples]
    fates = {
        0: FinishReason.ENVIRONMENT,
        1: FinishReason.ENVIRONMENT,
        2: FinishReason.ENVIRONMENT,
        3: FinishReason.LENGTH,
        4: FinishReason.ENVIRONMENT,
    }
    seen = set()
    for sample in samples:
        assert sample.written == ()
        fate = sample_seed(SEED, sample.group_id, sample.index) % 8
        if fate == 0 or len(sample.response_token_ids) < LONGEST:  # else the turn has not ended
            seen.add(fate)
            assert (fate == 0) == (len(sample.response_token_ids) == 0)
            assert sample.finish_reason is fates.get(fate, FinishReason.STOP)
            assert sample.reward == 0 or sample.finish_reason is not FinishReason.ENVIRONMENT
    assert seen >= {0, 1, 2, 3, 4}
    assert rows[0]["rollout/environment_errors"] > 0
    kinds = {name for row in rows for name in row if re.search(r"environment_errors_\w+", name)}
    assert kinds == {"rollout/environment_errors_error", "rollout/environment_errors_tokens"}
    assert any(row["train/updates"] for row in rows)
    for batch, row in zip(batches, rows, strict=True):
        masked = [s for s in batch.samples if s.finish_reason is FinishReason.ENVIRONMENT]
        share = sum(s.num_sampled for s in masked) / sum(s.num_sampled for s in batch.samples)
        assert row["rollout/masked_token_share"] == pytest.approx(share)


def test_an_environment_that_hangs_ends_its_episodes_only(outlasted: Path) -> None:
    samples = list(iterate_samples(outlasted / "eval" / "start_sums.jsonl"))
    assert len(samples) == 6 * 2
    hanging = [s for s in samples if any(question in s.prompt for question in HANGING)]
    assert len(hanging) == 2 * 2
    # Those whose turn has no end are not asked about.
    ended = {sample.finish_reason for sample in hanging}
    assert FinishReason.ENVIRONMENT in ended
    assert ended <= {FinishReason.ENVIRONMENT, FinishReason.LENGTH}
    assert FinishReason.STOP in {sample.finish_reason for sample in samples}
    for sample in samples:
        if sample.finish_reason is FinishReason.ENVIRONMENT:
            assert (sample.reward, sample.reason) == (0.0, "environment")


BAD = {
    "Raises": ("train", "own_world:Raises.step failed: RuntimeError: cannot go on (", "jsonl:"),
    "Nobody": ("eval", "own_world:Nobody"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_environment_is_one_line(config: Path, tmp_path: Path, name: str) -> None:
    command, *parts = BAD[name]
    with FakeSglang(stop_at=12) as fake:
        path = _on_servers(
            config,
            servers=[fake.address],
            environment=f"own_world:{name}",
            weight_sync={"method": "disk", "verify": "none"},
        )
        _, line = refusal(
            [command, str(path), f"run_dir={tmp_path / 'run'}", "eval.at_start=false"],
            environment=_search_path(config),
        )
    for part in ("rollout.environment", *parts):
        assert part in line
    assert name != "Nobody" or not list(tmp_path.glob("run/eval/*.jsonl"))


@pytest.mark.sglang
@pytest.mark.exhaustive
def test_a_server_continues_episodes_of_earlier_weights(
    config: Path, model: Path, server: SglangServer, model_dir: Path, tmp_path: Path
) -> None:
    """The trainer finds the server's log-probs, in each turn and after what was written."""
    run_dir = tmp_path / "run"
    path = _on_servers(
        config,
        servers=[server.address],
        async_steps=0,
        # The others begin as these end: some are unfinished when four groups are complete.
        oversample_groups=8,
        max_connections=12,
        max_response_tokens=120,
        stream_tokens=2,
    )
    overrides = ["train.steps=4", "checkpoint.every_steps=0", "checkpoint.at_end=false"]
    overrides += ["eval.at_start=false", "eval.at_end=false", "eval.every_steps=0"]
    with lent(server, model_dir) as keys:
        train(path, run_dir, *overrides, environment=_search_path(config) | keys)
    batches, rows = _batches(run_dir), steps(run_dir)
    _check_samples(batches, run_dir, ChatRenderer(load_tokenizer(model), DataConfig()), longest=120)
    samples = [sample for batch in batches for sample in batch.samples]
    assert sum(batch.stats.resumed_samples for batch in batches) > 0
    assert any(sample.written and len(sample.versions) > 1 for sample in samples)
    fresh = [row for row in rows if row.get("mismatch/tokens")]
    assert fresh
    # Of a step with a handful of them, all may agree to the last bit.
    assert 0 < max(row["mismatch/logprob_abs_max"] for row in fresh) <= 1e-4
