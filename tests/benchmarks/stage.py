"""One update's loss stage on made-up tokens: log-probs, loss and gradient of several micro-batches.

Shape legend: T = tokens of the update, C = tokens of a micro-batch, V = columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bapo_megatron.ops.backend import select_kernels
from bapo_megatron.ops.contributions import constant_bounds
from bapo_megatron.ops.logprob import vocab_parallel_logprobs
from bapo_megatron.ops.policy_loss import clipped_policy_loss


@dataclass(slots=True)
class Stage:
    """Tokens [T], and bfloat16 logits [C, V] that stand for those of every micro-batch."""

    logits_CV: Tensor
    target_C: Tensor
    logprob_T: Tensor
    behaviour_T: Tensor
    advantage_T: Tensor
    mask_T: Tensor
    weight_T: Tensor
    bounds: Tensor
    work_CV: Tensor

    @property
    def device(self) -> torch.device:
        """Where all of it is."""
        return self.logits_CV.device

    @property
    def num_columns(self) -> int:
        """V."""
        return self.logits_CV.shape[1]

    def restore(self) -> None:
        """Bring back the logits that a run has overwritten."""
        self.work_CV.copy_(self.logits_CV)

    def run(self) -> None:
        """Log-probs, loss and in-place gradient of every micro-batch.

        They share one buffer of logits, so from the second one on it holds gradients; kernels take
        the same time for any finite values.
        """
        num_chunk = len(self.target_C)
        kernels = select_kernels("auto", self.device)
        for begin in range(0, len(self.logprob_T), num_chunk):
            chunk = slice(begin, begin + num_chunk)
            leaf = self.work_CV.detach().requires_grad_()
            logprob_C, entropy_C = vocab_parallel_logprobs(
                leaf.view_as(leaf),
                self.target_C,
                vocab_size=self.num_columns,
                kernels=kernels,
                overwrite_logits=True,
            )
            loss, _ = clipped_policy_loss(
                logprob_C,
                behaviour_logprob_T=self.behaviour_T[chunk],
                advantage_T=self.advantage_T[chunk],
                mask_T=self.mask_T[chunk],
                loss_weight_T=self.weight_T[chunk],
                bounds=self.bounds,
                dual_clip=None,
                entropy_T=entropy_C,
                kernels=kernels,
            )
            torch.autograd.grad(loss, leaf)


def make_stage(num_tokens: int, num_columns: int, chunk_tokens: int, device: torch.device) -> Stage:
    """Make an update of ``num_tokens`` in micro-batches of ``chunk_tokens``, which divides it."""
    if num_tokens % chunk_tokens:
        raise ValueError(f"{chunk_tokens} tokens per micro-batch must divide {num_tokens}")
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    logprob_T = -normal(num_tokens).abs()
    logits_CV = (3 * normal(chunk_tokens, num_columns)).to(device, torch.bfloat16)
    return Stage(
        logits_CV=logits_CV,
        target_C=torch.randint(num_columns, (chunk_tokens,), generator=generator).to(device),
        logprob_T=logprob_T.to(device),
        behaviour_T=(logprob_T + 0.2 * normal(num_tokens)).to(device),
        advantage_T=normal(num_tokens).to(device),
        mask_T=torch.ones(num_tokens, device=device),
        weight_T=torch.full((num_tokens,), 1.0 / num_tokens, device=device),
        bounds=constant_bounds(0.6, 1.2, device),
        work_CV=logits_CV.clone(),
    )
