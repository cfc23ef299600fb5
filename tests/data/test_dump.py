from __future__ import annotations

import dataclasses
import errno
import hashlib
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
    texts_by_sample,
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
from tests.data.samples import add_branch, make_batch, make_episode, with_columns

ARRAYS = ("response_token_ids", "behaviour_logprobs")
KEY = b"bapo_megatron.rollout"


def decode(content: bytes) -> RolloutBatch:
    return decode_batch(EncodedBatch("rollout batch", bytearray(content)))


def assert_equal_arrays(mine, other):
    assert mine.dtype == other.dtype
    assert mine.tobytes() == other.tobytes()


def assert_equal_batches(batch, reference):
    assert (batch.step, batch.version, batch.stats) == (
        reference.step,
        reference.version,
        reference.stats,
    )
    assert [group.group_id for group in batch.groups] == [g.group_id for g in reference.groups]
    for mine, other in zip(batch.sequences, reference.sequences, strict=True):
        assert (mine.prompt.prompt_id, mine.prompt.source) == (
            other.prompt.prompt_id,
            other.prompt.source,
        )
        assert_equal_arrays(mine.prompt.token_ids, other.prompt.token_ids)
        for field in dataclasses.fields(other):
            mine_value, other_value = getattr(mine, field.name), getattr(other, field.name)
            if field.name in ARRAYS:
                assert_equal_arrays(mine_value, other_value)
            elif field.name == "columns":
                assert mine_value.keys() == other_value.keys()
                for name, values in other_value.items():
                    assert mine_value[name].shape == values.shape
                    assert_equal_arrays(mine_value[name], values)
            elif field.name == "branches":
                assert len(mine_value) == len(other_value)
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


def test_dumps_of_single_sequences_keep_their_bytes() -> None:
    # Hashes from before episodes had branches, by the pinned pyarrow.
    episodes = make_episodes()
    for sample in episodes.samples:
        with_columns(sample)
    hashes = [hashlib.sha256(encode_batch(b)).hexdigest() for b in (make_batch(3, 4), episodes)]
    assert hashes == [
        "453b292f3d305a9d8cd5eaa9e6cf0539c09290592e32c4180e7add04d610668f",
        "680469f1ae8fe2a18a16662ca58e8d57587a9fa3a2afcef2c2d87c9bd6cd5ae2",
    ]


def make_branched() -> RolloutBatch:
    """``make_episodes`` with columns, whose first sample has two branches and whose last has one.

    The second has no tokens.
    """
    batch = make_episodes()
    add_branch(batch.samples[0], (2, 1, 2), shared_tokens=4)
    add_branch(batch.samples[0], ())
    add_branch(batch.samples[3], (3,))
    for sequence in batch.sequences:
        with_columns(sequence)
    # Without tokens a file does not tell the width.
    batch.sequences[2].columns["teacher_top_ids"] = np.empty((0, 0), np.int32)
    return batch


def test_episodes_of_several_sequences_come_back_bit_for_bit() -> None:
    batch = make_branched()
    content = encode_batch(batch)
    read = decode(content)
    assert_equal_batches(read, batch)
    assert encode_batch(read) == content
    assert [len(sample.branches) for sample in read.samples] == [2, 0, 0, 1]
    rows = pq.read_table(pa.BufferReader(content)).to_pylist()
    assert [(row["group_id"], row["index"], row["sequence"]) for row in rows] == [
        *((0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0)),
        *((1, 0, 0), (1, 1, 0), (1, 1, 1)),
    ]
    first = rows[0]["response_token_ids"]
    assert rows[1]["prompt_token_ids"] == [*rows[0]["prompt_token_ids"], *first[:4]]


