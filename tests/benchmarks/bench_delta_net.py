"""The twin of FLA's gated delta rule beside transformers' own torch path, in one run.

python -m tests.benchmarks.bench_delta_net
"""

from __future__ import annotations

import sys
from functools import partial
from itertools import pairwise
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from bapo_megatron.policy.megatron_import import import_megatron

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

HEADS, KEY, VALUE = 16, 128, 128
"""A third of Qwen3.5-27B's heads, as on one of three tensor-parallel ranks."""
PACKS = {"8 × 256": [256] * 8, "1 to 300": [1, 30, 64, 65, 129, 200, 257, 300], "2048": [2048]}
REPEATS = 5


def timed(run: Callable[[], Tensor]) -> tuple[float, float]:
    """Best milliseconds of a forward, and of a backward pass."""
    forward, backward = [], []
    for _ in range(REPEATS):
        start = perf_counter()
        output = run()
        middle = perf_counter()
        output.sum().backward()
        forward.append(middle - start)
        backward.append(perf_counter() - middle)
    return 1e3 * min(forward), 1e3 * min(backward)


def ours(inputs: list[Tensor], ends: Tensor) -> Tensor:
    """The twin, on the pack."""
    from bapo_megatron.policy.delta_net import chunk_gated_delta_rule

    query, key, value, decay, rate = inputs
    unit = [torch.nn.functional.normalize(part, dim=-1) for part in (query, key)]
    return chunk_gated_delta_rule(*unit, value, g=decay, beta=rate, cu_seqlens=ends)[0]


def theirs(inputs: list[Tensor], ends: Tensor) -> Tensor:
    """transformers, sequence by sequence."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

    parts = []
    for start, end in pairwise(ends.tolist()):
        tensors = [tensor[:, start:end] for tensor in inputs]
        parts.append(torch_chunk_gated_delta_rule(*tensors, use_qk_l2norm_in_kernel=True)[0])
    return torch.cat(parts, dim=1)


def main() -> None:
    """Print a table, and where the time goes."""
    import_megatron()
    torch.manual_seed(0)
    lines = ["| sequences | rule | forward, ms | backward, ms |", "|---|---|---|---|"]
    for name, lengths in PACKS.items():
        ends, count = torch.tensor([0, *lengths]).cumsum(0).int(), sum(lengths)
        drawn = [torch.randn(1, count, HEADS, size) for size in (KEY, KEY, VALUE)]
        rates = [-torch.rand(1, count, HEADS), torch.rand(1, count, HEADS)]
        inputs = [tensor.requires_grad_() for tensor in (*drawn, *rates)]
        for rule in (ours, theirs):
            forward, backward = timed(partial(rule, inputs, ends))
            lines.append(f"| {name} | {rule.__name__} | {forward:.0f} | {backward:.0f} |")
    with torch.profiler.profile() as profile:
        ours(inputs, ends).sum().backward()
    lines.append(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=8))
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
