"""Rollout dumps: one training batch as one parquet file, a row per sample.

The file is the record that people read, the input of ``replay``, and the wire format between the
collector and the trainer. It holds everything the trainer needs, bit for bit; what belongs to the
batch as a whole (step, version, statistics) is JSON in the file's key-value metadata.

Shape legend: R = response tokens of one sample.
"""

from __future__ import annotations

import io
import json
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bapo_megatron.files import atomic_write_bytes
from bapo_megatron.types import FinishReason, Group, Prompt, RolloutBatch, RolloutStats, Sample

if TYPE_CHECKING:
    from collections.abc import Sequence

_METADATA_KEY = b"bapo_megatron.rollout"
_FORMAT = 1
_TOKEN_COLUMNS = {
    "prompt_token_ids": pa.int64(),
    "response_token_ids": pa.int64(),
    "behaviour_logprobs": pa.float32(),
    "versions": pa.int64(),
}
_VALUE_COLUMNS = {
    "group_id": pa.int64(),
    "index": pa.int64(),
    "prompt_id": pa.string(),
    "prompt_text": pa.string(),
    "answer": pa.string(),
    "source": pa.string(),
    "finish_reason": pa.string(),
    "response_text": pa.string(),
    "reward": pa.float64(),
    "answer_found": pa.bool_(),
}


_JSON_COLUMNS = ("reward_components",)
"""Text columns that hold JSON; older dumps have none of them."""
_LATER_COLUMNS = {"source": ""}
"""Columns that older dumps lack, and what stands for them."""


class DumpError(ValueError):
    """A file that is no intact rollout dump; the message is one line with its name."""


def write_batch(path: Path, batch: RolloutBatch) -> None:
    """Write a batch as a zstd-compressed parquet file, complete or not at all.

    Args:
        path: Destination; missing parent directories are created.
        batch: Finished samples; groups of equal size.

    Raises:
        DumpError: The batch breaks a rule that ``read_batch`` checks.
        OSError: The file cannot be written (disk full, no permission); nothing is left behind.
    """
    atomic_write_bytes(path, dump_bytes(batch))


def dump_bytes(batch: RolloutBatch) -> bytes:
    """The content of a dump file, for another rank or a file.

    Raises:
        DumpError: The batch breaks a rule that ``read_batch`` checks.
    """
    _check_batch(batch, f"batch of step {batch.step}")
    samples = batch.samples
    columns = {
        name: pa.array(_values(samples, name), kind) for name, kind in _VALUE_COLUMNS.items()
    }
    for name in _JSON_COLUMNS:
        columns[name] = pa.array([json.dumps(value) for value in _values(samples, name)])
    for name, kind in _TOKEN_COLUMNS.items():
        columns[name] = _list_column(_values(samples, name), kind)
    about = {
        "format": _FORMAT,
        "step": batch.step,
        "version": batch.version,
        "stats": asdict(batch.stats),
    }
    metadata = {_METADATA_KEY: json.dumps(about).encode()}
    table = pa.table(columns).replace_schema_metadata(metadata)
    stream = io.BytesIO()
    pq.write_table(table, stream, compression="zstd", write_page_checksum=True)
    return stream.getvalue()


