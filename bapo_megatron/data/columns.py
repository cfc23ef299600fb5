"""Parquet files with a row per record; each column is declared once, for writing and reading.

What belongs to the file as a whole is JSON in its key-value metadata. Pages have checksums.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bapo_megatron.errors import first_line
from bapo_megatron.runtime.calls import decode_json, shown_value
from bapo_megatron.runtime.files import parse_json

PARQUET_ERRORS = (pa.ArrowException, OSError, UnicodeDecodeError)
"""What Arrow raises for a damaged file; names of columns are decoded when it is opened."""


class DumpError(ValueError):
    """The file is damaged, or of another kind; the message is one line with its name."""


@dataclass(frozen=True, slots=True)
class RowFile[RecordT]:
    """A kind of parquet file: its columns and metadata."""

    what: str
    """Its name in messages."""
    remedy: str
    """What to do about a damaged one."""
    format: int
    columns: Mapping[str, tuple[Any, Callable[[RecordT], Any]]]
    """Arrow type of each column, and what gets its value from a record. Lists of numbers are read
    as arrays, without a Python object per element."""
    about: Any = dict[str, Any]
    """Type of the metadata about the whole file, ``format`` included."""
    key: str = "bapo_megatron.rollout"
    """Key of the metadata in the file."""
    optional: Mapping[str, tuple[Any, Callable[[RecordT], Any]]] = field(default_factory=dict)
    """Columns that a file may lack; its rows then lack them, too."""

    def write(
        self,
        stream: Any,
        chunks: Iterable[Sequence[RecordT]],
        about: Mapping[str, Any],
        optional_names: Sequence[str] = (),
    ) -> None:
        """Write the records of each chunk as a row group, with these optional columns.

        Raises:
            OSError: The stream cannot be written.
        """
        declared = {**self.columns, **{name: self.optional[name] for name in optional_names}}
        kinds = {name: kind for name, (kind, _) in declared.items()}
        arrays = [name for name, kind in kinds.items() if _is_array(kind)]
        metadata = {self.key: json.dumps({"format": self.format, **about})}
        with pq.ParquetWriter(
            stream,
            pa.schema(kinds, metadata),
            compression="zstd",
            compression_level=1,
            write_page_checksum=True,
            use_dictionary=[name for name, kind in kinds.items() if not pa.types.is_nested(kind)],
            write_statistics=[name for name in kinds if not pa.types.is_nested(kinds[name])],
            # Byte planes of ids and log-probs compress better and faster.
            column_encoding={f"{name}.list.element": "BYTE_STREAM_SPLIT" for name in arrays},
        ) as writer:
            for records in chunks:
                columns = [
                    pa.array([value_of(record) for record in records], kind)
                    for kind, value_of in declared.values()
                ]
                writer.write_table(pa.table(columns, schema=writer.schema))

    def read(self, source: Any, name: str) -> tuple[Any, Iterator[dict[str, Any]]]:
        """Return the metadata, of type ``about``, and an iterator that reads the rows.

        Arrays are read-only views of a row group's columns. ``source`` is a path, a file or Arrow's
        buffer, ``name`` what messages call it.

        Raises:
            DumpError: It is damaged, of another kind or format; the iterator raises it as well.
        """
        file, about = self.open(source, name)
        return about, self._rows(file, name)

    def open(self, source: Any, name: str) -> tuple[pq.ParquetFile, Any]:
        """Return the open file and its metadata; arguments and errors as those of ``read``."""
        try:
            file = pq.ParquetFile(source, page_checksum_verification=True)
        except PARQUET_ERRORS as error:
            raise self._unreadable(name, error) from error
        metadata = (file.schema_arrow.metadata or {}).get(self.key.encode())
        if metadata is None:
            raise DumpError(
                f"{name}: a parquet file but no {self.what} (metadata '{self.key}' is missing); "
                "give a file that a run of this version wrote"
            )
        place = f"{name}: metadata '{self.key}'"
        try:
            about = parse_json(metadata)
            version = about.get("format") if isinstance(about, dict) else None
            if version == self.format and type(version) is int:
                return file, decode_json(self.about, metadata)
        except ValueError as error:
            raise DumpError(f"{place}: {error}; {self.remedy}") from error
        raise DumpError(
            f"{place}: {self.what} format {shown_value(version)}, this version reads format "
            f"{self.format}; read it with the version that wrote it"
        )

    def row_groups(self, file: pq.ParquetFile, name: str) -> Iterator[dict[str, pa.Array]]:
        """Read the columns of each row group; every value is there, and of its column's type."""
        for number in range(file.num_row_groups):
            try:
                # Without Arrow's threads: one that releases the content, a Python object, while the
                # interpreter ends (a short command) aborts the process. They are no faster.
                table = file.read_row_group(number, use_threads=False)
            except PARQUET_ERRORS as error:
                raise self._unreadable(name, error) from error
            columns, declared = {}, {**self.columns, **self.optional}
            for column in declared:
                count = table.column_names.count(column)
                if count > 1 or (count == 0 and column in self.columns):
                    problem = "occurs twice" if count else "is missing"
                    raise DumpError(f"{name}: column '{column}' {problem}; {self.remedy}")
            for column, (kind, _) in declared.items():
                if column not in table.column_names:
                    continue
                chunks = table[column]
                # ``combine_chunks`` copies a single chunk, too.
                array = chunks.chunk(0) if chunks.num_chunks == 1 else chunks.combine_chunks()
                if array.type != kind:
                    raise DumpError(
                        f"{name}: column '{column}' must be {kind}, got {array.type}; {self.remedy}"
                    )
                elements = array.flatten() if pa.types.is_list(kind) else array
                if array.null_count or elements.null_count:
                    row = next(n for n, value in enumerate(array.to_pylist()) if _has_null(value))
                    group_id, index = (table[key][row].as_py() for key in ("group_id", "index"))
                    raise DumpError(
                        f"{name}: sample {index} of group {group_id}: column '{column}' must hold "
                        f"no null; {self.remedy}"
                    )
                columns[column] = array
            yield columns

    def _rows(self, file: pq.ParquetFile, name: str) -> Iterator[dict[str, Any]]:
        for columns in self.row_groups(file, name):
            try:
                values = [_values(array) for array in columns.values()]
            except UnicodeDecodeError as error:
                raise self._unreadable(name, error) from error
            for row in zip(*values, strict=True):
                yield dict(zip(columns, row, strict=True))

    def _unreadable(self, name: str, error: Exception) -> DumpError:
        return DumpError(
            f"{name}: not a readable parquet file ({first_line(error)}); {self.remedy}"
        )


def _values(array: Any) -> Sequence[Any]:
    if not _is_array(array.type) or not len(array):
        values: list[Any] = array.to_pylist()
        return values
    # Not ``to_numpy``: it imports pandas, a second and 50 MB on every rank.
    flat, offsets = np.from_dlpack(array.flatten()), np.from_dlpack(array.offsets)
    edges = (offsets - offsets[0]).tolist()
    return [flat[start:end] for start, end in pairwise(edges)]


def _has_null(value: Any) -> bool:
    return value is None or (isinstance(value, list) and None in value)


def _is_array(kind: Any) -> bool:
    return bool(pa.types.is_list(kind) and pa.types.is_primitive(kind.value_type))
