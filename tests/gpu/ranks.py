"""Trains a variant in several ranks on one device, each as rank 0 of a node of its own.

python -m tests.gpu.ranks DIRECTORY VARIANT        # is one of the ranks
"""

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bapo_megatron.runtime.processes import end_group
from bapo_megatron.runtime.versions import nccl_version
from tests.gpu.acceptance import HANG_S, SkipPartError

NCCL_VERSION = (2, 30)
"""The first that accepts several ranks on one GPU."""
NCCL = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "4",
    "NCCL_CUMEM_ENABLE": "0",
}
"""What several ranks on one GPU need in their environment (docs/gpu.md)."""


def require_nccl() -> None:
    """Skip the part if NCCL, as this process has loaded it, refuses two ranks on one GPU."""
    loaded = nccl_version()
    numbers = [int(part) for part in loaded.split(".") if part.isdigit()]
    if tuple(numbers[:2]) < NCCL_VERSION:
        raise SkipPartError(
            f"NCCL {loaded}: two ranks on one GPU need 2.30; preload its libnccl.so.2 (docs/gpu.md)"
        )


def train_in_ranks(
    directory: Path, variant: dict[str, dict[str, Any]], count: int, device: str
) -> dict[str, Any]:
    """Return the fields of ``Trained`` of rank 0.

    Raises:
        RuntimeError: A rank failed; it has said why on standard error.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    shared = {
        **NCCL,
        "WORLD_SIZE": str(count),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    if device == "cpu":
        shared["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, "-m", "tests.gpu.ranks", str(directory), json.dumps(variant)]
    ranks = [
        subprocess.Popen(
            command,
            env={**os.environ, **shared, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for rank in range(count)
    ]
    end_s = time.monotonic() + HANG_S / 3
    try:
        while any(rank.poll() is None for rank in ranks):
            if any(rank.poll() for rank in ranks) or time.monotonic() > end_s:
                time.sleep(2)  # the others may still say why
                break
            time.sleep(0.1)
    finally:
        for rank in ranks:
            end_group(rank)
    statuses = [rank.returncode for rank in ranks]
    if any(statuses):
        raise RuntimeError(f"ranks ended with {statuses}")
    assert ranks[0].stdout is not None
    trained: dict[str, Any] = json.loads(ranks[0].stdout.read().splitlines()[-1])
    return trained


def main(directory: str, variant: str) -> None:
    from bapo_megatron.policy.megatron_import import import_megatron

    import_megatron()
    from tests.gpu.training import train_variant

    on_gpu = torch.cuda.is_available()
    trained = train_variant(Path(directory), json.loads(variant), on_gpu=on_gpu)
    if os.environ["RANK"] == "0":
        print(json.dumps(asdict(trained)))  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
