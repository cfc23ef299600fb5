from __future__ import annotations

import dataclasses
import errno
import json
import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bapo_megatron.data.dump import DumpError, dump_bytes, read_batch, write_batch
from bapo_megatron.types import FinishReason, RolloutStats
from tests.data.samples import make_batch

ARRAYS = ("response_token_ids", "behaviour_logprobs", "versions")


def assert_equal_batches(given, wanted):
    assert (given.step, given.version, given.stats) == (wanted.step, wanted.version, wanted.stats)
    assert [group.group_id for group in given.groups] == [g.group_id for g in wanted.groups]
    for mine, other in zip(given.samples, wanted.samples, strict=True):
        for field in dataclasses.fields(other):
            mine_value, other_value = getattr(mine, field.name), getattr(other, field.name)
            if field.name in ARRAYS:
                assert mine_value.dtype == other_value.dtype
                assert mine_value.tobytes() == other_value.tobytes()
            else:
                assert mine_value == other_value
                assert type(mine_value) is type(other_value)


def test_a_batch_comes_back_bit_for_bit(tmp_path):
    batch = make_batch(num_groups=3, group_size=4)
    sample = batch.samples[1]
    odd_floats = np.array([np.nan, -np.inf, -0.0, 1e-45], dtype=np.float32)
    sample.behaviour_logprobs = odd_floats
    sample.response_token_ids = np.array([0, 151935, 2**40, 7])
    sample.versions = np.array([0, 0, 3, 3])
    sample.finish_reason = FinishReason.LENGTH
    sample.response_text = "null \x00 and 𝛑"
    path = tmp_path / "rollouts" / "step_5.parquet"

    write_batch(path, batch)

    assert_equal_batches(read_batch(path), batch)
    assert_equal_batches(read_batch(path.read_bytes()), batch)
    assert_equal_batches(read_batch(dump_bytes(batch)), batch)
    assert [p.name for p in path.parent.iterdir()] == ["step_5.parquet"]


def test_a_response_without_tokens_comes_back():
    batch = make_batch(num_groups=1)
    for sample in batch.samples:
        sample.response_token_ids = np.zeros(0, dtype=np.int64)
        sample.behaviour_logprobs = np.zeros(0, dtype=np.float32)
        sample.versions = np.zeros(0, dtype=np.int64)

    assert_equal_batches(read_batch(dump_bytes(batch)), batch)


def test_a_dump_from_before_a_statistic_was_counted_reads_as_zero():
    table = pq.read_table(pa.BufferReader(dump_bytes(make_batch())))
    key = b"bapo_megatron.rollout"
    about = json.loads(table.schema.metadata[key])
    about["stats"] = {"generated_tokens": 17, "generation_s": 0.1}
    stream = pa.BufferOutputStream()
    pq.write_table(table.replace_schema_metadata({key: json.dumps(about)}), stream)

    stats = read_batch(stream.getvalue().to_pybytes()).stats

    assert stats == RolloutStats(generated_tokens=17, generation_s=0.1)
    assert (stats.replayed_groups, stats.dropped_groups) == (0, {})


def test_a_dump_from_before_rewards_had_components_is_read_without_them():
    content = rewritten(lambda table: table.drop_columns(["reward_components"]))

    samples = read_batch(content).samples

    assert [sample.reward_components for sample in samples] == [{}] * len(samples)
    assert [sample.reward for sample in samples] == [s.reward for s in make_batch().samples]


def test_a_dump_from_before_data_sets_had_names_reads_without_them():
    batch = make_batch()
    table = pq.read_table(pa.BufferReader(dump_bytes(batch))).drop_columns("source")
    stream = pa.BufferOutputStream()
    pq.write_table(table, stream)

    groups = read_batch(stream.getvalue().to_pybytes()).groups

    assert [group.samples[0].prompt.source for group in groups] == ["", "", ""]
    assert {group.samples[0].prompt.source for group in batch.groups} == {"sums"}


def test_samples_of_a_group_share_one_prompt():
    group = read_batch(dump_bytes(make_batch(group_size=3))).groups[1]

    assert group.samples[0].prompt is group.samples[2].prompt
    assert group.samples[0].prompt.token_ids == (2000, 2001, 2002)


def test_other_programs_can_read_the_columns(tmp_path):
    write_batch(tmp_path / "x.parquet", make_batch(num_groups=1))

    row = pq.read_table(tmp_path / "x.parquet").to_pylist()[1]

    assert row["group_id"] == 0
    assert row["index"] == 1
    assert row["prompt_token_ids"] == [1000, 1001, 1002]
    assert row["response_token_ids"] == [1150, 1151]
    assert row["versions"] == [1, 1]
    assert row["finish_reason"] == "stop"
    assert row["reward"] == 1.0
    assert row["answer"] == "42"


def test_a_full_disk_leaves_no_file(tmp_path, monkeypatch):
    def no_space(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match=r"No space left on device: '.*step_5\.parquet'"):
        write_batch(tmp_path / "step_5.parquet", make_batch())

    assert list(tmp_path.iterdir()) == []


def test_a_cut_off_file_is_refused_by_name(tmp_path):
    path = tmp_path / "step_5.parquet"
    path.write_bytes(dump_bytes(make_batch())[:-20])

    with pytest.raises(
        DumpError, match=r"step_5\.parquet: not a readable parquet file \(.+\)"
    ) as e:
        read_batch(path)
    assert "\n" not in str(e.value)


def test_a_flipped_bit_in_a_page_is_found(tmp_path):
    batch = make_batch(num_groups=40, group_size=8)
    content = bytearray(dump_bytes(batch))
    content[len(content) // 3] ^= 1

    with pytest.raises(DumpError, match="not a readable parquet file"):
        read_batch(bytes(content))


def test_a_foreign_parquet_file_is_refused(tmp_path):
    pq.write_table(pa.table({"a": [1]}), tmp_path / "other.parquet")

    with pytest.raises(DumpError, match=r"other\.parquet: a parquet file but no rollout dump"):
        read_batch(tmp_path / "other.parquet")


def rewritten(change) -> bytes:
    """A dump after ``change`` of its table."""
    table = pq.read_table(pa.BufferReader(dump_bytes(make_batch())))
    stream = pa.BufferOutputStream()
    pq.write_table(change(table).replace_schema_metadata(table.schema.metadata), stream)
    return stream.getvalue().to_pybytes()


def test_a_missing_column_is_named():
    with pytest.raises(DumpError, match="column 'versions' is missing"):
        read_batch(rewritten(lambda table: table.drop_columns(["versions"])))


def test_a_column_of_another_type_is_named():
    def to_text(table):
        return table.set_column(
            table.column_names.index("reward"), "reward", pa.array(["1"] * len(table))
        )

    with pytest.raises(DumpError, match="column 'reward' must be double without nulls, got string"):
        read_batch(rewritten(to_text))


def test_log_probs_that_do_not_match_the_tokens_are_refused():
    batch = make_batch()
    batch.samples[3].behaviour_logprobs = np.zeros(7, dtype=np.float32)

    with pytest.raises(
        DumpError,
        match="sample 1 of group 1: 3 response tokens, 7 behaviour log-probs and 3 versions",
    ):
        dump_bytes(batch)


def test_groups_of_unequal_size_are_refused():
    with pytest.raises(DumpError, match=r"group 2 holds samples \[0\], expected 0 to 1"):
        read_batch(rewritten(lambda table: table.slice(0, len(table) - 1)))


def test_a_batch_without_samples_is_refused():
    with pytest.raises(DumpError, match="the batch has no samples"):
        read_batch(rewritten(lambda table: table.slice(0, 0)))
