"""Dumps of format 1, built by hand, through examples/convert_dumps.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bapo_megatron.data.dump import read_batch, write_batch
from tests.data.samples import make_batch
from tests.launch import REPOSITORY

KEY = b"bapo_megatron.rollout"
ABOUT = {
    "format": 1,
    "step": 3,
    "version": 12,
    "stats": {"generated_tokens": 17, "generation_s": 0.5, "dropped_groups": {"stale": 1}},
}
ROWS = [
    {
        "group_id": 4,
        "index": index,
        "prompt_id": "train.jsonl:9",
        "prompt_text": "What is 6 · 7?",
        "answer": "42",
        "source": "sums",
        "finish_reason": ("stop", "length")[index],
        "response_text": f"null \x00 and 𝛑 {index}",
        "reward": 0.1 * index,
        "answer_found": index == 0,
        "reward_components": json.dumps({"math": 0.1 * index}),
        "prompt_token_ids": [5, 151935],
        "response_token_ids": ([7, 8, 9], [])[index],
        "behaviour_logprobs": ([-0.1, float("nan"), -1e-45], [])[index],
        "versions": ([10, 12, 12], [])[index],
    }
    for index in (0, 1)
]
LISTS = {
    "prompt_token_ids": pa.list_(pa.int64()),
    "response_token_ids": pa.list_(pa.int64()),
    "behaviour_logprobs": pa.list_(pa.float32()),
    "versions": pa.list_(pa.int64()),
}


def write_former(path: Path, about: dict[str, Any] | None = None, drop: tuple[str, ...] = ()):
    columns = {
        name: pa.array([row[name] for row in ROWS], LISTS.get(name))
        for name in ROWS[0]
        if name not in drop
    }
    table = pa.table(columns).replace_schema_metadata({KEY: json.dumps(about or ABOUT)})
    path.parent.mkdir(exist_ok=True)
    pq.write_table(table, path, compression="zstd", write_page_checksum=True)


def convert(*arguments: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "examples/convert_dumps.py", *map(str, arguments)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_every_value_of_a_former_dump_is_in_the_new_one_or_its_texts(tmp_path: Path) -> None:
    source = tmp_path / "old" / "step_000003.parquet"
    write_former(source)
    before = source.read_bytes()

    result = convert(source.parent, tmp_path / "new")

    assert result.returncode == 0, result.stderr
    assert source.read_bytes() == before
    batch = read_batch(tmp_path / "new" / source.name)
    assert (batch.step, batch.version) == (3, 12)
    assert (batch.stats.generated_tokens, batch.stats.generation_s) == (17, 0.5)
    assert (batch.stats.dropped_groups, batch.stats.lost_requests) == ({"stale": 1}, 0)
    first, second = batch.samples
    assert [(s.group_id, s.index) for s in batch.samples] == [(4, 0), (4, 1)]
    assert (first.prompt.prompt_id, first.prompt.source) == ("train.jsonl:9", "sums")
    assert first.prompt.token_ids.tolist() == [5, 151935]
    assert first.response_token_ids.tolist() == [7, 8, 9]
    logprobs = np.array([-0.1, np.nan, -1e-45], np.float32)
    assert first.behaviour_logprobs.tobytes() == logprobs.tobytes()
    assert first.versions == ((10, 1), (12, 2))
    assert len(second.response_token_ids) == len(second.behaviour_logprobs) == 0
    assert second.versions == ()
    assert [s.finish_reason for s in batch.samples] == ["stop", "length"]
    assert [s.reward for s in batch.samples] == [0.0, 0.1]
    assert second.reward_components == {"math": 0.1}
    assert [s.answer_found for s in batch.samples] == [True, False]
    assert pq.read_table(tmp_path / "new" / "texts" / source.name).to_pylist() == [
        {
            "group_id": 4,
            "index": index,
            "prompt_text": "What is 6 · 7?",
            "answer": "42",
            "response_text": f"null \x00 and 𝛑 {index}",
        }
        for index in (0, 1)
    ]


def test_the_oldest_dumps_have_neither_sources_nor_parts_of_rewards(tmp_path: Path) -> None:
    write_former(tmp_path / "old" / "step_000003.parquet", drop=("source", "reward_components"))

    result = convert(tmp_path / "old", tmp_path / "new")

    assert result.returncode == 0, result.stderr
    (sample, _) = read_batch(tmp_path / "new" / "step_000003.parquet").samples
    assert (sample.prompt.source, sample.reward_components) == ("", {})


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("new format", "step_000001.parquet: dump format 2, this script converts 1; only dumps"),
        ("cut short", "step_000001.parquet: not a readable parquet file ("),
        ("foreign", "step_000001.parquet: a parquet file but no rollout dump"),
        ("too large an id", "step_000001.parquet: a token id of 2147483648 does not fit"),
        ("empty", "holds no step_*.parquet"),
        ("dumps in the target", "holds dumps already"),
    ],
)
def test_what_cannot_be_converted_is_one_line(
    tmp_path: Path, name: str, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tmp_path / "old", tmp_path / "new"
    path = source / "step_000001.parquet"
    source.mkdir()
    if name == "new format":
        write_batch(path, make_batch())
    elif name == "foreign":
        pq.write_table(pa.table({"a": [1]}), path)
    elif name != "empty":
        if name == "too large an id":
            monkeypatch.setitem(ROWS[0], "prompt_token_ids", [2**31])
        write_former(path)
    if name == "cut short":
        path.write_bytes(path.read_bytes()[:-20])
    if name == "dumps in the target":
        write_former(target / path.name)
    before = list(target.rglob("*"))

    result = convert(source, target)

    assert result.returncode == 1
    assert complaint in result.stderr
    assert result.stderr.count("\n") == 1
    assert list(target.rglob("*")) == before
