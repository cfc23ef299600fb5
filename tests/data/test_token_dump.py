"""Token dumps: what is written is read again, and what is none is refused by name."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bapo_megatron.data.columns import DumpError
from bapo_megatron.data.token_dump import (
    TOKEN_COLUMNS,
    read_token_dump,
    token_dump_path,
    write_token_dump,
)


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    path = token_dump_path(tmp_path, 7, 1)
    columns = {
        name: np.arange(3, dtype=kind.to_pandas_dtype()) for name, kind in TOKEN_COLUMNS.items()
    }
    write_token_dump(path, {**columns, "logprob": np.array([np.nan, -np.inf, -0.0], np.float32)})
    return path


def test_what_is_written_is_read_again(dump: Path, tmp_path: Path) -> None:
    assert dump == tmp_path / "tokens" / "step_000007_update_001.parquet"
    columns = read_token_dump(dump)
    assert list(columns) == list(TOKEN_COLUMNS)
    assert columns["logprob"].tobytes() == np.array([np.nan, -np.inf, -0.0], np.float32).tobytes()
    assert (columns["index"].tolist(), columns["position"].dtype) == ([0, 1, 2], np.int32)


def test_what_is_no_token_dump_of_this_format_is_refused(dump: Path) -> None:
    table = pq.read_table(dump)

    def refused(changed: object, match: str) -> None:
        pq.write_table(changed, dump)
        with pytest.raises(DumpError, match=rf"step_000007_update_001\.parquet: .*{match}"):
            read_token_dump(dump)

    refused(table.replace_schema_metadata(None), "no token dump")
    about = {b"bapo_megatron.tokens": json.dumps({"format": 1})}
    refused(table.replace_schema_metadata(about), "token dump format 1")
    refused(table.drop_columns(["group_id"]), "column 'group_id' is missing")
    refused(table.append_column("index", table["index"]), "column 'index' occurs twice")
    without_group = table.set_column(0, "group_id", pa.nulls(3, pa.int64()))
    refused(without_group.drop_columns(["index"]), "column 'index' is missing")
