from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bapo_megatron.data.columns import DumpError
from bapo_megatron.data.dump import (
    decode_batch,
    encode_batch,
    read_batch,
    read_encoded,
    read_texts,
    write_batch,
    write_texts,
)
from bapo_megatron.types import (
    EncodedBatch,
    FinishReason,
    Group,
    PromptTokens,
    RolloutBatch,
    RolloutStats,
    SampleText,
    VersionSpan,
    WrittenSpan,
)
from tests.data.samples import make_batch, make_episode

ARRAYS = ("response_token_ids", "behaviour_logprobs")
KEY = b"bapo_megatron.rollout"


def decode(content: bytes) -> RolloutBatch:
    return decode_batch(EncodedBatch("rollout batch", bytearray(content)))


def assert_equal_arrays(mine, other):
    assert mine.dtype == other.dtype
    assert mine.tobytes() == other.tobytes()


def assert_equal_batches(given, wanted):
    assert (given.step, given.version, given.stats) == (wanted.step, wanted.version, wanted.stats)
    assert [group.group_id for group in given.groups] == [g.group_id for g in wanted.groups]
    for mine, other in zip(given.samples, wanted.samples, strict=True):
        assert (mine.prompt.prompt_id, mine.prompt.source) == (
            other.prompt.prompt_id,
            other.prompt.source,
        )
        assert_equal_arrays(mine.prompt.token_ids, other.prompt.token_ids)
        for field in dataclasses.fields(other):
            mine_value, other_value = getattr(mine, field.name), getattr(other, field.name)
            if field.name in ARRAYS:
                assert_equal_arrays(mine_value, other_value)
            elif field.name != "prompt":
                assert mine_value == other_value
                assert type(mine_value) is type(other_value)


def test_a_batch_comes_back_bit_for_bit(tmp_path):
    batch = make_batch(num_groups=3, group_size=4)
    sample = batch.samples[1]
    odd_floats = np.array([np.nan, -np.inf, -0.0, 1e-45], dtype=np.float32)
    sample.behaviour_logprobs = odd_floats
    sample.response_token_ids = np.array([0, 151935, 2**31 - 1, 7], dtype=np.int32)
    sample.versions = (VersionSpan(0, 2), VersionSpan(3, 2))
    sample.finish_reason = FinishReason.LENGTH
    path = tmp_path / "rollouts" / "step_5.parquet"

    write_batch(path, batch)

    assert_equal_batches(read_batch(path), batch)
    assert path.read_bytes() == encode_batch(batch) == read_encoded(path).content
    assert_equal_batches(decode(encode_batch(batch)), batch)
    assert [p.name for p in path.parent.iterdir()] == ["step_5.parquet"]


def make_episodes() -> RolloutBatch:
    """Two groups of two: 2 + 1 sampled tokens, three turns, one turn, and one that failed."""
    samples = [
        make_episode(3, (2, 3, 1)),
        make_episode(3, (1, 1, 2, 4, 3), index=1),
        make_episode(2, (5,), group_id=1),
        make_episode(2, (1, 2, 1), group_id=1, index=1),
    ]
    for sample, reason in zip(samples[1:], ("turns", "length", "environment"), strict=True):
        sample.finish_reason = FinishReason(reason)
    groups = Group(0, tuple(samples[:2])), Group(1, tuple(samples[2:]))
    for group in groups:
        group.samples[1].prompt = group.samples[0].prompt
    stats = RolloutStats(environment_errors={"timeout": 1, "tokens": 2})
    return RolloutBatch(step=5, version=9, groups=groups, stats=stats)


def test_episodes_come_back_bit_for_bit(tmp_path):
    batch = make_episodes()
    assert batch.samples[1].written == (WrittenSpan(1, 1), WrittenSpan(4, 4))

    write_batch(tmp_path / "step_5.parquet", batch)
    read = read_batch(tmp_path / "step_5.parquet")

    assert_equal_batches(read, batch)
    assert encode_batch(read) == encode_batch(batch)
    assert read.samples[1].loss_mask.tolist() == [
        *(True, False, True, True),
        *(False, False, False, False),
        *(True, True, True),
    ]
    rows = pq.read_table(tmp_path / "step_5.parquet").to_pylist()
    assert [row["written_starts"] for row in rows] == [[2], [1, 4], [], [1]]
    assert [row["written_tokens"] for row in rows] == [[3], [1, 4], [], [2]]
    assert [len(row["behaviour_logprobs"]) for row in rows] == [3, 6, 5, 2]


