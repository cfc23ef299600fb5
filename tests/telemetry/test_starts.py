"""``starts.jsonl``: which processes trained a run."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest

from bapo_megatron import __version__
from bapo_megatron.telemetry.starts import read_starts, record_start

if TYPE_CHECKING:
    from pathlib import Path


def test_every_start_adds_a_line_that_says_what_ran_where(tmp_path: Path) -> None:
    assert read_starts(tmp_path) == []

    record_start(tmp_path, 0, 1)
    record_start(tmp_path, 40, 8)

    first, second = read_starts(tmp_path)
    assert (first.step, first.world_size, second.step, second.world_size) == (0, 1, 40, 8)
    assert second.versions["bapo-megatron"] == __version__
    assert abs((datetime.now(UTC) - datetime.fromisoformat(second.time)).total_seconds()) < 60
    assert second.host


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    record_start(tmp_path, 0, 1)
    with (tmp_path / "starts.jsonl").open("a") as file:
        file.write('{"step": "2"}\n')

    with pytest.raises(ValueError, match=r"starts\.jsonl:2: .*; remove the line"):
        read_starts(tmp_path)
