"""logits_backward_ against the float64 gradient, for every instruction set.

Shape legend: N = rows of logits, V = columns, T = tokens.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from tests.ops.kernel_calls import (
    DTYPES,
    TokenResults,
    gradient_,
    random_logits,
    random_targets,
    threads,
    token_results,
)
from tests.oracles.logprob import logits_gradient, spacing, token_logprobs

pytestmark = pytest.mark.usefixtures("isa")


def random_grads(num_tokens: int, *, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(num_tokens, generator=generator),
        0.1 * torch.randn(num_tokens, generator=generator),
    )


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


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_tokens", "vocab_size"),
    [(1, 1), (31, 2), (32, 63), (33, 64), (1, 65), (4097, 35), (33, 1025), (6, 19_008)],
)
def test_the_gradient_matches_float64(
    num_tokens: int, vocab_size: int, dtype: torch.dtype, temperature: float
) -> None:
    logits_TV = random_logits(num_tokens, vocab_size, dtype)
    target_T = random_targets(num_tokens, vocab_size)
    grads = random_grads(num_tokens)
    results = token_results(logits_TV, target_T, temperature=temperature)
    actual_TV = gradient_(logits_TV.clone(), target_T, results, *grads, temperature=temperature)
    assert_gradient(actual_TV, logits_TV, target_T, *grads, temperature)


@pytest.mark.parametrize("temperature", [0.6, 1.7])
@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_of_eighty_and_impossible_columns_keep_the_bound(
    dtype: torch.dtype, temperature: float
) -> None:
    logits_TV = random_logits(32, 1501, dtype, scale=30.0).clamp(-80, 80)
    logits_TV[:, 5::7] = -torch.inf
    target_T = random_targets(32, 1501) // 7 * 7
    grads = random_grads(32)
    results = token_results(logits_TV, target_T, temperature=temperature)
    actual_TV = gradient_(logits_TV.clone(), target_T, results, *grads, temperature=temperature)
    assert_gradient(actual_TV, logits_TV, target_T, *grads, temperature)
    assert not actual_TV[:, 5::7].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_absent_gradient_counts_as_zero(dtype: torch.dtype) -> None:
    logits_TV = random_logits(9, 77, dtype)
    target_T = random_targets(9, 77)
    results = token_results(logits_TV, target_T)
    by_logprob_T, by_entropy_T = random_grads(9)
    zero_T = torch.zeros(9)
    for partial, filled in [
        ((by_logprob_T, None), (by_logprob_T, zero_T)),
        ((None, by_entropy_T), (zero_T, by_entropy_T)),
        ((None, None), (zero_T, zero_T)),
    ]:
        actual_TV = gradient_(logits_TV.clone(), target_T, results, *partial)
        assert torch.equal(actual_TV, gradient_(logits_TV.clone(), target_T, results, *filled))
        assert_gradient(actual_TV, logits_TV, target_T, *filled)


@pytest.mark.parametrize("dtype", DTYPES)
def test_unselected_rows_and_padding_become_zeros_and_memory_around_stays(
    dtype: torch.dtype,
) -> None:
    # 11 columns on the left and 6 on the right belong to someone else; 3 of the 60 are padding.
    whole_NW = random_logits(20, 77, dtype)
    whole_NW[:, 11 + 57 : 11 + 60] = torch.nan
    before_NW = whole_NW.clone()
    logits_NV = whole_NW[:, 11 : 11 + 60]
    rows_T = torch.tensor([19, 3, 0])
    target_T = torch.tensor([56, 0, 20])
    selected_TV = logits_NV[rows_T, :57].clone()
    grads = random_grads(3)
    results = token_results(logits_NV, target_T, rows_T=rows_T, vocab_size=57)
    gradient_(logits_NV, target_T, results, *grads, rows_T=rows_T, vocab_size=57)
    assert_gradient(logits_NV[rows_T, :57], selected_TV, target_T, *grads)
    assert not logits_NV[:, 57:].any()
    unselected = torch.ones(20, dtype=torch.bool)
    unselected[rows_T] = False
    assert not logits_NV[unselected].any()
    assert torch.equal(whole_NW[:, :11], before_NW[:, :11])
    assert torch.equal(whole_NW[:, 71:], before_NW[:, 71:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_rank_writes_its_part_of_the_row(dtype: torch.dtype) -> None:
    # 40 ids over three ranks of 16: the last one has 8 columns of padding.
    logits_TV = random_logits(6, 48, dtype)
    target_T = torch.tensor([0, 15, 16, 31, 32, 39])
    grads = random_grads(6)
    results = token_results(logits_TV[:, :40].contiguous(), target_T)
    parts = [
        gradient_(
            logits_TV[:, start : start + 16].clone(),
            target_T,
            results,
            *grads,
            vocab_start=start,
            vocab_size=40,
        )
        for start in (0, 16, 32)
    ]
    actual_TV = torch.cat(parts, dim=1)
    assert_gradient(actual_TV[:, :40], logits_TV[:, :40], target_T, *grads)
    assert not actual_TV[:, 40:].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_without_gradient_gets_zeros_whatever_its_logits_hold(dtype: torch.dtype) -> None:
    logits_TV = random_logits(3, 70, dtype)
    logits_TV[1, 4] = torch.nan
    target_T = torch.tensor([1, 2, 3])
    results = token_results(logits_TV, target_T)
    grad_T = torch.tensor([1.0, 0.0, 2.0])
    actual_TV = gradient_(logits_TV.clone(), target_T, results, grad_T, torch.zeros(3))
    assert not actual_TV[1].any()
    assert_gradient(
        actual_TV[[0, 2]], logits_TV[[0, 2]], target_T[[0, 2]], grad_T[[0, 2]], torch.zeros(2)
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_stays_in_its_row(dtype: torch.dtype) -> None:
    logits_TV = random_logits(3, 70, dtype)
    target_T = torch.tensor([1, 2, 3])
    results = token_results(logits_TV, target_T)
    # All bits set: rounding it like a number would carry into the sign.
    full_payload = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    grad_T = torch.ones(3)
    grad_T[1] = full_payload[0]
    actual_TV = gradient_(logits_TV, target_T, results, grad_T, None)
    assert actual_TV[1].isnan().all()
    assert not actual_TV[[0, 2]].isnan().any()


def test_a_logit_that_turned_nan_stays_nan_in_its_column(isa: str) -> None:
    for dtype in DTYPES:
        logits_TV = random_logits(1, 70, dtype)
        target_T = torch.tensor([1])
        results = token_results(logits_TV, target_T)
        logits_TV[0, 40] = torch.nan
        actual_TV = gradient_(logits_TV, target_T, results, torch.ones(1), None)
        assert actual_TV[0].isnan().nonzero().tolist() == [[40]], isa


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_tokens_zero_every_row(dtype: torch.dtype) -> None:
    empty = torch.empty(0)
    results = TokenResults(empty, empty, empty, empty)
    none_T = torch.empty(0, dtype=torch.int64)
    actual_NV = gradient_(torch.ones(4, 9, dtype=dtype), none_T, results, None, None, rows_T=none_T)
    assert not actual_NV.any()
    assert gradient_(torch.ones(0, 9, dtype=dtype), none_T, results, None, None).shape == (0, 9)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_thread_and_eight_give_the_same_bits(dtype: torch.dtype) -> None:
    logits_TV = random_logits(67, 1500, dtype)
    target_T = random_targets(67, 1500)
    results = token_results(logits_TV, target_T)
    grads = random_grads(67)
    with threads(1):
        alone_TV = gradient_(logits_TV.clone(), target_T, results, *grads)
    with threads(8):
        shared_TV = gradient_(logits_TV.clone(), target_T, results, *grads)
    assert torch.equal(alone_TV, shared_TV)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_op_is_registered_as_torch_wants_it(dtype: torch.dtype) -> None:
    logits_NV = random_logits(5, 40, dtype)
    rows_T, target_T = torch.tensor([4, 0]), torch.tensor([39, 1])
    results = token_results(logits_NV, target_T, rows_T=rows_T)
    numbers = (results.max, results.log_sum, results.entropy)
    backward = torch.ops.bapo.logits_backward_.default
    opcheck(backward, (logits_NV, rows_T, target_T, *numbers, torch.ones(2), None, 0, 40, 0.6))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": torch.tensor([0, 2, 0])}, "rows must select each row at most once"),
        ({"target": torch.tensor([0, 1, 8])}, r"target must lie in .* \[0, 8\), got 8 at token 2"),
        ({"max": torch.zeros(2)}, r"max must have shape \[3\], got \[2\]"),
        ({"log_sum": torch.zeros(3).double()}, "log_sum must be float32, got float64"),
        ({"entropy": torch.zeros(6)[::2]}, "entropy must be contiguous, got stride 2"),
        ({"grad_logprob": torch.zeros(1)}, r"grad_logprob must have shape \[3\], got \[1\]"),
        ({"grad_entropy": torch.zeros(3).half()}, "grad_entropy must be float32, got float16"),
    ],
)
def test_bad_input_is_refused_and_the_logits_stay(changes: dict[str, object], message: str) -> None:
    logits_NV = torch.ones(3, 8)
    arguments: dict[str, object] = {
        "logits": logits_NV,
        "rows": None,
        "target": torch.tensor([0, 1, 2]),
        "max": torch.zeros(3),
        "log_sum": torch.zeros(3),
        "entropy": torch.zeros(3),
        "grad_logprob": torch.ones(3),
        "grad_entropy": None,
        "vocab_start": 0,
        "vocab_size": 8,
        "temperature": 1.0,
    }
    with pytest.raises(RuntimeError, match=message):
        torch.ops.bapo.logits_backward_(**{**arguments, **changes})
    assert torch.equal(logits_NV, torch.ones(3, 8))
