"""Rows from files and from the Hugging Face Hub, and what is said where they cannot be read."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bapo_megatron.config.data import DatasetConfig
from bapo_megatron.data.rows import DataError, read_rows
from tests.data.rows import GSM8K, write_jsonl
from tests.fakes.fake_hub import FakeHub

READ_FROM_HUB = """
import json, sys
from bapo_megatron.config.data import DatasetConfig
from bapo_megatron.data.rows import DataError, read_rows
for settings in json.loads(sys.argv[1]):
    try:
        rows = [(r.prompt_id, r.place, r.fields) for r in read_rows(DatasetConfig(**settings))]
        print(json.dumps(rows))
    except DataError as error:
        print(json.dumps(str(error)))
"""


def rows_of(path, **settings):
    return list(read_rows(DatasetConfig(path=path, **settings)))


def test_every_file_format_gives_the_same_fields(tmp_path):
    records = [{"prompt": "a", "n": 1}, {"prompt": "b", "n": 2}]
    write_jsonl(tmp_path / "x.jsonl", records[0], "", records[1])
    (tmp_path / "x.json").write_text(json.dumps(records))
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "x.parquet")

    jsonl, listed, parquet = (rows_of(tmp_path / f"x.{s}") for s in ("jsonl", "json", "parquet"))

    assert [row.fields for row in jsonl] == records
    assert [row.fields for row in listed] == records
    assert [row.fields for row in parquet] == records
    assert [row.prompt_id for row in jsonl] == ["x.jsonl:0", "x.jsonl:2"]
    assert [row.place for row in jsonl] == [f"{tmp_path}/x.jsonl:1", f"{tmp_path}/x.jsonl:3"]
    assert listed[1].place == f"{tmp_path}/x.json: entry 1"
    assert parquet[1].place == f"{tmp_path}/x.parquet: row 1"


def test_files_that_match_a_pattern_are_read_in_the_order_of_their_names(tmp_path):
    for name in ("b", "a", "c"):
        write_jsonl(tmp_path / f"part-{name}.jsonl", {"prompt": name})
    write_jsonl(tmp_path / "other.jsonl", {"prompt": "no"})

    rows = rows_of(tmp_path / "part-*.jsonl", name="parts")

    assert [(row.prompt_id, row.fields) for row in rows] == [
        ("part-a.jsonl:0", {"prompt": "a"}),
        ("part-b.jsonl:0", {"prompt": "b"}),
        ("part-c.jsonl:0", {"prompt": "c"}),
    ]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"prompt": "x", ', "not valid JSON"),
        (b"[1, 2]", "must be an object with named fields, got [1, 2]"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        (b"[" * 100_000, "not valid JSON (nested too deeply)"),
        (b'{"answer": ' + b"9" * 5000 + b"}", "not valid JSON (an integer"),
    ],
)
def test_a_line_that_cannot_be_read_has_a_place_and_a_reason_and_the_next_is_read(
    tmp_path, line, problem
):
    (tmp_path / "a.jsonl").write_bytes(line + b'\n{"prompt": "x"}\n')

    bad, good = rows_of(tmp_path / "a.jsonl")

    assert (bad.place, bad.fields) == (f"{tmp_path}/a.jsonl:1", None)
    assert bad.problem.startswith(problem)
    assert good.fields == {"prompt": "x"}


def test_parquet_rows_that_are_no_utf8_are_refused_by_place(tmp_path):
    binary = pa.array([b"good", b"\xff", b"too"], pa.binary())
    texts = pa.Array.from_buffers(pa.string(), 3, binary.buffers())
    pq.write_table(pa.table({"prompt": texts}), tmp_path / "a.parquet")

    with pytest.raises(DataError, match=r"a\.parquet: rows 0 to 2 .*utf-8"):
        rows_of(tmp_path / "a.parquet")


def test_parquet_rows_are_counted_over_row_groups(tmp_path):
    records = [{"n": n} for n in range(2500)]
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "a.parquet", row_group_size=700)

    rows = rows_of(tmp_path / "a.parquet")

    assert [row.fields for row in rows] == records
    assert [row.prompt_id for row in rows] == [f"a.parquet:{n}" for n in range(2500)]


def test_a_file_of_another_content_is_refused(tmp_path):
    (tmp_path / "a.parquet").write_text("no parquet")
    (tmp_path / "a.json").write_text('{"prompt": "x"}')
    (tmp_path / "b.json").write_text("[1,")

    for name in ("a.parquet", "a.json", "b.json"):
        with pytest.raises(DataError, match=f"{name}: "):
            rows_of(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        rows_of(tmp_path / "c.parquet")


def test_a_parquet_file_that_is_damaged_within_is_refused_on_one_line(tmp_path):
    path = tmp_path / "a.parquet"
    texts = [{"prompt": f"question {n} " * 20} for n in range(500)]
    pq.write_table(pa.Table.from_pylist(texts), path, compression="zstd")
    content = bytearray(path.read_bytes())
    content[40:400] = bytes(360)
    path.write_bytes(content)

    with pytest.raises(DataError, match=r"a\.parquet: not a readable parquet file") as caught:
        rows_of(path)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_set_of_the_hub_is_loaded_once_and_then_read_without_a_network(tmp_path):
    with FakeHub(
        {"acme/sums": {"data/train.jsonl": [GSM8K] * 3, "data/test.jsonl": [GSM8K]}}
    ) as hub:
        environment = {
            **os.environ,
            "HF_ENDPOINT": hub.address,
            "HF_HOME": str(tmp_path),
            "HF_DATASETS_CACHE": str(tmp_path / "datasets"),
            "NO_PROXY": "127.0.0.1",
        }

        def read(*settings, **variables):
            result = subprocess.run(
                [sys.executable, "-c", READ_FROM_HUB, json.dumps(settings)],
                env={**environment, **variables},
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            assert result.returncode == 0, result.stderr
            return [json.loads(line) for line in result.stdout.splitlines()]

        train, test = {"hub": "acme/sums", "split": "train"}, {"hub": "acme/sums", "split": "test"}
        (online,) = read(train)
    assert online == [
        [f"acme/sums:{n}", f"acme/sums (train): row {n}", dict(GSM8K)] for n in range(3)
    ]

    rows, others, no_split, absent = read(
        train,
        test,
        {"hub": "acme/sums", "split": "dev"},
        {"hub": "acme/products", "split": "train"},
        HF_HUB_OFFLINE="1",
    )
    assert (rows, len(others)) == (online, 1)
    assert no_split.startswith("acme/sums (dev): cannot be loaded (Unknown split")
    assert absent.startswith("acme/products (train): cannot be loaded (Couldn't reach")
    assert f"not in the cache {tmp_path}/datasets" in absent
