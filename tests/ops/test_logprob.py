"""Log-prob and entropy on one device against float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from bapo_megatron.ops.logprob import TokenLogprobs, vocab_parallel_logprobs
from tests.ops.kernel_calls import assert_close
from tests.oracles.logprob import logits_gradient, token_logprobs


def assert_matches(
    actual: TokenLogprobs, logits_TV: Tensor, target_T: Tensor, temperature: float = 1.0
) -> None:
    wanted = token_logprobs(logits_TV, target_T, temperature)
    assert_close(actual.logprob_T, wanted.logprob_T)
    assert_close(actual.entropy_T, wanted.entropy_T)


def random_logits(num_rows: int, num_columns: int, scale: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(num_rows * 1000 + num_columns)
    return scale * torch.randn(num_rows, num_columns, generator=generator)


@pytest.mark.parametrize("num_tokens", [0, 1, 31, 32, 33])
@pytest.mark.parametrize(("columns", "vocab_size"), [(7, 7), (48, 41), (1003, 1001)])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_it_equals_float64(
    num_tokens: int, columns: int, vocab_size: int, temperature: float
) -> None:
    logits_TV = random_logits(num_tokens, columns)
    target_T = torch.arange(num_tokens) % vocab_size
    actual = vocab_parallel_logprobs(
        logits_TV, target_T, vocab_size=vocab_size, temperature=temperature
    )
    assert actual.logprob_T.dtype == actual.entropy_T.dtype == torch.float32
    assert_matches(actual, logits_TV[:, :vocab_size], target_T, temperature)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("offset", [-300.0, 80.0, 30_000.0])
def test_logits_far_from_zero_lose_nothing(offset: float, temperature: float) -> None:
    logits_TV = (random_logits(16, 500) * 4).round() / 4 + offset  # exact in float32
    target_T = torch.arange(16)
    actual = vocab_parallel_logprobs(logits_TV, target_T, vocab_size=500, temperature=temperature)
    assert_matches(actual, logits_TV, target_T, temperature)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_computed_in_float32(dtype: torch.dtype) -> None:
    logits_TV = random_logits(8, 300).to(dtype).requires_grad_()
    target_T = torch.arange(8)
    actual = vocab_parallel_logprobs(logits_TV, target_T, vocab_size=300)
    exact_TV = logits_TV.detach().float()
    assert_close(actual.logprob_T, token_logprobs(exact_TV, target_T).logprob_T)
    actual.logprob_T.sum().backward()
    assert logits_TV.grad is not None
    assert logits_TV.grad.dtype == dtype
    wanted_TV = logits_gradient(exact_TV, target_T, torch.ones(8), torch.zeros(8)).gradient_TV
    # Rounded to nearest once, which is surely within ε / 2; 1 % of that is over 16 ε of float32.
    rounding = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(logits_TV.grad.double(), wanted_TV, rtol=1.01 * rounding, atol=1e-6)


ROWS_T, TARGET_T = torch.tensor([8, 1, 5, 2]), torch.tensor([40, 0, 3, 7])
GRAD_LOGPROB_T = torch.tensor([1.0, -2.0, 0.5, 1.5])
GRAD_ENTROPY_T = torch.tensor([0.3, 1.0, 0.0, -1.0])


def test_gradients_of_selected_rows_equal_float64() -> None:
    logits_NV = random_logits(10, 48).requires_grad_()
    actual = vocab_parallel_logprobs(
        logits_NV, TARGET_T, vocab_size=41, rows_T=ROWS_T, temperature=0.8
    )
    ((GRAD_LOGPROB_T * actual.logprob_T) + (GRAD_ENTROPY_T * actual.entropy_T)).sum().backward()
    wanted_NV = torch.zeros(10, 48, dtype=torch.float64)
    wanted_NV[ROWS_T, :41] = logits_gradient(
        logits_NV.detach()[ROWS_T, :41], TARGET_T, GRAD_LOGPROB_T, GRAD_ENTROPY_T, 0.8
    ).gradient_TV
    assert logits_NV.grad is not None
    assert_close(logits_NV.grad, wanted_NV)
    assert torch.count_nonzero(logits_NV.grad[:, 41:]) == 0
    assert torch.count_nonzero(logits_NV.grad[[0, 3, 4, 6, 7, 9]]) == 0


def test_an_entropy_that_nothing_depends_on_has_no_gradient() -> None:
    one = random_logits(4, 20).requires_grad_()
    target_T = torch.arange(4)
    result = vocab_parallel_logprobs(one, target_T, vocab_size=20)
    result.logprob_T.sum().backward()
    softmax_TV = torch.softmax(one.detach().double(), dim=1)
    wanted_TV = torch.nn.functional.one_hot(target_T, 20) - softmax_TV
    assert one.grad is not None
    assert_close(one.grad, wanted_TV)


def test_columns_of_minus_infinity_add_nothing() -> None:
    logits_TV = random_logits(2, 6)
    logits_TV[:, 4:] = -math.inf
    logits_TV.requires_grad_()
    target_T = torch.tensor([0, 3])
    result = vocab_parallel_logprobs(logits_TV, target_T, vocab_size=6)
    assert_matches(result, logits_TV.detach()[:, :4], target_T)
    (result.logprob_T.sum() + result.entropy_T.sum()).backward()
    assert logits_TV.grad is not None
    assert bool(torch.isfinite(logits_TV.grad).all())
    assert torch.count_nonzero(logits_TV.grad[:, 4:]) == 0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_infinite_logits_poison_their_token_only(value: float) -> None:
    logits_TV = random_logits(3, 6)
    logits_TV[1, 5] = value
    logits_TV.requires_grad_()
    result = vocab_parallel_logprobs(logits_TV, torch.tensor([0, 1, 2]), vocab_size=6)
    assert torch.isnan(result.logprob_T).tolist() == [False, True, False]
    assert torch.isnan(result.entropy_T).tolist() == [False, True, False]
    # Without a gradient of its own, the token's row gets zeros: reported, not spread.
    result.logprob_T.backward(torch.tensor([1.0, 0.0, 1.0]))
    assert logits_TV.grad is not None
    assert bool(torch.isfinite(logits_TV.grad).all())
    assert torch.count_nonzero(logits_TV.grad[1]) == 0


def test_a_second_backward_through_the_gradient_is_refused() -> None:
    logits_TV = random_logits(1, 4).requires_grad_()
    result = vocab_parallel_logprobs(logits_TV, torch.tensor([1]), vocab_size=4)
    (grad,) = torch.autograd.grad(result.logprob_T.sum(), logits_TV, create_graph=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        grad.sum().backward()
