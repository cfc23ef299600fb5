import dataclasses
import errno
import hashlib
import json
import math
import os

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

KEY = b"bapo_megatron.rollout"


def decode(content: bytes) -> RolloutBatch:
    return decode_batch(EncodedBatch("rollout batch", bytearray(content)))


def dtypes(batch: RolloutBatch) -> list[list[np.dtype]]:
    """The type of each array of each sequence."""
    return [
        [array.dtype for array in (s.prompt.token_ids, s.response_token_ids, s.behaviour_logprobs)]
        + [values.dtype for values in s.columns.values()]
        for s in batch.sequences
    ]


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


def make_scored() -> RolloutBatch:
    """``make_episodes`` with columns."""
    batch = make_episodes()
    for sample in batch.samples:
        with_columns(sample)
    return batch


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


def with_odd_values() -> RolloutBatch:
    batch = make_batch(num_groups=3, group_size=4)
    sample = batch.samples[1]
    sample.behaviour_logprobs = np.array([np.nan, -np.inf, -0.0, 1e-45], dtype=np.float32)
    sample.response_token_ids = np.array([0, 151935, 2**31 - 1, 7], dtype=np.int32)
    sample.versions = (VersionSpan(0, 2), VersionSpan(3, 2))
    sample.finish_reason = FinishReason.LENGTH
    return batch


def with_nan_in_a_column() -> RolloutBatch:
    batch = make_scored()
    batch.samples[2].columns["teacher_logprob"][1] = np.nan
    return batch


def with_rewards_of_calls() -> RolloutBatch:
    batch = make_branched()
    batch.sequences[1].call_rewards = (0.1, -2.0)
    return batch


def with_a_prompt_of_an_agent() -> RolloutBatch:
    batch = make_episodes()
    sample = batch.groups[0].samples[1]
    sample.prompt = dataclasses.replace(sample.prompt, token_ids=np.array([7, 8], np.int32))
    return batch


def without_tokens() -> RolloutBatch:
    batch = make_batch(num_groups=1)
    for sample in batch.samples:
        sample.response_token_ids = np.zeros(0, dtype=np.int32)
        sample.behaviour_logprobs = np.zeros(0, dtype=np.float32)
        sample.versions = ()
    return batch


def with_stats(stats: RolloutStats) -> RolloutBatch:
    return dataclasses.replace(make_episodes(), stats=stats)


@pytest.mark.parametrize(
    "batch",
    [
        pytest.param(with_odd_values(), id="odd values"),
        pytest.param(make_episodes(), id="episodes"),
        pytest.param(with_nan_in_a_column(), id="columns"),
        pytest.param(make_branched(), id="branches"),
        pytest.param(with_a_prompt_of_an_agent(), id="prompts"),
        pytest.param(with_rewards_of_calls(), id="rewards of calls"),
        pytest.param(without_tokens(), id="no tokens"),
        # A run without an environment, and one without errors.
        pytest.param(with_stats(RolloutStats()), id="no environment"),
        pytest.param(with_stats(RolloutStats(environment_errors={})), id="no errors"),
    ],
)
def test_a_batch_comes_back_bit_for_bit(tmp_path, batch):
    path = tmp_path / "rollouts" / "step_5.parquet"

    write_batch(path, batch)
    read = read_batch(path)

    np.testing.assert_equal(dataclasses.asdict(read), dataclasses.asdict(batch))
    assert dtypes(read) == dtypes(batch)
    assert path.read_bytes() == encode_batch(batch) == read_encoded(path).content
    assert encode_batch(read) == encode_batch(batch)
    assert [p.name for p in path.parent.iterdir()] == ["step_5.parquet"]


def test_dumps_of_single_sequences_keep_their_bytes() -> None:
    # Hashes from before episodes had branches, by the pinned pyarrow.
    batches = make_batch(3, 4), make_scored()
    assert [hashlib.sha256(encode_batch(batch)).hexdigest() for batch in batches] == [
        "453b292f3d305a9d8cd5eaa9e6cf0539c09290592e32c4180e7add04d610668f",
        "680469f1ae8fe2a18a16662ca58e8d57587a9fa3a2afcef2c2d87c9bd6cd5ae2",
    ]


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


def spans(*pairs: tuple[int, int]) -> tuple[WrittenSpan, ...]:
    return tuple(WrittenSpan(*pair) for pair in pairs)


@pytest.mark.parametrize(
    ("sequence", "field", "value", "problem"),
    [
        (0, "written", spans((0, 3)), "3 tokens from 0"),
        (0, "written", spans((2, 0)), "0 tokens from 2"),
        (0, "written", spans((2, -1)), "-1 tokens from 2"),
        (0, "written", spans((1, 2), (2, 1)), "1 tokens from 2"),
        (0, "written", spans((3, 1), (1, 1)), "1 tokens from 1"),
        (0, "written", spans((3, 3)), "end with a turn of the policy, .* up to 6"),
        (0, "written", spans((2, 2)), "4 sampled tokens, 3 behaviour log-probs and 3 tokens"),
        (0, "written", (), "6 sampled tokens, 3 behaviour log-probs and 3 tokens with a version"),
        (0, "versions", (VersionSpan(0, 6),), "6 tokens with a version"),
        (0, "versions", (VersionSpan(0, 3), VersionSpan(1, 0)), "version without tokens"),
        (0, "versions", (VersionSpan(-1, 3),), "versions must ascend"),
        (0, "versions", (VersionSpan(10, 3),), "versions must ascend from 0 to at most 9"),
        (0, "behaviour_logprobs", np.zeros(7, np.float32), "7 behaviour log-probs"),
        (0, "prompt", PromptTokens("train.jsonl:0", np.zeros(0, np.int32)), "prompt has no tokens"),
        (0, "reward", math.nan, "reward must be finite"),
        (0, "reward_components", {"a": math.inf}, r"reward_components\.a must be finite"),
        (0, "call_rewards", (1.0,), "1 call_rewards for 2 turns"),
        (0, "call_rewards", (1.0, math.inf), r"call_rewards\[1\] must be finite"),
        (1, "reward", 1.0, "has no reward"),
        (1, "reward_components", {"math": 0.0}, "has no reward"),
        (1, "branches", (make_episode(2, (1,)),), "no branches of its own"),
        (1, "prompt", PromptTokens("x:0", np.ones(2, np.int32)), "have its prompt_id"),
        (1, "written", spans((0, 1)), "between turns of the policy"),
    ],
)
def test_a_sequence_that_cannot_be_is_refused(sequence, field, value, problem):
    batch = make_branched()
    setattr(batch.sequences[sequence], field, value)

    place = "sample 0 of group 0" + ", sequence 1" * sequence
    with pytest.raises(DumpError, match=f"^batch of step 5: {place}: .*{problem}") as caught:
        encode_batch(batch)
    assert "\n" not in str(caught.value)