@pytest.mark.parametrize("stats", [RolloutStats(), RolloutStats(environment_errors={})])
def test_statistics_tell_a_run_without_an_environment_from_one_without_errors(stats):
    batch = dataclasses.replace(make_episodes(), stats=stats)

    assert decode(encode_batch(batch)).stats == stats


BETWEEN = "what the environment wrote must stand between turns of the policy, got"


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        ([(0, 3)], f"{BETWEEN} 3 tokens from 0;"),
        ([(-1, 3)], f"{BETWEEN} 3 tokens from -1;"),
        ([(2, 0)], f"{BETWEEN} 0 tokens from 2;"),
        ([(2, -1)], f"{BETWEEN} -1 tokens from 2;"),
        ([(1, 2), (3, 1)], f"{BETWEEN} 1 tokens from 3;"),
        ([(1, 2), (2, 1)], f"{BETWEEN} 1 tokens from 2;"),
        ([(3, 1), (1, 1)], f"{BETWEEN} 1 tokens from 1;"),
        ([(3, 3)], "must end with a turn of the policy, got 6 tokens of which .* up to 6;"),
        ([(3, 4)], "must end with a turn of the policy, got 6 tokens of which .* up to 7;"),
        ([(2, 2)], "4 sampled tokens, 3 behaviour log-probs and 3 tokens with a version must be"),
        ([], "6 sampled tokens, 3 behaviour log-probs and 3 tokens with a version must be"),
    ],
)
def test_written_spans_that_cannot_be_are_refused(written, problem):
    batch = make_episodes()
    batch.samples[0].written = tuple(WrittenSpan(*span) for span in written)

    with pytest.raises(DumpError, match=f"^batch of step 5: sample 0 of group 0: {problem}") as e:
        encode_batch(batch)
    assert str(e.value).endswith("; write the dump again")
    assert "\n" not in str(e.value)


def test_versions_of_written_tokens_are_refused():
    batch = make_episodes()
    batch.samples[0].versions = (VersionSpan(0, 6),)

    with pytest.raises(DumpError, match="3 sampled tokens, 3 behaviour log-probs and 6 tokens wi"):
        encode_batch(batch)


def test_a_damaged_span_is_found_when_a_dump_is_read():
    def shift(table):
        column = table.column_names.index("written_starts")
        starts = pa.array([[0], [1, 4], [], [1]], pa.list_(pa.int32()))
        return table.set_column(column, "written_starts", starts)

    with pytest.raises(DumpError, match=f"^rollout batch: sample 0 of group 0: {BETWEEN} 3 tok"):
        decode(rewritten(shift, make_episodes()))


def test_spans_without_their_numbers_of_tokens_are_refused():
    def cut(table):
        column = table.column_names.index("written_tokens")
        tokens = pa.array([[3], [1], [], [2]], pa.list_(pa.int32()))
        return table.set_column(column, "written_tokens", tokens)

    with pytest.raises(
        DumpError, match="sample 1 of group 0: 2 written spans but 1 numbers of their tokens"
    ):
        decode(rewritten(cut, make_episodes()))


def test_a_response_without_tokens_comes_back():
    batch = make_batch(num_groups=1)
    for sample in batch.samples:
        sample.response_token_ids = np.zeros(0, dtype=np.int32)
        sample.behaviour_logprobs = np.zeros(0, dtype=np.float32)
        sample.versions = ()

    assert_equal_batches(decode(encode_batch(batch)), batch)


def test_texts_are_beside_the_dump_and_joined_by_group_and_index(tmp_path):
    path = tmp_path / "rollouts" / "step_000005.parquet"
    texts = [
        SampleText(7, index, "What is 6 · 7?", "42", f"null \x00 and 𝛑 {index}") for index in (0, 1)
    ]

    write_texts(path, 5, texts)

    beside = tmp_path / "rollouts" / "texts" / "step_000005.parquet"
    assert list(path.parent.rglob("*.parquet")) == [beside]
    table = pq.read_table(beside)
    assert table.to_pylist()[1] == {
        "group_id": 7,
        "index": 1,
        "prompt_text": "What is 6 · 7?",
        "answer": "42",
        "response_text": "null \x00 and 𝛑 1",
        "turns": [],
        "extracted": "",
        "reason": "",
    }
    assert json.loads(table.schema.metadata[b"bapo_megatron.texts"]) == {"format": 5, "step": 5}
    with pytest.raises(
        DumpError, match=r"step_000005\.parquet: a parquet file but no rollout dump"
    ):
        read_batch(beside)


