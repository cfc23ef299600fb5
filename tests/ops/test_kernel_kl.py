"""kl_partials, kl_combine and kl_backward_ against float64, on the CPU and with CUDA.

Shape legend: T = tokens, V = columns, P = tensor-parallel ranks.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.kernel_calls import (
    DTYPES,
    Columns,
    KlResults,
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
from tests.oracles.logprob import spacing, token_logprobs
from tests.tolerances import EPS, assert_within

BLOCK = 1024
"""Columns that the CPU kernels sum at a time."""
KL_TOLERANCE = 32 * EPS
"""Times the size of the terms, at least 1. Eight lanes sum a block: √128 · ε / 2 = 6e-7 is likely,
and 128 ε the worst case."""
SIZES = (
    *((0, 16), (9, 1), (9, 3), (1, 31), (33, 17), (9, 1023), (9, 1025)),
    *((2, 19_008), (2, 21_003)),
)
"""Numbers of tokens and of columns."""
Grads = tuple[Tensor | None, Tensor | None, Tensor]
"""Of log-prob, entropy and KL."""

both_directions = pytest.mark.parametrize("direction", ["reverse", "forward"])
all_dtypes = pytest.mark.parametrize("dtype", DTYPES)


def kl_results(
    kernels: Any,
    student_TV: Tensor,
    teacher_TV: Tensor,
    target_T: Tensor,
    direction: str,
    columns: Columns | None = None,
) -> KlResults:
    """Log-probs and divergences of one rank that holds the whole vocabulary."""
    columns = columns or Columns(0, student_TV.shape[1])
    part_T8 = kernels.kl_partials(student_TV, teacher_TV, target_T, *columns, direction)
    return KlResults(*kernels.kl_combine(part_T8[None], columns.temperature, direction))


def kl_gradient_(
    kernels: Any,
    student_TV: Tensor,
    teacher_TV: Tensor,
    target_T: Tensor,
    results: KlResults,
    grads: Grads,
    direction: str,
    columns: Columns | None = None,
) -> Tensor:
    """Overwrite the student's logits with their gradient and return them."""
    columns, numbers = columns or Columns(0, student_TV.shape[1]), results.numbers()
    kernels.kl_backward_(student_TV, teacher_TV, target_T, *numbers, *grads, *columns, direction)
    return student_TV


def make_rows(
    num_tokens: int, num_columns: int, dtype: torch.dtype, *, noise: float = 1.0, offset: int = 1
) -> tuple[StridedLogits, StridedLogits, Tensor]:
    """Student, teacher and targets; the rows of both have other strides.

    The teacher is as far from the student as two random rows, or only by ``noise`` times that.
    """
    student = strided_logits(num_tokens, num_columns, dtype, seed=1)
    gap = 2 - num_columns % 2
    teacher = strided_logits(num_tokens, num_columns, dtype, gap=gap, offset=offset, seed=2)
    if noise != 1.0:
        other_TV = random_logits(num_tokens, num_columns, torch.float32, seed=3)
        teacher.view_NV.copy_(student.view_NV.float() + noise * other_TV)
    return student, teacher, random_targets(num_tokens, num_columns)