def column(name, values, kind=None):
    """A change of one column of a dump's table."""
    return lambda table: table.set_column(
        table.column_names.index(name), name, pa.array(values, kind)
    )


def check_refused(batch, change, place):
    """A batch whose table is changed is refused with this place."""
    table = pq.read_table(pa.BufferReader(encode_batch(batch)))
    stream = pa.BufferOutputStream()
    pq.write_table(change(table).replace_schema_metadata(table.schema.metadata), stream)

    with pytest.raises(DumpError, match=f"^rollout batch: .*{place}"):
        decode(stream.getvalue().to_pybytes())


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
            "sample 1 of group 1: .*prompt_t",
        ),
        (column("group_id", [0, 1, 0, 1]), "group_id occurs twice"),
        (lambda table: table.slice(0, 3), r"group 1 holds samples \[0\]"),
        (lambda table: table.slice(0, 0), "the batch has no samples"),
    ],
)
def test_a_table_that_no_run_writes_is_refused_by_place(change, place):
    check_refused(make_episodes(), change, place)


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
    check_refused(make_branched(), column("sequence", numbers, pa.int32()), place)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 3}, "rollout dump format 3, .* format 4"),
        ({"format": 5}, "rollout dump format 5, .* format 4"),
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
    table = pq.read_table(pa.BufferReader(encode_batch(make_batch())))
    about = json.loads(table.schema.metadata[KEY]) | changes
    stream = pa.BufferOutputStream()
    pq.write_table(table.replace_schema_metadata({KEY: json.dumps(about)}), stream)

    with pytest.raises(DumpError, match=f"metadata '{KEY.decode()}': {message}"):
        decode(stream.getvalue().to_pybytes())


def test_texts_are_beside_the_dump_and_joined_by_group_and_index(tmp_path):
    path = tmp_path / "rollouts" / "step_000005.parquet"
    turns = ("add 3 to 4", "=> 7", "7")
    texts = [
        SampleText(7, 0, "3 + 4?", "7", "7", turns, "7 m", "unit_differs"),
        SampleText(7, 1, "3 + 4?", "7", "null \x00 and 𝛑"),
    ]

    write_texts(path, 5, texts)

    beside = tmp_path / "rollouts" / "texts" / "step_000005.parquet"
    assert list(path.parent.rglob("*.parquet")) == [beside]
    assert texts_by_sample(path) == {(7, 0): texts[0], (7, 1): texts[1]}
    assert texts_by_sample(tmp_path / "none.parquet") is None
    table = pq.read_table(beside)
    assert [row["turns"] for row in table.to_pylist()] == [list(turns), []]
    assert json.loads(table.schema.metadata[b"bapo_megatron.texts"]) == {"format": 5, "step": 5}
    with pytest.raises(DumpError, match=r"step_000005\.parquet: .* no rollout dump"):
        read_batch(beside)

    pq.write_table(table.drop_columns(["response_text"]), beside)
    with pytest.raises(DumpError, match=r"texts/step_000005\.parquet: column 'response_text'"):
        texts_by_sample(path)
    beside.write_bytes(encode_batch(make_batch()))
    with pytest.raises(DumpError, match=r"texts/step_000005\.parquet: .* no texts"):
        texts_by_sample(path)


def test_samples_of_a_group_share_one_prompt():
    group = decode(encode_batch(make_batch(group_size=3))).groups[1]

    assert group.samples[0].prompt is group.samples[2].prompt
    assert group.samples[0].prompt.token_ids.tolist() == [2000, 2001, 2002]


@pytest.mark.parametrize(
    "damage", [lambda c: c[:-20], lambda c: c[: len(c) // 3] + b"\x99" + c[len(c) // 3 + 1 :]]
)
def test_a_cut_off_file_and_a_changed_page_are_refused_by_name(tmp_path, damage):
    path = tmp_path / "step_5.parquet"
    path.write_bytes(damage(encode_batch(make_batch(num_groups=40, group_size=8))))

    with pytest.raises(DumpError, match=r"step_5\.parquet: not a readable parquet") as e:
        read_batch(path)
    assert "\n" not in str(e.value)


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


def test_a_full_disk_leaves_no_file(tmp_path, monkeypatch):
    def no_space(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match=r"'.*step_5\.parquet'"):
        write_batch(tmp_path / "step_5.parquet", make_batch())

    assert list(tmp_path.iterdir()) == []
