"""What a test that disturbs a run watches for."""

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from bapo_megatron.telemetry.sinks import read_metrics


def steps(run_dir: Path) -> list[dict[str, float]]:
    """Rows of the steps that were made."""
    path = run_dir / "metrics.jsonl"
    rows = read_metrics(path) if path.exists() else []
    return [row for row in rows if row["step"] > 0]


def wait_for(
    process: subprocess.Popen[str], condition: Callable[[], bool], what: str, timeout_s: float = 300
) -> None:
    """Wait for something to happen in a run that goes on."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s"
        time.sleep(0.1)
