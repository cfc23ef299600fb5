"""The part of the acceptance that samples by SGLang: the demo, with weights sent in two ways."""

import argparse
import contextlib
import importlib.util
import json
import math
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.gpu.acceptance import HANG_S, Check, SkipPartError
from tests.gpu.ranks import NCCL, require_nccl

Server = subprocess.Popen[bytes]
_SERVER_S = 400.0


def sglang(options: argparse.Namespace) -> Iterator[Check]:
    """Train the demo by SGLang, colocated by tensors, then with `serve` and a broadcast."""
    if importlib.util.find_spec("sglang") is None:
        raise SkipPartError("SGLang is not installed (docs/launch.md)")
    on_gpu = options.device == "cuda"
    demo = options.dir.absolute() / "demo"
    _run("examples.tiny", str(demo))
    common = [
        f"model.path={demo}/model",
        f"model.dtype={'bfloat16' if on_gpu else 'float32'}",
        "parallel.tensor=1",
        f"data.train.path={demo}/train.jsonl",
        f"eval.sets=[{{path: {demo}/heldout.jsonl, name: heldout}}]",
        f"train.steps={options.steps}",
        "rollout.weight_sync.verify=every",
        *options.overrides,
    ]
    if on_gpu:  # servers on a CPU have no memory to release
        colocated = ["rollout.colocated=true", "rollout.async_steps=0"]
        colocated += ["rollout.weight_sync.method=tensor"]
        yield from _trained("tensor", demo / "tensor", [*common, *colocated])
        require_nccl()
    os.environ.update(NCCL, BAPO_MEGATRON_ADMIN_API_KEY=secrets.token_hex(16))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    with _served(demo / "servers", port, common) as server:
        _wait_until_ready(address, server)
        backend = f"rollout.weight_sync.backend={'nccl' if on_gpu else 'gloo'}"
        ours = [*common, f"rollout.servers=[{address}]", backend]
        yield from _trained("broadcast", demo / "broadcast", ours)


def _trained(method: str, run_dir: Path, overrides: list[str]) -> Iterator[Check]:
    _run("bapo_megatron", "train", "configs/demo.yaml", f"run_dir={run_dir}", *overrides)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((run_dir / "summary.json").read_text())

    def worst(name: str) -> float:
        return max((row[name] for row in rows if name in row), default=math.nan)

    yield Check(f"mismatch of sampler and trainer ({method})", worst("mismatch/logprob_abs_mean"))
    difference = worst("weight_sync/logprob_difference")
    yield Check(f"difference after a weight sync ({method})", difference)
    gained = summary["accuracy_after"] - summary["accuracy_before"]
    yield Check(f"accuracy gained ({method})", gained)


@contextlib.contextmanager
def _served(run_dir: Path, port: int, overrides: list[str]) -> Iterator[Server]:
    command = [sys.executable, "-m", "bapo_megatron", "serve", "configs/demo.yaml", *overrides]
    command += [f"run_dir={run_dir}", f"rollout.server.port={port}"]
    with subprocess.Popen(command, stdout=sys.stderr) as server:
        try:
            yield server
        finally:
            server.terminate()
            server.wait(60)


def _wait_until_ready(address: str, server: Server) -> None:
    import httpx

    end_s = time.monotonic() + _SERVER_S
    while True:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{address}/health", timeout=30).status_code == httpx.codes.OK:
                return
        if server.poll() is not None or time.monotonic() > end_s:
            raise TimeoutError(f"{address} was not ready within {_SERVER_S:g} s, or ended")
        time.sleep(1)


def _run(module: str, *arguments: str) -> None:
    command = [sys.executable, "-m", module, *arguments]
    subprocess.run(command, stdout=sys.stderr, check=True, timeout=HANG_S)
