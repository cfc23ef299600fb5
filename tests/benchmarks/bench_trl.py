"""Training on the same rollouts by TRL's GRPOTrainer and by this project, without generation.

    python -m venv build/trl
    build/trl/bin/pip install torch==2.13.0 transformers==5.12.1 trl==1.16.0
    python -m tests.benchmarks.bench_trl --out docs/benchmarks/trl_cpu_202611

Model, rollouts, loss, updates and optimizer are the same. Contenders are processes that live side
by side and take turns, a batch at a time and in random order (``turns.py``); TRL runs with several
sizes of its micro-batches and, on two cores, both as two ranks and as one of two threads, and is
judged by its fastest.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from tests.benchmarks.harness import REPOSITORY, columns, finish, machine, page, report_arguments
from tests.benchmarks.trl_loads import (
    LOADS,
    MODELS,
    Load,
    padded_share,
    training_order,
    write_rollouts,
)
from tests.launch import free_port
from tests.policy.tiny_models import load_reference

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

LR = 1e-4
ENVIRONMENT = [line for line in (__doc__ or "").splitlines() if "build/trl" in line]
"""The commands that make TRL's environment."""
COLUMNS = {
    "": "{name}",
    "time per update": "{update_ms:,.0f} ms",
    "min – max": "{min_update_ms:,.0f} – {max_update_ms:,.0f}",
    "trained tokens/s": "{tokens_per_s:,.0f}",
    "×": "{speedup:.2f}",
    "peak memory": "{peak_mb:,.0f} MB",
    "× ": "{memory:.2f}",
}
AGREEMENT = 1e-4
"""Limit of the relative difference between the gradient norms of the first update."""


TRL, SAME_WORK, AS_SHIPPED = "TRL", "this project", "this project, recorded log-probs"
TURN_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Contender:
    name: str
    module: str
    python: str
    ranks: int
    threads: int
    spec: dict[str, Any]


