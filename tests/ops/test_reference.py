"""The reference in float64: its gradients pass gradcheck.

Shape legend: T = response tokens, V = vocabulary columns.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bapo_megatron.ops import reference
from bapo_megatron.ops.contributions import constant_bounds
from bapo_megatron.ops.logprob import vocab_parallel_logprobs
from bapo_megatron.ops.policy_loss import clipped_policy_loss

BOUNDS = constant_bounds(0.75, 1.25, torch.device("cpu"))


def float64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_the_policy_loss_passes_gradcheck(dual_clip: float | None) -> None:
    # Ratios on both sides of every limit, none within reach of the differences.
    log_ratio_T = float64(0.5, 1.1, 1.4, 1.1, 3.5, 0.1, 2.9).log()
    advantage_T = float64(1.0, 0.5, 2.0, -1.0, -0.5, -2.0, -1.5)
    behaviour_T = float64(-0.1, -0.7, -2.0, -1.0, -0.2, -0.4, -3.0)
    weight_T = float64(0.2, 0.1, 0.3, 0.2, 0.4, 0.5, 0.6)
    mask_T = float64(1, 1, 1, 1, 1, 1, 0)
    logprob_T = (behaviour_T + log_ratio_T).requires_grad_()
    entropy_T = float64(0.5, 1.0, 0.1, 2.0, 0.3, 0.4, 0.6).requires_grad_()

    def loss(logprob_T: Tensor, entropy_T: Tensor) -> Tensor:
        value, _ = clipped_policy_loss(
            logprob_T,
            behaviour_logprob_T=behaviour_T,
            advantage_T=advantage_T,
            mask_T=mask_T,
            loss_weight_T=weight_T,
            bounds=BOUNDS,
            dual_clip=dual_clip,
            entropy_T=entropy_T,
            entropy_coefficient=0.3,
            kernels=reference.KERNELS,
        )
        return value

    assert torch.autograd.gradcheck(loss, (logprob_T, entropy_T))
    grad_T, _ = torch.autograd.grad(loss(logprob_T, entropy_T), (logprob_T, entropy_T))
    held = [False, False, True, False, dual_clip is not None, True, True]
    assert (grad_T == 0).tolist() == held


def test_logprob_and_entropy_of_selected_rows_pass_gradcheck() -> None:
    generator = torch.Generator().manual_seed(1)
    logits_NV = torch.randn(4, 9, generator=generator, dtype=torch.float64).requires_grad_()
    rows_T, target_T = torch.tensor([3, 0, 1]), torch.tensor([0, 4, 6])

    def function(logits_NV: Tensor) -> tuple[Tensor, Tensor]:
        return vocab_parallel_logprobs(
            logits_NV, target_T, rows_T=rows_T, vocab_size=7, temperature=1.3
        )

    assert torch.autograd.gradcheck(function, (logits_NV,))


def test_float64_logits_give_float64_results_by_themselves() -> None:
    logits_TV = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    result = vocab_parallel_logprobs(logits_TV, torch.tensor([0]), vocab_size=2)
    # log σ(1) and the entropy of σ(1)
    assert result.logprob_T.dtype == torch.float64
    assert result.logprob_T.item() == pytest.approx(-0.31326168751822286, abs=1e-15)
    assert result.entropy_T.item() == pytest.approx(0.5822031088882179, abs=1e-15)
