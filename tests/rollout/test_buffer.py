"""Unfinished samples keep every token, and survive a checkpoint bit for bit."""

from __future__ import annotations

import io
import json
import math
from collections import deque
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bapo_megatron.data.columns import DumpError
from bapo_megatron.data.staleness import response_age
from bapo_megatron.engine.base import Completion
from bapo_megatron.rollout import saved as saved_module
from bapo_megatron.rollout.buffer import DropReason, PendingGroup, PendingSample, RolloutBuffer
from bapo_megatron.rollout.saved import SavedRollout, read_saved
from bapo_megatron.types import FinishReason, Prompt, Sample, VersionSpan
from tests.data.samples import add_branch
from tests.rollout.saved_files import AT_START, file_of, read_file

if TYPE_CHECKING:
    from pathlib import Path

PROMPTS = [
    Prompt(f"train.jsonl:{n}", (10 + n, 11, 12), f"{n}", f"prompt {n} ×", "train", {"level": [n]})
    for n in range(3)
]


def _completion(first: int, length: int, version: int, finish: str = "abort") -> Completion:
    token_ids = np.arange(first, first + length, dtype=np.int32)
    # Neither representable exactly in decimal nor equal in float32 and float64.
    logprobs = (-(token_ids + 1) / 7).astype(np.float32)
    versions = (VersionSpan(version, length),) if length else ()
    return Completion(token_ids, logprobs, versions, FinishReason(finish))


def _filled() -> RolloutBuffer:
    """Group 0 is done and scored, group 1 half done, group 2 untouched."""
    buffer = RolloutBuffer()
    groups = [buffer.start_group(prompt, 2) for prompt in PROMPTS]
    for pending in groups[0].samples:
        pending.append(_completion(0, 3, 1, "stop"), 8)
        pending.finish(FinishReason.STOP)
        pending.texts = ("fine\n",)
        pending.extracted, pending.reason = "5 cm", "unit_differs"
        pending.sample.reward = 1.0
        pending.sample.reward_components = {"math": 1.0, "overlong": -0.25}
        pending.sample.answer_found = True
    groups[1].samples[0].append(_completion(20, 2, 1), 8)
    groups[1].samples[0].append(_completion(22, 3, 2), 8)
    groups[1].samples[0].rests_at = 5
    groups[1].samples[1].append(_completion(30, 4, 2, "stop"), 8)
    groups[1].samples[1].finish(FinishReason.STOP)
    return buffer


def test_a_continued_sample_sends_prompt_and_prefix_and_keeps_everything_in_order() -> None:
    pending = list(_filled())[1].samples[0]
    assert pending.input_ids() == [11, 11, 12, 20, 21, 22, 23, 24]
    assert pending.sample.versions == ((1, 2), (2, 3))
    expected = [np.float32(-21 / 7), -22 / 7, -23 / 7, -24 / 7, -25 / 7]
    np.testing.assert_allclose(pending.sample.behaviour_logprobs, expected, rtol=1e-7)
    assert not pending.is_finished


def test_a_sample_is_finished_at_its_very_last_token_and_its_end_may_come_twice() -> None:
    pending = PendingGroup.start(0, PROMPTS[0], 1).samples[0]
    pending.append(_completion(0, 5, 0), 8)
    pending.append(_completion(5, 3, 0), 8)
    assert pending.sample.finish_reason is FinishReason.LENGTH
    pending.append(_completion(8, 0, 0, "length"), 8)
    assert pending.sample.finish_reason is FinishReason.LENGTH
    assert len(pending.sample.response_token_ids) == 8


def _file(buffer: RolloutBuffer) -> bytes:
    return file_of(SavedRollout(AT_START, buffer.snapshot()))


