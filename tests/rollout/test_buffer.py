"""Unfinished samples keep every token and their experts, and survive a checkpoint bit for bit."""

import io
import json
import math
from collections import deque
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bapo_megatron.data.columns import DumpError
from bapo_megatron.data.record import Call, Completion
from bapo_megatron.data.staleness import response_age
from bapo_megatron.rollout import saved as saved_module
from bapo_megatron.rollout.buffer import DropReason, Episode, PendingGroup, RolloutBuffer
from bapo_megatron.rollout.saved import SavedRollout, read_saved
from bapo_megatron.types import FinishReason, Prompt, VersionSpan
from tests.fakes.fake_pool import likeliest_of
from tests.rollout.calls import begin, give, so_far
from tests.rollout.saved_files import AT_START, file_of, read_file

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


def _routed(num_tokens: int, rows: range, version: int = 0, finish: str = "abort") -> Completion:
    """Tokens with the experts of further rows of their sequence, each with its number."""
    routes = np.array([[row, 7] for row in rows], np.int16)
    return replace(_completion(0, num_tokens, version, finish), routes=routes)


def _branch(episode: Episode) -> None:
    """Two branches of one turn, whose rows of experts begin with 20 and 40."""
    first = begin(episode)
    first.append(_routed(3, range(5), 1, "stop"))
    for version in (1, 2):
        call = Call(f"call {version}", first, np.array([7, 8], np.int32), max_tokens=8)
        assert call.routed == 5
        call.append(_routed(2, range(20 * version, 20 * version + 4), version, "stop"))
        episode.record.calls.append(call)
    episode.finish(FinishReason.STOP)


def _filled() -> RolloutBuffer:
    """Group 0 is done and scored, group 1 half done, group 2 has branches, which are scored.

    Group 0 has a teacher's column and routes: five rows of two experts.
    """
    buffer = RolloutBuffer()
    groups = [buffer.start_group(prompt, 2) for prompt in PROMPTS]
    routes = np.arange(120, 130, dtype=np.int16).reshape(5, 2)
    for episode in groups[0].episodes:
        give(episode, replace(_completion(0, 3, 1, "stop"), routes=routes))
        episode.texts = ("fine\n",)
        episode.extracted, episode.reason = "5 cm", "unit_differs"
        sample = episode.finished()
        sample.reward, sample.answer_found = 1.0, True
        sample.reward_components = {"math": 1.0, "overlong": -0.25}
        sample.columns = {"teacher_logprob": np.array([-1, -2, -3], np.float32)}
    give(groups[1].episodes[0], _completion(20, 2, 1), _completion(22, 3, 2))
    groups[1].episodes[0].rests_at = 5
    give(groups[1].episodes[1], _completion(30, 4, 2, "stop"))
    branched = groups[2].episodes[0]
    _branch(branched)
    branched.texts = ("fine",)
    for sequence in branched.finished().sequences:
        values = np.arange(sequence.num_sampled) + 10 * sequence.number
        sequence.columns = {"teacher_logprob": values.astype(np.float32)}
    return buffer


def test_a_sample_is_finished_at_its_very_last_token_and_its_end_may_come_twice() -> None:
    call = begin(PendingGroup.start(0, PROMPTS[0], 1).episodes[0], 8)
    call.append(_completion(0, 5, 0))
    call.append(_completion(5, 3, 0))
    assert call.finish_reason is FinishReason.LENGTH
    call.append(_completion(8, 0, 0, "length"))
    assert call.finish_reason is FinishReason.LENGTH
    assert len(call.turn.token_ids) == 8


def _file(buffer: RolloutBuffer) -> bytes:
    return file_of(SavedRollout(AT_START, buffer.snapshot()))


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return (value.dtype, value.tobytes()) if isinstance(value, np.ndarray) else value


