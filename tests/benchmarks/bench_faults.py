"""Kill a run's servers at random moments, and check that it ends with every sample accounted for.

python -m tests.benchmarks.bench_faults --out docs/benchmarks/faults_cpu_202611

One run on two servers of its own, one step ahead. A server chosen by chance gets ``kill -9`` (every
third time SIGSTOP, which only a time-out reveals) at a moment chosen by chance, as soon as both
have served again. Written: what each fault cost, and the account at the end.
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.launch import start
from tests.trainer.chaos import (
    GROUPS_PER_STEP,
    assert_balanced,
    servers,
    signal_server,
    steps,
    wait_for,
    write_config,
)
from tests.trainer.dumps import make_random_model

_MAX_DELAY_S = 6.0
_RETURN_TIMEOUT_S = 400.0


@dataclass(frozen=True, slots=True)
class Fault:
    """One server that failed."""

    kind: str
    step: int
    """Steps that had been made."""
    return_s: float
    """Until a server that answers again was given weights and the next step was made."""
    steps_meanwhile: int
    """Steps made until then, by the other server."""


def run_faults(directory: Path, num_faults: int, num_steps: int, seed: int) -> list[Fault]:
    """Let a run go to its end through ``num_faults`` faults; its directory is ``directory/run``."""
    chance = random.Random(seed)
    config = write_config(directory, make_random_model(directory / "model"))
    process = start(["train", str(config), f"train.steps={num_steps}", "checkpoint.every_steps=20"])
    run_dir = directory / "run"
    log = run_dir / "logs" / "collector.log"
    faults: list[Fault] = []
    try:
        wait_for(process, lambda: len(steps(run_dir)) >= 2, "the first steps")
        for number in range(num_faults):
            time.sleep(chance.uniform(0, _MAX_DELAY_S))
            faults.append(_fail_one(process, run_dir, log, chance, number))
            print(f"{number + 1}/{num_faults}: {faults[-1]}", file=sys.stderr, flush=True)  # noqa: T201
        out, err = process.communicate(timeout=3600)
        assert process.returncode == 0, out + err
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert [row["step"] for row in steps(run_dir)] == list(range(1, num_steps + 1))
    return faults


def _fail_one(
    process: subprocess.Popen[str], run_dir: Path, log: Path, chance: random.Random, number: int
) -> Fault:
    victim = chance.choice(servers(process))
    before, returns = len(steps(run_dir)), log.read_text().count("needs weights")
    started_s = time.monotonic()
    kind = signal.SIGSTOP if number % 3 == 2 else signal.SIGKILL
    signal_server(victim, kind)
    if kind is signal.SIGSTOP:
        taken_out = log.read_text().count("is taken out")
        wait_for(process, lambda: log.read_text().count("is taken out") > taken_out, "the time-out")
        signal_server(victim, signal.SIGCONT)
    wait_for(
        process,
        lambda: log.read_text().count("needs weights") > returns,
        "its return",
        _RETURN_TIMEOUT_S,
    )
    returned = len(steps(run_dir))
    wait_for(process, lambda: len(steps(run_dir)) >= returned + 2, "a step with both servers")
    return Fault(kind.name, before, time.monotonic() - started_s, returned - before)


def report(faults: list[Fault], run_dir: Path, command: str) -> str:
    """The markdown of a finished run."""
    account = assert_balanced(run_dir)
    rows = steps(run_dir)
    lost = sum(row["rollout/lost_requests"] for row in rows)
    lines = [
        "# Servers that fail in the middle of a run",
        "",
        f"`{command}`: one run of {len(rows)} steps on two CPU servers, `async_steps: 1`.",
        "",
        "| fault | after step | steps made until its return | until both served again |",
        "|---|---|---|---|",
    ]
    lines += [f"| {f.kind} | {f.step} | {f.steps_meanwhile} | {f.return_s:.0f} s |" for f in faults]
    lines += [
        "",
        f"The run ended by itself. {lost:.0f} requests were continued on the other server. Groups: "
        f"{account['drawn']} drawn = {account['trained']} trained ({GROUPS_PER_STEP} × "
        f"{len(rows)}) + {account['dropped']} dropped + {account['waiting']} in the buffer; none "
        "twice; versions never decrease within a response.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--faults", type=int, default=15)
    parser.add_argument("--steps", type=int, default=360)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="without suffix")
    options = parser.parse_args()
    command = (
        f"python -m tests.benchmarks.bench_faults --faults {options.faults} --steps {options.steps}"
    )
    with tempfile.TemporaryDirectory() as directory:
        faults = run_faults(Path(directory), options.faults, options.steps, options.seed)
        text = report(faults, Path(directory) / "run", command)
    options.out.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
