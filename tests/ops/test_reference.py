"""The reference in float64: its gradients pass gradcheck.

Shape legend: N = rows, T = tokens, V = vocabulary columns.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bapo_megatron.ops.logprob import vocab_parallel_logprobs


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
