"""What test_acceptance.py runs in a process of its own, with Megatron on the CPU."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path

from tests.gpu import acceptance

TINY = ["--device=cpu", "--sizes=tiny", "--tokens=64", "--columns=24", "--rounds=2"]


def run_parts(directory: Path, parts: list[str]) -> dict[str, tuple[int, str, str]]:
    """Exit status, lines and table of each part."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)  # the process is the only rank, of several groups in turn
    results = {}
    for part in parts:
        lines, table = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(lines), contextlib.redirect_stderr(table):
            status = acceptance.main([part, f"--dir={directory}", *TINY])
        results[part] = (status, lines.getvalue(), table.getvalue())
    return results
