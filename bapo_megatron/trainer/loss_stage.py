"""What the last pipeline stage does with the logits of a micro-batch.

Shape legend: N = packed tokens, V = local vocabulary columns, T = response tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from bapo_megatron.algorithm.clipping import make_clip_rule
from bapo_megatron.algorithm.loss import policy_loss
from bapo_megatron.algorithm.masked import masked_max, masked_sum
from bapo_megatron.ops.contributions import accumulate
from bapo_megatron.ops.logprob import vocab_parallel_logprobs
from bapo_megatron.types import ClipBounds

if TYPE_CHECKING:
    from torch import Tensor

    from bapo_megatron.algorithm.clipping import ClipRule
    from bapo_megatron.algorithm.loss import LossSums
    from bapo_megatron.config.schema import AlgorithmConfig
    from bapo_megatron.types import MicroBatch

SUM_NAMES = (
    "tokens",
    "tokens/positive",
    "tokens/signed",
    "loss/policy",
    "policy/entropy",
    "policy/kl_behaviour",
    "clip/high",
    "clip/low",
    "clip/dual",
    "staleness",
    "mismatch/tokens",
    "mismatch/abs",
    "nonfinite_tokens",
)
"""What ``TokenReport.sums`` holds, in order."""

MAX_NAMES = ("staleness", "mismatch/abs")
"""What ``TokenReport.maxima`` holds, in order."""

_REFUSED = ClipBounds(
    low=0.0, high=math.inf, positive_share_start=math.nan, positive_share=math.nan, exit="fixed"
)
"""Stands in where a value is not finite, so that every rank reaches every collective; the update
is refused afterwards."""


@dataclass(frozen=True, slots=True)
class TokenReport:
    """What one micro-batch reports beside its loss."""

    sums: Tensor
    """[len(SUM_NAMES)] float64, on the device."""
    maxima: Tensor
    """[len(MAX_NAMES)] float64, on the device."""
    logprob_T: Tensor
    """[T] ℓ, without gradient; read only to explain a failure."""
    bounds: ClipBounds
    """The bounds that held."""


@dataclass(frozen=True, slots=True)
class UpdateContext:
    """What an update knows about its place in the run."""

    num_updates: int
    """Optimizer updates made before this one: the age of a token is this minus its version."""
    rollout_version: int | None
    """While the policy still has the weights that the engines held, their version: its tokens are
    compared with the trainer's log-probs. None once the weights have moved."""


