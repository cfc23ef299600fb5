"""Token dumps: what one optimizer update computed of every token, as one parquet file.

A row per token that the policy sampled, in the order of the batch: those of a response stand
together, by position. ``group_id`` and ``index`` name the response in the rollout dump of the step.

Shape legend: T = tokens of an update.
"""

import io
import json
from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bapo_megatron.data.columns import RowFile
from bapo_megatron.runtime.files import atomic_write_bytes, open_regular

FORMAT = 2
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
"""Arrow's type of each column; docs/formats.md has their meanings."""
_FILE: RowFile[Mapping[str, Any]] = RowFile(
    "token dump",
    "remove it",
    FORMAT,
    {name: (kind, itemgetter(name)) for name, kind in TOKEN_COLUMNS.items()},
    key="bapo_megatron.tokens",
)


def token_dump_path(run_dir: Path, step: int, update: int) -> Path:
    """Return where a run keeps the tokens of an update, counted from 0 in its step."""
    return run_dir / "tokens" / f"step_{step:06d}_update_{update:03d}.parquet"


def token_dump_paths(run_dir: Path, step: int) -> list[Path]:
    """Return the files of a step's updates, in their order."""
    paths = (run_dir / "tokens").glob(f"step_{step:06d}_update_*.parquet")
    return sorted(paths, key=lambda path: (len(path.name), path.name))


def write_token_dump(path: Path, columns: Mapping[str, np.ndarray]) -> None:
    """Write columns [T], those of ``TOKEN_COLUMNS``, complete or not at all.

    Raises:
        OSError: The file cannot be written.
    """
    schema = pa.schema(TOKEN_COLUMNS, {_FILE.key: json.dumps({"format": FORMAT})})
    arrays = [pa.array(columns[name], kind) for name, kind in TOKEN_COLUMNS.items()]
    content = io.BytesIO()
    pq.write_table(pa.table(arrays, schema=schema), content, compression="zstd")
    atomic_write_bytes(path, content.getvalue())


def read_token_dump(path: Path) -> dict[str, np.ndarray]:
    """Return the columns, [T] each.

    Raises:
        DumpError: The file is damaged, not a token dump, or of another format.
        OSError: It cannot be read.
    """
    with open_regular(path) as stream:
        file, _ = _FILE.open(stream, str(path))
        parts = list(_FILE.row_groups(file, str(path)))
    return {
        name: np.concatenate(
            [np.empty(0, kind.to_pandas_dtype()), *(np.from_dlpack(part[name]) for part in parts)]
        )
        for name, kind in TOKEN_COLUMNS.items()
    }
