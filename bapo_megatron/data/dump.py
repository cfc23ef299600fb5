"""Rollout dumps: one training batch as one parquet file, a row per sample.

The file is the input of ``replay`` and, byte for byte, what every rank gets: it is encoded once,
by the collector. It holds everything that training needs, bit for bit, and no text; what belongs
to the batch as a whole (step, version, statistics) is JSON in the file's key-value metadata. Texts
for people are in a file of the same name in ``texts/`` beside it, joined by group_id and index.

Shape legend: P = prompt tokens, R = tokens of one response, Q = those of them that the policy
sampled, K = its version spans, W = spans that an environment wrote.
"""

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bapo_megatron.data.staleness import num_spanned
from bapo_megatron.files import atomic_write_bytes
from bapo_megatron.types import (
    EncodedBatch,
    FinishReason,
    Group,
    PromptTokens,
    RolloutBatch,
    RolloutStats,
    Sample,
    SampleText,
    VersionSpan,
    WrittenSpan,
)

METADATA_KEY = b"bapo_megatron.rollout"
FORMAT = 4
"""Steps count from 1; in earlier formats they counted from 0."""

_COLUMNS: dict[str, tuple[Any, Callable[[Sample], Any]]] = {
    "group_id": (pa.int64(), lambda sample: sample.group_id),
    "index": (pa.int64(), lambda sample: sample.index),
    "prompt_id": (pa.string(), lambda sample: sample.prompt.prompt_id),
    "source": (pa.string(), lambda sample: sample.prompt.source),
    "finish_reason": (pa.string(), lambda sample: sample.finish_reason.value),
    "reward": (pa.float64(), lambda sample: sample.reward),
    "reward_components": (pa.string(), lambda sample: json.dumps(sample.reward_components)),
    "answer_found": (pa.bool_(), lambda sample: sample.answer_found),
    "prompt_token_ids": (pa.list_(pa.int32()), lambda sample: sample.prompt.token_ids),
    "response_token_ids": (pa.list_(pa.int32()), lambda sample: sample.response_token_ids),
    "behaviour_logprobs": (pa.list_(pa.float32()), lambda sample: sample.behaviour_logprobs),
    "versions": (pa.list_(pa.int32()), lambda sample: [v for v, _ in sample.versions]),
    "version_tokens": (pa.list_(pa.int32()), lambda sample: [n for _, n in sample.versions]),
    "written_starts": (pa.list_(pa.int32()), lambda sample: [start for start, _ in sample.written]),
    "written_tokens": (pa.list_(pa.int32()), lambda sample: [n for _, n in sample.written]),
}
"""One value per sample, or a list: [P], [R], [Q], [K], [K], [W], [W]."""
_LISTS = [name for name, (kind, _) in _COLUMNS.items() if pa.types.is_list(kind)]
_ARRAYS = ("prompt_token_ids", "response_token_ids", "behaviour_logprobs")
"""Lists that are read as arrays, without a Python object per token."""
_TEXT_COLUMNS: dict[str, Any] = {
    "group_id": pa.int64(),
    "index": pa.int64(),
    "prompt_text": pa.string(),
    "answer": pa.string(),
    "response_text": pa.string(),
    "turns": pa.list_(pa.string()),
}
"""The fields of ``SampleText``."""


class DumpError(ValueError):
    """The file is not an intact rollout dump; the message is one line with its name."""


def write_batch(path: Path, batch: RolloutBatch) -> None:
    """Write a batch as a parquet file, complete or not at all; parent directories are created.

    Raises:
        DumpError: The batch breaks a rule that ``decode_batch`` checks.
        OSError: The file cannot be written (disk full, no permission); nothing is left behind.
    """
    atomic_write_bytes(path, encode_batch(batch))


def read_batch(path: Path) -> RolloutBatch:
    """Read and decode a dump; raises what ``read_encoded`` and ``decode_batch`` do."""
    return decode_batch(read_encoded(path))


def read_encoded(path: Path) -> EncodedBatch:
    """Read a dump without looking into it; raises ``OSError``."""
    with path.open("rb") as file:
        content = bytearray(path.stat().st_size)
        del content[file.readinto(content) :]
    return EncodedBatch(str(path), content)


def encode_batch(batch: RolloutBatch) -> bytes:
    """Encode a batch as the content of a dump.

    Raises:
        DumpError: The batch breaks a rule that ``decode_batch`` checks.
    """
    _check_batch(batch, f"batch of step {batch.step}")
    columns = {}
    for name, (kind, value_of) in _COLUMNS.items():
        values = [value_of(sample) for sample in batch.samples]
        columns[name] = _list_column(values, kind) if name in _LISTS else pa.array(values, kind)
    # Byte planes of ids and log-probs are smaller than their values or a dictionary, and faster.
    return _parquet(
        columns,
        {"step": batch.step, "version": batch.version, "stats": asdict(batch.stats)},
        use_dictionary=["prompt_id", "source", "finish_reason"],
        write_statistics=[name for name in _COLUMNS if name not in _LISTS],
        column_encoding={f"{name}.list.element": "BYTE_STREAM_SPLIT" for name in _LISTS},
    )