@pytest.mark.parametrize("chunk_samples", [1, 128], ids=["many row groups", "one row group"])
def test_a_restored_buffer_is_the_saved_one_bit_for_bit(
    chunk_samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved_module, "_CHUNK_SAMPLES", chunk_samples)
    buffer = _filled()
    buffer.drop(buffer.start_group(PROMPTS[0], 2), DropReason.STALE)
    list(buffer)[1].carries = 3
    list(buffer)[1].samples[0].state = {"board": [["x", None], [0.1, "ß"]]}
    list(buffer)[1].samples[0].has_begun = True
    restored = read_file(_file(buffer)).buffer
    assert len(restored) == 3
    assert pq.ParquetFile(io.BytesIO(_file(buffer))).num_row_groups == 6 // min(chunk_samples, 6)
    for saved_group, group in zip(buffer, restored, strict=True):
        assert (group.group_id, group.carries) == (saved_group.group_id, saved_group.carries)
        for saved, pending in zip(saved_group.samples, group.samples, strict=True):
            saved.settle()
            for field in fields(Sample):
                mine, other = (getattr(p.sample, field.name) for p in (pending, saved))
                if isinstance(mine, np.ndarray):
                    assert (mine.dtype, mine.tobytes()) == (other.dtype, other.tobytes())
                elif field.name != "prompt":
                    assert mine == other
            for field in fields(PendingSample):
                if field.name != "sample":
                    assert getattr(pending, field.name) == getattr(saved, field.name)
    restored.take(list(restored)[:1])
    assert restored.start_group(PROMPTS[0], 2).group_id == 4
    assert restored.dropped == {"stale": 1}


def test_a_restored_buffer_has_the_branches_of_its_episodes() -> None:
    buffer = _filled()
    first, _ = next(iter(buffer)).samples
    routes = np.arange(12, dtype=np.int8).reshape(4, 3)
    branches = [add_branch(first.sample, (2, 1, 1), shared_tokens=2), add_branch(first.sample, ())]
    branches[0].columns = {"teacher_logprob": np.array([-1, -2, -3], np.float32)}
    branches[0].routes = routes
    assert first.num_tokens == 3 + 4
    list(buffer)[1].samples[0].settle()

    saved = buffer.snapshot()
    branches[0].columns = {}  # after the snapshot
    restored = next(iter(read_file(_file(saved)).buffer)).samples

    assert [len(pending.sample.branches) for pending in restored] == [2, 0]
    kept, empty = restored[0].sample.branches
    assert kept.prompt.token_ids.tolist() == [10, 11, 12, 0, 1]
    assert kept.response_token_ids.tolist() == branches[0].response_token_ids.tolist()
    assert kept.written == ((2, 1),)
    assert kept.versions == branches[0].versions
    assert kept.columns["teacher_logprob"].tolist() == [-1, -2, -3]
    assert kept.routes is not None
    assert kept.routes.tolist() == routes.tolist()
    assert (empty.number, len(empty.response_token_ids), empty.routes) == (2, 0, None)
    assert restored[0].texts == ("fine\n",)
    assert file_of(SavedRollout(AT_START, saved)) == _file(read_file(_file(saved)).buffer)


def test_the_length_limit_and_the_age_count_all_sequences() -> None:
    pending = PendingGroup.start(0, PROMPTS[0], 1).samples[0]
    pending.sample.branches = (replace(pending.sample, number=1),)
    branch = pending.sample.branches[0]
    branch.response_token_ids = np.arange(5, dtype=np.int32)
    branch.versions = (VersionSpan(1, 5),)
    pending.append(_completion(0, 2, 4), 8)
    assert not pending.is_finished
    pending.append(_completion(2, 1, 4), 8)
    assert pending.sample.finish_reason is FinishReason.LENGTH
    assert response_age(pending.sample.episode_versions, 5, "oldest") == 4


def test_taken_groups_are_gone_and_their_ids_are_not_used_again() -> None:
    buffer = _filled()
    buffer.take(list(buffer)[:1])
    assert [group.group_id for group in buffer] == [1, 2]
    for group in buffer:
        buffer.drop(group, DropReason.SURPLUS)
    assert len(buffer) == 0
    assert buffer.start_group(PROMPTS[0], 2).group_id == 3
    assert buffer.next_group_id == buffer.num_accounted


