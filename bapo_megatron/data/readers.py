"""From files and the Hugging Face Hub to rows: the fields of each, and its place for messages."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from bapo_megatron.config.data import DatasetConfig

_LONGEST_VALUE = 60
_LONGEST_REASON = 300
_BATCH_ROWS = 1024
"""Rows that are held as Python values at a time; a row may have columns of megabytes."""


class DataError(ValueError):
    """Prompts that cannot be used; one line with file, row, field and reason."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a set, readable or not."""

    prompt_id: str
    """``<file name or Hub id>:<row, from 0>``."""
    place: str
    """The row for messages, such as ``data/train.jsonl:17`` (lines count from 1)."""
    fields: dict[str, Any] | None
    """Its columns; none where the row cannot be read."""
    problem: str = ""
    """Why it cannot be read."""


def read_rows(dataset: DatasetConfig) -> Iterator[Row]:
    """Read a set row by row.

    Args:
        dataset: Files, which are read in the order of their names, or an id of the Hub.

    Raises:
        DataError: A file or set as a whole cannot be read.
        OSError: A file cannot be opened.
    """
    if dataset.path is None:
        yield from _read_hub(dataset)
        return
    for path in dataset.files():
        reader = {".jsonl": _read_jsonl, ".json": _read_json, ".parquet": _read_parquet}.get(
            path.suffix
        )
        if reader is None:
            raise DataError(f"{path}: must end in .jsonl, .json or .parquet; convert the file")
        yield from reader(path)


def shown(value: Any) -> str:
    """A value for a message: as JSON, cut where it is long."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= _LONGEST_VALUE else text[:_LONGEST_VALUE] + "…"


def _read_jsonl(path: Path) -> Iterator[Row]:
    """One JSON object per line; blank lines count as rows but hold no prompt."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines):
            if line.strip():
                prompt_id, place = f"{path.name}:{number}", f"{path}:{number + 1}"
                try:
                    record = _parse_json(line)
                except ValueError as error:
                    yield Row(prompt_id, place, None, str(error))
                else:
                    yield _row(prompt_id, place, record)


def _read_json(path: Path) -> Iterator[Row]:
    """A JSON list of objects."""
    try:
        records = _parse_json(path.read_bytes())
    except ValueError as error:
        raise DataError(f"{path}: {error}; correct the file") from error
    if not isinstance(records, list):
        raise DataError(f"{path}: must be a JSON list of objects, got {shown(records)}")
    for number, record in enumerate(records):
        yield _row(f"{path.name}:{number}", f"{path}: entry {number}", record)


def _read_parquet(path: Path) -> Iterator[Row]:
    with path.open("rb") as stream:
        try:
            batches = pq.ParquetFile(stream).iter_batches(batch_size=_BATCH_ROWS)
            yield from _rows_of_batches(batches, path.name, f"{path}: row ")
        except (pa.ArrowException, OSError) as error:
            reason = str(error).partition("\n")[0]
            raise DataError(
                f"{path}: not a readable parquet file ({reason}); give it again"
            ) from error


def _read_hub(dataset: DatasetConfig) -> Iterator[Row]:
    """A data set of the Hub; the library takes it from its cache where there is no network."""
    import datasets  # takes seconds, and most runs read files

    place = f"{dataset.hub} ({dataset.subset + ', ' if dataset.subset else ''}{dataset.split})"
    try:
        loaded = datasets.load_dataset(
            dataset.hub, name=dataset.subset or None, split=dataset.split
        )
    except (datasets.exceptions.DatasetsError, OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:_LONGEST_REASON]
        remedy = "check hub, subset and split"
        if isinstance(error, ConnectionError):
            cache = datasets.config.HF_DATASETS_CACHE
            remedy = (
                f"it is not in the cache {cache} either: load it once where there is a network, or "
                "set path to its file"
            )
        raise DataError(f"{place}: cannot be loaded ({reason}); {remedy}") from error
    # As arrow, so that images and sound are not decoded.
    batches = loaded.with_format("arrow").iter(batch_size=_BATCH_ROWS)
    yield from _rows_of_batches(batches, dataset.hub, f"{place}: row ")


def _rows_of_batches(batches: Iterator[Any], name: str, place: str) -> Iterator[Row]:
    """The rows of arrow tables or record batches."""
    first = 0
    for batch in batches:
        try:
            records = batch.to_pylist()
        except UnicodeDecodeError:
            records = [_arrow_record(batch, number) for number in range(batch.num_rows)]
        for number, record in enumerate(records, start=first):
            if isinstance(record, dict):
                yield Row(f"{name}:{number}", f"{place}{number}", record)
            else:
                yield Row(f"{name}:{number}", f"{place}{number}", None, record)
        first += batch.num_rows


def _arrow_record(batch: Any, number: int) -> Any:
    """One row's fields, or why it has none."""
    try:
        return batch.slice(number, 1).to_pylist()[0]
    except UnicodeDecodeError as error:
        return f"not UTF-8 ({error.reason})"


def _row(prompt_id: str, place: str, record: Any) -> Row:
    if isinstance(record, dict):
        return Row(prompt_id, place, record)
    problem = f"must be an object with named fields, got {shown(record)}"
    return Row(prompt_id, place, None, problem)


def _parse_json(content: bytes) -> Any:
    try:
        return json.loads(content)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 ({error.reason})") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON ({error.msg})") from error
    except RecursionError as error:
        raise ValueError("not valid JSON (nested too deeply)") from error
    except ValueError as error:  # an integer of thousands of digits
        raise ValueError(f"not valid JSON ({error})") from error
