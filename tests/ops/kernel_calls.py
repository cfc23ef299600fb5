"""Short calls of ``torch.ops.bapo`` for the kernel tests, with the usual arguments filled in.

Shape legend: N = rows of logits, V = columns, T = tokens, P = tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from bapo_megatron.ops import extension
from tests.cuda_emulation import launchers
from tests.oracles.bound_search import Rule, Tokens
from tests.tolerances import assert_within

ISAS: list[str] = extension.build_info()["available_isas"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LOWER, UPPER = (0.6, 0.9, 0.02), (1.2, 3.0, 0.05)
"""The candidates of the paper, of which ``paper_rule`` knows the values."""
GRID = extension.ClipGrid(LOWER, UPPER)
NONFINITE, OUT_OF_RANGE, POSITIVE, NEGATIVE = range(-4, 0)
"""Slots at the end of the table."""


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 2e-6) -> None:
    """Within tolerance · max(1, |expected|), or both NaN or the same infinity."""
    assert actual.shape == expected.shape
    error = (actual.detach().double() - expected).abs() / expected.double().abs().clamp(min=1.0)
    same = (actual.isnan() & expected.isnan()) | (actual.double() == expected)
    if not same.all():
        assert_within(error[~same].max(), tolerance)


@contextmanager
def instruction_set(name: str) -> Iterator[None]:
    """Run the CPU ops with one instruction set."""
    extension.use_isa(name)
    try:
        yield
    finally:
        extension.use_isa("auto")


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Run torch's operators with this many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class TokenResults(NamedTuple):
    """What ``logprob_combine`` returns; each [T] float32."""

    logprob: Tensor
    entropy: Tensor
    max: Tensor
    log_sum: Tensor


def partials(
    logits_NV: Tensor,
    target_T: Tensor,
    *,
    rows_T: Tensor | None = None,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """[T, 4] partials of one rank; the vocabulary is all columns unless its size is given."""
    size = logits_NV.shape[1] if vocab_size is None else vocab_size
    return torch.ops.bapo.logprob_partials(
        logits_NV, rows_T, target_T, vocab_start, size, temperature
    )


def token_results(
    logits_NV: Tensor, target_T: Tensor, *, temperature: float = 1.0, **where: object
) -> TokenResults:
    """Log-probs of one rank that holds the whole vocabulary."""
    part_T4 = partials(logits_NV, target_T, temperature=temperature, **where)  # type: ignore[arg-type]
    return TokenResults(*torch.ops.bapo.logprob_combine(part_T4[None], temperature))


def gradient_(
    logits_NV: Tensor,
    target_T: Tensor,
    results: TokenResults,
    grad_logprob_T: Tensor | None,
    grad_entropy_T: Tensor | None,
    *,
    rows_T: Tensor | None = None,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """Overwrite the logits with their gradient and return them."""
    torch.ops.bapo.logits_backward_(
        logits_NV,
        rows_T,
        target_T,
        results.max,
        results.log_sum,
        results.entropy,
        grad_logprob_T,
        grad_entropy_T,
        vocab_start,
        logits_NV.shape[1] if vocab_size is None else vocab_size,
        temperature,
    )
    return logits_NV


class KlResults(NamedTuple):
    """What ``kl_combine`` returns; each [T] float32."""

    logprob: Tensor
    entropy: Tensor
    max: Tensor
    log_sum: Tensor
    teacher_max: Tensor
    teacher_log_sum: Tensor
    kl: Tensor


def kl_partials(
    student_TV: Tensor,
    teacher_TV: Tensor,
    target_T: Tensor,
    direction: str,
    *,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """[T, 8] partials of one rank; the vocabulary is all columns unless its size is given."""
    size = student_TV.shape[1] if vocab_size is None else vocab_size
    return torch.ops.bapo.kl_partials(
        student_TV, teacher_TV, target_T, vocab_start, size, temperature, direction
    )


def kl_results(
    student_TV: Tensor,
    teacher_TV: Tensor,
    target_T: Tensor,
    direction: str,
    *,
    temperature: float = 1.0,
) -> KlResults:
    """Log-probs and divergences of one rank that holds the whole vocabulary."""
    part_T8 = kl_partials(student_TV, teacher_TV, target_T, direction, temperature=temperature)
    return KlResults(*torch.ops.bapo.kl_combine(part_T8[None], temperature, direction))


def kl_gradient_(
    student_TV: Tensor,
    teacher_TV: Tensor,
    target_T: Tensor,
    results: KlResults,
    grads: tuple[Tensor | None, Tensor | None, Tensor],
    direction: str,
    *,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """Overwrite the student's logits with their gradient and return them.

    ``grads`` are those of log-prob, entropy and KL.
    """
    size = student_TV.shape[1] if vocab_size is None else vocab_size
    torch.ops.bapo.kl_backward_(
        student_TV,
        teacher_TV,
        target_T,
        *results[2:4],
        results.entropy,
        *results[4:],
        *grads,
        vocab_start,
        size,
        temperature,
        direction,
    )
    return student_TV


def random_logits(
    num_rows: int, num_columns: int, dtype: torch.dtype, *, scale: float = 4.0, seed: int = 0
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(num_rows, num_columns, generator=generator) * scale).to(dtype)


def random_targets(num_tokens: int, vocab_size: int, *, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (num_tokens,), generator=generator)


def grid_tensor(grid: extension.ClipGrid) -> Tensor:
    return torch.frombuffer(bytearray(grid.to_bytes()), dtype=torch.uint8)


def plain_candidates(grid: extension.ClipGrid) -> tuple[list[float], list[float], float | None]:
    """Lower and upper candidates and the dual clip, read from the grid's bytes."""
    plain = launchers.plain_grid(grid)
    lower, upper = plain.lower[: plain.num_lower], plain.upper[: plain.num_upper]
    return lower, upper, plain.lower[plain.num_lower] if plain.has_dual_clip else None


def path_of(grid: extension.ClipGrid) -> list[tuple[float, float]]:
    """The (low, high) pairs in the order of the search: those it reports for an empty table."""
    result = extension.search([0] * grid.num_slots, grid, 0.5, "surrogate", "share")
    return [(pair.clip_low, pair.clip_high) for pair in result.candidates]


def filled_table(
    tokens: Tokens,
    grid: extension.ClipGrid,
    weight: str = "uniform",
    *,
    table: Tensor | None = None,
) -> Tensor:
    """[slots] int64: the tokens added to a table, a new one unless it is given."""
    if table is None:
        table = torch.zeros(grid.num_slots, dtype=torch.int64)
    arrays = [torch.from_numpy(array) for array in tokens.arrays()]
    torch.ops.bapo.contributions_(table, grid_tensor(grid), *arrays, weight)
    return table


def search_table(table: Tensor, grid: extension.ClipGrid, rule: Rule) -> extension.SearchResult:
    return extension.search(table.tolist(), grid, rule.target, rule.contribution, rule.measure)  # type: ignore[arg-type]