@pytest.mark.parametrize(
    ("numbers", "place"),
    [
        ([1, 1, 2, 0, 0, 0, 1], "sample 0 of group 0, sequence 1: .* from 0, got 1 for 0"),
        ([0, 2, 1, 0, 0, 0, 1], "sample 0 of group 0, sequence 2: .* from 0, got 2 for 1"),
        ([0, 1, 1, 0, 0, 0, 1], "sample 0 of group 0, sequence 1: .* from 0, got 1 for 2"),
        ([0, 1, -1, 0, 0, 0, 1], "sequence -1: .* from 0, got -1 for 2"),
        ([0, 1, 2, 3, 0, 0, 1], "sample 1 of group 0, sequence 3: .* stand with those of its"),
        ([0, 1, 0, 0, 0, 0, 1], r"group 0 holds samples \[0, 0, 1"),
    ],
)
def test_sequences_that_do_not_follow_each_other_are_refused(numbers, place):
    table = pq.read_table(pa.BufferReader(encode_batch(make_branched())))
    changed = column("sequence", numbers, pa.int32())(table)
    stream = pa.BufferOutputStream()
    pq.write_table(changed.replace_schema_metadata(table.schema.metadata), stream)
    with pytest.raises(DumpError, match=f"^rollout batch: .*{place}"):
        decode(stream.getvalue().to_pybytes())


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("reward", 1.0, "has no reward"),
        ("reward_components", {"math": 0.0}, "has no reward"),
        ("branches", (make_episode(2, (1,)),), "no branches of its own"),
        ("prompt", PromptTokens("x:0", np.ones(2, np.int32)), "have its prompt_id"),
        ("written", (WrittenSpan(0, 1),), "between turns of the policy"),
    ],
)
def test_a_branch_that_cannot_be_is_refused(field, value, problem):
    batch = make_branched()
    setattr(batch.samples[0].branches[0], field, value)
    with pytest.raises(DumpError, match=f"sample 0 of group 0, sequence 1: .*{problem}"):
        encode_batch(batch)


def test_columns_of_scorers_come_back_bit_for_bit() -> None:
    batch = make_episodes()
    for sample in batch.samples:
        with_columns(sample)
    batch.samples[2].columns["teacher_logprob"][1] = np.nan
    read = decode(encode_batch(batch))
    assert_equal_batches(read, batch)
    assert encode_batch(read) == encode_batch(batch)


def test_a_sample_without_a_column_of_its_batch_gets_the_default() -> None:
    batch = make_episodes()
    with_columns(batch.samples[0])
    columns = decode(encode_batch(batch)).samples[1].columns
    assert columns["teacher_logprob"].shape == (6,)
    assert np.isnan(columns["teacher_logprob"]).all()
    assert columns["teacher_top_ids"].shape == (6, 0)


def test_a_column_that_does_not_fit_its_tokens_is_refused() -> None:
    batch = make_episodes()
    batch.samples[3].columns = {"teacher_logprob": np.zeros(3, np.float32)}
    with pytest.raises(DumpError, match=r"sample 1 of group 1: token columns: teacher_logprob: 3 "):
        decode(encode_batch(batch))


@pytest.mark.parametrize("stats", [RolloutStats(), RolloutStats(environment_errors={})])
def test_statistics_tell_a_run_without_an_environment_from_one_without_errors(stats):
    batch = dataclasses.replace(make_episodes(), stats=stats)

    assert decode(encode_batch(batch)).stats == stats


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        ([(0, 3)], "3 tokens from 0"),
        ([(2, 0)], "0 tokens from 2"),
        ([(2, -1)], "-1 tokens from 2"),
        ([(1, 2), (2, 1)], "1 tokens from 2"),
        ([(3, 1), (1, 1)], "1 tokens from 1"),
        ([(3, 3)], "end with a turn of the policy, .* up to 6"),
        ([(2, 2)], "4 sampled tokens, 3 behaviour log-probs and 3 tokens with a version"),
        ([], "6 sampled tokens, 3 behaviour log-probs and 3 tokens with a version"),
    ],
)
def test_written_spans_that_cannot_be_are_refused(written, problem):
    batch = make_episodes()
    batch.samples[0].written = tuple(WrittenSpan(*span) for span in written)

    with pytest.raises(DumpError, match=f"^batch of step 5: sample 0 of group 0: .*{problem}") as e:
        encode_batch(batch)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("versions", (VersionSpan(0, 6),), "6 tokens with a version"),
        ("versions", (VersionSpan(0, 3), VersionSpan(1, 0)), "version without tokens"),
        ("behaviour_logprobs", np.zeros(7, np.float32), "7 behaviour log-probs"),
        ("prompt", PromptTokens("x:0", np.zeros(0, np.int32)), "prompt has no tokens"),
    ],
)
def test_a_sample_whose_parts_do_not_fit_is_refused(field, value, problem):
    batch = make_episodes()
    setattr(batch.samples[0], field, value)

    with pytest.raises(DumpError, match=f"sample 0 of group 0: .*{problem}"):
        encode_batch(batch)


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
    with pytest.raises(DumpError, match=r"step_000005\.parquet: .* no rollout dump"):
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
    assert texts_by_sample(path) == {(7, 0): texts[0], (7, 1): texts[1]}
    assert texts_by_sample(tmp_path / "none.parquet") is None


