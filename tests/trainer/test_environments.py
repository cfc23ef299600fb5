"""A run with an environment of the user, from a file outside the package, as a user starts it."""

from pathlib import Path

import pytest
from pyarrow.parquet import read_table

from bapo_megatron.config.data import DataConfig
from bapo_megatron.data.chat import ChatRenderer, load_tokenizer
from bapo_megatron.data.dump import read_batch, texts_path
from bapo_megatron.evaluation.samples import iterate_samples
from bapo_megatron.types import FinishReason
from tests.launch import run
from tests.trainer.chaos import steps
from tests.trainer.runs import run_of_short_turns, train

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

LONGEST, LONGEST_EVALUATED = 64, 32
MODULE = r'''
import re

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


def even(turns, state, sample):
    """Whether the last turn and what the state holds are even together."""
    assert sample.num_turns == 1 + len(turns) // 2
    seen = state["digit"] + sum(state["heard"])
    return {"reward": float((len(turns[-1]) + seen) % 2 == 0), "turns": sample.num_turns}


def best(rewards, states):
    """A bonus for the best of a group."""
    return [0.25 * (reward == max(rewards)) for reward in rewards]
'''


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Path:
    directory = tmp_path_factory.mktemp("environments")
    (directory / "own_world.py").write_text(MODULE)
    return run_of_short_turns(
        directory,
        model_dir,
        {
            "environment": "own_world:Again",
            "episodes": {"workers": 2, "max_turns": 2},
            "max_response_tokens": LONGEST,
            "temperature": 0.8,
            "local": {"decode_steps_ahead": 4},
        },
        {"name": "even", "function": "own_world:even"},
        {"name": "best", "function": "own_world:best"},
        seed=7,
        algorithm={"updates_per_batch": 1},  # log-probs are compared before the first update
        eval={"max_prompts": 6, "max_response_tokens": LONGEST_EVALUATED},
    )


@pytest.fixture(scope="module")
def search_path(config: Path) -> dict[str, str]:
    return {"PYTHONPATH": str(config.parent)}


@pytest.fixture(scope="module")
def finished(
    config: Path, search_path: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    train(config, run_dir, "reward.truncated=mask", environment=search_path)
    return run_dir


def test_a_run_keeps_turns_apart_and_trains_on_what_the_policy_wrote(
    finished: Path, config: Path
) -> None:
    renderer = ChatRenderer(load_tokenizer(config.parent / "model"), DataConfig())
    dumps, rows = sorted((finished / "rollouts").glob("step_*.parquet")), steps(finished)
    batches = [read_batch(path) for path in dumps]
    samples = [sample for batch in batches for sample in batch.samples]
    assert any(sample.written for sample in samples)
    for sample in samples:
        first, *others = sample.segments()
        if others:
            question = [{"role": "user", "content": f"{len(first)}+1=?"}]
            assert others[0].tolist() == list(renderer.continuation(question))
            assert sample.written == ((len(first), len(others[0])),)
        assert len(sample.response_token_ids) <= LONGEST
        assert len(sample.behaviour_logprobs) == sample.num_sampled
        assert sample.num_turns == 2 or sample.finish_reason is FinishReason.LENGTH
    texts = read_table(texts_path(dumps[0])).to_pylist()
    for sample, text in zip(batches[0].samples, texts, strict=True):
        decoded = [renderer.decode(ids.tolist(), skips_special=True) for ids in sample.segments()]
        assert text["response_text"] == decoded[-1]
        assert text["turns"] == (decoded if len(decoded) > 1 else [])
    for batch, row in zip(batches, rows, strict=True):
        assert (row["rollout/turns_max"], row["rollout/environment_errors"]) == (2, 0)
        for group in batch.groups:
            even = [sample.reward_components["even"] for sample in group.samples]
            assert [sample.reward for sample in group.samples] == [
                reward + 0.25 * (reward == max(even)) for reward in even
            ]
        masked = [s for s in batch.samples if s.finish_reason is FinishReason.LENGTH]
        share = sum(s.num_sampled for s in masked) / sum(s.num_sampled for s in batch.samples)
        assert row["rollout/masked_token_share"] == pytest.approx(share)
    assert 0 < max(row["rollout/masked_token_share"] for row in rows) < 1
    # Tokens of the newest weights can be compared, also where older ones began the response.
    fresh = [row for row in rows if row["mismatch/tokens"] > 0]
    assert any(row["rollout/resumed_samples"] > 0 for row in fresh)
    assert any(row["rollout/age_max"] >= 1 for row in fresh)
    for row in fresh:
        assert 0 < row["mismatch/logprob_abs_max"] <= 1e-4


def test_an_evaluation_plays_whole_episodes_and_is_graded_again_to_the_same(
    config: Path, search_path: dict[str, str], finished: Path, tmp_path: Path
) -> None:
    path = finished / "eval" / "start_sums.jsonl"
    samples = list(iterate_samples(path))
    assert len(samples) == 6 * 2
    assert {len(sample.turns) for sample in samples} == {0, 3}
    for sample in samples:
        assert (sample.num_environment_tokens > 0) == (len(sample.turns) == 3)
        assert sample.num_tokens + sample.num_environment_tokens <= LONGEST_EVALUATED
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
        environment=search_path,
    )
    assert result.returncode == 0, result.stderr
    assert "regraded 12 samples, 0 rewards changed" in result.stderr
    by_key = {sample.key: sample for sample in iterate_samples(again / path.name)}
    assert by_key == {sample.key: sample for sample in samples}