def test_groups_of_the_latest_batches_are_kept_for_replay_over_a_restart() -> None:
    buffer = RolloutBuffer(deque(maxlen=2))
    for prompt in PROMPTS:
        group = buffer.start_group(prompt, 1)
        group.samples[0].append(_completion(5, 2, group.group_id, "stop"), 8)
        group.samples[0].finish(FinishReason.STOP)
        group.samples[0].texts = ("fine",)
        buffer.take([group])
    restored = read_file(_file(buffer)).buffer
    assert [[group.group_id for group in batch] for batch in restored.earlier] == [[1], [2]]
    assert restored.earlier[1][0].samples[0].sample.response_token_ids.tolist() == [5, 6]
    assert restored.earlier[1][0].samples[0].sample.versions == ((2, 2),)


def test_what_comes_after_a_snapshot_is_not_in_it() -> None:
    buffer = _filled()
    first, second, third = buffer
    second.samples[0].state = {"seed": 1}
    before = _file(buffer)
    saved = SavedRollout(AT_START, buffer.snapshot())
    second.samples[0].state["seed"] = 2
    second.samples[0].append(_completion(25, 1, 3), 8)
    second.samples[1].texts, second.carries = ("fine",), 4
    third.samples[0].append(_completion(40, 1, 3), 8)
    buffer.take([first])
    buffer.drop(third, DropReason.STALE)
    buffer.start_group(PROMPTS[0], 2)
    assert file_of(saved) == before
    assert _file(buffer) != before


def test_a_damaged_file_and_one_of_another_format_are_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rollout.parquet"
    content = _file(_filled())
    path.write_bytes(content[:-20])
    with pytest.raises(
        DumpError, match=r"rollout\.parquet: not a readable parq.*; this checkpoint"
    ):
        read_saved(path)
    path.write_bytes(content)
    assert len(read_saved(path).buffer) == 3
    monkeypatch.setattr(saved_module, "_FILE", replace(saved_module._FILE, format=10))
    with pytest.raises(DumpError, match="rollout buffer format 9, this version reads format 10"):
        read_saved(path)


@pytest.mark.parametrize(
    ("damage", "place"),
    [
        ({"generation_s": math.nan}, "'generation_s' must "),
        ({"next_group_id": 10**30}, "'next_group_id' must "),
        ({"next_group_id": 4}, "next_group_id must .* 3, got 4"),
        ({"num_earlier": 10**9}, "'num_earlier' must "),
        ({"prompts": {"sets": [{}]}}, r"'prompts\.sets\[0\]\.name' is missing"),
        ({"counted": {"lost": 1}}, r"'counted\.lost' is an unknown field"),
        ({"other": 1}, "'other' is an unknown field"),
        ({"texts": "1"}, "sample 0 of group 0: texts: must be a list"),
        ({"prompt_row": "{"}, "sample 0 of group 0: prompt_row: not valid JSON"),
        ({"batch": 0}, "batch below num_earlier, 0"),
    ],
)
def test_what_no_run_writes_is_named_by_its_field(
    damage: dict[str, Any], place: str, tmp_path: Path
) -> None:
    path, key = tmp_path / "rollout.parquet", b"bapo_megatron.rollout"
    table = pq.read_table(io.BytesIO(_file(_filled())))
    about = json.loads(table.schema.metadata[key])
    for name, value in damage.items():
        if name in table.column_names:
            column, kind = table.column_names.index(name), table.schema.field(name).type
            values = pa.array([value, *table[name].to_pylist()[1:]], kind)
            table = table.set_column(column, pa.field(name, kind), values)
        else:
            about[name] = value
    pq.write_table(table.replace_schema_metadata({key: json.dumps(about)}), path)
    with pytest.raises(DumpError, match=f"rollout.parquet: .*{place}.*; this checkpoint cannot be"):
        read_saved(path)
