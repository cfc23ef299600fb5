"""The ops over rows of logits, with a teacher and without, against float64.

Shape legend: N = rows of logits, V = columns, T = tokens, P = tensor-parallel ranks, K = numbers of
a partial: 4, with a teacher 8.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from bapo_megatron.ops.logprob import Columns
from tests.ops.kernel_calls import (
    DTYPES,
    StridedLogits,
    adversarial_rows,
    assert_close,
    assert_token_results,
    random_logits,
    random_targets,
    strided_logits,
    threads,
)
from tests.oracles.kl import kl_divergence, kl_logits_gradient, kl_term_size
from tests.oracles.logprob import logits_gradient, spacing, token_logprobs
from tests.tolerances import EPS, assert_within

BLOCK = 1024
"""Columns that the CPU kernels sum at a time."""
KL_TOLERANCE = 32 * EPS
"""Times the size of the terms, at least 1. Eight lanes sum a block: √128 · ε / 2 = 6e-7 is likely,
and 128 ε the worst case."""
SIZES = (
    *((0, 16), (1, 1), (31, 2), (9, 3), (32, 15), (33, 16), (33, 17), (1, 31), (9, 63), (9, 64)),
    *((9, 65), (9, 1023), (9, 1025), (2, 4097), (2, 19_008), (2, 33_000)),
)
"""Numbers of tokens and of columns, around those of vectors, blocks and pieces."""
Grads = tuple[Tensor | None, Tensor | None, Tensor]
"""Of log-prob, entropy and KL."""
Results = tuple[Tensor, ...]
"""Log-prob, entropy, maximum and log-sum; with a teacher also its maximum and log-sum, and KL."""

all_dtypes = pytest.mark.parametrize("dtype", DTYPES)
with_a_teacher = pytest.mark.parametrize("direction", ["reverse", "forward"])


class Rows(NamedTuple):
    """Logits of student and teacher, the targets, and the student's row of each (None: its own)."""

    student_NV: Tensor
    teacher_TV: Tensor
    target_T: Tensor
    rows_T: Tensor | None = None

    def take(self, tokens: list[int]) -> Rows:
        return Rows(self.student_NV[tokens], self.teacher_TV[tokens], self.target_T[tokens])