def make_pair(
    num_tokens: int, num_columns: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Student, teacher and targets."""
    student, teacher, target_T = make_rows(num_tokens, num_columns, dtype)
    return student.view_NV, teacher.view_NV, target_T


def random_grads(num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    by_logprob_T, by_entropy_T, by_kl_T = torch.randn(3, num_tokens, generator=generator)
    return by_logprob_T, 0.1 * by_entropy_T, by_kl_T


def assert_matches(
    results: KlResults,
    student_TV: Tensor,
    teacher_TV: Tensor,
    target_T: Tensor,
    direction: str,
    temperature: float = 1.0,
) -> None:
    assert_token_results(results[:4], student_TV, target_T, temperature)
    expected_T = kl_divergence(student_TV, teacher_TV, direction, temperature)
    size_T = kl_term_size(student_TV, teacher_TV, direction, temperature).clamp(min=1.0)
    error_T = (results.kl - expected_T).abs() / size_T
    assert_within(error_T.amax() if len(error_T) else 0.0, KL_TOLERANCE, "kl")
    teacher_TV = teacher_TV.double()
    assert torch.equal(results.teacher_max.double(), teacher_TV.amax(1))
    d_TV = (teacher_TV - teacher_TV.amax(1, keepdim=True)) / temperature
    assert_close(results.teacher_log_sum, torch.logsumexp(d_TV, 1))


def assert_gradient(
    actual_TV: Tensor,
    student_TV: Tensor,
    teacher_TV: Tensor,
    target_T: Tensor,
    grads: tuple[Tensor, Tensor, Tensor],
    direction: str,
    temperature: float = 1.0,
) -> None:
    """As in test_kernel_backward: one rounding, and 2e-6 · max(1, |log p|) of the terms' size.

    Probabilities below 2^-126 may be 0; here they are multiplied by log-ratios of up to 1e4.
    """
    exact = kl_logits_gradient(student_TV, teacher_TV, target_T, grads, direction, temperature)
    log_p_TV = token_logprobs(student_TV, target_T, temperature).logprobs_TV.abs()
    log_q_TV = token_logprobs(teacher_TV, target_T, temperature).logprobs_TV.abs()
    relative = 2e-6 if actual_TV.dtype == torch.float32 else 5e-6
    size_TV = torch.maximum(log_p_TV, log_q_TV).clamp(1.0, 200.0) * exact.term_size_TV
    slack_TV = relative * size_TV + 2.0**-110
    if actual_TV.dtype != torch.float32:
        slack_TV = slack_TV + 0.5 * spacing(exact.gradient_TV, actual_TV.dtype)
    error_TV = (actual_TV.double() - exact.gradient_TV).abs()
    assert bool((error_TV <= slack_TV).all()), f"{(error_TV / slack_TV).max():.2f} times the limit"


@both_directions
@all_dtypes
@pytest.mark.parametrize(("noise", "offset", "temperature"), [(1.0, 1, 0.6), (0.01, 2, 1.7)])
@pytest.mark.parametrize(("num_tokens", "num_columns"), SIZES)
def test_value_and_gradient_match_float64_on_rows_of_any_alignment(
    kernels: Any,
    num_tokens: int,
    num_columns: int,
    noise: float,
    offset: int,
    dtype: torch.dtype,
    temperature: float,
    direction: str,
) -> None:
    student, teacher, target_T = make_rows(
        num_tokens, num_columns, dtype, noise=noise, offset=offset
    )
    before_TV, teacher_TV = student.view_NV.clone(), teacher.view_NV
    columns, grads = Columns(0, num_columns, temperature), random_grads(num_tokens)
    arguments = (student.view_NV, teacher_TV, target_T)
    results = kl_results(kernels, *arguments, direction, columns)
    rows = (before_TV, teacher_TV, target_T)
    assert_matches(results, *rows, direction, temperature)
    kl_gradient_(kernels, *arguments, results, grads, direction, columns)
    assert_gradient(student.view_NV, *rows, grads, direction, temperature)
    assert student.border_is_intact()
    assert teacher.border_is_intact()
    assert torch.equal(
        teacher_TV, make_rows(num_tokens, num_columns, dtype, noise=noise)[1].view_NV
    )


@both_directions
@pytest.mark.parametrize("only", [0, 1, 2])
def test_each_gradient_alone_matches_float64(kernels: Any, only: int, direction: str) -> None:
    student_TV, teacher_TV, target_T = rows = make_pair(9, 77, torch.float32)
    zero_T = torch.zeros(9)
    filled = [random_grads(9)[number] if number == only else zero_T for number in range(3)]
    by_logprob_T, by_entropy_T, by_kl_T = filled
    absent = (by_logprob_T if only == 0 else None, by_entropy_T if only == 1 else None, by_kl_T)
    results = kl_results(kernels, *rows, direction)
    actual_TV, filled_TV = (
        kl_gradient_(kernels, student_TV.clone(), teacher_TV, target_T, results, grads, direction)
        for grads in (absent, (by_logprob_T, by_entropy_T, by_kl_T))
    )
    assert_gradient(actual_TV, *rows, (by_logprob_T, by_entropy_T, by_kl_T), direction)
    assert torch.equal(actual_TV, filled_TV)


def test_both_directions_by_hand(kernels: Any) -> None:
    # d = (x − 3) / 2 = (−1, 0, −2) and d' = (x' − 2) / 2 = (0, −1, −1): s' = 1 + 2 e^−1.
    student_TV, teacher_TV = torch.tensor([[1.0, 3.0, -1.0]]), torch.tensor([[2.0, 0.0, 0.0]])
    # reverse: −e^−1 + 1 − e^−2; forward: 1 − e^−1 + e^−1.
    for direction, cross in (("reverse", 0.4967853), ("forward", 1.0)):
        rows = (student_TV, teacher_TV, torch.tensor([12]))
        part_T8 = kernels.kl_partials(*rows, 10, 13, 2.0, direction)
        expected = [3.0, 1.5032147, -0.6385500, -1.0, 2.0, 1.7357589, cross, 0.0]
        torch.testing.assert_close(part_T8, torch.tensor([expected]), rtol=1e-6, atol=0)
        # cross / s − log s + log s' with s of the first row: 0.3304819 − 0.4076059 + 0.5514446.
        kl = 0.4743206 if direction == "reverse" else 0.5761169 - 0.5514446 + 0.4076059
        results = kernels.kl_combine(part_T8[None], 2.0, direction)
        assert results[-1].item() == pytest.approx(kl, abs=3e-7)


@both_directions
@all_dtypes
@pytest.mark.parametrize("num_columns", [1, 70, 2 * BLOCK + 7, 21_003])
def test_the_students_partials_have_the_bits_without_a_teacher(
    kernels: Any, num_columns: int, dtype: torch.dtype, direction: str
) -> None:
    student_TV, teacher_TV, target_T = make_pair(5, num_columns, dtype)
    student_TV[0].copy_(torch.linspace(-30, 30, num_columns))
    columns = (0, num_columns, 0.6)
    part_T8 = kernels.kl_partials(student_TV, teacher_TV, target_T, *columns, direction)
    alone_T4 = kernels.logprob_partials(student_TV, None, target_T, *columns)
    assert torch.equal(part_T8[:, :4], alone_T4)


@both_directions
@all_dtypes
@pytest.mark.parametrize("num_columns", [1, 3, 31, 1023, 1025, 21_001])
def test_equal_logits_have_a_divergence_and_gradient_of_exactly_zero(
    kernels: Any, num_columns: int, dtype: torch.dtype, direction: str
) -> None:
    student_TV, _, target_T = make_pair(3, num_columns, dtype)
    student_TV[0].copy_(torch.linspace(-30, 30, num_columns))
    student_TV[1, 1::3] = -torch.inf
    rows = (student_TV, student_TV.clone(), target_T)
    columns = Columns(0, num_columns, 0.6)
    results = kl_results(kernels, *rows, direction, columns)
    assert results.kl.tolist() == [0.0] * 3
    grads = (None, None, torch.full((3,), 3.0))
    kl_gradient_(kernels, *rows, results, grads, direction, columns)
    assert not student_TV.any()


@both_directions
@all_dtypes
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_ranks_merge_to_the_whole_row_and_padding_is_neither_read_nor_kept(
    kernels: Any, num_ranks: int, dtype: torch.dtype, direction: str
) -> None:
    # 64 ids: over two ranks of 48 the second has padding, of three the last one nothing else.
    per_rank = {1: 71, 2: 48, 3: 32}[num_ranks]
    student_TV, teacher_TV, target_T = rows = make_pair(19, 64, dtype)
    teacher_TV[:, 3::7] = -torch.inf
    teacher_TV[2, :48] = -torch.inf  # of whole ranks
    student_TV[3, :48] = -torch.inf
    target_T[3] = 50
    padded = torch.full((2, 19, num_ranks * per_rank), torch.nan, dtype=dtype)
    padded[0, :, :64], padded[1, :, :64] = student_TV, teacher_TV
    shards = [
        (Columns(rank * per_rank, 64, 0.6), *part.unbind())
        for rank, part in enumerate(padded.split(per_rank, dim=2))
    ]
    parts = [kernels.kl_partials(*pair, target_T, *columns, direction) for columns, *pair in shards]
    results = KlResults(*kernels.kl_combine(torch.stack(parts), 0.6, direction))
    assert_matches(results, *rows, direction, 0.6)
    grads = random_grads(19)
    gradient = [
        kl_gradient_(kernels, part.clone(), other, target_T, results, grads, direction, columns)
        for columns, part, other in shards
    ]
    actual_TW = torch.cat(gradient, dim=1)
    assert_gradient(actual_TW[:, :64], *rows, grads, direction, 0.6)
    assert not actual_TW[:, 64:].any()


def test_a_vanishing_second_probability_is_floored_and_counts_as_constant(kernels: Any) -> None:
    # One half on a column whose log-prob is −150 ln 2: −ln 2 + 75 ln 2 = 51.2928914.
    both, one = torch.zeros(1, 2), torch.tensor([[0.0, -torch.inf]])
    target_T = torch.tensor([0])
    for direction, student_TV, teacher_TV in (("reverse", both, one), ("forward", one, both)):
        results = kl_results(kernels, student_TV, teacher_TV, target_T, direction)
        assert results.kl.item() == pytest.approx(51.2928914, abs=1e-5)
        split = [
            kernels.kl_partials(
                student_TV[:, [rank]], teacher_TV[:, [rank]], target_T, rank, 2, 1.0, direction
            )
            for rank in (0, 1)
        ]
        merged = kernels.kl_combine(torch.stack(split), 1.0, direction)
        assert merged[-1].item() == pytest.approx(51.2928914, abs=1e-5)
        rows, grads = (student_TV.clone(), teacher_TV, target_T), (None, None, torch.ones(1))
        gradient_TV = kl_gradient_(kernels, *rows, results, grads, direction)
        # p_j (log p_j − log q_j − KL): half of ∓(ln 2 + 51.2928914); forward: p − q, and nothing
        # where no change of the logit is seen.
        expected = [-25.9930193, 25.9930193] if direction == "reverse" else [0.5, 0.0]
        assert gradient_TV[0].tolist() == pytest.approx(expected, abs=1e-5)


@both_directions
@all_dtypes
@pytest.mark.parametrize("num_columns", [5, 64, 2 * BLOCK + 7])
def test_every_adversarial_row_against_every_other_one_matches_float64(
    kernels: Any, num_columns: int, dtype: torch.dtype, direction: str
) -> None:
    rows_RV = adversarial_rows(num_columns).to(dtype)
    rows_RV[2] /= 10
    student_TV, teacher_TV = rows_RV.repeat(7, 1), rows_RV.repeat_interleave(7, 0)
    rows = (student_TV, teacher_TV, torch.full((49,), num_columns - 1))
    results = kl_results(kernels, *rows, direction)
    assert_matches(results, *rows, direction)
    assert bool((results.kl >= -1e-6).all())  # of rows that are equal the terms cancel
    grads = random_grads(49)
    actual_TV = kl_gradient_(kernels, student_TV.clone(), *rows[1:], results, grads, direction)
    assert_gradient(actual_TV, *rows, grads, direction)


@both_directions
@pytest.mark.parametrize("bad_row", [0, 1], ids=["student", "teacher"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("column", [0, BLOCK, 2 * BLOCK + 2])
def test_a_bad_logit_of_either_row_makes_its_token_nan_and_no_other(
    kernels: Any, column: int, bad: float, bad_row: int, direction: str
) -> None:
    rows = make_pair(3, 2 * BLOCK + 3, torch.bfloat16)
    clean, grads = kl_results(kernels, *rows, direction), random_grads(3)
    expected_TV = kl_gradient_(kernels, rows[0].clone(), *rows[1:], clean, grads, direction)
    rows[bad_row][1, column] = bad
    results = kl_results(kernels, *rows, direction)
    actual_TV = kl_gradient_(kernels, *rows, results, grads, direction)
    for result_T, clean_T in zip((*results, actual_TV), (*clean, expected_TV), strict=True):
        assert result_T[1].isnan().all()
        assert torch.equal(result_T[[0, 2]], clean_T[[0, 2]])


@both_directions
@pytest.mark.parametrize("number", range(8))
def test_a_nan_partial_makes_all_seven_results_nan(
    kernels: Any, number: int, direction: str
) -> None:
    part_T8 = kernels.kl_partials(*make_pair(3, 40, torch.float32), 0, 40, 1.0, direction)
    partials_PT8 = torch.stack([part_T8, part_T8])
    partials_PT8[1, 1, number] = torch.nan
    for result_T in kernels.kl_combine(partials_PT8, 1.0, direction):
        assert result_T.isnan().tolist() == [False, True, False]


@both_directions
@pytest.mark.parametrize("impossible", [0, 1], ids=["student", "teacher"])
def test_a_row_without_a_possible_column_is_nan(
    kernels: Any, impossible: int, direction: str
) -> None:
    rows = make_pair(1, 70, torch.float32)
    rows[impossible].fill_(-torch.inf)
    assert all(result_T.isnan().all() for result_T in kl_results(kernels, *rows, direction))


@both_directions
@all_dtypes
def test_a_token_without_gradient_gets_zeros_whatever_its_logits_hold(
    kernels: Any, dtype: torch.dtype, direction: str
) -> None:
    student_TV, teacher_TV, _ = rows = make_pair(3, 70, dtype)
    student_TV[1, 4] = teacher_TV[1, 5] = torch.nan
    results = kl_results(kernels, *rows, direction)
    by_logprob_T, by_entropy_T, by_kl_T = random_grads(3)
    for grad_T in (by_logprob_T, by_entropy_T, by_kl_T):
        grad_T[1] = 0.0
    grads = (by_logprob_T, by_entropy_T, by_kl_T)
    actual_TV = kl_gradient_(kernels, *rows, results, grads, direction)
    assert not actual_TV[1].any()
    assert actual_TV[[0, 2]].isfinite().all()
    assert actual_TV[[0, 2]].any()


@both_directions
@all_dtypes
def test_a_nan_gradient_stays_in_its_row(kernels: Any, dtype: torch.dtype, direction: str) -> None:
    rows = make_pair(3, 70, dtype)
    results = kl_results(kernels, *rows, direction)
    # All bits set: rounding it like a number would carry into the sign.
    by_kl_T = torch.ones(3)
    by_kl_T[1] = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)[0]
    actual_TV = kl_gradient_(kernels, *rows, results, (None, None, by_kl_T), direction)
    assert actual_TV[1].isnan().all()
    assert not actual_TV[[0, 2]].isnan().any()


@both_directions
def test_on_cuda_targets_out_of_range_give_nan(cuda_kernels: Any, direction: str) -> None:
    student_TV, teacher_TV, target_T = make_pair(4, 50, torch.bfloat16)
    target_T[1:3] = torch.tensor([-1, 50])
    results = kl_results(cuda_kernels, student_TV, teacher_TV, target_T, direction)
    assert results.kl.isnan().tolist() == [False, True, True, False]
    kept = [0, 3]
    part = KlResults(*(result_T[kept] for result_T in results))
    assert_matches(part, student_TV[kept], teacher_TV[kept], target_T[kept], direction)


@both_directions
@all_dtypes
def test_one_thread_and_eight_give_the_same_bits(
    isa: Any, dtype: torch.dtype, direction: str
) -> None:
    student_TV, *others = rows = make_pair(67, 1500, dtype)
    outcomes = []
    for number in (1, 8):
        with threads(number):
            results = kl_results(isa, *rows, direction)
            copy_TV = student_TV.clone()
            kl_gradient_(isa, copy_TV, *others, results, random_grads(67), direction)
            outcomes.append((*results, copy_TV))
    assert all(torch.equal(*pair) for pair in zip(*outcomes, strict=True))


@both_directions
def test_the_order_of_cuda_s_threads_does_not_change_a_bit(emulated: Any, direction: str) -> None:
    # Rows that rise in opposite directions: each of three pieces moves a reference.
    student_TV, teacher_TV, _ = make_pair(2, 41_001, torch.bfloat16)
    slope_V = torch.linspace(0, 1, 41_001)
    student_TV.mul_(0.1).add_(slope_V)
    teacher_TV.mul_(0.1).sub_(slope_V)
    rows, columns = (student_TV, teacher_TV, torch.tensor([7, 40_000])), Columns(0, 41_001, 0.9)
    expected = kl_results(emulated, *rows, direction, columns)
    assert_matches(expected, *rows, direction, 0.9)
    for order in range(1, 5):
        emulated.set_order(order)
        results = kl_results(emulated, *rows, direction, columns)
        assert all(torch.equal(*pair) for pair in zip(results, expected, strict=True))