def test_texts_of_episodes_have_all_turns(tmp_path):
    path = tmp_path / "step_000005.parquet"
    turns = ("add 3 to 4", "=> 7", "7")
    said = ("7 m", "unit_differs")
    texts = [
        SampleText(7, 0, "3 + 4?", "7", "7", turns, *said),
        SampleText(7, 1, "3 + 4?", "7", "8"),
    ]

    write_texts(path, 5, texts)

    rows = pq.read_table(tmp_path / "texts" / path.name).to_pylist()
    assert [row["turns"] for row in rows] == [list(turns), []]
    assert [row["response_text"] for row in rows] == ["7", "8"]
    assert read_texts(path) == tuple(texts)


def test_texts_that_are_none_are_refused_by_name(tmp_path):
    path = tmp_path / "step_5.parquet"
    write_texts(path, 5, [SampleText(7, 0, "3 + 4?", "7", "7")])
    beside = tmp_path / "texts" / path.name
    whole = pq.read_table(beside)

    pq.write_table(whole.drop_columns(["response_text"]), beside)
    with pytest.raises(DumpError, match=r"texts/step_5\.parquet: column 'response_text' is missi"):
        read_texts(path)
    beside.write_bytes(encode_batch(make_batch()))
    with pytest.raises(DumpError, match=r"texts/step_5\.parquet: a parquet file but no texts of a"):
        read_texts(path)
    beside.write_bytes(b"PAR1")
    with pytest.raises(DumpError, match=r"texts/step_5\.parquet: not a readable parquet file"):
        read_texts(path)


def with_metadata(**changes: Any) -> bytes:
    table = pq.read_table(pa.BufferReader(encode_batch(make_batch())))
    about = json.loads(table.schema.metadata[KEY]) | changes
    stream = pa.BufferOutputStream()
    pq.write_table(table.replace_schema_metadata({KEY: json.dumps(about)}), stream)
    return stream.getvalue().to_pybytes()


@pytest.mark.parametrize("number", [3, 5])
def test_a_dump_of_another_format_is_refused(number):
    with pytest.raises(DumpError, match=f"dump format {number}, this version reads format 4"):
        decode(with_metadata(format=number))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step": 10**30}, "'step' must be less than or equal to 2147483647, got 10000"),
        ({"step": "1"}, "'step' must be an integer, got '1'"),
        ({"version": 2**31}, "'version' must be less than or equal to 2147483647"),
        ({"version": math.nan}, "'version' must be an integer, got NaN"),
        ({"stats": {"generation_s": math.nan}}, r"'stats\.generation_s' must be a finite number"),
        ({"stats": {"engine_load": {"a": math.inf}}}, r"'stats\.engine_load\.a' must be a finite"),
        ({"stats": {"generated_tokens": 10**400}}, r"'stats\.generated_tokens' must be less than"),
        ({"stats": {"dropped_groups": {"a": -1}}}, r"'stats\.dropped_groups\.a' must be greater"),
        ({"stats": {"lost": 1}}, r"'stats\.lost' is no field of it"),
    ],
)
def test_metadata_that_no_run_writes_are_named_by_field(changes, message):
    with pytest.raises(DumpError, match=f"metadata '{KEY.decode()}': {message}.*; write the dump"):
        decode(with_metadata(**changes))


def test_samples_of_a_group_share_one_prompt():
    group = decode(encode_batch(make_batch(group_size=3))).groups[1]

    assert group.samples[0].prompt is group.samples[2].prompt
    assert group.samples[0].prompt.token_ids.tolist() == [2000, 2001, 2002]


def test_other_programs_can_read_the_columns(tmp_path):
    write_batch(tmp_path / "x.parquet", make_batch(num_groups=1))

    row = pq.read_table(tmp_path / "x.parquet").to_pylist()[1]

    assert row["group_id"] == 0
    assert row["index"] == 1
    assert row["prompt_token_ids"] == [1000, 1001, 1002]
    assert row["response_token_ids"] == [1150, 1151]
    assert (row["versions"], row["version_tokens"]) == ([1], [2])
    assert row["finish_reason"] == "stop"
    assert row["reward"] == 1.0
    assert json.loads(row["reward_components"]) == {"math": 1.0, "style/words": 8.25}