def decode_batch(encoded: EncodedBatch) -> RolloutBatch:
    """Read what ``encode_batch`` wrote.

    The arrays of the samples are read-only views of the columns. Log-probs are not required to be
    finite: the trainer reports those with sample and position.

    Raises:
        DumpError: It is damaged, not a dump of this format, or inconsistent.
    """
    about, rows = _read_rows(encoded, {name: kind for name, (kind, _) in _COLUMNS.items()})
    batch = RolloutBatch(
        step=about["step"],
        version=about["version"],
        groups=_groups(rows, encoded.name),
        stats=RolloutStats(**about["stats"]),
    )
    _check_batch(batch, encoded.name)
    return batch


def step_of(encoded: EncodedBatch) -> int:
    """Return the step of a dump without reading its samples; raises as ``decode_batch``."""
    step: int = _open(encoded, reads=False)[1]["step"]
    return step


def texts_path(path: Path) -> Path:
    """Return where the texts of a dump are."""
    return path.parent / "texts" / path.name


def write_texts(path: Path, step: int, texts: Sequence[SampleText]) -> None:
    """Write what people read of a batch beside its dump ``path``: one text per sample, in order."""
    columns = {
        name: pa.array([getattr(text, name) for text in texts], kind)
        for name, kind in _TEXT_COLUMNS.items()
    }
    content = _parquet(columns, {"step": step}, use_dictionary=["prompt_text", "answer"])
    atomic_write_bytes(texts_path(path), content)


def read_texts(path: Path) -> tuple[SampleText, ...]:
    """Read what ``write_texts`` wrote; raises ``DumpError``, or ``OSError`` where there is none."""
    _, rows = _read_rows(read_encoded(texts_path(path)), _TEXT_COLUMNS, holds_texts=True)
    return tuple(SampleText(**{**row, "turns": tuple(row["turns"])}) for row in rows)


def _parquet(columns: dict[str, Any], about: dict[str, Any], **settings: Any) -> bytes:
    """Encode columns with checksums; what belongs to all rows is JSON in the metadata."""
    metadata = {METADATA_KEY: json.dumps({"format": FORMAT, **about}).encode()}
    stream = io.BytesIO()
    pq.write_table(
        pa.table(columns).replace_schema_metadata(metadata),
        stream,
        compression="zstd",
        compression_level=1,
        write_page_checksum=True,
        **settings,
    )
    return stream.getvalue()


def _list_column(rows: Sequence[Any], kind: Any) -> Any:
    """A list column from one array per row, without a Python object per token."""
    dtype = kind.value_type.to_pandas_dtype()
    offsets = np.cumsum([0, *(len(row) for row in rows)]).astype(np.int32)
    flat = np.concatenate([np.empty(0, dtype), *(np.asarray(row, dtype) for row in rows)])
    return pa.ListArray.from_arrays(offsets, pa.array(flat, kind.value_type))


