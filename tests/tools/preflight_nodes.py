"""``doctor --cluster`` on machines of network namespaces, with faults made on purpose.

``python -m tests.tools.preflight_nodes`` prints the rows of
docs/benchmarks/preflight_cpu_202611.md.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.launch import REPOSITORY, free_port
from tests.nodes import INTERFACE, Node, make_nodes
from tests.trainer.dumps import make_random_model

SLOW_LINK = f"tc qdisc replace dev {INTERFACE} root tbf rate 16mbit burst 64kbit latency 1s"
FLOORS = ("--min-network", "0.004", "--min-disk", "0.001", "--min-free", "0.01")
TIMEOUT_S = 240


@dataclass(frozen=True)
class Cluster:
    """Machines that see the same files, in which a command may see others."""

    nodes: Sequence[Node]
    folder: Path

    @property
    def config(self) -> Path:
        return self.folder / "run.yaml"

    @property
    def model(self) -> Path:
        return self.folder / "model"

    def other_model(self, name: str) -> str:
        """A command by which a machine sees another directory in place of the model's."""
        return f"mount --bind {self.folder / name} {self.model}"

    def full_disk(self) -> str:
        return f"mount -t tmpfs -o size=8m tmpfs {self.folder / 'run'}"


@dataclass(frozen=True)
class Fault:
    """What is wrong on one machine."""

    command: str = "true"
    """Run there first."""
    environment: Mapping[str, str] = field(default_factory=dict)


@contextmanager
def make_cluster(folder: Path, size: int = 3) -> Iterator[Cluster]:
    """Machines, a configuration, its model, and damaged copies of it."""
    with make_nodes(size) as nodes:
        cluster = Cluster(nodes, folder)
        make_random_model(cluster.model)
        (folder / "run").mkdir()
        (folder / "questions.jsonl").write_text('{"prompt": "1+1?", "answer": "2"}\n')
        settings = {
            "name": "x",
            "run_dir": str(folder / "run"),
            "model": {"path": str(cluster.model), "dtype": "float32"},
            "data": {"train": {"path": str(folder / "questions.jsonl")}},
        }
        cluster.config.write_text(yaml.safe_dump(settings))
        for name in ("changed", "lacking"):
            shutil.copytree(cluster.model, folder / name)
        (folder / "lacking" / "tokenizer_config.json").unlink()
        with (folder / "changed" / "model.safetensors").open("r+b") as weights:
            weights.seek(-1, os.SEEK_END)
            last = weights.read(1)[0]
            weights.seek(-1, os.SEEK_END)
            weights.write(bytes([last ^ 1]))
        yield cluster


def check(
    cluster: Cluster, faults: Mapping[int, Fault], *overrides: str
) -> tuple[list[int], list[dict[str, Any]], str]:
    """Exit status of each machine, rank 0's findings, and what it wrote to standard error."""
    port = str(free_port())

    def run(number: int) -> subprocess.CompletedProcess[str]:
        node, fault = cluster.nodes[number], faults.get(number, Fault())
        program = (
            *(sys.executable, "-m", "bapo_megatron.torchrun", "--nproc-per-node", "1"),
            *("--nnodes", str(len(cluster.nodes)), "--node-rank", str(number)),
            *("--master-addr", cluster.nodes[0].address, "--master-port", port),
            *("-m", "bapo_megatron", "doctor", "--cluster", str(cluster.config), "--json"),
            *FLOORS,
            *overrides,
        )
        settings = {"NCCL_IB_HCA": "mlx5_0", "GLOO_SOCKET_IFNAME": INTERFACE, **fault.environment}
        try:
            return subprocess.run(
                [*node.prefix, "sh", "-c", f'{fault.command} && exec "$@"', "sh", *program],
                cwd=REPOSITORY,
                env={**os.environ, "OMP_NUM_THREADS": "1", **settings},
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
            )
        finally:
            if fault.command.endswith(SLOW_LINK):
                qdisc = ("tc", "qdisc", "delete", "dev", INTERFACE, "root")
                subprocess.run([*node.prefix, *qdisc], check=True)

    with ThreadPoolExecutor() as pool:
        ended = list(pool.map(run, range(len(cluster.nodes))))
    assert ended[0].stdout, ended
    statuses = [process.returncode for process in ended]
    return statuses, json.loads(ended[0].stdout), ended[0].stderr


def problems(findings: Sequence[dict[str, Any]]) -> list[str]:
    return [f"{row['topic']}: {row['text']}" for row in findings if row["verdict"] == "problem"]


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch, make_cluster(Path(scratch)) as cluster:
        faults = {
            "none": {},
            "a slow link": {2: Fault(SLOW_LINK)},
            "a full disk": {1: Fault(cluster.full_disk())},
            "another setting": {1: Fault(environment={"NCCL_IB_HCA": "mlx5_1"})},
            "a missing file": {2: Fault(cluster.other_model("lacking"))},
            "a different file": {1: Fault(cluster.other_model("changed"))},
        }
        for name, fault in faults.items():
            started_s = time.monotonic()
            statuses, findings, _ = check(cluster, fault)
            lines = "<br>".join(problems(findings)).replace(scratch, "…") or "no problem"
            seconds = time.monotonic() - started_s
            sys.stdout.write(f"| {name} | {statuses} | {seconds:.0f} s | {lines} |\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
