"""Times contenders side by side and writes what was measured, with everything needed to repeat it.

Machines are shared and noisy, so contenders take turns in random order, and what counts is the
ratio of their medians in one run.
"""

import argparse
import contextlib
import gc
import importlib.metadata
import json
import os
import platform
import random
import shlex
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from bapo_megatron.ops import extension
from bapo_megatron.runtime.versions import commit_of

REPOSITORY = Path(__file__).resolve().parents[2]

PACKAGES = (
    *("torch", "megatron-core", "transformer-engine", "flash-attn", "liger-kernel", "triton"),
    *("aiohttp", "orjson", "math-verify", "pyarrow", "transformers", "sglang"),
)


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to do the work."""

    name: str
    run: Callable[[], object]
    prepare: Callable[[], object] = lambda: None
    """Called before each timed run, outside the clock."""
    num_bytes: int = 0
    """What a run must at least move through memory; 0: not of interest."""


@dataclass(frozen=True, slots=True)
class Timing:
    name: str
    median_s: float
    min_s: float
    max_s: float
    num_bytes: int
    peak_bytes: int
    """Most bytes that a run had allocated at a time, beyond what was there before it."""

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth that the median amounts to."""
        return self.num_bytes / self.median_s


@dataclass(slots=True)
class Section:
    """One table of a report."""

    title: str
    timings: list[Timing]
    baseline: str
    """The contender that the others are divided by."""
    bandwidth: tuple[str, float] | None = None
    """Name and bytes per second of what bandwidths are shares of."""
    remarks: list[str] = field(default_factory=list)

    def ratio(self, name: str) -> float:
        """Median of a contender over that of the baseline."""
        medians = {timing.name: timing.median_s for timing in self.timings}
        return medians[name] / medians[self.baseline]


def interleave(
    contenders: Sequence[Contender], device: torch.device, *, rounds: int, warmup: int = 2
) -> list[Timing]:
    """Time every contender ``rounds`` times, in turns whose order is random but reproducible."""
    order = random.Random(0)
    samples: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    gc.collect()
    gc.disable()
    for number in range(warmup + rounds):
        for contender in order.sample(list(contenders), len(contenders)):
            contender.prepare()
            elapsed_s = timed_s(device, contender.run)
            if number >= warmup:
                samples[contender.name].append(elapsed_s)
    gc.enable()
    return [
        Timing(
            contender.name,
            statistics.median(samples[contender.name]),
            min(samples[contender.name]),
            max(samples[contender.name]),
            contender.num_bytes,
            peak_bytes(contender, device),
        )
        for contender in contenders
    ]


_AHEAD_CYCLES = 2_000_000
"""What a GPU waits while the host launches, about a millisecond."""


def timed_s(device: torch.device, run: Callable[[], object]) -> float:
    """Seconds that a run takes; on a GPU by its own clock, so that launches do not count."""
    if device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_AHEAD_CYCLES)  # else a short run's time is the host's to launch it
        begin.record()
        result = run()
        end.record()
        end.synchronize()
        del result
        return begin.elapsed_time(end) / 1e3
    begin_s = time.perf_counter()
    result = run()
    elapsed_s = time.perf_counter() - begin_s
    del result
    return elapsed_s


def peak_bytes(contender: Contender, device: torch.device) -> int:
    """Most bytes beyond the start that PyTorch's allocator of the device had out during a run."""
    contender.prepare()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        contender.run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        contender.run()
    assert profiler.profiler is not None
    result = profiler.profiler.kineto_results
    assert result is not None
    events = [(event.start_ns(), event.nbytes()) for event in result.events() if event.nbytes()]
    now = peak = 0
    for _, num_bytes in sorted(events, key=lambda event: event[0]):
        now += num_bytes
        peak = max(peak, now)
    return peak


ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty")
"""Operators that compute nothing."""


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not func.is_view and name not in ALLOCATIONS:
            self.operators[name] += 1
        return func(*args, **(kwargs or {}))


def count_operators(contender: Contender) -> Counter[str]:
    """The operators that a run dispatches, but for views and allocations; each is a launch."""
    contender.prepare()
    with _Counting() as counting:
        contender.run()
    return counting.operators


def count_kernels(contender: Contender) -> int:
    """Kernels and copies that a run launches on a GPU."""
    contender.prepare()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        contender.run()
        torch.cuda.synchronize()
    return sum(event.device_type == DeviceType.CUDA for event in profiler.events() or [])


def _uncached(device: torch.device) -> Tensor:
    """Ones that no cache holds: 256 MB, and 2 GB on a GPU, where a launch would count."""
    return torch.ones(1 << (29 if device.type == "cuda" else 26), device=device)


def read_bandwidth(device: torch.device, rounds: int) -> float:
    """Bytes per second of the fastest of PyTorch's plain reductions."""
    floats = _uncached(device)
    integers = floats.view(torch.int64)
    contenders = [
        Contender("sum", floats.sum, num_bytes=floats.nbytes),
        Contender("amax", floats.amax, num_bytes=floats.nbytes),
        Contender("integer sum", integers.sum, num_bytes=floats.nbytes),
    ]
    return max(timing.bytes_per_s for timing in interleave(contenders, device, rounds=rounds))


def write_bandwidth(device: torch.device, rounds: int) -> tuple[str, float]:
    """Name and bytes per second of what reads and writes in the best way of the device.

    On a GPU that is a copy. On a CPU a copy also reads what it is about to overwrite, so an
    in-place product is the measure for kernels that work in place.
    """
    values = _uncached(device)
    if device.type == "cuda":
        target = torch.empty_like(values)
        name, run = "copy bandwidth", lambda: target.copy_(values)
    else:
        name, run = "in-place bandwidth", lambda: values.mul_(1.0)
    contender = Contender(name, run, num_bytes=2 * values.nbytes)
    return name, interleave([contender], device, rounds=rounds)[0].bytes_per_s