def test_texts_that_are_none_are_refused_by_name(tmp_path):
    path = tmp_path / "step_5.parquet"
    write_texts(path, 5, [SampleText(7, 0, "3 + 4?", "7", "7")])
    beside = tmp_path / "texts" / path.name

    pq.write_table(pq.read_table(beside).drop_columns(["response_text"]), beside)
    with pytest.raises(DumpError, match=r"texts/step_5\.parquet: column 'response_text'"):
        texts_by_sample(path)
    beside.write_bytes(encode_batch(make_batch()))
    with pytest.raises(DumpError, match=r"texts/step_5\.parquet: .* no texts"):
        texts_by_sample(path)


def with_metadata(**changes: Any) -> bytes:
    table = pq.read_table(pa.BufferReader(encode_batch(make_batch())))
    about = json.loads(table.schema.metadata[KEY]) | changes
    stream = pa.BufferOutputStream()
    pq.write_table(table.replace_schema_metadata({KEY: json.dumps(about)}), stream)
    return stream.getvalue().to_pybytes()


@pytest.mark.parametrize("number", [3, 5])
def test_a_dump_of_another_format_is_refused(number):
    with pytest.raises(DumpError, match=f"dump format {number}, .* format 4"):
        decode(with_metadata(format=number))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step": 10**30}, "'step'"),
        ({"step": "1"}, "'step'"),
        ({"version": 2**31}, "'version'"),
        ({"version": math.nan}, "'version'"),
        ({"stats": {"generation_s": math.nan}}, r"'stats\.generation_s'"),
        ({"stats": {"engine_load": {"a": math.inf}}}, r"'stats\.engine_load\.a'"),
        ({"stats": {"generated_tokens": 10**400}}, r"'stats\.generated_tokens'"),
        ({"stats": {"dropped_groups": {"a": -1}}}, r"'stats\.dropped_groups\.a'"),
        ({"stats": {"lost": 1}}, r"'stats\.lost'"),
    ],
)
def test_metadata_that_no_run_writes_are_named_by_field(changes, message):
    with pytest.raises(DumpError, match=f"metadata '{KEY.decode()}': {message}"):
        decode(with_metadata(**changes))


def test_samples_of_a_group_share_one_prompt():
    group = decode(encode_batch(make_batch(group_size=3))).groups[1]

    assert group.samples[0].prompt is group.samples[2].prompt
    assert group.samples[0].prompt.token_ids.tolist() == [2000, 2001, 2002]


