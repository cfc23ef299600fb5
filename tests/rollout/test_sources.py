"""Replay reads the dumps of a run in order; every call of the collector is answered."""

from dataclasses import replace
from pathlib import Path

import pytest

from bapo_megatron.config.rollout import RolloutConfig
from bapo_megatron.data.dump import decode_batch, write_batch
from bapo_megatron.errors import RolloutError
from bapo_megatron.rollout import messages
from bapo_megatron.rollout.client import ReplaySource
from bapo_megatron.rollout.collector import Collector, remove_dumps
from bapo_megatron.runtime.calls import Answers, Call
from bapo_megatron.weight_sync import receive
from bapo_megatron.weight_sync.receive import WeightReceiver
from tests.data.samples import make_batch
from tests.weight_sync.setting import StubPool


@pytest.fixture
def dumps(tmp_path: Path) -> Path:
    """Steps 1, 2 and 4."""
    for step in (1, 2, 4):
        write_batch(tmp_path / f"step_{step:06d}.parquet", replace(make_batch(), step=step))
    return tmp_path


def test_each_step_gets_its_own_dump_also_after_a_resume(dumps: Path) -> None:
    source = ReplaySource(dumps)
    path = dumps / "rollout.parquet"
    source.save(path)()
    assert not path.exists()
    source.restore(path)
    for step in (4, 1, 2):
        batch = decode_batch(source.collect(step))
        assert batch.step == step
        assert [group.group_id for group in batch.groups] == [0, 1, 2]


def test_old_dumps_and_their_texts_are_removed_and_nothing_else(dumps: Path) -> None:
    for folder in ("texts", "routes"):
        (dumps / folder).mkdir()
    others = ("step_000001.parquet.bak", "step_last.parquet", "notes.parquet", "texts/step_1.txt")
    texts = [f"texts/step_{step:06d}.parquet" for step in (0, 2, 3, 4)]
    for name in (*others, *texts, *(f"routes/step_{step:06d}.safetensors" for step in (2, 3))):
        (dumps / name).write_text("")
    remove_dumps(dumps, 2)
    left = {str(path.relative_to(dumps)) for path in dumps.rglob("*") if path.is_file()}
    assert left == {
        *others,
        "step_000004.parquet",
        "texts/step_000003.parquet",
        "texts/step_000004.parquet",
        "routes/step_000003.safetensors",
    }


def test_a_missing_step_is_named_with_what_is_there(dumps: Path) -> None:
    message = r"step_000003\.parquet: .*from step_000001\.parquet to step_000004\.parquet"
    with pytest.raises(RolloutError, match=message):
        ReplaySource(dumps).collect(3)


def test_the_collector_answers_all_of_its_calls_and_those_of_a_push() -> None:
    answers = Answers()
    WeightReceiver(StubPool([]), RolloutConfig(), None).bind_to(answers)
    for module, bound in ((messages, Collector(print).answers), (receive, answers)):
        calls = [value for value in vars(module).values() if isinstance(value, Call)]
        assert len(calls) >= 6
        # An interrupt is taken while another call is answered, and has no answer.
        answered = {call.name for call in calls} - {messages.INTERRUPT.name}
        assert answered == bound._bound.keys()
