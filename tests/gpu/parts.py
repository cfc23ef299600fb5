"""The parts of the acceptance: each yields its checks one by one (``acceptance.Check``)."""

import argparse
import contextlib
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bapo_megatron.algorithm.objectives.bapo import BapoConfig
from bapo_megatron.ops.logprob import vocab_parallel_logprobs
from bapo_megatron.runtime.gpus import recognize_gpu
from tests.benchmarks.harness import clocks_under_load, timed_s
from tests.gpu.acceptance import HANG_S, Check
from tests.gpu.ranks import NCCL, require_nccl
from tests.gpu.sampling import sglang  # noqa: F401 - a part
from tests.gpu.training import (  # noqa: F401 - parts, too
    experts,
    fp8,
    hybrid,
    model,
    profile,
    ranks,
    thin,
    train,
)

_SYNC_S = 120.0
"""Limit of a broadcast to another process."""
_BUFFERS = 3
"""Logits in turns, so that none of them is in a cache."""
_PARENT = Path(__file__).parents[2]
_PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu")
_SANITIZED = "not 152064 and not more_rows_than"
"""Without the largest tensors: a sanitizer takes minutes for each."""
_UNUSED_PACKAGES = ("transformers",)
"""What runs need and no part does."""


def build(options: argparse.Namespace) -> Iterator[Check]:
    """The extension is built for this GPU, and doctor finds no problem."""
    answer = _python("bapo_megatron", "doctor", "--json")
    for row in json.loads(answer.stdout):
        if row["verdict"] != "note" and row["topic"] not in _UNUSED_PACKAGES:
            yield Check(f"doctor: {row['topic']}", float(row["verdict"] == "ok"))


def tests(options: argparse.Namespace) -> Iterator[Check]:
    """What is marked ``gpu`` passes."""
    command = [sys.executable, *_PYTEST, *map(str, gpu_tests())]
    status = _status(command)
    yield Check("pytest -m gpu", float(status == 0))


def gpu_tests() -> list[Path]:
    """The files with tests for a GPU; others import more than a bare machine has."""
    files = (_PARENT / "tests").rglob("test_*.py")
    # The fixture ``kernels`` of tests/ops has those of a GPU among them.
    marks = ("mark.gpu", "kernels: Any")
    return sorted(path for path in files if any(mark in path.read_text() for mark in marks))