def clocks_under_load(device: torch.device) -> dict[str, float]:
    """Clocks of the GPU in MHz, while it copies."""
    source = torch.zeros(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    for _ in range(2000):  # about a second, which nobody waits for
        target.copy_(source)
    command = ["nvidia-smi", f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}"]
    command += ["--query-gpu=clocks.sm,clocks.mem", "--format=csv,noheader,nounits"]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    torch.cuda.synchronize(device)
    return dict(zip(("SM", "memory"), map(float, answer.stdout.split(",")), strict=True))


def arguments(description: str, *, rounds: int = 11) -> argparse.ArgumentParser:
    """The options of a benchmark that times contenders by ``interleave``."""
    parser = report_arguments(description)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="CPU threads")
    parser.add_argument("--rounds", type=int, default=rounds)
    return parser


def report_arguments(description: str, *, needs_out: bool = False) -> argparse.ArgumentParser:
    """The options that all benchmarks have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--out", type=Path, required=needs_out, help="write OUT.md and OUT.json (no suffix)"
    )
    return parser


def machine(device: torch.device | None = None) -> dict[str, Any]:
    """Where and with what a report was made; by default on the CPU."""
    build, versions = extension.build_info(), {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit_of(REPOSITORY) or "unknown",
        "command": f"python -m {_module()} {shlex.join(sys.argv[1:])}",
        "processor": _processor(),
        "device": _device(device or torch.device("cpu")),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "packages": versions,
        "instruction_set": build["isa"],
        "compiler": build["compiler"],
    }


def page(title: str, where: dict[str, Any], *blocks: str | Sequence[str]) -> str:
    """A report for people: what ``machine`` returned, then paragraphs and tables."""
    packages = ", ".join(f"{name} {version}" for name, version in where["packages"].items())
    heading = (
        f"{where['date']}, commit {where['commit']}, {where['processor']}, device "
        f"{where['device']}, {where['threads']} threads, {where['instruction_set']}; Python "
        f"{where['python']}, {packages}; {where['compiler']}."
    )
    texts = [f"# {title}", heading, f"    {where['command']}"]
    texts += [block if isinstance(block, str) else "\n".join(block) for block in blocks]
    return "\n\n".join(text for text in texts if text) + "\n"


def table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> list[str]:
    """The lines of a table in markdown."""
    lines = [f"| {' | '.join(map(str, cells))} |" for cells in (head, *rows)]
    lines.insert(1, "|---" * len(head) + "|")
    return lines


def columns(rows: Iterable[dict[str, Any]], templates: dict[str, str]) -> list[str]:
    """The lines of a table with a row per record; each column is a template of its fields."""
    cells = ([text.format(**row) for text in templates.values()] for row in rows)
    return table(list(templates), cells)


def publish(
    title: str, sections: Sequence[Section], options: argparse.Namespace, device: torch.device
) -> None:
    """Print the report and, if asked, write it."""
    report = {
        "title": title,
        "machine": machine(device),
        "sections": [asdict(section) for section in sections],
    }
    finish(options.out, _markdown(title, report["machine"], sections), report)


def finish(out: Path | None, text: str, report: dict[str, Any]) -> None:
    """Print ``text``; write it to OUT.md and ``report`` to OUT.json, if there is an OUT."""
    print(text)  # noqa: T201
    if out is None:
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".md").write_text(text)
    out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")


def _markdown(title: str, where: dict[str, Any], sections: Sequence[Section]) -> str:
    has_memory = any(timing.peak_bytes for section in sections for timing in section.timings)
    blocks: list[str | list[str]] = [
        "Medians of interleaved rounds; the machine is shared, so ratios count and times do not."
        + " Memory is what a run allocates beyond its inputs." * has_memory
    ]
    for section in sections:
        blocks += [f"## {section.title}", _section_table(section, has_memory), section.remarks]
    return page(title, where, *blocks)


def _section_table(section: Section, has_memory: bool) -> list[str]:
    head = ["", "median", "min – max", f"× {section.baseline}", *["memory"] * has_memory]
    head += [f"share of {section.bandwidth[0]}"] if section.bandwidth is not None else []
    rows = []
    for timing in section.timings:
        factor, unit = (1.0, "s") if timing.max_s >= 1 else (1e3, "ms")
        cells = [
            timing.name,
            f"{timing.median_s * factor:.3g} {unit}",
            f"{timing.min_s * factor:.3g} – {timing.max_s * factor:.3g}",
            f"{section.ratio(timing.name):.2f}",
            *[f"{timing.peak_bytes / 1e6:.1f} MB"] * has_memory,
        ]
        if section.bandwidth is not None:
            share = timing.bytes_per_s / section.bandwidth[1]
            cells.append(f"{share:.0%}" if timing.num_bytes else "")
        rows.append(cells)
    return table(head, rows)


def _device(device: torch.device) -> str:
    """Name of the device, and of a GPU its clocks, which tell whether it was throttled."""
    if device.type == "cpu":
        return "cpu"
    clocks = clocks_under_load(device).items()
    under_load = ", ".join(f"{name} clock {megahertz:.0f} MHz" for name, megahertz in clocks)
    return f"{torch.cuda.get_device_name(device)} ({under_load})"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return f"{line.partition(':')[2].strip()}, {os.cpu_count()} cores"
    return platform.processor()


def _module() -> str:
    path = Path(sys.argv[0]).resolve()
    if path.is_relative_to(REPOSITORY):
        return ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)
    return path.stem
