"""logprob_partials and logprob_combine against float64, on the CPU and with CUDA.

Shape legend: N = rows of logits, V = columns, T = tokens, P = tensor-parallel ranks.
"""

from typing import Any

import pytest
import torch

from tests.ops.kernel_calls import (
    DTYPES,
    SIZES,
    adversarial_rows,
    assert_token_results,
    random_logits,
    random_targets,
    strided_logits,
    threads,
    token_results,
)

BLOCK = 1024
"""Columns that the CPU kernels sum at a time."""
all_dtypes = pytest.mark.parametrize("dtype", DTYPES)


@pytest.mark.parametrize("temperature", [0.6, 1.7])
@all_dtypes
@pytest.mark.parametrize(("num_tokens", "vocab_size"), SIZES)
def test_rows_of_any_size_and_alignment_match_float64(
    kernels: Any, num_tokens: int, vocab_size: int, dtype: torch.dtype, temperature: float
) -> None:
    case = strided_logits(num_tokens, vocab_size, dtype)
    target_T = random_targets(num_tokens, vocab_size)
    results = token_results(kernels, case.view_NV, target_T, temperature=temperature)
    assert_token_results(results, case.view_NV, target_T, temperature)
    assert case.border_is_intact()


@all_dtypes
def test_thousands_of_tokens_match_float64(isa: Any, dtype: torch.dtype) -> None:
    logits_TV, target_T = random_logits(4097, 35, dtype), random_targets(4097, 35)
    assert_token_results(token_results(isa, logits_TV, target_T), logits_TV, target_T)


@pytest.mark.parametrize("temperature", [0.6, 1.0])
@all_dtypes
@pytest.mark.parametrize("num_columns", [5, 64, 2 * BLOCK + 7, 21_000])
def test_adversarial_rows_match_float64(
    kernels: Any, num_columns: int, dtype: torch.dtype, temperature: float
) -> None:
    wide_TV = random_logits(4, num_columns, torch.float32, scale=30.0).clamp(-80, 80)
    rising_TV = wide_TV.sort(dim=1).values + 77
    climbing_TV = torch.linspace(-1000, 1000, num_columns).expand(1, -1)
    rows = (adversarial_rows(num_columns), wide_TV, rising_TV, climbing_TV, climbing_TV.flip(1))
    logits_TV = torch.cat(rows).to(dtype)
    target_T = torch.full((len(logits_TV),), num_columns - 1)
    results = token_results(kernels, logits_TV, target_T, temperature=temperature)
    assert_token_results(results, logits_TV, target_T, temperature)


@all_dtypes
def test_rows_may_be_selected_and_repeated(kernels: Any, dtype: torch.dtype) -> None:
    logits_NV = strided_logits(40, 517, dtype, gap=4, offset=3).view_NV
    rows_T = torch.tensor([39, 0, 7, 7, 21])
    target_T = random_targets(5, 517)
    results = token_results(kernels, logits_NV, target_T, rows_T=rows_T)
    assert_token_results(results, logits_NV[rows_T], target_T)


def test_partials_hold_raw_maximum_and_target_and_scaled_sums(kernels: Any) -> None:
    # d = (x − 3) / 2 = (−1, 0, −2): s = 1 + e^−1 + e^−2, t = −e^−1 − 2 e^−2.
    logits_TV, target_T = torch.tensor([[1.0, 3.0, -1.0]]), torch.tensor([12])
    part_T4 = kernels.logprob_partials(logits_TV, None, target_T, 10, 13, 2.0)
    assert part_T4[0, 0] == 3.0
    assert part_T4[0, 1:3].tolist() == pytest.approx([1.5032147, -0.6385500], rel=1e-6)
    assert part_T4[0, 3] == -1.0


@all_dtypes
@pytest.mark.parametrize(("vocab_size", "per_rank"), [(100, 32), (64, 32), (33, 16), (61, 64)])
def test_ranks_merge_to_the_whole_row_and_padding_is_not_read(
    kernels: Any, vocab_size: int, per_rank: int, dtype: torch.dtype
) -> None:
    # Four ranks; where the ids fill fewer, the others have padding only.
    logits_TV = random_logits(33, vocab_size, dtype)
    target_T = random_targets(33, vocab_size)
    padded_TW = torch.full((33, 4 * per_rank), torch.nan, dtype=dtype)
    padded_TW[:, :vocab_size] = logits_TV
    parts = [
        kernels.logprob_partials(part_TV, None, target_T, number * per_rank, vocab_size, 0.6)
        for number, part_TV in enumerate(padded_TW.split(per_rank, dim=1))
    ]
    results = kernels.logprob_combine(torch.stack(parts), 0.6)
    assert_token_results(results, logits_TV, target_T, 0.6)