def kernels(options: argparse.Namespace) -> Iterator[Check]:
    """Log-prob, entropy and gradient against the bandwidth of a copy, and against others."""
    from tests.benchmarks.bench_logprob import join_one_rank

    device = torch.device(options.device)
    join_one_rank(device)
    shapes = {
        "": (options.tokens, options.columns),
        "long rows ": (max(options.tokens // 8, 1), options.columns * 8),
    }
    for name, shape in shapes.items():
        yield from _logprob_checks(name, shape, device, options.rounds)
    yield Check("bound search us", 1e6 * _search_s(options, device))
    if device.type == "cuda":
        for clock, frequency in clocks_under_load(device).items():
            yield Check(f"{clock} clock MHz", frequency)


def _logprob_checks(
    name: str, shape: tuple[int, int], device: torch.device, rounds: int
) -> Iterator[Check]:
    """Our two kernels against a copy; for the first shape, also against other libraries."""
    from tests.benchmarks.bench_logprob import (
        gpu_cross_entropies,
        gradient_alone,
        megatron_cross_entropies,
    )

    logits = [make_logits(shape, device, number) for number in range(_BUFFERS)]
    target_T = torch.randint(shape[1], (shape[0],), device=device)
    spare_TV = torch.empty_like(logits[0])
    num_bytes = spare_TV.nbytes

    def on_part(function: Callable[..., object], share: int = 1) -> Callable[[int], object]:
        """The work on the first of ``share`` equal parts of the tokens."""
        parts = [logits_TV[: len(logits_TV) // share] for logits_TV in logits]
        part_T = target_T[: len(target_T) // share]
        return lambda number: function(parts[number], part_T)

    def copy(number: int) -> object:
        return spare_TV.copy_(logits[number])

    works = {"copy": copy, "forward": on_part(_forward)}
    others: dict[str, Callable[..., Tensor]] = {}
    if not name:
        fused = megatron_cross_entropies()["Megatron-core fused"]
        others = gpu_cross_entropies() if device.type == "cuda" else {}
        # An eighth of the tokens: it makes float32 copies.
        works["fused"], works["fused both"] = on_part(_no_grad(fused), 8), on_part(_both(fused), 8)
        works |= {library: on_part(_no_grad(function)) for library, function in others.items()}
    took_s = medians_s(device, rounds, works)
    forward_s = took_s["forward"]
    bytes_per_s = 2 * num_bytes / took_s["copy"]
    yield Check(f"{name}copy TB/s", bytes_per_s / 1e12)
    gpu = recognize_gpu(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if gpu is not None:
        share = bytes_per_s / gpu.memory_bytes_per_s
        yield Check(f"{name}copy share of the data sheet", share)
    yield Check(f"{name}forward bandwidth share", num_bytes / forward_s / bytes_per_s)
    # Last, since it overwrites the logits.
    gradient = gradient_alone(logits[0], target_T)
    works = {"copy": copy, "backward": lambda number: gradient(logits[number])}
    took_s |= medians_s(device, rounds, works)
    share = took_s["copy"] / took_s["backward"]  # both read and write the logits once
    yield Check(f"{name}backward bandwidth share", share)
    if not name:
        yield Check("forward against Megatron-core", 8 * took_s["fused"] / forward_s)
        both_s = forward_s + took_s["backward"]
        yield Check("both against Megatron-core", 8 * took_s["fused both"] / both_s)
        for library in others:
            yield Check(f"forward against others ({library})", took_s[library] / forward_s)


def sanitize(options: argparse.Namespace) -> Iterator[Check]:
    """The sanitizer's tools find nothing in our kernels."""
    sanitizer = shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path="/usr/local/cuda/bin"
    )
    if sanitizer is None:
        raise FileNotFoundError("compute-sanitizer is not installed; it is in the CUDA toolkit")
    files = [str(path) for path in gpu_tests() if path.parent.name == "ops"]
    command = [sys.executable, *_PYTEST, "-x", "-k", _SANITIZED, *files]
    ours = ["--kernel-name", "kernel_substring=bapo"]
    # initcheck must see what torch's kernels write.
    for tool, which in {"memcheck": ours, "racecheck": ours, "initcheck": []}.items():
        watch = [sanitizer, f"--tool={tool}", "--error-exitcode=9", *which]
        # Each tensor in memory of its own, else what lies beside it in torch's pool hides a fault.
        status = _status([*watch, *command], PYTORCH_NO_CUDA_MEMORY_CACHING="1")
        yield Check(f"compute-sanitizer {tool}", float(status == 0))


def ipc(options: argparse.Namespace) -> Iterator[Check]:
    """A child maps a bucket and sees it; the memory saver gives memory away and takes it again."""
    from bapo_megatron.engine.base import BucketLayout
    from bapo_megatron.weight_sync.send import shared_memory_payload

    device = torch.device(options.device)
    num_values = 1 << (26 if device.type == "cuda" else 10)
    flat = torch.arange(num_values, dtype=torch.float32, device=device).view(torch.uint8)
    layout = BucketLayout(("w",), ("float32",), ((num_values,),))
    payload = shared_memory_payload(layout, flat)
    child = _python("tests.gpu.ipc_child", "open", text=payload)
    expected = num_values * (num_values - 1) / 2
    seen = float(child.stdout or "nan") if child.returncode == 0 else float("nan")
    yield Check("a child process sees a shared bucket", float(abs(seen / expected - 1) < 1e-6))
    if device.type == "cuda":
        import torch_memory_saver

        with torch_memory_saver.configure_subprocess():
            saver = _python("tests.gpu.ipc_child", "release")
        released, returned = map(float, saver.stdout.split()) if saver.stdout else (0.0, 0.0)
        yield Check("released share", released)
        yield Check("memory is taken again", float(returned >= 0.95))


def sync(options: argparse.Namespace) -> Iterator[Check]:
    """Another process on this device receives weights; after one is killed, another one does."""
    from bapo_megatron.engine.collective import WeightGroup

    device = torch.device(options.device)
    if device.type == "cuda":
        require_nccl()
    backend, megabytes = ("nccl", (1, 64, 512)) if device.type == "cuda" else ("gloo", (1,))
    os.environ.update(NCCL)
    for is_killed in (True, False):
        group = WeightGroup("127.0.0.1", backend, 2, _SYNC_S)
        command = [sys.executable, "-m", "tests.gpu.receiver", json.dumps(asdict(group.place))]
        command += [options.device, *map(str, megabytes), *["1"] * is_killed]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as receiver:
            try:
                group.form().result(_SYNC_S)
                for size in megabytes:
                    flat = torch.full((size << 20,), size % 251, dtype=torch.uint8, device=device)
                    start_s = time.perf_counter()
                    group.broadcast(flat).result(_SYNC_S)
                    took_s = time.perf_counter() - start_s
                    if not is_killed:
                        yield Check(f"broadcast GB/s ({size} MiB)", flat.nbytes / took_s / 1e9)
                if is_killed:
                    receiver.kill()
                    yield Check("seconds until a lost receiver is noticed", _noticed_s(group, flat))
                else:
                    answer, _ = receiver.communicate(timeout=_SYNC_S)
                    yield Check("the bytes of every broadcast", float(answer == "right\n"))
            finally:
                receiver.kill()
                group.close()


def _noticed_s(group: Any, flat: Tensor) -> float:
    start_s = time.perf_counter()
    with contextlib.suppress(Exception):
        group.broadcast(flat).result(_SYNC_S)
        return math.inf  # it must not succeed
    return time.perf_counter() - start_s


def _python(module: str, *arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        input=text,
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_S,
    )


def _status(command: list[str], **environment: str) -> int:
    """Run a command of the repository, with its output on standard error."""
    return subprocess.run(
        command,
        cwd=_PARENT,
        env={**os.environ, **environment},
        stdout=sys.stderr,
        check=False,
        timeout=HANG_S,
    ).returncode


def make_logits(shape: tuple[int, int], device: torch.device, seed: int) -> Tensor:
    """Bfloat16, made where they are used."""
    generator = torch.Generator(device).manual_seed(seed)
    logits = torch.empty(shape, dtype=torch.bfloat16, device=device)
    return logits.normal_(std=3.0, generator=generator)


def medians_s(
    device: torch.device, rounds: int, works: dict[str, Callable[[int], object]]
) -> dict[str, float]:
    """Median time of each ``work(number of the buffer)``, all of them in turns."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for round_ in range(rounds + 2):
        for name, work in works.items():
            times[name].append(timed_s(device, lambda: work(round_ % _BUFFERS)))  # noqa: B023
    return {name: statistics.median(of_one[2:]) for name, of_one in times.items()}


def _forward(logits_TV: Tensor, target_T: Tensor) -> object:
    with torch.no_grad():
        return vocab_parallel_logprobs(logits_TV, target_T, vocab_size=logits_TV.shape[1])


def _no_grad(function: Callable[..., Tensor]) -> Callable[[Tensor, Tensor], object]:
    def run(logits_TV: Tensor, target_T: Tensor) -> object:
        with torch.no_grad():
            return function(logits_TV, target_T)

    return run


def _both(function: Callable[..., Tensor]) -> Callable[[Tensor, Tensor], object]:
    def run(logits_TV: Tensor, target_T: Tensor) -> object:
        leaf = logits_TV.detach().requires_grad_()
        return torch.autograd.grad(function(leaf.view_as(leaf), target_T).sum(), leaf)

    return run


def _search_s(options: argparse.Namespace, device: torch.device) -> float:
    """Time of the table and the search of one update."""
    generator = torch.Generator(device).manual_seed(0)
    normal = torch.empty(3, options.tokens, device=device).normal_(generator=generator)
    logprob_T, mask_T = -normal[0].abs(), torch.ones(options.tokens, device=device)
    search = BapoConfig().search()

    def run(_: int) -> object:
        tokens = (logprob_T, logprob_T + 0.1 * normal[1], normal[2], mask_T)
        return search.bounds(search.contributions(*tokens))

    return medians_s(device, options.rounds, {"search": run})["search"]
