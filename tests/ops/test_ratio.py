"""The importance ratio: the op's bits, and the differentiable face.

Shape legend: T = tokens.
"""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bapo_megatron.ops.logprob import importance_ratio
from tests.ops.kernel_calls import threads
from tests.oracles.token_batches import paper_rule, random_tokens

E_TO_20 = 485165195.40979028
E_TO_MINUS_20 = 2.0611536224385578e-09


def random_pair(num_tokens: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Log-probs and behaviour log-probs, many of them on a candidate or one float beside it."""
    tokens = random_tokens(np.random.default_rng(seed + num_tokens), num_tokens, paper_rule())
    return torch.from_numpy(tokens.logprob), torch.from_numpy(tokens.behaviour)


def oracle(logprob_T: Tensor, behaviour_T: Tensor) -> Tensor:
    """The float64 exponential of the float32 difference, rounded once."""
    difference = np.clip(logprob_T.numpy() - behaviour_T.numpy(), np.float32(-20), np.float32(20))
    return torch.from_numpy(np.exp(difference.astype(np.float64)).astype(np.float32))


@pytest.mark.parametrize("num_tokens", [0, 1, 31, 32, 33, 4097])
def test_the_ratio_is_the_float64_exponential_rounded_once(kernels: Any, num_tokens: int) -> None:
    for seed in range(5):
        pair = random_pair(num_tokens, seed)
        assert torch.equal(kernels.importance_ratio(*pair), oracle(*pair))


@pytest.mark.parametrize("num_threads", [1, 8])
def test_any_number_of_threads_gives_the_same(isa: Any, num_threads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logprob_T = 15 * torch.randn(200_003, generator=generator)
    behaviour_T = torch.randn(200_003, generator=generator)
    with threads(num_threads):
        ratio_T = isa.importance_ratio(logprob_T, behaviour_T)
    assert torch.equal(ratio_T, oracle(logprob_T, behaviour_T))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("position", [0, 17, 40])
def test_a_token_that_is_not_finite_is_nan_and_its_neighbours_are_not(
    kernels: Any, bad: float, position: int
) -> None:
    for argument in range(2):
        pair = random_pair(41)
        expected_T = oracle(*pair)
        pair[argument][position] = bad
        ratio_T = kernels.importance_ratio(*pair)
        assert ratio_T[position].isnan()
        others_T = torch.arange(41) != position
        assert torch.equal(ratio_T[others_T], expected_T[others_T])
    both_T = torch.full((41,), bad)
    assert kernels.importance_ratio(both_T, both_T).isnan().all()


def test_beyond_twenty_the_log_ratio_is_held_and_the_derivative_is_zero(kernels: Any) -> None:
    logprob_T = torch.tensor([20.0, 20.000002, 300.0, 3e38, -20.0, -20.000002, -300.0, -3e38])
    behaviour_T = torch.tensor([0.0, 0.0, 0.0, -3e38, 0.0, 0.0, 0.0, 3e38])
    high, low = float(np.float32(E_TO_20)), float(np.float32(E_TO_MINUS_20))
    assert kernels.importance_ratio(logprob_T, behaviour_T).tolist() == [high] * 4 + [low] * 4
    logprob_T.requires_grad_()
    ratio_T = importance_ratio(logprob_T, behaviour_T)
    assert ratio_T.tolist() == [high] * 4 + [low] * 4
    ratio_T.sum().backward()
    assert logprob_T.grad is not None
    assert logprob_T.grad.tolist() == [high, 0, 0, 0, low, 0, 0, 0]


def test_the_derivative_by_the_log_prob_is_the_ratio_of_strided_tensors_too() -> None:
    logprob_T, behaviour_T = random_pair(64)
    expected_T = oracle(logprob_T, behaviour_T)
    wide_T3 = torch.stack([logprob_T, behaviour_T, logprob_T], dim=1).requires_grad_()
    ratio_T = importance_ratio(wide_T3[:, 0], wide_T3[:, 1])
    assert torch.equal(ratio_T, expected_T)
    grad_T = torch.randn(64, generator=torch.Generator().manual_seed(3))
    (grad_T3,) = torch.autograd.grad(ratio_T, wide_T3, grad_T)
    inside_T = (logprob_T - behaviour_T).abs() <= 20
    assert torch.equal(grad_T3[:, 0], torch.where(inside_T, grad_T * expected_T, 0))
    assert not grad_T3[:, 1:].any()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_token_that_is_not_finite_has_no_derivative(bad: float, dtype: torch.dtype) -> None:
    logprob_T = torch.tensor([-1.0, bad, -1.0, bad], dtype=dtype, requires_grad=True)
    behaviour_T = torch.tensor([-1.0, -1.0, bad, bad], dtype=dtype)
    ratio_T = importance_ratio(logprob_T, behaviour_T)
    assert ratio_T.isnan().tolist() == [False, True, True, True]
    (grad_T,) = torch.autograd.grad(ratio_T.nansum(), logprob_T)
    assert grad_T.tolist() == [1.0, 0.0, 0.0, 0.0]


def test_float64_passes_gradcheck_inside_and_outside_the_clamp() -> None:
    logprob_T = torch.tensor([-0.1, -2.0, 3.0, 19.5, 25.0, -30.0], dtype=torch.float64)
    behaviour_T = torch.tensor([-0.4, -1.5, 0.0, 0.0, -0.5, -1.0], dtype=torch.float64)
    logprob_T.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: importance_ratio(x, behaviour_T).log(), logprob_T)
    ratio_T = importance_ratio(logprob_T, behaviour_T)
    assert ratio_T.dtype == torch.float64
    assert ratio_T[0].item() == pytest.approx(1.3498588075760032, rel=1e-15)
    assert ratio_T[4].item() == pytest.approx(E_TO_20, rel=1e-15)