def test_a_rank_of_padding_reports_minus_infinity_and_zeros(kernels: Any) -> None:
    padding_TV, target_T = torch.full((2, 16), torch.nan), torch.tensor([0, 3])
    part_T4 = kernels.logprob_partials(padding_TV, None, target_T, 32, 32, 1.0)
    assert part_T4.tolist() == [[-torch.inf, 0.0, 0.0, 0.0]] * 2


def test_columns_of_minus_infinity_add_exactly_nothing(kernels: Any) -> None:
    logits_TV = torch.full((1, 100), -torch.inf)
    logits_TV[0, 37] = 0.0
    part_T4 = kernels.logprob_partials(logits_TV, None, torch.tensor([37]), 0, 100, 1.0)
    assert part_T4.tolist() == [[0.0, 1.0, 0.0, 0.0]]


@all_dtypes
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("column", [0, 8, BLOCK, 20_480, 41_000])
@pytest.mark.parametrize("others", [0.0, -torch.inf])
def test_nan_and_infinity_make_their_token_nan_and_no_other(
    kernels: Any, others: float, column: int, bad: float, dtype: torch.dtype
) -> None:
    logits_TV = random_logits(3, 41_001, dtype)
    target_T = torch.tensor([1, 1, 1])
    clean = token_results(kernels, logits_TV, target_T)
    logits_TV[1] += others
    logits_TV[1, column] = bad
    results = token_results(kernels, logits_TV, target_T)
    for result_T, clean_T in zip(results, clean, strict=True):
        assert result_T[1].isnan()
        assert torch.equal(result_T[[0, 2]], clean_T[[0, 2]])


def test_a_row_without_a_possible_column_is_nan(kernels: Any) -> None:
    results = token_results(kernels, torch.full((1, 70), -torch.inf), torch.tensor([0]))
    assert all(result_T.isnan().all() for result_T in results)


def test_combine_skips_a_rank_at_minus_infinity_and_spreads_nan(kernels: Any) -> None:
    nothing = [-torch.inf, 0.0, 0.0, 0.0]
    two_equal = [1.0, 2.0, 0.0, 1.0]
    bad = [torch.nan, torch.nan, torch.nan, 0.0]
    partials_PT4 = torch.tensor([[nothing, nothing, bad], [two_equal, nothing, two_equal]])
    results = kernels.logprob_combine(partials_PT4, 1.0)
    # Two equal columns: the log-prob is log 1/2.
    expected = [-0.6931472, 0.6931472, 1.0, 0.6931472]
    assert [result_T[0].item() for result_T in results] == pytest.approx(expected, abs=1e-7)
    assert all(result_T[1:].isnan().all() for result_T in results)


def test_on_cuda_rows_and_targets_out_of_range_give_nan_and_spare_their_neighbours(
    cuda_kernels: Any,
) -> None:
    # Rows -1 and 3 hold finite numbers here: reading them would show.
    logits_NV = random_logits(5, 20, torch.bfloat16)[1:4]
    rows_T = torch.tensor([0, -1, 3, 1 << 40, 1, 2, 2])
    target_T = torch.tensor([4, 4, 4, 4, -1, 20, 4])
    part_T4 = cuda_kernels.logprob_partials(logits_NV, rows_T, target_T, 0, 20, 1.0)
    assert part_T4[1:6].isnan().all()
    kept_T4 = part_T4[[0, 6]]
    results = cuda_kernels.logprob_combine(kept_T4[None], 1.0)
    assert_token_results(results, logits_NV[[0, 2]], target_T[[0, 6]])


@all_dtypes
def test_one_thread_and_eight_give_the_same_bits(isa: Any, dtype: torch.dtype) -> None:
    logits_TV = random_logits(67, 1500, dtype)
    target_T = random_targets(67, 1500)
    with threads(1):
        alone = token_results(isa, logits_TV, target_T)
    with threads(8):
        shared = token_results(isa, logits_TV, target_T)
    assert all(torch.equal(*pair) for pair in zip(alone, shared, strict=True))


def test_the_order_of_cuda_s_threads_does_not_change_a_bit(emulated: Any) -> None:
    # Logits that rise along the row: each of its three pieces has a new maximum, and none
    # dominates the sum.
    rising_V = torch.linspace(0, 1, 41_001)
    logits_TV = (0.1 * random_logits(2, 41_001, torch.float32) + rising_V).bfloat16()
    target_T = torch.tensor([7, 40_000])
    expected = token_results(emulated, logits_TV, target_T, temperature=0.9)
    assert_token_results(expected, logits_TV, target_T, 0.9)
    for order in range(1, 13):
        emulated.set_order(order)
        results = token_results(emulated, logits_TV, target_T, temperature=0.9)
        assert all(torch.equal(*pair) for pair in zip(results, expected, strict=True))
