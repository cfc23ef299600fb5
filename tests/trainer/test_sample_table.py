"""The samples of a step that trackers show."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bapo_megatron.data.dump import texts_path, write_batch, write_texts
from bapo_megatron.trainer.sample_table import sample_rows
from bapo_megatron.types import Group, RolloutBatch, SampleText
from tests.data.samples import make_sample

if TYPE_CHECKING:
    from pathlib import Path


def write_step(directory: Path, step: int, rewards: list[list[float]]) -> Path:
    groups = []
    for group_id, own in enumerate(rewards):
        samples = [make_sample(2, 3, group_id, index) for index in range(len(own))]
        for sample, reward in zip(samples, own, strict=True):
            sample.reward, sample.prompt = reward, samples[0].prompt
        groups.append(Group(group_id, tuple(samples)))
    batch = RolloutBatch(step=step, version=9, groups=tuple(groups))
    texts = [
        SampleText(s.group_id, s.index, "1+1=", "2", f"answer {s.reward:g}") for s in batch.samples
    ]
    path = directory / f"step_{step:06d}.parquet"
    write_texts(path, step, texts)
    write_batch(path, batch)
    return path


def test_samples_lie_evenly_between_the_lowest_and_the_highest_reward(tmp_path: Path) -> None:
    rewards = [
        [0.0, 0.9, 0.1, 0.8],
        [0.7, 0.2, 0.6, 0.3],
        [0.5, 0.4, 1.0, 1.1],
        [1.2, 1.3, 1.4, 1.5],
    ]
    write_step(tmp_path, 20, rewards)
    rows = sample_rows(tmp_path, 20)
    assert [round(row.reward, 1) for row in rows] == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.5]
    assert [row.response for row in rows[:2]] == ["answer 0", "answer 0.2"]
    assert rows[1] == (20, 1, 1, 0.2, 3, "stop", "1+1=", "answer 0.2", "2")


def test_a_batch_with_fewer_samples_is_shown_whole(tmp_path: Path) -> None:
    write_step(tmp_path, 1, [[1.0, 0.0], [0.5, 0.25]])
    assert [row.reward for row in sample_rows(tmp_path, 1)] == [0.0, 0.25, 0.5, 1.0]
    write_step(tmp_path, 2, [[1.0]])
    assert [row.reward for row in sample_rows(tmp_path, 2)] == [1.0]


def test_turns_are_one_text_and_the_middle_of_a_long_one_is_left_out(tmp_path: Path) -> None:
    path = write_step(tmp_path, 1, [[0.0, 1.0]])
    long = "a" * 2000 + "b" * 9000 + "c" * 2000
    turns = ("42", "wrong", "2")
    write_texts(
        path, 1, [SampleText(0, 0, long, "2", "2", turns), SampleText(0, 1, "1+1=", "2", "2")]
    )
    first, second = sample_rows(tmp_path, 1)
    assert first.prompt == "a" * 2000 + "\n[…]\n" + "c" * 2000
    assert first.response == "42\n\nwrong\n\n2"
    assert second.response == "2"


def test_samples_without_a_text_are_left_out(tmp_path: Path) -> None:
    path = write_step(tmp_path, 1, [[0.0, 0.5, 1.0]])
    write_texts(path, 1, [SampleText(0, 2, "1+1=", "2", "2"), SampleText(0, 0, "1+1=", "2", "3")])
    assert [row.reward for row in sample_rows(tmp_path, 1)] == [0.0, 1.0]


def test_without_kept_texts_or_dump_there_is_no_table(tmp_path: Path) -> None:
    assert sample_rows(tmp_path, 1) == []
    path = write_step(tmp_path, 1, [[0.0, 1.0]])
    path.unlink()
    assert sample_rows(tmp_path, 1) == []
    path = write_step(tmp_path, 1, [[0.0, 1.0]])
    texts_path(path).unlink()
    assert sample_rows(tmp_path, 1) == []
