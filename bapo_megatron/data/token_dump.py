"""Token dumps: what one optimizer update computed of every token, as one parquet file.

A row per token that the policy sampled, in the order of the batch: those of a response stand
together, by position. ``group_id`` and ``index`` name the response in the rollout dump of the step.

Shape legend: T = tokens of an update.
"""

import io
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bapo_megatron.data.columns import PARQUET_ERRORS, DumpError
from bapo_megatron.errors import first_line
from bapo_megatron.runtime.calls import shown_value
from bapo_megatron.runtime.files import atomic_write_bytes, open_regular, parse_json

FORMAT = 2
"""Files of format 1 had no metadata, and their rows named no response."""
TOKEN_COLUMNS: dict[str, Any] = {
    "group_id": pa.int64(),
    "index": pa.int64(),
    "position": pa.int32(),
    "logprob": pa.float32(),
    "behaviour_logprob": pa.float32(),
    "advantage": pa.float32(),
    "entropy": pa.float32(),
    "mask": pa.float32(),
}
"""Arrow's type of each column; docs/dumps.md has their meanings."""
_KEY = b"bapo_megatron.tokens"


def token_dump_path(run_dir: Path, step: int, update: int) -> Path:
    """Return where a run keeps the tokens of an update, counted from 0 in its step."""
    return run_dir / "tokens" / f"step_{step:06d}_update_{update:03d}.parquet"


def token_dump_paths(run_dir: Path, step: int) -> list[Path]:
    """Return the files of a step's updates, in their order."""
    start = f"step_{step:06d}_update_"
    found = [
        (int(match[1]), path)
        for path in (run_dir / "tokens").glob(f"{start}*.parquet")
        if (match := re.fullmatch(rf"{start}(\d+)\.parquet", path.name))
    ]
    return [path for _, path in sorted(found)]


def write_token_dump(path: Path, columns: Mapping[str, np.ndarray]) -> None:
    """Write columns [T], those of ``TOKEN_COLUMNS``, complete or not at all.

    Raises:
        OSError: The file cannot be written.
    """
    metadata = {_KEY: json.dumps({"format": FORMAT})}
    schema = pa.schema(TOKEN_COLUMNS, metadata)
    table = pa.table(
        [pa.array(columns[name], kind) for name, kind in TOKEN_COLUMNS.items()], schema=schema
    )
    content = io.BytesIO()
    pq.write_table(table, content, compression="zstd")
    atomic_write_bytes(path, content.getvalue())


def read_token_dump(path: Path) -> dict[str, np.ndarray]:
    """Return the columns, [T] each.

    Raises:
        DumpError: The file is damaged, not a token dump, or of another format.
        OSError: It cannot be read.
    """
    with open_regular(path) as stream:
        try:
            table = pq.ParquetFile(stream).read(use_threads=False)
        except PARQUET_ERRORS as error:
            reason = first_line(error)
            raise DumpError(f"{path}: not a readable parquet file ({reason}); remove it") from error
    try:
        about = parse_json((table.schema.metadata or {}).get(_KEY, b"null"))
    except ValueError as error:
        raise DumpError(f"{path}: metadata '{_KEY.decode()}': {error}; remove it") from error
    found = about.get("format") if isinstance(about, dict) else None
    if found != FORMAT:
        raise DumpError(
            f"{path}: token dump format {shown_value(found)}, this version reads format {FORMAT}; "
            "read it with the version that wrote it, or move it away"
        )
    columns = {}
    for name, kind in TOKEN_COLUMNS.items():
        if name not in table.column_names or table.schema.field(name).type != kind:
            raise DumpError(f"{path}: column '{name}' must be {kind}; remove the file")
        if table[name].null_count:
            raise DumpError(f"{path}: column '{name}' must hold no nulls; remove the file")
        # Not ``to_numpy``: it imports pandas.
        columns[name] = np.from_dlpack(table[name].combine_chunks())
    return columns