def _open(
    encoded: EncodedBatch, *, holds_texts: bool = False, reads: bool = True
) -> tuple[Any, dict[str, Any]]:
    """The table, unless it is not read, and what its metadata say about all of it."""
    name, key = encoded.name, METADATA_KEY.decode()
    try:
        content = pa.BufferReader(encoded.content)
        file = pq.ParquetFile(content, page_checksum_verification=True)
        # Without Arrow's threads: one that lets go of the content, a Python object, while the
        # interpreter ends (a short command) aborts the process. They are no faster.
        table = file.read(use_threads=False) if reads else None
    except (pa.ArrowException, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise DumpError(
            f"{name}: not a readable parquet file ({reason}); delete it, or write the dump again"
        ) from error
    metadata = (file.schema_arrow.metadata or {}).get(METADATA_KEY)
    if metadata is None:
        raise DumpError(
            f"{name}: a parquet file but no rollout dump (metadata '{key}' is missing); give a "
            "file that a run wrote"
        )
    try:
        about: dict[str, Any] = json.loads(metadata)
        found = about["format"]
    except (ValueError, TypeError, KeyError) as error:
        raise DumpError(
            f"{name}: its metadata '{key}' cannot be read ({error!r}); write the dump again"
        ) from error
    if found != FORMAT:
        raise DumpError(
            f"{name}: dump format {found}, this version reads format {FORMAT}; "
            "read it with the version that wrote it"
        )
    if holds_texts and "version" in about:
        above = Path(name).parent.parent
        raise DumpError(f"{name}: a dump where its texts should be; move it to {above}")
    if not holds_texts and "version" not in about:
        raise DumpError(f"{name}: the texts of a dump; give the file in the directory above")
    return table, about


def _read_rows(
    encoded: EncodedBatch, kinds: Mapping[str, Any], *, holds_texts: bool = False
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What the metadata say about all rows, and the columns ``kinds`` of each row."""
    name = encoded.name
    table, about = _open(encoded, holds_texts=holds_texts)
    columns: dict[str, Sequence[Any]] = {}
    for column, kind in kinds.items():
        if column not in table.column_names:
            raise DumpError(f"{name}: column '{column}' is missing; write the dump again")
        chunks = table[column]
        # ``combine_chunks`` copies a single chunk, too.
        stored = chunks.chunk(0) if chunks.num_chunks == 1 else chunks.combine_chunks()
        if stored.type != kind or stored.null_count:
            raise DumpError(
                f"{name}: column '{column}' must be {kind} without nulls, got {stored.type} with "
                f"{stored.null_count} nulls; write the dump again"
            )
        columns[column] = _arrays(stored) if column in _ARRAYS else stored.to_pylist()
    values = zip(*columns.values(), strict=True)
    return about, [dict(zip(columns, row, strict=True)) for row in values]


def _arrays(stored: Any) -> list[np.ndarray]:
    """One array per row of a list column."""
    # Not ``to_numpy``: it imports pandas, a second and 50 MB on every rank.
    flat, offsets = np.from_dlpack(stored.flatten()), np.from_dlpack(stored.offsets)
    return np.split(flat, offsets[1:-1] - offsets[0]) if len(stored) else []


def _groups(all_rows: list[dict[str, Any]], name: str) -> tuple[Group, ...]:
    """Groups of the consecutive rows with one ``group_id``, whose samples share one prompt."""
    groups = []
    for group_id, members in groupby(all_rows, key=lambda row: row["group_id"]):
        rows = list(members)
        first = rows[0]
        # Copied: a view would keep the prompts of all rows, the same one for every row of a group.
        prompt = PromptTokens(first["prompt_id"], first["prompt_token_ids"].copy(), first["source"])
        for row in rows:
            if row["prompt_id"] != prompt.prompt_id:
                raise DumpError(
                    f"{name}: group {group_id} mixes prompts '{prompt.prompt_id}' and "
                    f"'{row['prompt_id']}'; write the dump again"
                )
        groups.append(Group(group_id, tuple(_sample(row, prompt, name) for row in rows)))
    return tuple(groups)


def _sample(row: dict[str, Any], prompt: PromptTokens, name: str) -> Sample:
    place = f"{name}: sample {row['index']} of group {row['group_id']}"
    try:
        finish_reason = FinishReason(row["finish_reason"])
        reward_components = json.loads(row["reward_components"])
    except ValueError as error:
        raise DumpError(
            f"{place}: unusable finish_reason or reward_components ({error}); write the dump again"
        ) from error
    versions, version_tokens = row["versions"], row["version_tokens"]
    starts, written_tokens = row["written_starts"], row["written_tokens"]
    for what, keys, numbers in (
        ("versions", versions, version_tokens),
        ("written spans", starts, written_tokens),
    ):
        if len(keys) != len(numbers):
            raise DumpError(
                f"{place}: {len(keys)} {what} but {len(numbers)} numbers of their tokens; write "
                "the dump again"
            )
    return Sample(
        group_id=row["group_id"],
        index=row["index"],
        prompt=prompt,
        response_token_ids=row["response_token_ids"],
        behaviour_logprobs=row["behaviour_logprobs"],
        versions=tuple(map(VersionSpan, versions, version_tokens)),
        written=tuple(map(WrittenSpan, starts, written_tokens)),
        finish_reason=finish_reason,
        reward=row["reward"],
        reward_components=reward_components,
        answer_found=row["answer_found"],
    )


def _check_batch(batch: RolloutBatch, name: str) -> None:
    if not batch.groups:
        raise DumpError(f"{name}: the batch has no samples; collect at least one group")
    group_size = len(batch.groups[0].samples)
    if len({group.group_id for group in batch.groups}) != len(batch.groups):
        raise DumpError(f"{name}: a group_id occurs twice; its rows must stand together")
    for group in batch.groups:
        indices = [sample.index for sample in group.samples]
        if indices != list(range(group_size)):
            raise DumpError(
                f"{name}: group {group.group_id} holds samples {indices}, expected 0 to "
                f"{group_size - 1} as in the first group; write the dump again"
            )
        for sample in group.samples:
            if problem := _problem(sample):
                place = f"{name}: sample {sample.index} of group {sample.group_id}"
                raise DumpError(f"{place}: {problem}; write the dump again")


def _problem(sample: Sample) -> str:
    """Describe what is wrong with a sample; empty if nothing is."""
    end = 0
    for start, num_tokens in sample.written:
        if start <= end or num_tokens < 1:
            return (
                "what the environment wrote must stand between turns of the policy, got "
                f"{num_tokens} tokens from {start}"
            )
        end = start + num_tokens
    if sample.written and end >= len(sample.response_token_ids):
        return (
            f"must end with a turn of the policy, got {len(sample.response_token_ids)} tokens of "
            f"which the environment wrote those up to {end}"
        )
    lengths = sample.num_sampled, len(sample.behaviour_logprobs), num_spanned(sample.versions)
    if len(set(lengths)) != 1:
        return (
            f"{lengths[0]} sampled tokens, {lengths[1]} behaviour log-probs and {lengths[2]} "
            "tokens with a version must be equally many"
        )
    if any(span.num_tokens < 1 for span in sample.versions):
        return "a weights version without tokens"
    return "" if len(sample.prompt.token_ids) else "the prompt has no tokens"
