"""What autograd adds to the kernels: gradients of selected rows, of each result, and of no second.

Shape legend: N = rows of logits, V = columns, T = tokens.
"""

import pytest
import torch

from bapo_megatron.ops.logprob import vocab_parallel_logprobs
from tests.ops.kernel_calls import DTYPES, assert_close, random_logits
from tests.oracles.logprob import logits_gradient, token_logprobs

ROWS_T, TARGET_T = torch.tensor([8, 1, 5, 2]), torch.tensor([40, 0, 3, 7])
GRAD_LOGPROB_T = torch.tensor([1.0, -2.0, 0.5, 1.5])
GRAD_ENTROPY_T = torch.tensor([0.3, 1.0, 0.0, -1.0])


@pytest.mark.parametrize("uses_entropy", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_results_and_gradients_of_selected_rows_equal_float64(
    dtype: torch.dtype, uses_entropy: bool
) -> None:
    logits_NV = random_logits(10, 48, dtype).requires_grad_()
    actual = vocab_parallel_logprobs(
        logits_NV, TARGET_T, vocab_size=41, rows_T=ROWS_T, temperature=0.8
    )
    used_TV = logits_NV.detach()[ROWS_T, :41]
    wanted = token_logprobs(used_TV, TARGET_T, 0.8)
    assert actual.logprob_T.dtype == actual.entropy_T.dtype == torch.float32
    assert_close(actual.logprob_T, wanted.logprob_T)
    assert_close(actual.entropy_T, wanted.entropy_T)
    loss_T, grad_entropy_T = GRAD_LOGPROB_T * actual.logprob_T, torch.zeros(4)
    if uses_entropy:
        loss_T, grad_entropy_T = loss_T + GRAD_ENTROPY_T * actual.entropy_T, GRAD_ENTROPY_T
    loss_T.sum().backward()
    exact = logits_gradient(used_TV, TARGET_T, GRAD_LOGPROB_T, grad_entropy_T, 0.8)
    wanted_NV = torch.zeros(10, 48, dtype=torch.float64)
    wanted_NV[ROWS_T, :41] = exact.gradient_TV
    assert logits_NV.grad is not None
    assert logits_NV.grad.dtype == dtype
    # Rounded to nearest once, which is surely within ε / 2; 1 % of that is over 16 ε of float32.
    rounding = 0.0 if dtype == torch.float32 else 1.01 * torch.finfo(dtype).eps / 2
    torch.testing.assert_close(logits_NV.grad.double(), wanted_NV, rtol=rounding, atol=2e-6)
    assert torch.count_nonzero(logits_NV.grad[:, 41:]) == 0
    assert torch.count_nonzero(logits_NV.grad[[0, 3, 4, 6, 7, 9]]) == 0


def test_a_second_backward_through_the_gradient_is_refused() -> None:
    logits_TV = random_logits(1, 4, torch.float32).requires_grad_()
    result = vocab_parallel_logprobs(logits_TV, torch.tensor([1]), vocab_size=4)
    (grad,) = torch.autograd.grad(result.logprob_T.sum(), logits_TV, create_graph=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        grad.sum().backward()
