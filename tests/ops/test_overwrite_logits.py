"""The gradient in the memory of the logits: what is written, and what autograd then refuses.

Shape legend: N = rows of the logits, V = columns, T = tokens.
"""

import pytest
import torch
from torch import Tensor

from bapo_megatron.ops.logprob import TokenLogprobs, vocab_parallel_logprobs

ROWS_T, TARGET_T = torch.tensor([4, 1, 2]), torch.tensor([0, 30, 7])


def random_weight(dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(6, 33, generator=generator).to(dtype).requires_grad_()


def make_logits(weight_NV: Tensor) -> Tensor:
    """Logits that something computes, but does not need for its own gradient."""
    return weight_NV + 1


def logprobs(logits_NV: Tensor, *, overwrite: bool = True) -> TokenLogprobs:
    return vocab_parallel_logprobs(
        logits_NV,
        TARGET_T,
        vocab_size=31,
        rows_T=ROWS_T,
        temperature=0.7,
        overwrite_logits=overwrite,
    )


def loss_of(result: TokenLogprobs) -> Tensor:
    return (result.logprob_T - 0.3 * result.entropy_T).sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_producer_gets_the_memory_of_the_logits_with_the_bits_of_a_gradient_beside_them(
    dtype: torch.dtype,
) -> None:
    weight_NV, beside_NV = random_weight(dtype), random_weight(dtype)
    logits_NV = make_logits(weight_NV)
    seen: list[int] = []
    logits_NV.register_hook(lambda grad_NV: seen.append(grad_NV.data_ptr()))
    loss_of(logprobs(logits_NV)).backward()
    loss_of(logprobs(make_logits(beside_NV), overwrite=False)).backward()
    assert seen == [logits_NV.data_ptr()]
    assert torch.equal(weight_NV.grad, beside_NV.grad)
    assert torch.equal(logits_NV.detach(), beside_NV.grad)
    assert torch.count_nonzero(beside_NV.grad) > 0


def test_whatever_needs_the_logits_after_a_backward_pass_is_refused() -> None:
    logits_NV = make_logits(random_weight())
    loss, penalty = loss_of(logprobs(logits_NV)), logits_NV.square().sum()
    loss.backward(retain_graph=True)
    for value in (loss, penalty):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            value.backward()


def test_a_leaf_that_requires_a_gradient_is_refused() -> None:
    with pytest.raises(AssertionError, match="overwriting would destroy a leaf's value"):
        logprobs(random_weight())


def test_a_leaf_without_gradient_is_only_read() -> None:
    logits_NV = random_weight().detach()
    before_NV = logits_NV.clone()
    assert not logprobs(logits_NV).logprob_T.requires_grad
    assert torch.equal(logits_NV, before_NV)


def test_without_overwriting_the_logits_stay_and_backward_can_run_twice() -> None:
    weight_NV = random_weight()
    logits_NV = make_logits(weight_NV)
    before_NV, version = logits_NV.detach().clone(), logits_NV._version
    loss = loss_of(logprobs(logits_NV, overwrite=False))
    loss.backward(retain_graph=True)
    assert weight_NV.grad is not None
    once_NV = weight_NV.grad.clone()
    loss.backward()
    assert torch.equal(weight_NV.grad, 2 * once_NV)
    assert torch.equal(logits_NV.detach(), before_NV)
    assert logits_NV._version == version