@pytest.mark.parametrize("chunk_samples", [1, 128], ids=["many row groups", "one row group"])
def test_a_restored_buffer_is_the_saved_one_bit_for_bit(
    chunk_samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved_module, "_CHUNK_CALLS", chunk_samples)
    buffer = _filled()
    buffer.drop(buffer.start_group(PROMPTS[0], 2), DropReason.STALE)
    list(buffer)[1].carries = 3
    list(buffer)[1].episodes[0].state = {"board": [["x", None], [0.1, "ß"]]}
    restored = read_file(_file(buffer)).buffer
    assert len(restored) == 3
    assert pq.ParquetFile(io.BytesIO(_file(buffer))).num_row_groups == 8 // min(chunk_samples, 8)
    for saved_group, group in zip(buffer, restored, strict=True):
        assert (group.group_id, group.carries) == (saved_group.group_id, saved_group.carries)
        for saved, episode in zip(saved_group.episodes, group.episodes, strict=True):
            assert episode.is_finished == saved.is_finished
            assert _plain(so_far(episode)) == _plain(so_far(saved))
            for field in fields(Episode):
                if field.name not in ("sample", "record"):
                    assert getattr(episode, field.name) == getattr(saved, field.name)
    restored.take(list(restored)[:1])
    assert restored.start_group(PROMPTS[0], 2).group_id == 4
    assert restored.dropped == {"stale": 1}


@pytest.mark.parametrize("known", [None, 0, 1])
def test_likeliest_tokens_of_finished_and_unfinished_calls_are_restored(known: int | None) -> None:
    """``known``: the only part that has them; None: all have."""
    buffer = RolloutBuffer()
    done, begun = buffer.start_group(PROMPTS[0], 2).episodes
    for episode, end in ((done, "stop"), (begun, "abort")):
        parts = (_completion(8, 2, 1), _completion(6, 3, 2, end))
        for n, part in enumerate(parts):
            columns = likeliest_of(part.token_ids, 2) if known in (None, n) else {}
            give(episode, replace(part, columns=columns))
    done.texts = ("fine",)
    done.finished().columns |= {"teacher_logprob": np.arange(5, dtype=np.float32)}
    [restored] = read_file(_file(buffer)).buffer
    assert [_plain(so_far(episode)) for episode in restored.episodes] == [
        _plain(so_far(episode)) for episode in (done, begun)
    ]
    ids_RK = likeliest_of(np.array([8, 9, 6, 7, 8]), 2)["sampler_top_ids"]
    ids_RK[{None: [], 0: [2, 3, 4], 1: [0, 1]}[known]] = -1
    for episode in (*restored.episodes, done):
        columns = so_far(episode).columns
        np.testing.assert_array_equal(columns["sampler_top_ids"], ids_RK)
        assert np.isnan(columns["sampler_top_logprobs"]).tolist() == (ids_RK < 0).tolist()


def test_routes_of_later_requests_follow_those_of_earlier_ones() -> None:
    episode = Episode(0, 0, PROMPTS[0])
    record, first = episode.record, begin(episode)
    first.append(_completion(0, 2, 0))
    first.append(_routed(1, range(5)))  # three of the prompt, two of three tokens
    assert first.routed == 5
    first.append(_routed(2, range(5, 7), finish="stop"))
    record.write([5, 6])
    second = record.calls[-1]
    second.max_tokens = 50
    assert second.routed == 7
    # The last sampled one, and those written.
    second.append(_routed(1, range(7, 10), finish="stop"))
    assert second.routed == 10
    episode.finish(FinishReason.STOP)
    assert episode.finished().routes[:, 0].tolist() == list(range(10))


def test_branches_of_an_agent_have_the_routes_of_what_they_share() -> None:
    episode = Episode(0, 0, PROMPTS[0])
    _branch(episode)
    one, other = episode.finished().sequences
    assert one.response_token_ids.tolist() == [0, 1, 2, 7, 8, 0, 1]
    assert other.prompt.token_ids.tolist() == [10, 11, 12, 0, 1, 2, 7, 8]
    assert (other.response_token_ids.tolist(), other.number) == ([0, 1], 1)
    for sequence, start in ((one, 20), (other, 40)):
        assert sequence.routes[:, 0].tolist() == [*range(5), *range(start, start + 4)]
        assert len(sequence.routes) == sequence.sequence_tokens - 1


