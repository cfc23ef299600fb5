"""Where the time of a step goes, by torch's profiler."""

import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import profile

KINDS = {
    "loss stage": r"bapo",
    "attention": r"flash|fmha|attention|sdpa",
    "communication": r"nccl|gloo|c10d",
    "optimizer": r"adam|multi_tensor|_foreach",
    "GEMM": r"gemm|cutlass|cublas|nvjet|xmma|splitk|aten::(add|b)?mm|_grouped_mm|addbmm|baddbmm",
    "copies": r"memcpy|memset|copy_|aten::(cat|index|fill_|zero_)|catarray",
}
"""Patterns of the names of kernels, or of operations on a CPU; the first that matches counts."""
_TABLE_ROWS = 60


class StepProfile:
    """Records what runs within ``running``; writes a table and a trace for Perfetto."""

    def __init__(self, path: Path, *, on_gpu: bool) -> None:
        """Write ``path`` with ``.txt`` and with ``.json``."""
        self._path, self._on_gpu = path, on_gpu
        self._seconds: Counter[str] = Counter()
        self._wall_s = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Profile the block."""
        with profile() as recorded:
            start_s = time.perf_counter()
            yield
            self._wall_s = time.perf_counter() - start_s
        by = "self_cuda_time_total" if self._on_gpu else "self_cpu_time_total"
        table = recorded.key_averages().table(sort_by=by, row_limit=_TABLE_ROWS)
        self._path.with_suffix(".txt").write_text(table)
        recorded.export_chrome_trace(str(self._path.with_suffix(".json")))
        busy_us = 0.0
        for name, took_us in self._spans(recorded.events()):
            self._seconds[kind_of(name)] += took_us / 1e6
            busy_us += took_us
        self._seconds["idle"] = max(0.0, self._wall_s - busy_us / 1e6)

    def shares(self) -> dict[str, float]:
        """Return each kind's share of the time, of kernels on one stream; they add up to 1."""
        total_s = sum(self._seconds.values())
        return {kind: seconds / total_s for kind, seconds in self._seconds.most_common()}

    def _spans(self, events: Any) -> Iterator[tuple[str, float]]:
        for event in events:
            if self._on_gpu and event.device_type == DeviceType.CUDA:
                yield event.name, event.time_range.elapsed_us()
            elif not self._on_gpu:
                yield event.name, event.self_cpu_time_total


def kind_of(name: str) -> str:
    """Return the kind of a kernel or an operation."""
    for kind, pattern in KINDS.items():
        if re.search(pattern, name, re.IGNORECASE):
            return kind
    return "elementwise, norms and others"
