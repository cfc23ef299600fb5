"""The path of a batch from the collector to every rank, against that of the commit before.

Both trees make the same batch. The collector's part (encode and write) and the ranks' part (read,
broadcast over gloo, decode) run in processes of their own, the trees in turns.

    git worktree add /tmp/before 3fd403c
    python -m tests.benchmarks.bench_data_path --before /tmp/before \
        --out docs/benchmarks/data_path_cpu_202611
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bapo_megatron.runtime.versions import commit_of
from tests.benchmarks import harness
from tests.launch import free_port

_WORK = Path(__file__).with_name("data_path_work.py")
_TIMEOUT_S = 600.0

TIMES = {
    "encode_s": "collector: encode and write",
    "texts_s": "… of which texts",
    "prepare_s": "rank 0: until the broadcast begins",
    "broadcast_s": "broadcast",
    "decode_s": "decode, slowest rank",
    "all_s": "from the file to the batch on every rank",
}
SIZES = {
    "broadcast_bytes": "broadcast to each rank",
    "disk_bytes": "on the disk, texts included",
    "peak_bytes_0": "peak memory of rank 0",
    "peak_bytes_other": "peak memory of another rank",
    "kept_bytes": "memory that a rank keeps",
}


def measure(tree: Path, tokens: int, ranks: int, repeats: int) -> dict[str, float]:
    """One round of one tree: medians over its repeats, by the names of ``TIMES`` and ``SIZES``."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "step_000001.parquet"
        encode = ["encode", path, "--tokens", tokens, "--repeats", repeats]
        (encoded,) = _finish([_start(tree, encode)])
        port = free_port()
        deliver = ["deliver", path, "--ranks", ranks, "--port", port, "--repeats", repeats]
        told = _finish([_start(tree, [*deliver, "--rank", rank]) for rank in range(ranks)])
    phases = [each["phases"] for each in told]

    def slowest(name: str) -> float:
        return statistics.median(map(max, zip(*(phase[name] for phase in phases), strict=True)))

    return {
        "tokens": encoded["tokens"],
        "encode_s": statistics.median(encoded["seconds"]),
        "texts_s": statistics.median(encoded["texts_s"]),
        "prepare_s": statistics.median(phases[0]["prepare"]),
        "broadcast_s": slowest("broadcast"),
        "decode_s": slowest("decode"),
        "all_s": slowest("all"),
        "broadcast_bytes": encoded["dump_bytes"],
        "disk_bytes": encoded["dump_bytes"] + encoded["texts_bytes"],
        "peak_bytes_0": told[0]["peak_bytes"],
        "peak_bytes_other": statistics.median(each["peak_bytes"] for each in told[1:]),
        "kept_bytes": statistics.median(each["kept_bytes"] for each in told[1:]),
    }


def _start(tree: Path, arguments: Sequence[object]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(_WORK), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"},
        cwd=tree,
        stdout=subprocess.PIPE,
        text=True,
    )


def _finish(processes: Sequence[subprocess.Popen[str]]) -> list[dict[str, Any]]:
    """What each process says.

    Raises:
        RuntimeError: One of them failed; its error is above.
    """
    try:
        outputs = [process.communicate(timeout=_TIMEOUT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode for process in processes):
        raise RuntimeError(f"{_WORK.name} failed; see above")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def _report(
    rounds: dict[str, list[dict[str, float]]], options: argparse.Namespace, machine: dict[str, Any]
) -> str:
    medians = {
        tree: {name: statistics.median(each[name] for each in told) for name in told[0]}
        for tree, told in rounds.items()
    }
    before, after = medians["before"], medians["after"]
    lines = [
        "# From the collector to the ranks: the path of a batch",
        "",
        *harness.heading(machine, ("torch", "pyarrow")),
        f"64 groups of 16 responses, {after['tokens']:,.0f} response tokens in all, prompts of 200 "
        f"tokens, a vocabulary of 151,936; {options.ranks} ranks on one machine, gloo. `before` is "
        f"commit {machine['before']}. Medians of {options.rounds} rounds in turns, of "
        f"{options.repeats} repeats each; the machine is shared, so ratios count and times do not. "
        "Memory is that of the process beyond what it had before, in its first delivery.",
        "",
        "| time | before | after | after / before |",
        "|---|---|---|---|",
    ]
    for name, what in TIMES.items():
        old = "–" if name == "texts_s" else f"{1e3 * before[name]:,.0f} ms"
        ratio = "" if name == "texts_s" else f"{after[name] / before[name]:.2f}"
        lines.append(f"| {what} | {old} | {1e3 * after[name]:,.0f} ms | {ratio} |")
    lines += ["", "| size | before | after | after / before |", "|---|---|---|---|"]
    lines += [
        f"| {what} | {before[name] / 1e6:.1f} MB | {after[name] / 1e6:.1f} MB | "
        f"{after[name] / before[name]:.2f} |"
        for name, what in SIZES.items()
    ]
    lines += [
        "",
        f"That is {before['broadcast_bytes'] / before['tokens']:.2f} bytes per response token "
        f"before and {after['broadcast_bytes'] / after['tokens']:.2f} after.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure both trees in turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, required=True, help="checkout of the commit before")
    parser.add_argument("--tokens", type=int, default=2_000_000)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write OUT.md and OUT.json (no suffix)")
    options = parser.parse_args()
    trees = {"before": options.before.absolute(), "after": harness.REPOSITORY}
    rounds: dict[str, list[dict[str, float]]] = {tree: [] for tree in trees}
    for number in range(options.rounds):
        for tree in list(trees)[:: 1 if number % 2 else -1]:
            rounds[tree].append(
                measure(trees[tree], options.tokens, options.ranks, options.repeats)
            )
    machine = harness.machine(torch.device("cpu"))
    machine["before"] = commit_of(trees["before"]) or "unknown"
    report = _report(rounds, options, machine)
    print(report)  # noqa: T201
    harness.write_report(options.out, report, {"machine": machine, "rounds": rounds})


if __name__ == "__main__":
    main()
