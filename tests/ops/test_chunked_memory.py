"""What the token-chunked path allocates, counted by PyTorch's profiler on the CPU."""

from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from bapo_megatron.ops.chunked import OutputHead, TeacherRows, chunked_logprobs
from tests.ops.chunked_problem import (
    ClippedLoss,
    Problem,
    chunked_loss,
    chunks_of,
    make_problem,
    with_main_grad,
)

NUM_COLUMNS, HIDDEN_SIZE = 9728, 448


def _large_problem(dtype: torch.dtype) -> tuple[Problem, dict[str, Any]]:
    """A vocabulary of the size that one of eight ranks holds, with few tokens and hidden units."""
    generator = torch.Generator().manual_seed(0)
    tokens = make_problem(num_rows=1200, num_tokens=1100).tokens
    hidden_NH = torch.randn(1200, HIDDEN_SIZE, generator=generator)
    weight_VH = torch.randn(NUM_COLUMNS, HIDDEN_SIZE, generator=generator) / 30
    return (
        Problem(hidden_NH.to(dtype), weight_VH.to(dtype), tokens),
        {"vocab_size": NUM_COLUMNS, "token_loss": ClippedLoss(tokens, 0.03)},
    )


def _peak_bytes(run: Any) -> int:
    """Most bytes above the start that PyTorch's CPU allocator had out while ``run`` ran."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    assert profiler.profiler is not None
    result = profiler.profiler.kineto_results
    assert result is not None
    allocations = sorted(
        ((event.start_ns(), event.nbytes()) for event in result.events() if event.nbytes()),
        key=lambda allocation: allocation[0],
    )
    now, peak = 0, 0
    for _, num_bytes in allocations:
        now += num_bytes
        peak = max(peak, now)
    return peak


def _scratch_bytes(problem: Problem, num_rows: int) -> int:
    """What this machine's matrix product of so many rows takes beside its result."""
    rows, weight_VH = problem.hidden_NH[:num_rows].detach(), problem.weight_VH.detach()
    logits_bytes = num_rows * NUM_COLUMNS * rows.element_size()
    return _peak_bytes(lambda: torch.mm(rows, weight_VH.T)) - logits_bytes


@pytest.mark.parametrize("with_teacher", [False, True])
@pytest.mark.parametrize("chunk_tokens", [128, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peak_memory_is_that_of_a_chunk(
    dtype: torch.dtype, chunk_tokens: int, with_teacher: bool
) -> None:
    problem, settings = _large_problem(dtype)
    weight_VH: Any = with_main_grad(problem.weight_VH)
    if with_teacher:
        rows_TH = problem.hidden_NH[problem.tokens.rows_T]
        settings["teacher"] = TeacherRows(rows_TH, OutputHead(problem.weight_VH), "reverse")
    hidden_NH = problem.hidden_NH.requires_grad_()

    def run() -> None:
        loss, _ = chunked_loss(
            hidden_NH,
            OutputHead(weight_VH),
            problem.tokens,
            **settings,
            chunk_tokens=chunk_tokens,
        )
        loss.backward()

    chunk_logits = (1 + with_teacher) * chunk_tokens * NUM_COLUMNS * dtype.itemsize
    weight_gradient = NUM_COLUMNS * HIDDEN_SIZE * dtype.itemsize
    hidden_gradient = 4 * hidden_NH.numel()
    beyond = _peak_bytes(run) - hidden_gradient - _scratch_bytes(problem, chunk_tokens)
    # Measured at all: the logits of a chunk are there.
    assert beyond > 0.9 * chunk_logits
    assert beyond <= 1.1 * (chunk_logits + weight_gradient)


def test_the_collection_pass_holds_the_logits_of_one_chunk() -> None:
    problem, _ = _large_problem(torch.bfloat16)

    def run() -> None:
        head = OutputHead(problem.weight_VH)
        sizes = {"vocab_size": NUM_COLUMNS, "chunk_tokens": 128}
        chunked_logprobs(problem.hidden_NH, chunks_of(head, problem.tokens, **sizes))

    chunk_logits = 128 * NUM_COLUMNS * 2
    peak = _peak_bytes(run) - _scratch_bytes(problem, 128)
    assert chunk_logits < peak < 1.3 * chunk_logits  # and hidden states of a chunk
