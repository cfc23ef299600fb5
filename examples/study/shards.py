"""Many runs as shards: computed on all cores, each one written as a whole or not at all.

A shard is a parquet file with a row per run. Existing ones are not computed again, so the same
command continues an interrupted study. The file's metadata records commit and versions.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import signal
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bapo_megatron.runtime.files import atomic_write_bytes, atomic_write_text
from bapo_megatron.runtime.processes import end_with_parent
from bapo_megatron.runtime.versions import commit_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_PACKAGES = ("bapo-megatron", "numpy", "torch", "pyarrow")


@dataclass(frozen=True, slots=True)
class Shard:
    """Runs that are computed one after the other by one process."""

    name: str
    compute: Callable[..., list[dict[str, Any]]]
    """Returns a row per run; importable by its name."""
    arguments: tuple[Any, ...]


def run_shards(shards: Sequence[Shard], directory: Path, jobs: int) -> None:
    """Compute the shards that are missing in a directory; prints a line for each."""
    missing = [shard for shard in shards if not path_of(directory, shard.name).exists()]
    print(f"{directory}: {len(shards)} shards, {len(missing)} to compute", flush=True)
    if not missing:
        return
    metadata, began_s = provenance(), time.monotonic()
    context, end = get_context("spawn"), (signal.SIGTERM,)
    with ProcessPoolExecutor(jobs, context, end_with_parent, end) as pool:
        futures = {
            pool.submit(_write, shard, path_of(directory, shard.name), metadata): shard.name
            for shard in missing
        }
        try:
            for count, future in enumerate(as_completed(futures), start=1):
                future.result()
                left_s = (time.monotonic() - began_s) / count * (len(missing) - count)
                name = futures[future]
                print(f"{count}/{len(missing)} {name}, {left_s / 60:.0f} min left", flush=True)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def read_shards(directory: Path) -> list[dict[str, Any]]:
    """Every row of every shard in a directory."""
    return [
        row
        for path in sorted(directory.glob("*.parquet"))
        for row in pq.read_table(path).to_pylist()
    ]


def path_of(directory: Path, name: str) -> Path:
    """The file of a shard."""
    return directory / f"{name}.parquet"


def provenance() -> dict[str, str]:
    """What results depend on besides the seeds: commit, versions, processor."""
    versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
    return {
        "commit": commit_of(Path(__file__).parents[2]) or "unknown",
        "python": platform.python_version(),
        "machine": platform.machine(),
    } | versions


def write_manifest(directory: Path, plan: dict[str, Any], files: Iterable[Path]) -> None:
    """Write ``manifest.json``: the plan, the command, and what the shards were made with."""
    made_with: dict[str, int] = {}
    for path in files:
        metadata = pq.read_schema(path).metadata or {}
        text = metadata[b"provenance"].decode()
        made_with[text] = made_with.get(text, 0) + 1
    entries = [{"shards": count} | json.loads(text) for text, count in sorted(made_with.items())]
    manifest = plan | {"command": " ".join(sys.orig_argv[1:]), "made_with": entries}
    atomic_write_text(directory / "manifest.json", json.dumps(manifest, indent=1) + "\n")


def _write(shard: Shard, path: Path, metadata: dict[str, str]) -> None:
    began_s = time.process_time()
    rows = shard.compute(*shard.arguments)
    made_with = {
        "provenance": json.dumps(metadata),
        "cpu_s": f"{time.process_time() - began_s:.1f}",
    }
    table = _curves_in_float32(pa.Table.from_pylist(rows)).replace_schema_metadata(made_with)
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    atomic_write_bytes(path, sink.getvalue().to_pybytes())


def _curves_in_float32(table: pa.Table) -> pa.Table:
    """Halves the bytes; curves need no more digits."""
    curve = pa.list_(pa.float32())
    fields = [
        field.with_type(curve) if pa.types.is_list(field.type) else field for field in table.schema
    ]
    return table.cast(pa.schema(fields))


def best_rates(rows: Iterable[dict[str, Any]], *keys: str) -> dict[tuple[Any, ...], float]:
    """The learning rate with the highest final expected reward, by the values of ``keys``."""
    final: dict[tuple[Any, ...], dict[float, list[float]]] = {}
    for row in rows:
        by_rate = final.setdefault(tuple(row[key] for key in keys), {})
        by_rate.setdefault(row["learning_rate"], []).append(row["expected_reward"][-1])
    return {
        key: max(by_rate, key=lambda rate: float(np.mean(by_rate[rate])))
        for key, by_rate in final.items()
    }