@dataclass(frozen=True, slots=True)
class LossStage:
    """Log-probs and loss of a micro-batch, on the ranks that hold logits."""

    config: AlgorithmConfig
    vocab_size: int
    """True size of the vocabulary."""
    temperature: float
    tensor_group: dist.ProcessGroup | None
    data_group: dist.ProcessGroup

    @property
    def rule(self) -> ClipRule:
        """The clip rule of the run."""
        return make_clip_rule(self.config)

    def logprobs(self, logits_NV: Tensor, micro_batch: MicroBatch) -> Tensor:
        """ℓ [T] of the response tokens, without gradient."""
        return vocab_parallel_logprobs(
            logits_NV,
            micro_batch.target_T,
            vocab_size=self.vocab_size,
            rows_T=micro_batch.rows_T,
            temperature=self.temperature,
            group=self.tensor_group,
        ).logprob_T

    def search(
        self, logprobs: list[Tensor], micro_batches: tuple[MicroBatch, ...]
    ) -> ClipBounds | None:
        """Choose the bounds for these tokens of this rank and those of all others.

        A collective over the data-parallel group: one integer all-reduce where the rule searches.

        Args:
            logprobs: ℓ [T] of each micro-batch.
            micro_batches: This rank's micro-batches.

        Returns:
            The bounds, equal on all ranks; None if a value on any of them is not finite.
        """
        rule = self.rule
        table = rule.new_table()
        if table is not None:
            for logprob_T, micro_batch in zip(logprobs, micro_batches, strict=True):
                accumulate(
                    table,
                    logprob_T,
                    micro_batch.behaviour_logprob_T,
                    micro_batch.advantage_T,
                    micro_batch.mask_T,
                )
            # The table lives on the host, a group over NCCL reduces on the device.
            total = table.tensor.to(logprobs[0].device)
            dist.all_reduce(total, group=self.data_group)
            table.tensor.copy_(total)
            if table.nonfinite_tokens > 0:
                return None
            if table.trained_tokens == 0:
                # Nothing to search over (a micro-batch without signal): it counts as no search.
                return replace(
                    rule.bounds(table),
                    positive_share_start=math.nan,
                    positive_share=math.nan,
                    exit="fixed",
                )
        return rule.bounds(table)

    def loss(
        self,
        logits_NV: Tensor,
        micro_batch: MicroBatch,
        *,
        bounds: ClipBounds | None,
        context: UpdateContext,
    ) -> tuple[Tensor, TokenReport]:
        """The loss of one micro-batch over the global denominators, and its report.

        Args:
            logits_NV: [N, V] this rank's columns of the logits.
            micro_batch: The tokens.
            bounds: The bounds of the update; None: choose them for the micro-batches that all
                data-parallel ranks hold at this position (``scope: micro_batch``, fixed clips).
            context: Where the update stands.
        """
        logprob_T, entropy_T = vocab_parallel_logprobs(
            logits_NV,
            micro_batch.target_T,
            vocab_size=self.vocab_size,
            rows_T=micro_batch.rows_T,
            temperature=self.temperature,
            group=self.tensor_group,
        )
        current_T = logprob_T.detach()
        if bounds is None:
            bounds = self.search([current_T], (micro_batch,)) or _REFUSED
        result = policy_loss(
            logprob_T,
            behaviour_logprob_T=micro_batch.behaviour_logprob_T,
            advantage_T=micro_batch.advantage_T,
            mask_T=micro_batch.mask_T,
            loss_weight_T=micro_batch.loss_weight_T,
            rule=self.rule,
            bounds=bounds,
            entropy_T=entropy_T,
            entropy_coefficient=self.config.entropy_coefficient,
        )
        return result.loss, _report(current_T, micro_batch, context, bounds, result.sums)


def _report(
    current_T: Tensor,
    micro_batch: MicroBatch,
    context: UpdateContext,
    bounds: ClipBounds,
    sums: LossSums,
) -> TokenReport:
    """Sums and maxima over the tokens with mask 1; ``current_T`` [T] is ℓ without gradient."""
    staleness_T = (context.num_updates - micro_batch.version_T).double()
    mask_T, advantage_T = micro_batch.mask_T, micro_batch.advantage_T
    mismatch_T, compared_T = _mismatch(current_T, micro_batch, context)
    finite_T = (
        torch.isfinite(current_T)
        & torch.isfinite(micro_batch.behaviour_logprob_T)
        & torch.isfinite(advantage_T)
    )
    reported = {
        "tokens": sums.tokens,
        "tokens/positive": sums.positive_tokens,
        "tokens/signed": masked_sum(advantage_T != 0, mask_T),
        "loss/policy": sums.policy_loss,
        "policy/entropy": sums.entropy,
        "policy/kl_behaviour": sums.kl_behaviour,
        "clip/high": sums.clipped_high,
        "clip/low": sums.clipped_low,
        "clip/dual": sums.clipped_dual,
        "staleness": masked_sum(staleness_T, mask_T),
        "mismatch/tokens": compared_T.sum(dtype=torch.float64),
        "mismatch/abs": masked_sum(mismatch_T, compared_T),
        "nonfinite_tokens": masked_sum(~finite_T, mask_T),
    }
    return TokenReport(
        sums=torch.stack([reported[name] for name in SUM_NAMES]),
        maxima=torch.stack([masked_max(staleness_T, mask_T), masked_max(mismatch_T, compared_T)]),
        logprob_T=current_T,
        bounds=bounds,
    )


def _mismatch(
    logprob_T: Tensor, micro_batch: MicroBatch, context: UpdateContext
) -> tuple[Tensor, Tensor]:
    """|trainer − engine| [T] and which tokens [T] can be compared: those of the same weights."""
    difference_T = (logprob_T - micro_batch.rollout_logprob_T).abs()
    if context.rollout_version is None:
        return difference_T, torch.zeros_like(micro_batch.mask_T)
    same_T = (micro_batch.version_T == context.rollout_version).to(micro_batch.mask_T.dtype)
    return difference_T, same_T * micro_batch.mask_T
