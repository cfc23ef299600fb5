"""Start-up: how long commands take to say something, and `train` to ask for something.

    make demo && git worktree add build/before COMMIT
    python -m tests.benchmarks.bench_startup runs/demo-tiny-seed0 --before build/before \
        --out docs/benchmarks/startup_cpu_202611

Every run is a process of its own. The server that `train` asks is a socket, which only notes that
somebody came. Imports of libraries by themselves are the yardstick.
"""

import os
import socket
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch

from bapo_megatron.runtime.processes import end_group
from tests.benchmarks import harness

LIBRARIES = {
    "import torch": "import torch",
    "import torch and Megatron-core": (
        "from bapo_megatron.policy.megatron_import import import_megatron; import_megatron()"
    ),
    "import transformers' AutoTokenizer": "from transformers import AutoTokenizer",
}
COMMANDS = {
    "--help": ["--help"],
    "config": ["config"],
    "train --help": ["train", "--help"],
}
LIMIT_S = 300.0
_MODULE = ("-m", "bapo_megatron")


def main() -> None:
    parser = harness.arguments("Start-up of commands.")
    parser.add_argument("data_dir", type=Path, help="what examples.tiny wrote")
    parser.add_argument("--before", type=Path, help="another tree of this project, built")
    options = parser.parse_args()
    trees = {"": harness.REPOSITORY}
    if options.before is not None:
        trees[" (before)"] = options.before.resolve()
    settings = [
        "configs/demo.yaml",
        f"model.path={options.data_dir.resolve()}/model",
        f"data.train.path={options.data_dir.resolve()}/train.jsonl",
        "eval.sets=[]",
        "parallel.tensor=1",
    ]
    contenders = [
        harness.Contender(name, partial(_finish, ["-c", code], harness.REPOSITORY))
        for name, code in LIBRARIES.items()
    ]
    for mark, tree in trees.items():
        contenders += [
            harness.Contender(
                f"{name}{mark}",
                partial(_finish, [*_MODULE, *words, *(settings if name == "config" else ())], tree),
            )
            for name, words in COMMANDS.items()
        ]
        contenders.append(
            harness.Contender(
                f"train, first request{mark}", partial(_first_request, settings, tree)
            )
        )
    device = torch.device("cpu")
    timings = harness.interleave(contenders, device, rounds=options.rounds, warmup=0)
    section = harness.Section("From the start of the process", timings, "import torch")
    harness.publish("Start-up", [section], options, device)


def _environment(tree: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(tree), "CUDA_VISIBLE_DEVICES": ""}


def _finish(arguments: list[str], tree: Path) -> None:
    subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        cwd=tree,
        env=_environment(tree),
        stdout=subprocess.DEVNULL,
        check=True,
        timeout=LIMIT_S,
    )


def _first_request(settings: list[str], tree: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch, socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(LIMIT_S)
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        process = subprocess.Popen(
            [
                *(sys.executable, "-W", "ignore"),
                *(*_MODULE, "train", *settings),
                f"run_dir={scratch}/run",
                f"rollout.servers=[{address}]",
            ],
            cwd=tree,
            env=_environment(tree),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            server.accept()[0].close()
        finally:
            end_group(process)


if __name__ == "__main__":
    main()
