"""The path of a batch from the collector to every rank: time of its parts, memory and sizes.

The collector's part (encode and write) and the ranks' part (read, broadcast over gloo, decode) run
in processes of their own.

    python -m tests.benchmarks.bench_data_path --out docs/benchmarks/data_path_cpu_202611
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from tests.benchmarks.data_path_ranks import NUM_GROUPS, SAMPLES_PER_GROUP, deliver, encode
from tests.benchmarks.harness import finish, machine, page, report_arguments, table
from tests.distributed_launch import run_ranks

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


def measure(tokens: int, ranks: int, repeats: int) -> dict[str, float]:
    """One round: medians over its repeats, by the names of ``TIMES`` and ``SIZES``."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "step_000001.parquet"
        (encoded,) = run_ranks(encode, 1, path, tokens, repeats, timeout_s=_TIMEOUT_S)
        replies = run_ranks(deliver, ranks, path, repeats, timeout_s=_TIMEOUT_S)
    phases = [reply["phases"] for reply in replies]

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
        "peak_bytes_0": replies[0]["peak_bytes"],
        "peak_bytes_other": statistics.median(reply["peak_bytes"] for reply in replies[1:]),
        "kept_bytes": statistics.median(reply["kept_bytes"] for reply in replies[1:]),
    }


def _report(
    rounds: list[dict[str, float]], options: argparse.Namespace, where: dict[str, object]
) -> str:
    medians = {name: statistics.median(row[name] for row in rounds) for name in rounds[0]}
    return page(
        "From the collector to the ranks: the path of a batch",
        where,
        f"{NUM_GROUPS} groups of {SAMPLES_PER_GROUP} responses, {medians['tokens']:,.0f} response "
        f"tokens in all, prompts of 200 tokens, a vocabulary of 151,936; {options.ranks} ranks on "
        f"one machine, gloo. Medians of {options.rounds} rounds of {options.repeats} repeats each. "
        "Memory is that of the process beyond what it had before, in its first delivery.",
        table(
            ("time", ""), [(what, f"{1e3 * medians[name]:,.0f} ms") for name, what in TIMES.items()]
        ),
        table(
            ("size", ""), [(what, f"{medians[name] / 1e6:.1f} MB") for name, what in SIZES.items()]
        ),
        f"That is {medians['broadcast_bytes'] / medians['tokens']:.2f} bytes per response token.",
        packages=("torch", "pyarrow"),
    )


def main() -> None:
    """Measure and report."""
    parser = report_arguments(__doc__ or "")
    parser.add_argument("--tokens", type=int, default=2_000_000)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    rounds = [
        measure(options.tokens, options.ranks, options.repeats) for _ in range(options.rounds)
    ]
    where = machine()
    finish(options.out, _report(rounds, options, where), {"machine": where, "rounds": rounds})


if __name__ == "__main__":
    main()
