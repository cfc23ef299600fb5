"""Convert the rollout dumps of versions before 22 November 2026 (format 1) to format 2.

    python examples/convert_dumps.py runs/demo/rollouts converted

writes ``converted/step_<n>.parquet`` and ``converted/texts/step_<n>.parquet`` for every dump of the
first directory, which stays as it is. ``train … replay=converted`` then reads them.
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bapo_megatron.data.dump import METADATA_KEY, DumpError, write_batch, write_texts
from bapo_megatron.data.version_spans import spans_of
from bapo_megatron.types import (
    FinishReason,
    Group,
    PromptTokens,
    RolloutBatch,
    RolloutStats,
    Sample,
    SampleText,
)

FORMER_FORMAT = 1


def convert(source: Path, target: Path) -> None:
    """Write one dump of format 1 as format 2, texts first.

    Raises:
        DumpError: ``source`` is no intact dump of format 1.
        OverflowError: A token id needs more than 32 bits.
        OSError: A file cannot be read or written.
    """
    about, rows = _read(source)
    texts = [
        SampleText(
            row["group_id"],
            row["index"],
            row["prompt_text"],
            row["answer"],
            row["response_text"],
        )
        for row in rows
    ]
    batch = RolloutBatch(
        step=about["step"],
        version=about["version"],
        groups=tuple(
            _group(group_id, list(members))
            for group_id, members in groupby(rows, key=lambda row: row["group_id"])
        ),
        stats=RolloutStats(**about["stats"]),
    )
    write_texts(target, batch.step, texts)
    write_batch(target, batch)


def _read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What belongs to the whole batch, and its rows, lists of numbers as arrays."""
    try:
        table = pq.read_table(path, partitioning=None, page_checksum_verification=True)
    except pa.ArrowException as error:
        reason = str(error).partition("\n")[0]
        raise DumpError(f"{path}: not a readable parquet file ({reason})") from error
    encoded = (table.schema.metadata or {}).get(METADATA_KEY)
    if encoded is None:
        raise DumpError(f"{path}: a parquet file but no rollout dump")
    about: dict[str, Any] = json.loads(encoded)
    if about["format"] != FORMER_FORMAT:
        raise DumpError(
            f"{path}: dump format {about['format']}, this script converts {FORMER_FORMAT}; only "
            "dumps of earlier versions need it"
        )
    columns = {name: _values(table[name].combine_chunks()) for name in table.column_names}
    # The first versions had neither.
    columns.setdefault("source", [""] * table.num_rows)
    columns.setdefault("reward_components", ["{}"] * table.num_rows)
    rows = [
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    ]
    return about, rows


def _values(column: Any) -> list[Any]:
    if not pa.types.is_list(column.type):
        values: list[Any] = column.to_pylist()
        return values
    return [row.values.to_numpy() for row in column]


def _group(group_id: int, rows: list[dict[str, Any]]) -> Group:
    first = rows[0]
    prompt = PromptTokens(first["prompt_id"], _as_int32(first["prompt_token_ids"]), first["source"])
    samples = [
        Sample(
            group_id=group_id,
            index=row["index"],
            prompt=prompt,
            response_token_ids=_as_int32(row["response_token_ids"]),
            behaviour_logprobs=row["behaviour_logprobs"],
            versions=spans_of(row["versions"]),
            finish_reason=FinishReason(row["finish_reason"]),
            reward=row["reward"],
            reward_components=json.loads(row["reward_components"]),
            answer_found=row["answer_found"],
        )
        for row in rows
    ]
    return Group(group_id, tuple(samples))


def _as_int32(token_ids: np.ndarray) -> np.ndarray:
    narrowed = token_ids.astype(np.int32)
    if (narrowed != token_ids).any():
        raise OverflowError(f"a token id of {token_ids.max()} does not fit in 32 bits")
    return narrowed


def main() -> None:
    """Convert a directory; stop at the first file that cannot be converted, in one line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("source", type=Path, help="directory of dumps of format 1")
    parser.add_argument("target", type=Path, help="directory to write; without dumps so far")
    arguments = parser.parse_args()
    source, target = arguments.source, arguments.target
    dumps = sorted(source.glob("step_*.parquet"))
    if not dumps:
        sys.exit(f"{source}: holds no step_*.parquet; give the rollouts directory of a run")
    if any(target.glob("step_*.parquet")):
        sys.exit(f"{target}: holds dumps already; give another directory")
    for path in dumps:
        try:
            convert(path, target / path.name)
        except (DumpError, OSError) as error:
            sys.exit(str(error))
        except OverflowError as error:
            sys.exit(f"{path}: {error}")
    print(f"{len(dumps)} dumps of {source} converted to {target}")


if __name__ == "__main__":
    main()
