"""The benchmark of the saved buffer runs at a small size; what it costs is not looked at."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tests.benchmarks.bench_buffer import measure

if TYPE_CHECKING:
    from pathlib import Path


def test_the_saved_buffer_is_read_again_and_measured(tmp_path: Path) -> None:
    row = asyncio.run(measure(300_000, tmp_path / "rollout.parquet"))
    assert row.num_tokens == 300_000
    # 8 bytes uncompressed; ids of 17.2 bits and log-probs whose last three bytes are noise.
    assert 5.0 < row.bytes_per_token < 6.5