def read_batch(source: Path | bytes) -> RolloutBatch:
    """Read what ``write_batch`` wrote.

    Log-probs are not required to be finite: the trainer reports those with sample and position.

    Args:
        source: The file, or its content.

    Raises:
        DumpError: The file is cut short, no dump, or inconsistent.
        OSError: The file cannot be opened.
    """
    name = str(source) if isinstance(source, Path) else "rollout batch"
    content = source.read_bytes() if isinstance(source, Path) else source
    try:
        table = pq.read_table(pa.BufferReader(content), page_checksum_verification=True)
    except (pa.ArrowException, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise DumpError(
            f"{name}: not a readable parquet file ({reason}); delete it, or write the dump again"
        ) from error
    about = _about(table, name)
    columns = {column: _read_column(table, column, name) for column in _columns()}
    for column in _JSON_COLUMNS:
        columns[column] = _read_json_column(table, column, name)
    batch = RolloutBatch(
        step=about["step"],
        version=about["version"],
        groups=_groups(columns, name),
        stats=RolloutStats(**about["stats"]),
    )
    _check_batch(batch, name)
    return batch


def _columns() -> dict[str, Any]:
    """Every column with its arrow type."""
    return _VALUE_COLUMNS | {name: pa.list_(kind) for name, kind in _TOKEN_COLUMNS.items()}


def _values(samples: Sequence[Sample], column: str) -> list[Any]:
    """One value per sample."""
    prompt_fields = {
        "prompt_id": "prompt_id",
        "prompt_token_ids": "token_ids",
        "prompt_text": "text",
        "answer": "answer",
        "source": "source",
    }
    if column in prompt_fields:
        return [getattr(sample.prompt, prompt_fields[column]) for sample in samples]
    return [getattr(sample, column) for sample in samples]


def _list_column(rows: Sequence[Any], kind: Any) -> Any:
    """A list column from one array per row, without a Python object per token."""
    dtype = kind.to_pandas_dtype()
    offsets = np.cumsum([0, *(len(row) for row in rows)]).astype(np.int32)
    flat = np.concatenate([np.empty(0, dtype), *(np.asarray(row, dtype) for row in rows)])
    return pa.ListArray.from_arrays(offsets, pa.array(flat, kind))


def _about(table: Any, name: str) -> dict[str, Any]:
    """Step, version and statistics from the file's metadata."""
    encoded = (table.schema.metadata or {}).get(_METADATA_KEY)
    if encoded is None:
        raise DumpError(
            f"{name}: a parquet file but no rollout dump (metadata "
            f"'{_METADATA_KEY.decode()}' is missing); give a file that a run wrote"
        )
    about: dict[str, Any] = json.loads(encoded)
    if about["format"] != _FORMAT:
        raise DumpError(
            f"{name}: dump format {about['format']}, this version reads {_FORMAT}; "
            "read it with the version that wrote it"
        )
    return about


def _read_column(table: Any, column: str, name: str) -> list[Any]:
    """One value per row; token columns as numpy arrays."""
    kind = _columns()[column]
    if column not in table.column_names and column in _LATER_COLUMNS:
        return [_LATER_COLUMNS[column]] * table.num_rows
    if column not in table.column_names:
        raise DumpError(f"{name}: column '{column}' is missing; write the dump again")
    stored = table[column].combine_chunks()
    if stored.type != kind or stored.null_count:
        raise DumpError(
            f"{name}: column '{column}' must be {kind} without nulls, got {stored.type} with "
            f"{stored.null_count} nulls; write the dump again"
        )
    if column not in _TOKEN_COLUMNS:
        values: list[Any] = stored.to_pylist()
        return values
    # Copied, so that the samples' arrays are writable and do not hold the whole file.
    flat = stored.flatten().to_numpy(zero_copy_only=False).copy()
    offsets = stored.offsets.to_numpy()
    return np.split(flat, offsets[1:-1] - offsets[0]) if len(stored) else []


def _read_json_column(table: Any, column: str, name: str) -> list[Any]:
    """One value per row; empty mappings where the file is older than the column."""
    if column not in table.column_names:
        return [{} for _ in range(len(table))]
    try:
        return [json.loads(value) for value in table[column].to_pylist()]
    except (ValueError, TypeError) as error:
        raise DumpError(
            f"{name}: column '{column}' must hold JSON ({error}); write the dump again"
        ) from error


def _groups(columns: dict[str, list[Any]], name: str) -> tuple[Group, ...]:
    """Samples of consecutive rows with one ``group_id``; they share one ``Prompt``."""
    rows = [
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    ]
    groups = []
    for group_id, members in groupby(rows, key=lambda row: row["group_id"]):
        group_rows = list(members)
        first = group_rows[0]
        prompt = Prompt(
            prompt_id=first["prompt_id"],
            token_ids=tuple(first["prompt_token_ids"].tolist()),
            answer=first["answer"],
            text=first["prompt_text"],
            source=first["source"],
        )
        for row in group_rows:
            if row["prompt_id"] != prompt.prompt_id:
                raise DumpError(
                    f"{name}: group {group_id} mixes prompts '{prompt.prompt_id}' and "
                    f"'{row['prompt_id']}'; write the dump again"
                )
        groups.append(Group(group_id, tuple(_sample(row, prompt, name) for row in group_rows)))
    return tuple(groups)


def _sample(row: dict[str, Any], prompt: Prompt, name: str) -> Sample:
    try:
        finish_reason = FinishReason(row["finish_reason"])
    except ValueError as error:
        raise DumpError(
            f"{name}: sample {row['index']} of group {row['group_id']}: unknown finish_reason "
            f"'{row['finish_reason']}'; write the dump again"
        ) from error
    return Sample(
        group_id=row["group_id"],
        index=row["index"],
        prompt=prompt,
        response_token_ids=row["response_token_ids"],
        behaviour_logprobs=row["behaviour_logprobs"],
        versions=row["versions"],
        finish_reason=finish_reason,
        response_text=row["response_text"],
        reward=row["reward"],
        reward_components=row["reward_components"],
        answer_found=row["answer_found"],
    )


def _check_batch(batch: RolloutBatch, name: str) -> None:
    """Hold the rules of an intact batch."""
    if not batch.groups:
        raise DumpError(f"{name}: the batch has no samples; collect at least one group")
    group_size = len(batch.groups[0].samples)
    group_ids = [group.group_id for group in batch.groups]
    if len(set(group_ids)) != len(group_ids):
        raise DumpError(f"{name}: a group_id occurs twice; its rows must stand together")
    for group in batch.groups:
        indices = [sample.index for sample in group.samples]
        if indices != list(range(group_size)):
            raise DumpError(
                f"{name}: group {group.group_id} holds samples {indices}, expected 0 to "
                f"{group_size - 1} as in the first group; write the dump again"
            )
        for sample in group.samples:
            _check_sample(sample, name)


def _check_sample(sample: Sample, name: str) -> None:
    place = f"{name}: sample {sample.index} of group {sample.group_id}"
    lengths = (
        len(sample.response_token_ids),
        len(sample.behaviour_logprobs),
        len(sample.versions),
    )
    if len(set(lengths)) != 1:
        raise DumpError(
            f"{place}: {lengths[0]} response tokens, {lengths[1]} behaviour log-probs and "
            f"{lengths[2]} versions must be equally many; write the dump again"
        )
    if not sample.prompt.token_ids:
        raise DumpError(f"{place}: the prompt has no tokens; write the dump again")
