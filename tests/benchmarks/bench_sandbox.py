"""What a program in the sandbox costs, and what ten thousand of them leave.

Short programs run one after the other, as in one worker or in several; a share of them are endless,
flood their output or fork. CPU time is that of this process and of everything it waited for.

    python -m tests.benchmarks.bench_sandbox --runs 10000
    taskset --cpu-list 0 python -m tests.benchmarks.bench_sandbox --callers 2    # of one core
"""

import argparse
import os
import random
import re
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import psutil

from bapo_megatron.config.sandbox import SandboxConfig
from bapo_megatron.sandbox.bubblewrap import open_sandbox
from bapo_megatron.sandbox.cgroup import left_behind

_HOSTILE = (
    "while True: pass",
    "while True: print('x' * 999)",
    "import os\nfor _ in range(99): os.fork()",
)


def traces() -> dict[str, set[object]]:
    """What sandboxes could leave on this machine."""
    return {
        "children": {child.pid for child in psutil.Process().children()},
        "processes of their users": set(filter(_is_of_sandbox, Path("/proc").glob("[0-9]*"))),
        "control groups": set(left_behind()),
        "files": {
            path
            for folder in ("/tmp", "/dev/shm", "/run", "/var/tmp")
            for path in Path(folder).iterdir()
            if _is_of_sandbox(path) or re.search("bapo_megatron_sandbox|bwrap", path.name)
        },
        "descriptors": {path.name for path in Path("/proc/self/fd").iterdir()},
    }


def _is_of_sandbox(path: Path) -> bool:
    try:
        return 60578 <= path.stat().st_uid < 61184
    except FileNotFoundError:
        return False


def call(caller: int, runs: int, hostile_share: float) -> list[float]:
    """The seconds of each short program."""
    config = SandboxConfig(timeout_s=0.5)
    draws, seconds, num_ok = random.Random(caller), [], 0
    with closing(open_sandbox(config)) as sandbox:
        for number in range(runs):
            is_hostile = draws.random() < hostile_share
            program = draws.choice(_HOSTILE) if is_hostile else f"print({number} * 7)"
            start_s = time.perf_counter()
            outcome = sandbox.run(program)
            if not is_hostile:
                seconds.append(time.perf_counter() - start_s)
                num_ok += outcome.stdout == f"{number * 7}\n"
    assert num_ok == len(seconds), "a short program failed"
    return seconds


def measure(runs: int, hostile_share: float, callers: int) -> str:
    """A row: runs per second of wall clock and of CPU time, and percentiles."""
    before_s, before = time.perf_counter(), sum(os.times()[:4])
    with ThreadPoolExecutor(callers) as threads:
        share = [runs // callers] * callers
        parts = threads.map(call, range(callers), share, [hostile_share] * callers)
        seconds = [second for part in parts for second in part]
    wall_s, cpu_s = time.perf_counter() - before_s, sum(os.times()[:4]) - before
    p50, p95, p99 = (1000 * statistics.quantiles(seconds, n=100)[p - 1] for p in (50, 95, 99))
    rate, cpu_rate = runs / wall_s, runs / max(cpu_s, 1e-3)
    times = " | ".join(f"{p:.2f} ms" for p in (p50, p95, p99))
    return f"| {runs:,} | {hostile_share:.0%} | {rate:,.0f} | {cpu_rate:,.0f} | {times} |"


def main() -> None:
    """Print a row, and what is left."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--callers", type=int, default=1)
    parser.add_argument("--hostile", type=float, default=0.0)
    options = parser.parse_args()
    measure(5, 0, 1)  # imports, and descriptors that Python keeps
    before = traces()
    rows = ["| runs | hostile | runs/s | runs/s of CPU | p50 | p95 | p99 |"]
    rows.append(measure(options.runs, options.hostile, options.callers))
    after = traces()
    left = {name: new for name in after if (new := after[name] - before[name])}
    sys.stdout.write("\n".join([*rows, f"left behind: {left or 'nothing'}", ""]))


if __name__ == "__main__":
    main()