def test_the_length_limit_and_the_age_count_all_sequences() -> None:
    episode = PendingGroup.start(0, PROMPTS[0], 1).episodes[0]
    begin(episode).append(_completion(0, 5, 1, "stop"))
    episode.record.write([9])
    episode.record.calls[-1].append(_completion(5, 2, 4))
    other = Call("other", None, np.array([1], np.int32), max_tokens=9)
    other.append(_completion(0, 3, 4))
    episode.record.calls.append(other)
    assert episode.num_tokens == 5 + 1 + 2 + 3
    assert response_age(episode.record.versions, 5, "oldest") == 4


def test_a_restored_episode_has_its_prompt_though_its_first_turn_was_empty() -> None:
    buffer = RolloutBuffer()
    episode = buffer.start_group(PROMPTS[0], 1).episodes[0]
    begin(episode).append(_completion(0, 0, 1, "stop"))
    episode.record.write([7])
    episode.record.calls[-1].append(_completion(3, 2, 1, "stop"))
    episode.finish(FinishReason.STOP)
    [restored] = next(iter(read_file(_file(buffer)).buffer)).episodes
    for sample in (episode.finished(), restored.finished()):
        assert sample.prompt.token_ids.tolist() == [10, 11, 12]
        assert sample.response_token_ids.tolist() == [7, 3, 4]


def test_groups_of_the_latest_batches_are_kept_for_replay_over_a_restart() -> None:
    buffer = RolloutBuffer(deque(maxlen=2))
    for prompt in PROMPTS:
        group = buffer.start_group(prompt, 1)
        give(group.episodes[0], _completion(5, 2, group.group_id, "stop"))
        group.episodes[0].texts = ("fine",)
        buffer.take([group])
    content = _file(buffer)
    assert b"routed_tokens" not in content
    restored = read_file(content).buffer
    assert [[group.group_id for group in batch] for batch in restored.earlier] == [[1], [2]]
    sample = restored.earlier[1][0].episodes[0].finished()
    assert sample.routes is None
    assert sample.response_token_ids.tolist() == [5, 6]
    assert sample.versions == ((2, 2),)


def test_what_comes_after_a_snapshot_is_not_in_it() -> None:
    buffer = _filled()
    first, second, third = buffer
    second.episodes[0].state = {"seed": 1}
    before = _file(buffer)
    saved = SavedRollout(AT_START, buffer.snapshot())
    second.episodes[0].state["seed"] = 2
    give(second.episodes[0], _completion(25, 1, 3))
    second.episodes[1].texts, second.carries = ("fine",), 4
    give(third.episodes[1], _completion(40, 1, 3))
    third.episodes[0].finished().branches[0].columns = {}
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
    monkeypatch.setattr(saved_module, "_FILE", replace(saved_module._FILE, format=11))
    with pytest.raises(DumpError, match="rollout buffer format 10, this version reads format 11"):
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
        ({"episode": "[]"}, "sample 0 of group 0: episode: must be a dictionary"),
        ({"parent": 3}, "sample 0 of group 0: call: must come in order and after its parent"),
        ({"version_tokens": [2]}, "sample 0 of group 0: call: must have a log-prob and a version"),
        ({"turn_end": "over"}, "sample 0 of group 0: call: 'over' is not a valid"),
        ({"teacher_logprob": [0.0]}, "sample 0 of group 0: .*teacher_logprob"),
        ({"routed_tokens": 7}, "sample 0 of group 0: call: routes: 10 experts for 7 tokens"),
        ({"prompt": "{"}, "sample 0 of group 0: prompt: not valid JSON"),
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