@dataclass(frozen=True)
class Ops:
    """Those of a direction of the divergence; None: those without a teacher."""

    kernels: Any
    direction: str | None

    def partials(self, rows: Rows, columns: Columns) -> Tensor:
        student_NV, teacher_TV, target_T, rows_T = rows
        if self.direction is None:
            part_T4: Tensor = self.kernels.logprob_partials(student_NV, rows_T, target_T, *columns)
            return part_T4
        rest = (*columns, self.direction)
        part_T8: Tensor = self.kernels.kl_partials(student_NV, teacher_TV, target_T, *rest)
        return part_T8

    def combine(self, partials_PTK: Tensor, temperature: float) -> Results:
        if self.direction is None:
            return tuple(self.kernels.logprob_combine(partials_PTK, temperature))
        return tuple(self.kernels.kl_combine(partials_PTK, temperature, self.direction))

    def results(self, rows: Rows, columns: Columns | None = None) -> Results:
        """Those of one rank that holds the whole vocabulary."""
        columns = columns or Columns(0, rows.student_NV.shape[1], 1.0)
        return self.combine(self.partials(rows, columns)[None], columns.temperature)

    def gradient_(
        self, rows: Rows, results: Results, grads: Grads, columns: Columns | None = None
    ) -> Tensor:
        """Overwrite the student's logits with their gradient and return them."""
        student_NV, teacher_TV, target_T, rows_T = rows
        columns = columns or Columns(0, student_NV.shape[1], 1.0)
        _, entropy_T, max_T, log_sum_T, *teacher = results
        numbers = (max_T, log_sum_T, entropy_T, *teacher)
        if self.direction is None:
            rest = (*numbers, *grads[:2], *columns)
            self.kernels.logits_backward_(student_NV, rows_T, target_T, *rest)
        else:
            rest = (*numbers, *grads, *columns, self.direction)
            self.kernels.kl_backward_(student_NV, teacher_TV, target_T, *rest)
        return student_NV

    def gradient(
        self, rows: Rows, results: Results, grads: Grads, columns: Columns | None = None
    ) -> Tensor:
        """The same in a copy."""
        copied = rows._replace(student_NV=rows.student_NV.clone())
        return self.gradient_(copied, results, grads, columns)

    def assert_results(self, results: Results, rows: Rows, temperature: float = 1.0) -> None:
        """Against float64; the maxima are logits."""
        student_TV, teacher_TV, target_T, _ = rows
        assert_token_results(results[:4], student_TV, target_T, temperature)
        if self.direction is None:
            return
        teacher_max_T, teacher_log_sum_T, kl_T = results[4:]
        expected_T = kl_divergence(student_TV, teacher_TV, self.direction, temperature)
        size_T = kl_term_size(student_TV, teacher_TV, self.direction, temperature).clamp(min=1.0)
        error_T = (kl_T - expected_T).abs() / size_T
        assert_within(error_T.amax() if len(error_T) else 0.0, KL_TOLERANCE, "kl")
        teacher_TV = teacher_TV.double()
        assert torch.equal(teacher_max_T.double(), teacher_TV.amax(1))
        d_TV = (teacher_TV - teacher_TV.amax(1, keepdim=True)) / temperature
        assert_close(teacher_log_sum_T, torch.logsumexp(d_TV, 1))

    def assert_gradient(
        self,
        actual_TV: Tensor,
        rows: Rows,
        grads: tuple[Tensor, Tensor, Tensor],
        temperature: float = 1.0,
    ) -> None:
        """One rounding to the type of the logits, and 2e-6 · max(1, |log p|) of the terms' size.

        Where the terms cancel, the error of float32 arithmetic stays that of the terms. 16-bit
        results may use a shorter exponential, off by 3e-6. Probabilities below 2^-126 may be 0;
        beside a teacher they are multiplied by log-ratios of up to 1e4.
        """
        student_TV, teacher_TV, target_T, _ = rows
        if self.direction is None:
            exact = logits_gradient(student_TV, target_T, *grads[:2], temperature)
            compared, tiny = [student_TV], 2.0**-120
        else:
            pair = (student_TV, teacher_TV)
            exact = kl_logits_gradient(*pair, target_T, grads, self.direction, temperature)
            compared, tiny = [student_TV, teacher_TV], 2.0**-110
        sizes = [token_logprobs(x_TV, target_T, temperature).logprobs_TV.abs() for x_TV in compared]
        size_TV = torch.stack(sizes).amax(0).clamp(1.0, 200.0) * exact.term_size_TV
        relative = 2e-6 if actual_TV.dtype == torch.float32 else 5e-6
        slack_TV = relative * size_TV + tiny
        if actual_TV.dtype != torch.float32:
            slack_TV = slack_TV + 0.5 * spacing(exact.gradient_TV, actual_TV.dtype)
        error_TV = (actual_TV.double() - exact.gradient_TV).abs()
        worst = (error_TV / slack_TV).max() if error_TV.numel() else torch.tensor(0.0)
        assert bool((error_TV <= slack_TV).all()), f"{worst:.2f} times the limit"


