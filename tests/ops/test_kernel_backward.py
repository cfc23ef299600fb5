"""logits_backward_ against the float64 gradient, on the CPU and with CUDA.

Shape legend: N = rows of logits, V = columns, T = tokens.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.kernel_calls import (
    DTYPES,
    SIZES,
    Columns,
    TokenResults,
    random_logits,
    random_targets,
    strided_logits,
    threads,
    token_results,
)
from tests.oracles.logprob import logits_gradient, spacing, token_logprobs

all_dtypes = pytest.mark.parametrize("dtype", DTYPES)


def random_grads(num_tokens: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    by_logprob_T, by_entropy_T = torch.randn(2, num_tokens, generator=generator)
    return by_logprob_T, 0.1 * by_entropy_T


def gradient_(
    kernels: Any,
    logits_NV: Tensor,
    target_T: Tensor,
    results: TokenResults,
    *grads: Tensor | None,
    rows_T: Tensor | None = None,
    columns: Columns | None = None,
) -> Tensor:
    """Overwrite the logits with their gradient and return them; by default of all columns."""
    columns = columns or Columns(0, logits_NV.shape[1])
    numbers = (results.max, results.log_sum, results.entropy)
    kernels.logits_backward_(logits_NV, rows_T, target_T, *numbers, *grads, *columns)
    return logits_NV


def assert_gradient(
    actual_TV: Tensor,
    logits_TV: Tensor,
    target_T: Tensor,
    grad_logprob_T: Tensor,
    grad_entropy_T: Tensor,
    temperature: float = 1.0,
) -> None:
    """One rounding to the type of the logits, and 2e-6 · max(1, |log p|) of the terms' size.

    Where the terms cancel, the error of float32 arithmetic stays that of the terms. 16-bit results
    may use a shorter exponential, off by 3e-6. Terms below 2^-126 may be 0.
    """
    exact = logits_gradient(logits_TV, target_T, grad_logprob_T, grad_entropy_T, temperature)
    log_p_TV = token_logprobs(logits_TV, target_T, temperature).logprobs_TV.abs()
    relative = 2e-6 if actual_TV.dtype == torch.float32 else 5e-6
    slack_TV = relative * log_p_TV.clamp(1.0, 200.0) * exact.term_size_TV + 2.0**-120
    if actual_TV.dtype != torch.float32:
        slack_TV = slack_TV + 0.5 * spacing(exact.gradient_TV, actual_TV.dtype)
    error_TV = (actual_TV.double() - exact.gradient_TV).abs()
    worst = (error_TV / slack_TV).max() if error_TV.numel() else torch.tensor(0.0)
    assert bool((error_TV <= slack_TV).all()), f"{worst:.2f} times the allowed error"


@pytest.mark.parametrize("temperature", [0.6, 1.7])
@all_dtypes
@pytest.mark.parametrize("spare_rows", [0, 3])
@pytest.mark.parametrize(("num_tokens", "num_columns"), SIZES)
def test_the_gradient_matches_float64_and_rows_without_a_token_and_padding_become_zeros(
    kernels: Any,
    num_tokens: int,
    num_columns: int,
    spare_rows: int,
    dtype: torch.dtype,
    temperature: float,
) -> None:
    num_rows, vocab_size = num_tokens + spare_rows, num_columns - num_columns // 9
    case = strided_logits(num_rows, num_columns, dtype)
    case.view_NV[:, vocab_size:] = torch.nan
    rows_T = torch.randperm(num_rows, generator=torch.Generator().manual_seed(2))[:num_tokens]
    if not spare_rows:
        rows_T = torch.arange(num_rows)
    selected_TV, target_T = (
        case.view_NV[rows_T, :vocab_size],
        random_targets(num_tokens, vocab_size),
    )
    grads, chosen_T = random_grads(num_tokens), rows_T if spare_rows else None
    columns = Columns(0, vocab_size, temperature)
    results = token_results(
        kernels,
        case.view_NV,
        target_T,
        rows_T=chosen_T,
        vocab_size=vocab_size,
        temperature=temperature,
    )
    gradient_(kernels, case.view_NV, target_T, results, *grads, rows_T=chosen_T, columns=columns)
    assert_gradient(case.view_NV[rows_T, :vocab_size], selected_TV, target_T, *grads, temperature)
    is_spare_N = torch.ones(num_rows, dtype=torch.bool)
    is_spare_N[rows_T] = False
    assert not case.view_NV[is_spare_N].any()
    assert not case.view_NV[:, vocab_size:].any()
    assert case.border_is_intact()


@all_dtypes
def test_thousands_of_tokens_match_float64(isa: Any, dtype: torch.dtype) -> None:
    logits_TV, target_T = random_logits(4097, 35, dtype), random_targets(4097, 35)
    grads, results = random_grads(4097), token_results(isa, logits_TV, target_T)
    actual_TV = gradient_(isa, logits_TV.clone(), target_T, results, *grads)
    assert_gradient(actual_TV, logits_TV, target_T, *grads)


@pytest.mark.parametrize("temperature", [0.6, 1.7])
@all_dtypes
def test_logits_of_eighty_and_impossible_columns_keep_the_bound(
    kernels: Any, dtype: torch.dtype, temperature: float
) -> None:
    logits_TV = random_logits(32, 1501, dtype, scale=30.0).clamp(-80, 80)
    logits_TV[:, 5::7] = -torch.inf
    target_T = random_targets(32, 1501) // 7 * 7
    grads, columns = random_grads(32), Columns(0, 1501, temperature)
    results = token_results(kernels, logits_TV, target_T, temperature=temperature)
    actual_TV = gradient_(kernels, logits_TV.clone(), target_T, results, *grads, columns=columns)
    assert_gradient(actual_TV, logits_TV, target_T, *grads, temperature)
    assert not actual_TV[:, 5::7].any()


@all_dtypes
def test_an_absent_gradient_counts_as_zero(kernels: Any, dtype: torch.dtype) -> None:
    logits_TV = random_logits(9, 77, dtype)
    target_T = random_targets(9, 77)
    results = token_results(kernels, logits_TV, target_T)
    by_logprob_T, by_entropy_T = random_grads(9)
    zero_T = torch.zeros(9)
    for partial, filled in [
        ((by_logprob_T, None), (by_logprob_T, zero_T)),
        ((None, by_entropy_T), (zero_T, by_entropy_T)),
        ((None, None), (zero_T, zero_T)),
    ]:
        actual_TV = gradient_(kernels, logits_TV.clone(), target_T, results, *partial)
        filled_TV = gradient_(kernels, logits_TV.clone(), target_T, results, *filled)
        assert torch.equal(actual_TV, filled_TV)
        assert_gradient(actual_TV, logits_TV, target_T, *filled)


@all_dtypes
def test_each_rank_writes_its_part_of_the_row(kernels: Any, dtype: torch.dtype) -> None:
    # 40 ids over four ranks of 16: the third has 8 columns of padding, the last nothing else.
    logits_TV = random_logits(6, 64, dtype)
    target_T = torch.tensor([0, 15, 16, 31, 32, 39])
    grads = random_grads(6)
    results = token_results(kernels, logits_TV, target_T, vocab_size=40)
    parts = [
        gradient_(
            kernels,
            logits_TV[:, start : start + 16].clone(),
            target_T,
            results,
            *grads,
            columns=Columns(start, 40),
        )
        for start in (0, 16, 32, 48)
    ]
    actual_TV = torch.cat(parts, dim=1)
    assert_gradient(actual_TV[:, :40], logits_TV[:, :40], target_T, *grads)
    assert not actual_TV[:, 40:].any()


@all_dtypes
def test_a_token_without_gradient_gets_zeros_whatever_its_logits_hold(
    kernels: Any, dtype: torch.dtype
) -> None:
    logits_TV = random_logits(3, 70, dtype)
    logits_TV[1, 4] = torch.nan
    target_T = torch.tensor([1, 2, 3])
    results = token_results(kernels, logits_TV, target_T)
    grads = (torch.tensor([1.0, 0.0, 2.0]), torch.zeros(3))
    actual_TV = gradient_(kernels, logits_TV.clone(), target_T, results, *grads)
    assert not actual_TV[1].any()
    others = [0, 2]
    assert_gradient(
        actual_TV[others],
        logits_TV[others],
        target_T[others],
        *(grad_T[others] for grad_T in grads),
    )


@all_dtypes
def test_a_nan_gradient_stays_in_its_row(kernels: Any, dtype: torch.dtype) -> None:
    logits_TV = random_logits(3, 70, dtype)
    target_T = torch.tensor([1, 2, 3])
    results = token_results(kernels, logits_TV, target_T)
    # All bits set: rounding it like a number would carry into the sign.
    grad_T = torch.ones(3)
    grad_T[1] = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)[0]
    actual_TV = gradient_(kernels, logits_TV, target_T, results, grad_T, None)
    assert actual_TV[1].isnan().all()
    assert not actual_TV[[0, 2]].isnan().any()


@all_dtypes
def test_a_logit_that_turned_nan_stays_nan_in_its_column(kernels: Any, dtype: torch.dtype) -> None:
    logits_TV = random_logits(1, 70, dtype)
    target_T = torch.tensor([1])
    results = token_results(kernels, logits_TV, target_T)
    logits_TV[0, 40] = torch.nan
    actual_TV = gradient_(kernels, logits_TV, target_T, results, torch.ones(1), None)
    assert actual_TV[0].isnan().nonzero().tolist() == [[40]]


@pytest.mark.parametrize("order", [0, 1, 7])
def test_on_cuda_a_row_of_several_tokens_becomes_nan_and_its_neighbours_do_not(
    cuda_kernels: Any, order: int
) -> None:
    if hasattr(cuda_kernels, "library"):
        cuda_kernels.set_order(order)
    logits_NV, target_T = torch.zeros(5, 40, dtype=torch.bfloat16), torch.full((8,), 7)
    rows_T = torch.tensor([4, 1, 4, 1 << 40, -1, 2, 4, 1])
    log_sum_T = torch.full((8,), math.log(40.0))
    results = TokenResults(log_sum_T, log_sum_T, torch.zeros(8), log_sum_T)
    gradient_(
        cuda_kernels,
        logits_NV,
        target_T,
        results,
        torch.ones(8),
        None,
        rows_T=rows_T,
        columns=Columns(0, 36),
    )
    assert logits_NV[:, :36].isnan().all(dim=1).tolist() == [False, True, False, False, True]
    assert not logits_NV[:, 36:].any()
    expected_V = torch.full((36,), -1 / 40)
    expected_V[7] += 1
    assert torch.equal(logits_NV[2, :36], expected_V.bfloat16())
    assert not logits_NV[[0, 3]].any()


@all_dtypes
def test_one_thread_and_eight_give_the_same_bits(isa: Any, dtype: torch.dtype) -> None:
    logits_TV = random_logits(67, 1500, dtype)
    target_T, grads = random_targets(67, 1500), random_grads(67)
    results = token_results(isa, logits_TV, target_T)
    with threads(1):
        alone_TV = gradient_(isa, logits_TV.clone(), target_T, results, *grads)
    with threads(8):
        shared_TV = gradient_(isa, logits_TV.clone(), target_T, results, *grads)
    assert torch.equal(alone_TV, shared_TV)