def test_a_full_disk_leaves_no_file(tmp_path, monkeypatch):
    def no_space(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match=r"'.*step_5\.parquet'"):
        write_batch(tmp_path / "step_5.parquet", make_batch())

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "damage", [lambda c: c[:-20], lambda c: c[: len(c) // 3] + b"\x99" + c[len(c) // 3 + 1 :]]
)
def test_a_cut_off_file_and_a_changed_page_are_refused_by_name(tmp_path, damage):
    path = tmp_path / "step_5.parquet"
    path.write_bytes(damage(encode_batch(make_batch(num_groups=40, group_size=8))))

    with pytest.raises(DumpError, match=r"step_5\.parquet: not a readable parquet") as e:
        read_batch(path)
    assert "\n" not in str(e.value)


def column(name, values, kind=None):
    """A change of one column of a dump's table."""
    return lambda table: table.set_column(
        table.column_names.index(name), name, pa.array(values, kind)
    )


LISTS = pa.list_(pa.int32())


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (lambda table: table.drop_columns(["versions"]), "column 'versions'"),
        (column("reward", ["1"] * 4), "column 'reward' must be double, got string"),
        (column("reward", [0.0, 1.0, None, 0.0]), "sample 0 of group 1: column 'reward'"),
        (column("versions", [[0, 1], [1], [], [None]], LISTS), "sample 1 of group 1: column 'vers"),
        (column("written_starts", [[0], [1, 4], [], [1]], LISTS), "sample 0 of group 0: .* from 0"),
        (column("written_tokens", [[3], [1], [], [2]], LISTS), "sample 1 of group 0: written_tok"),
        (column("version_tokens", [[]] * 4, LISTS), "sample 0 of group 0: version_tokens"),
        (column("finish_reason", ["?"] * 4), "sample 0 of group 0: finish_reason"),
        (column("reward_components", ["?"] * 4), "sample 0 of group 0: reward_components"),
        (column("prompt_id", ["x", "y", "z", "z"]), "sample 1 of group 0: prompt_id"),
        (
            column("prompt_token_ids", [[1], [1], [1], [2]], LISTS),
            "sample 1 of group 1: .*prompt_token_ids",
        ),
        (column("group_id", [0, 1, 0, 1]), "group_id occurs twice"),
        (lambda table: table.slice(0, 3), r"group 1 holds samples \[0\]"),
        (lambda table: table.slice(0, 0), "the batch has no samples"),
    ],
)
def test_a_table_that_no_run_writes_is_refused_by_place(change, place):
    table = pq.read_table(pa.BufferReader(encode_batch(make_episodes())))
    stream = pa.BufferOutputStream()
    pq.write_table(change(table).replace_schema_metadata(table.schema.metadata), stream)

    with pytest.raises(DumpError, match=f"^rollout batch: .*{place}"):
        decode(stream.getvalue().to_pybytes())


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("versions", (VersionSpan(-1, 3),), "versions must ascend"),
        ("versions", (VersionSpan(10, 3),), "versions must ascend from 0 to at most 9"),
        ("reward", math.nan, "reward must be finite"),
        ("reward_components", {"a": math.inf}, r"reward_components\.a must be finite"),
    ],
)
def test_a_value_that_no_run_writes_is_refused(field, value, problem):
    batch = make_episodes()
    setattr(batch.samples[0], field, value)

    with pytest.raises(DumpError, match=f"sample 0 of group 0: {problem}"):
        encode_batch(batch)


@pytest.mark.parametrize(
    ("tokens", "place"),
    [
        (lambda sample: sample.response_token_ids, "response_token_ids"),
        (lambda sample: sample.prompt.token_ids, "prompt_token_ids"),
    ],
)
def test_a_token_beyond_the_vocabulary_is_named_with_its_position(tokens, place):
    batch = make_episodes()
    tokens(batch.samples[0])[2] = 5000
    encoded = EncodedBatch("rollout batch", bytearray(encode_batch(batch)))

    with pytest.raises(DumpError, match=rf"sample 0 of group 0: {place}\[2\] .* got 5000"):
        decode_batch(encoded, 5000)


def test_samples_of_an_agent_have_prompts_of_their_own() -> None:
    batch = make_episodes()
    sample = batch.groups[0].samples[1]
    sample.prompt = dataclasses.replace(sample.prompt, token_ids=np.array([7, 8], np.int32))
    [_, again] = (
        decode_batch(EncodedBatch("a batch", bytearray(encode_batch(batch)))).groups[0].samples
    )
    assert again.prompt.token_ids.tolist() == [7, 8]
    assert again.prompt.prompt_id == sample.prompt.prompt_id