@pytest.fixture(params=[None, "reverse", "forward"])
def direction(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def ops(kernels: Any, direction: str | None) -> Ops:
    return Ops(kernels, direction)


def strided_pair(
    num_tokens: int, num_columns: int, dtype: torch.dtype, *, noise: float = 1.0, offset: int = 1
) -> tuple[StridedLogits, StridedLogits]:
    """Student and teacher; the rows of both have other strides.

    The teacher is as far from the student as two random rows, or only by ``noise`` times that.
    """
    student = strided_logits(num_tokens, num_columns, dtype, seed=1)
    gap = 2 - num_columns % 2
    teacher = strided_logits(num_tokens, num_columns, dtype, gap=gap, offset=offset, seed=2)
    if noise != 1.0:
        other_TV = random_logits(num_tokens, num_columns, torch.float32, seed=3)
        teacher.view_NV.copy_(student.view_NV.float() + noise * other_TV)
    return student, teacher


def make_rows(num_tokens: int, num_columns: int, dtype: torch.dtype) -> Rows:
    student, teacher = strided_pair(num_tokens, num_columns, dtype)
    return Rows(student.view_NV, teacher.view_NV, random_targets(num_tokens, num_columns))


def random_grads(num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    by_logprob_T, by_entropy_T, by_kl_T = torch.randn(3, num_tokens, generator=generator)
    return by_logprob_T, 0.1 * by_entropy_T, by_kl_T


@all_dtypes
@pytest.mark.parametrize(
    ("spare_rows", "noise", "offset", "temperature"), [(0, 1.0, 1, 0.6), (3, 0.01, 2, 1.7)]
)
@pytest.mark.parametrize(("num_tokens", "num_columns"), SIZES)
def test_rows_of_any_size_and_alignment_match_float64_and_spare_ones_and_padding_become_zeros(
    ops: Ops,
    num_tokens: int,
    num_columns: int,
    spare_rows: int,
    noise: float,
    offset: int,
    dtype: torch.dtype,
    temperature: float,
) -> None:
    num_rows, vocab_size = num_tokens + spare_rows, num_columns
    chosen_T, rows_T = torch.arange(num_rows), None
    if spare_rows:
        vocab_size -= num_columns // 9
        if ops.direction is None:
            order_N = torch.randperm(num_rows, generator=torch.Generator().manual_seed(2))
            chosen_T = rows_T = order_N[:num_tokens]
    student, teacher = strided_pair(num_rows, num_columns, dtype, noise=noise, offset=offset)
    for logits in (student, teacher):
        logits.view_NV[:, vocab_size:] = torch.nan
    target_T = random_targets(len(chosen_T), vocab_size)
    rows = Rows(student.view_NV, teacher.view_NV, target_T, rows_T)
    used = Rows(*(x.view_NV[chosen_T, :vocab_size] for x in (student, teacher)), target_T)
    columns, grads = Columns(0, vocab_size, temperature), random_grads(len(chosen_T))
    results = ops.results(rows, columns)
    ops.assert_results(results, used, temperature)
    gradient_NV = ops.gradient_(rows, results, grads, columns)
    ops.assert_gradient(gradient_NV[chosen_T, :vocab_size], used, grads, temperature)
    is_spare_N = torch.ones(num_rows, dtype=torch.bool)
    is_spare_N[chosen_T] = False
    assert not gradient_NV[is_spare_N].any()
    assert not gradient_NV[:, vocab_size:].any()
    assert torch.equal(teacher.view_NV[chosen_T, :vocab_size], used.teacher_TV)
    assert student.border_is_intact()
    assert teacher.border_is_intact()


@all_dtypes
def test_thousands_of_tokens_match_float64(
    isa: Any, dtype: torch.dtype, direction: str | None
) -> None:
    ops, rows, grads = Ops(isa, direction), make_rows(4097, 35, dtype), random_grads(4097)
    results = ops.results(rows)
    ops.assert_results(results, rows)
    ops.assert_gradient(ops.gradient(rows, results, grads), rows, grads)


@pytest.mark.parametrize("temperature", [0.6, 1.7])
@all_dtypes
@pytest.mark.parametrize("num_columns", [5, 64, 2 * BLOCK + 7, 21_000])
def test_adversarial_rows_match_float64(
    kernels: Any, num_columns: int, dtype: torch.dtype, temperature: float
) -> None:
    wide_TV = random_logits(4, num_columns, torch.float32, scale=30.0).clamp(-80, 80)
    rising_TV = wide_TV.sort(dim=1).values + 77
    climbing_TV = torch.linspace(-1000, 1000, num_columns).expand(1, -1)
    parts = (adversarial_rows(num_columns), wide_TV, rising_TV, climbing_TV, climbing_TV.flip(1))
    logits_TV = torch.cat(parts).to(dtype)
    rows = Rows(logits_TV, logits_TV, torch.full((len(logits_TV),), num_columns - 1))
    ops, grads = Ops(kernels, None), random_grads(len(logits_TV))
    columns = Columns(0, num_columns, temperature)
    results = ops.results(rows, columns)
    ops.assert_results(results, rows, temperature)
    ops.assert_gradient(ops.gradient(rows, results, grads, columns), rows, grads, temperature)


@with_a_teacher
@all_dtypes
@pytest.mark.parametrize("num_columns", [5, 64, 2 * BLOCK + 7])
def test_every_adversarial_row_against_every_other_one_matches_float64(
    ops: Ops, num_columns: int, dtype: torch.dtype
) -> None:
    rows_RV = adversarial_rows(num_columns).to(dtype)
    rows_RV[2] /= 10
    target_T, grads = torch.full((49,), num_columns - 1), random_grads(49)
    rows = Rows(rows_RV.repeat(7, 1), rows_RV.repeat_interleave(7, 0), target_T)
    results = ops.results(rows)
    ops.assert_results(results, rows)
    assert bool((results[-1] >= -1e-6).all())  # of rows that are equal the terms cancel
    ops.assert_gradient(ops.gradient(rows, results, grads), rows, grads)


@all_dtypes
def test_rows_may_be_selected_and_repeated(kernels: Any, dtype: torch.dtype) -> None:
    logits_NV = strided_logits(40, 517, dtype, gap=4, offset=3).view_NV
    rows_T, target_T = torch.tensor([39, 0, 7, 7, 21]), random_targets(5, 517)
    results = Ops(kernels, None).results(Rows(logits_NV, logits_NV, target_T, rows_T))
    assert_token_results(results, logits_NV[rows_T], target_T)


@all_dtypes
@pytest.mark.parametrize("only", [0, 1, 2])
def test_each_gradient_alone_matches_float64_and_an_absent_one_counts_as_zero(
    ops: Ops, dtype: torch.dtype, only: int
) -> None:
    rows, zero_T = make_rows(9, 77, dtype), torch.zeros(9)
    by_logprob_T, by_entropy_T, by_kl_T = (
        grad_T if number == only else zero_T for number, grad_T in enumerate(random_grads(9))
    )
    absent = (by_logprob_T if only == 0 else None, by_entropy_T if only == 1 else None, by_kl_T)
    filled = (by_logprob_T, by_entropy_T, by_kl_T)
    results = ops.results(rows)
    actual_TV = ops.gradient(rows, results, absent)
    ops.assert_gradient(actual_TV, rows, filled)
    assert torch.equal(actual_TV, ops.gradient(rows, results, filled))


@with_a_teacher
@all_dtypes
@pytest.mark.parametrize("num_columns", [1, 70, 2 * BLOCK + 7, 21_003])
def test_the_students_partials_have_the_bits_without_a_teacher(
    ops: Ops, num_columns: int, dtype: torch.dtype
) -> None:
    rows, columns = make_rows(5, num_columns, dtype), Columns(0, num_columns, 0.6)
    rows.student_NV[0].copy_(torch.linspace(-30, 30, num_columns))
    alone_T4 = Ops(ops.kernels, None).partials(rows, columns)
    assert torch.equal(ops.partials(rows, columns)[:, :4], alone_T4)


@with_a_teacher
@all_dtypes
@pytest.mark.parametrize("num_columns", [1, 3, 31, 1023, 1025, 21_001])
def test_equal_logits_have_a_divergence_and_gradient_of_exactly_zero(
    ops: Ops, num_columns: int, dtype: torch.dtype
) -> None:
    student_TV, _, target_T, _ = make_rows(3, num_columns, dtype)
    student_TV[0].copy_(torch.linspace(-30, 30, num_columns))
    student_TV[1, 1::3] = -torch.inf
    rows, columns = Rows(student_TV, student_TV.clone(), target_T), Columns(0, num_columns, 0.6)
    results = ops.results(rows, columns)
    assert results[-1].tolist() == [0.0] * 3
    assert not ops.gradient(rows, results, (None, None, torch.full((3,), 3.0)), columns).any()


@all_dtypes
@pytest.mark.parametrize(
    ("num_ranks", "per_rank", "vocab_size"),
    [(1, 71, 64), (2, 48, 64), (3, 32, 64), (4, 32, 100), (4, 16, 33), (4, 64, 61)],
)
def test_ranks_merge_to_the_whole_row_and_padding_is_neither_read_nor_kept(
    ops: Ops, num_ranks: int, per_rank: int, vocab_size: int, dtype: torch.dtype
) -> None:
    # Where the ids fill fewer ranks, the others have padding only.
    student_TV, teacher_TV, target_T, _ = rows = make_rows(19, vocab_size, dtype)
    whole_ranks = slice((vocab_size - 1) // per_rank * per_rank)
    teacher_TV[:, 3::7] = -torch.inf
    teacher_TV[2, whole_ranks] = student_TV[3, whole_ranks] = -torch.inf
    target_T[3] = vocab_size - 1
    padded = torch.full((2, 19, num_ranks * per_rank), torch.nan, dtype=dtype)
    padded[0, :, :vocab_size], padded[1, :, :vocab_size] = student_TV, teacher_TV
    shards = [
        (Rows(*part.unbind(), target_T), Columns(rank * per_rank, vocab_size, 0.6))
        for rank, part in enumerate(padded.split(per_rank, dim=2))
    ]
    partials_PTK = torch.stack([ops.partials(*shard) for shard in shards])
    results, grads = ops.combine(partials_PTK, 0.6), random_grads(19)
    ops.assert_results(results, rows, 0.6)
    gradient = [ops.gradient(part, results, grads, columns) for part, columns in shards]
    actual_TW = torch.cat(gradient, dim=1)
    ops.assert_gradient(actual_TW[:, :vocab_size], rows, grads, 0.6)
    assert not actual_TW[:, vocab_size:].any()


@with_a_teacher
def test_a_vanishing_second_probability_is_floored_and_counts_as_constant(ops: Ops) -> None:
    # One half on a column whose log-prob is −150 ln 2: −ln 2 + 75 ln 2 = 51.2928914.
    both_TV, one_TV = torch.zeros(1, 2), torch.tensor([[0.0, -torch.inf]])
    is_reverse, target_T = ops.direction == "reverse", torch.tensor([0])
    rows = Rows(*((both_TV, one_TV) if is_reverse else (one_TV, both_TV)), target_T)
    results = ops.results(rows)
    assert results[-1].item() == pytest.approx(51.2928914, abs=1e-5)
    split = [
        ops.partials(Rows(rows[0][:, [rank]], rows[1][:, [rank]], target_T), Columns(rank, 2, 1.0))
        for rank in (0, 1)
    ]
    merged = ops.combine(torch.stack(split), 1.0)
    assert merged[-1].item() == pytest.approx(51.2928914, abs=1e-5)
    gradient_TV = ops.gradient(rows, results, (None, None, torch.ones(1)))
    # p_j (log p_j − log q_j − KL): half of ∓(ln 2 + 51.2928914); forward: p − q, and nothing
    # where no change of the logit is seen.
    expected = [-25.9930193, 25.9930193] if is_reverse else [0.5, 0.0]
    assert gradient_TV[0].tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("direction", "bad_row", "dtype"),
    [
        *((None, 0, dtype) for dtype in DTYPES),
        *((name, row, torch.bfloat16) for name in ("reverse", "forward") for row in (0, 1)),
    ],
)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("column", [0, 8, BLOCK, 20_480, 41_000])
@pytest.mark.parametrize("others", [0.0, -torch.inf])
def test_a_bad_logit_of_either_row_makes_its_token_nan_and_no_other(
    ops: Ops, others: float, column: int, bad: float, bad_row: int, dtype: torch.dtype
) -> None:
    rows, grads = make_rows(3, 41_001, dtype), random_grads(3)
    clean = ops.results(rows)
    expected_TV = ops.gradient(rows, clean, grads)
    bad_TV = (rows.student_NV, rows.teacher_TV)[bad_row]
    bad_TV[1] += others
    bad_TV[1, column] = bad
    results = ops.results(rows)
    actual_TV = ops.gradient(rows, results, grads)
    for result_T, clean_T in zip((*results, actual_TV), (*clean, expected_TV), strict=True):
        assert result_T[1].isnan().all()
        assert torch.equal(result_T[[0, 2]], clean_T[[0, 2]])


@pytest.mark.parametrize(
    ("direction", "impossible"),
    [(None, 0), *((name, row) for name in ("reverse", "forward") for row in (0, 1))],
)
def test_a_row_without_a_possible_column_is_nan(ops: Ops, impossible: int) -> None:
    rows = make_rows(1, 70, torch.float32)
    (rows.student_NV, rows.teacher_TV)[impossible].fill_(-torch.inf)
    assert all(result_T.isnan().all() for result_T in ops.results(rows))


@pytest.mark.parametrize(
    ("direction", "numbers"),
    [(None, slice(3)), *((name, number) for name in ("reverse", "forward") for number in range(8))],
)
def test_a_partial_of_a_rank_that_is_nan_makes_all_results_nan(
    ops: Ops, numbers: slice | int
) -> None:
    part_TK = ops.partials(make_rows(3, 40, torch.float32), Columns(0, 40, 1.0))
    partials_PTK = torch.stack([part_TK, part_TK])
    partials_PTK[1, 1, numbers] = torch.nan
    for result_T in ops.combine(partials_PTK, 1.0):
        assert result_T.isnan().tolist() == [False, True, False]


@all_dtypes
def test_a_token_without_gradient_gets_zeros_whatever_its_logits_hold(
    ops: Ops, dtype: torch.dtype
) -> None:
    rows, grads = make_rows(3, 70, dtype), random_grads(3)
    rows.student_NV[1, 4] = rows.teacher_TV[1, 5] = torch.nan
    for grad_T in grads:
        grad_T[1] = 0.0
    actual_TV = ops.gradient(rows, ops.results(rows), grads)
    assert not actual_TV[1].any()
    others = [0, 2]
    kept = rows.take(others)
    by_logprob_T, by_entropy_T, by_kl_T = (grad_T[others] for grad_T in grads)
    ops.assert_gradient(actual_TV[others], kept, (by_logprob_T, by_entropy_T, by_kl_T))


@all_dtypes
def test_a_nan_gradient_stays_in_its_row_and_a_logit_that_turned_nan_in_its_column(
    ops: Ops, dtype: torch.dtype
) -> None:
    rows = make_rows(3, 70, dtype)
    results = ops.results(rows)
    # All bits set: rounding it like a number would carry into the sign.
    grad_T = torch.ones(3)
    grad_T[1] = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)[0]
    rows.student_NV[2, 40] = torch.nan
    actual_TV = ops.gradient(rows, results, (grad_T, None, grad_T))
    expected_TV = torch.zeros(3, 70, dtype=torch.bool)
    expected_TV[1] = expected_TV[2, 40] = True
    assert torch.equal(actual_TV.isnan(), expected_TV)


def test_on_cuda_rows_and_targets_out_of_range_give_nan_and_spare_their_neighbours(
    cuda_kernels: Any,
) -> None:
    # Rows -1 and 3 hold finite numbers here: reading them would show.
    logits_NV = random_logits(5, 20, torch.bfloat16)[1:4]
    rows_T = torch.tensor([0, -1, 3, 1 << 40, 1, 2, 2])
    target_T = torch.tensor([4, 4, 4, 4, -1, 20, 4])
    ops = Ops(cuda_kernels, None)
    part_T4 = ops.partials(Rows(logits_NV, logits_NV, target_T, rows_T), Columns(0, 20, 1.0))
    assert part_T4[1:6].isnan().all()
    results = ops.combine(part_T4[None, [0, 6]], 1.0)
    assert_token_results(results, logits_NV[[0, 2]], target_T[[0, 6]])


@with_a_teacher
def test_on_cuda_targets_out_of_range_give_nan(cuda_kernels: Any, direction: str) -> None:
    ops, rows = Ops(cuda_kernels, direction), make_rows(4, 50, torch.bfloat16)
    rows.target_T[1:3] = torch.tensor([-1, 50])
    results = ops.results(rows)
    assert results[-1].isnan().tolist() == [False, True, True, False]
    kept = [0, 3]
    part = rows.take(kept)
    ops.assert_results(tuple(result_T[kept] for result_T in results), part)


@pytest.mark.parametrize("order", [0, 1, 7])
def test_on_cuda_a_row_of_several_tokens_becomes_nan_and_its_neighbours_do_not(
    cuda_kernels: Any, order: int
) -> None:
    if hasattr(cuda_kernels, "library"):
        cuda_kernels.set_order(order)
    logits_NV, target_T = torch.zeros(5, 40, dtype=torch.bfloat16), torch.full((8,), 7)
    rows_T = torch.tensor([4, 1, 4, 1 << 40, -1, 2, 4, 1])
    rows, log_sum_T = Rows(logits_NV, logits_NV, target_T, rows_T), torch.full((8,), math.log(40.0))
    results, grads = (log_sum_T, log_sum_T, torch.zeros(8), log_sum_T), (torch.ones(8), None)
    Ops(cuda_kernels, None).gradient_(rows, results, (*grads, torch.zeros(8)), Columns(0, 36, 1.0))
    assert logits_NV[:, :36].isnan().all(dim=1).tolist() == [False, True, False, False, True]
    assert not logits_NV[:, 36:].any()
    expected_V = torch.full((36,), -1 / 40)
    expected_V[7] += 1
    assert torch.equal(logits_NV[2, :36], expected_V.bfloat16())
    assert not logits_NV[[0, 3]].any()


@all_dtypes
def test_one_thread_and_eight_give_the_same_bits(
    isa: Any, dtype: torch.dtype, direction: str | None
) -> None:
    ops, rows, outcomes = Ops(isa, direction), make_rows(67, 1500, dtype), []
    for number in (1, 8):
        with threads(number):
            results = ops.results(rows)
            outcomes.append((*results, ops.gradient(rows, results, random_grads(67))))
    assert all(torch.equal(*pair) for pair in zip(*outcomes, strict=True))


def test_the_order_of_cuda_s_threads_does_not_change_a_bit(
    emulated: Any, direction: str | None
) -> None:
    # Rows that rise in opposite directions: each of three pieces moves a reference, and none
    # dominates the sum.
    ops, rows = Ops(emulated, direction), make_rows(2, 41_001, torch.bfloat16)
    slope_V = torch.linspace(0, 1, 41_001)
    rows.student_NV.mul_(0.1).add_(slope_V)
    rows.teacher_TV.mul_(0.1).sub_(slope_V)
    rows.target_T.copy_(torch.tensor([7, 40_000]))
    columns = Columns(0, 41_001, 0.9)
    expected = ops.results(rows, columns)
    ops.assert_results(expected, rows, 0.9)
    for order in range(1, 7):
        emulated.set_order(order)
        results = ops.results(rows, columns)
        assert all(torch.equal(*pair) for pair in zip(results, expected, strict=True))