class Running:
    def __init__(self, contender: Contender, scratch: Path) -> None:
        self.contender = contender
        self._logs = [scratch / f"rank_{rank}.log" for rank in range(contender.ranks)]
        scratch.mkdir()
        port = free_port()
        self._processes = [
            self._start(rank, scratch, log, port) for rank, log in enumerate(self._logs)
        ]

    def _start(self, rank: int, scratch: Path, log: Path, port: int) -> subprocess.Popen[str]:
        contender = self.contender
        changes: dict[str, Any] = {"scratch": str(scratch), "overrides": [f"run_dir={scratch}/run"]}
        variables = {
            "OMP_NUM_THREADS": str(contender.threads),
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": str(REPOSITORY),
            "GLOO_SOCKET_IFNAME": "lo",
            "HF_HUB_OFFLINE": "1",
        }
        if contender.ranks > 1 or contender.module == "replay_ranks":
            variables |= {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(contender.ranks),
                "LOCAL_WORLD_SIZE": str(contender.ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
        with log.open("w") as errors:
            return subprocess.Popen(
                [
                    contender.python,
                    "-m",
                    f"tests.benchmarks.{contender.module}",
                    json.dumps(contender.spec | changes),
                ],
                cwd=scratch,
                env={**os.environ, **variables},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def wait(self) -> list[dict[str, Any]]:
        """Replies of all ranks: ready, or what the turn measured.

        Raises:
            RuntimeError: A rank has ended or does not answer in time.
        """
        replies = []
        for process, log in zip(self._processes, self._logs, strict=True):
            assert process.stdout is not None
            ready, _, _ = select.select([process.stdout], [], [], TURN_TIMEOUT_S)
            line = process.stdout.readline() if ready else ""
            if not line:
                what = "ended" if ready else f"did not answer in {TURN_TIMEOUT_S:g} s"
                tail = log.read_text()[-3000:]
                raise RuntimeError(f"{self.contender.name}: a rank {what}; its output ends\n{tail}")
            replies.append(json.loads(line))
        return replies

    def turn(self) -> list[dict[str, Any]]:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        return self.wait()

    def close(self) -> None:
        """End them; what they are in the middle of is of no use."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.communicate()


def take_turns(
    contenders: Sequence[Contender], scratch: Path, *, warmup: int, rounds: int
) -> dict[str, list[list[dict[str, Any]]]]:
    """Train ``warmup + rounds`` batches of each in turns; by contender and batch the replies."""
    order = random.Random(0)
    replies: dict[str, list[list[dict[str, Any]]]] = {
        contender.name: [] for contender in contenders
    }
    with contextlib.ExitStack() as stack:
        running = []
        for number, contender in enumerate(contenders):
            running.append(Running(contender, scratch / str(number)))
            stack.callback(running[-1].close)
        for processes in running:
            processes.wait()
        for _ in range(warmup + rounds):
            for processes in order.sample(running, len(running)):
                replies[processes.contender.name].append(processes.turn())
    return replies


def contenders(
    load: Load, cores: int, model: Path, dumps: Path, scratch: Path, batches: int, trl_python: str
) -> list[Contender]:
    """Everything that is compared on this many cores."""
    common = {"model": str(model), "dumps": str(dumps), "cores": _cores(cores)}
    trainers = []
    for ranks, threads in [(1, 1)] if cores == 1 else [(2, 1), (1, 2)]:
        for divisor in load.trl_divisors if ranks == cores else load.trl_divisors[:1]:
            rows = load.samples_per_update // ranks // divisor
            spec = common | {
                "ranks": ranks,
                "updates": load.updates,
                "order": training_order(load, ranks, batches),
                "samples": load.groups * load.group_size,
                "group_size": load.group_size,
                "max_response_tokens": load.max_response_tokens,
                "micro_batch": rows,
                "lr": LR,
            }
            layout = "" if cores == 1 else f", {ranks} × {threads} threads"
            name = f"{TRL}, {rows} per micro-batch{layout}"
            trainers.append(Contender(name, "trl_ranks", trl_python, ranks, threads, spec))
    for name, behaviour in ((SAME_WORK, "recomputed"), (AS_SHIPPED, "rollout")):
        config = scratch / f"{behaviour}.yaml"
        config.write_text(yaml.safe_dump(_settings(load, model, dumps, batches, behaviour)))
        spec = common | {"config": str(config)}
        trainers.append(Contender(name, "replay_ranks", sys.executable, cores, 1, spec))
    return trainers


def _cores(number: int) -> list[int]:
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) < number:
        raise SystemExit(f"--cores {number}: this process may use {len(usable)}; ask for fewer")
    return usable[:number]


def _settings(load: Load, model: Path, dumps: Path, batches: int, behaviour: str) -> dict[str, Any]:
    return {
        "name": "bench-trl",
        "replay": str(dumps),
        "model": {"path": str(model), "dtype": "float32"},
        "algorithm": {
            "objective": "clip",
            "fixed": {"low": 0.8, "high": 1.2},
            "advantage": "grpo_no_std",
            "loss_aggregation": "token_mean",
            "behaviour": behaviour,
            "updates_per_batch": load.updates,
        },
        "optimizer": {"lr": LR, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "clip_grad": 1.0},
        "train": {
            "steps": batches,
            "max_tokens_per_micro_batch": load.max_micro_batch_tokens,
        },
        "checkpoint": {"at_end": False},
        "log": {"console": False, "tensorboard": False},
    }


def summarize(
    replies: Sequence[Sequence[dict[str, Any]]], *, warmup: int, tokens: int, updates: int
) -> dict[str, Any]:
    """The row of a contender, from the replies of all ranks to all turns."""
    seconds = [max(rank["seconds"] for rank in turn) for turn in replies[warmup:]]
    median_s = statistics.median(seconds)
    return {
        "seconds": seconds,
        "update_ms": 1e3 * median_s / updates,
        "min_update_ms": 1e3 * min(seconds) / updates,
        "max_update_ms": 1e3 * max(seconds) / updates,
        "tokens_per_s": tokens / median_s,
        "peak_mb": sum(rank["peak_bytes"] for rank in replies[-1]) / 1e6,
        # All ranks know the same norm.
        "grad_norms": [norm for turn in replies for norm in turn[0]["grad_norms"]],
        "losses": [
            statistics.fmean(losses)
            for turn in replies
            for losses in zip(*(rank["losses"] for rank in turn), strict=True)
        ],
    }


def compare(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """TRL's fastest row, and how far any of its gradients and losses are from this project's."""
    ours = rows[SAME_WORK]
    theirs = {name: row for name, row in rows.items() if name.startswith(TRL)}
    differences = [
        [abs(a / b - 1) for a, b in zip(row["grad_norms"], ours["grad_norms"], strict=True)]
        for row in theirs.values()
    ]
    return {
        "fastest": min(theirs, key=lambda name: theirs[name]["update_ms"]),
        "first_grad_norm": ours["grad_norms"][0],
        "first_norm_difference": max(of_row[0] for of_row in differences),
        "max_norm_difference": max(map(max, differences)),
        "first_loss": ours["losses"][0],
        "first_loss_difference": max(
            abs(row["losses"][0] - ours["losses"][0]) for row in theirs.values()
        ),
        "updates": len(ours["grad_norms"]),
    }


def markdown(report: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in report["trl"].items())
    return page(
        "Training beside TRL",
        report["machine"],
        f"TRL's environment has {versions}:",
        ENVIRONMENT,
        "Both train the same models from the same recorded rollouts: random weights, tokens and "
        "rewards. Generation is not part of it: this project replays dumps, and GRPOTrainer gets "
        "them through its argument `rollout_func`. TRL's shuffle between generation and training "
        "is patched away, so that every update has the same samples in both; nothing else of TRL "
        "is changed.",
        "Settings of both: clip at 0.2, mean over the tokens of an update (TRL: `dapo`), "
        "advantage R − mean of the group, temperature 1, no KL, AdamW "
        f"(lr {LR:g}, β 0.9 and 0.95, no decay), gradient norm clipped at 1, float32, no "
        "recomputation of activations, no compilation. Every update has equally many tokens, "
        "because TRL divides by their mean over the updates of a batch.",
        "Several updates per batch need the log-probs at its start. TRL computes them in a pass of "
        f"its own and has no setting to use recorded ones; so does '{SAME_WORK}' here "
        f"(`algorithm.behaviour: recomputed`). '{AS_SHIPPED}' is its default, without that pass.",
        "GRPOTrainer pads every row to the longest of the batch and has no packed or padding-free "
        "mode; this project packs. Several sizes of TRL's micro-batches are tried, and on two "
        "cores two ranks and one rank of two threads; × is relative to the fastest of them, in "
        "bold. This project has one size, 4,096 tokens, and on two cores two data-parallel ranks.",
        "Time is that of a batch over its updates, from the request for the batch to the request "
        "for the next: log-probs, updates, metrics, and here the reading of the dump, which TRL "
        "has in memory. Medians of "
        f"{report['rounds']} batches after {report['warmup']}; contenders take turns, batch by "
        "batch. Memory is the largest resident set of a process, libraries included, added up "
        "over ranks.",
        *(block for section in report["sections"] for block in _section(section)),
    )


def _section(section: dict[str, Any]) -> list[str]:
    load, rows, agreement = section["load"], section["rows"], section["agreement"]
    baseline = rows[agreement["fastest"]]
    cores = "one core" if section["cores"] == 1 else f"{section['cores']} cores"
    lines = [
        row
        | {"name": f"**{name}**" if name == agreement["fastest"] else name}
        | {"speedup": row["tokens_per_s"] / baseline["tokens_per_s"]}
        | {"memory": row["peak_mb"] / baseline["peak_mb"]}
        for name, row in rows.items()
    ]
    return [
        f"## {section['parameters'] / 1e6:.3g} million parameters, {cores}",
        f"{load['name'].capitalize()}: batches of {load['groups']} × {load['group_size']} "
        f"responses of {load['min_response_tokens']} to {load['max_response_tokens']} tokens "
        f"(evenly spaced, {section['tokens']:,} in all) after prompts of {load['prompt_tokens']}, "
        f"{load['updates']} updates each. {section['padded_share']:.0%} of the positions that TRL "
        "computes are padding.",
        "\n".join(columns(lines, COLUMNS)),
        f"Gradient norm of the first update: {agreement['first_grad_norm']:.6g}, relative "
        f"difference {agreement['first_norm_difference']:.1e}; largest over all "
        f"{agreement['updates']} updates {agreement['max_norm_difference']:.1e}. Loss of the first "
        f"update: {agreement['first_loss']:.6g}, difference "
        f"{agreement['first_loss_difference']:.1e}.",
    ]


def trl_versions(python: Path) -> dict[str, str]:
    """Versions of the packages in TRL's environment.

    Raises:
        SystemExit: There is none.
    """
    if not python.exists():
        raise SystemExit(
            "\n".join([f"{python} is not there; make TRL's environment:", *ENVIRONMENT])
        )
    code = (
        "import importlib.metadata as m, json\n"
        "names = ['trl', 'transformers', 'accelerate', 'torch']\n"
        "print(json.dumps({name: m.version(name) for name in names}))"
    )
    answer = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    versions: dict[str, str] = json.loads(answer.stdout)
    return versions


def measure(name: str, root: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Train one load; a section for each number of cores."""
    load, batches = LOADS[name], options.warmup + options.rounds
    model, dumps = root / "model", root / "dumps"
    MODELS[name](model)
    tokens = write_rollouts(dumps, model, load, batches)
    sections = []
    for cores in options.cores:
        scratch = root / str(cores)
        scratch.mkdir()
        python = str(options.trl.absolute())
        trainers = contenders(load, cores, model, dumps, scratch, batches, python)
        replies = take_turns(trainers, scratch, warmup=options.warmup, rounds=options.rounds)
        rows = {
            contender: summarize(of_one, warmup=options.warmup, tokens=tokens, updates=load.updates)
            for contender, of_one in replies.items()
        }
        sections.append(
            {
                "load": asdict(load),
                "parameters": load_reference("qwen2", model).num_parameters(),
                "cores": cores,
                "tokens": tokens,
                "padded_share": padded_share(load, tokens),
                "rows": rows,
                "agreement": compare(rows),
            }
        )
    return sections


def main() -> None:
    parser = report_arguments(__doc__ or "")
    parser.add_argument(
        "--trl",
        type=Path,
        default=REPOSITORY / "build/trl/bin/python",
        help="Python of TRL's environment",
    )
    parser.add_argument("--rounds", type=int, default=5, help="batches that are timed")
    parser.add_argument("--warmup", type=int, default=1, help="batches before")
    parser.add_argument("--cores", type=int, nargs="+", choices=(1, 2), default=[1, 2])
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=[*LOADS])
    options = parser.parse_args()
    report: dict[str, Any] = {
        "machine": machine(),
        "trl": trl_versions(options.trl),
        "rounds": options.rounds,
        "warmup": options.warmup,
        "sections": [],
    }
    with tempfile.TemporaryDirectory() as directory:
        for name in options.loads:
            report["sections"] += measure(name, Path(directory) / name, options)
    finish(options.out, markdown(report), report)
    differences = [section["agreement"]["first_norm_difference"] for section in report["sections"]]
    if max(differences) > AGREEMENT:
        raise SystemExit(f"the first gradient norms differ by {max(differences):.1e}, relatively")


if __name__ == "__main__":
    main()