def test_a_full_disk_leaves_no_file(tmp_path, monkeypatch):
    def no_space(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match=r"No space left on device: '.*step_5\.parquet'"):
        write_batch(tmp_path / "step_5.parquet", make_batch())

    assert list(tmp_path.iterdir()) == []


def test_a_cut_off_file_is_refused_by_name(tmp_path):
    path = tmp_path / "step_5.parquet"
    path.write_bytes(encode_batch(make_batch())[:-20])

    with pytest.raises(
        DumpError, match=r"step_5\.parquet: not a readable parquet file \(.+\)"
    ) as e:
        read_batch(path)
    assert "\n" not in str(e.value)


def test_a_flipped_bit_in_a_page_is_found(tmp_path):
    batch = make_batch(num_groups=40, group_size=8)
    content = bytearray(encode_batch(batch))
    content[len(content) // 3] ^= 1

    with pytest.raises(DumpError, match="not a readable parquet file"):
        decode(content)


def test_a_foreign_parquet_file_is_refused(tmp_path):
    pq.write_table(pa.table({"a": [1]}), tmp_path / "other.parquet")

    with pytest.raises(DumpError, match=r"other\.parquet: a parquet file but no rollout dump"):
        read_batch(tmp_path / "other.parquet")


def rewritten(change, batch=None) -> bytes:
    """A dump after ``change`` of its table."""
    table = pq.read_table(pa.BufferReader(encode_batch(batch or make_batch())))
    stream = pa.BufferOutputStream()
    pq.write_table(change(table).replace_schema_metadata(table.schema.metadata), stream)
    return stream.getvalue().to_pybytes()


def test_a_missing_column_is_named():
    with pytest.raises(DumpError, match="column 'versions' is missing"):
        decode(rewritten(lambda table: table.drop_columns(["versions"])))


def test_a_column_of_another_type_is_named():
    def to_text(table):
        return table.set_column(
            table.column_names.index("reward"), "reward", pa.array(["1"] * len(table))
        )

    with pytest.raises(DumpError, match="column 'reward' must be double, got string"):
        decode(rewritten(to_text))


def test_log_probs_that_do_not_match_the_tokens_are_refused():
    batch = make_batch()
    batch.samples[3].behaviour_logprobs = np.zeros(7, dtype=np.float32)

    with pytest.raises(
        DumpError,
        match="sample 1 of group 1: 3 sampled tokens, 7 behaviour log-probs and 3 tokens",
    ):
        encode_batch(batch)


def test_versions_without_their_numbers_of_tokens_are_refused():
    def cut(table):
        column = table.column_names.index("version_tokens")
        shorter = pa.array([[]] * len(table), pa.list_(pa.int32()))
        return table.set_column(column, "version_tokens", shorter)

    with pytest.raises(DumpError, match="sample 0 of group 0: 1 versions but 0 numbers of their"):
        decode(rewritten(cut))


def test_groups_of_unequal_size_are_refused():
    with pytest.raises(DumpError, match=r"group 2 holds samples \[0\], expected 0 to 1"):
        decode(rewritten(lambda table: table.slice(0, len(table) - 1)))


def test_a_batch_without_samples_is_refused():
    with pytest.raises(DumpError, match="the batch has no samples"):
        decode(rewritten(lambda table: table.slice(0, 0)))


def test_a_prompt_without_tokens_is_refused():
    batch = make_batch()
    batch.samples[0].prompt = PromptTokens("x:0", np.zeros(0, dtype=np.int32))

    with pytest.raises(DumpError, match="sample 0 of group 0: the prompt has no tokens; write"):
        encode_batch(batch)


@pytest.mark.parametrize("column", ["finish_reason", "reward_components"])
def test_a_value_that_no_run_writes_is_refused(column):
    def spoil(table):
        texts = pa.array(["?"] * len(table))
        return table.set_column(table.column_names.index(column), column, texts)

    with pytest.raises(DumpError, match=f"sample 0 of group 0: {column}: "):
        decode(rewritten(spoil))
