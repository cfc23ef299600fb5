"""What the last pipeline stage does with the model's output for a micro-batch.

The output is the logits [N, V], or with ``ops.logits_chunk_tokens`` the hidden states [N, H] from
which logits are made chunk by chunk. With compiled kernels nothing here waits for the device.

Shape legend: N = packed tokens, V = local vocabulary columns, H = hidden size, T = response tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from bapo_megatron.algorithm.clipping import make_clip_rule
from bapo_megatron.algorithm.correction import limit_weights
from bapo_megatron.algorithm.masked import masked_max, masked_sum
from bapo_megatron.ops.backend import select_kernels
from bapo_megatron.ops.chunked import chunked_logprobs, chunked_policy_loss
from bapo_megatron.ops.contributions import accumulate
from bapo_megatron.ops.logprob import vocab_parallel_logprobs
from bapo_megatron.ops.policy_loss import LOSS_SUMS, clipped_policy_loss

if TYPE_CHECKING:
    from torch import Tensor

    from bapo_megatron.config.schema import AlgorithmConfig, OpsConfig
    from bapo_megatron.distributed import ProcessGroups
    from bapo_megatron.ops.chunked import OutputHead
    from bapo_megatron.ops.logprob import TokenLogprobs
    from bapo_megatron.types import MicroBatch

SUM_NAMES = (
    *LOSS_SUMS,
    "staleness",
    "mismatch_tokens",
    "mismatch_abs",
    "corrected_tokens",
    "correction_weight",
    "correction_capped",
    "correction_masked",
)
"""What ``TokenReport.sums`` holds, in order."""

MAX_NAMES = ("staleness", "mismatch_abs", "correction_weight")
"""What ``TokenReport.maxima`` holds, in order."""


@dataclass(frozen=True, slots=True)
class TokenReport:
    """What one micro-batch reports beside its loss; all of it on the device, without gradient."""

    sums: Tensor
    """[len(SUM_NAMES)] float64."""
    maxima: Tensor
    """[len(MAX_NAMES)] float64."""
    bounds: Tensor
    """[len(BOUNDS_FIELDS)] float64: the bounds that held."""
    logprob_T: Tensor
    """[T] ℓ; read only to explain a failure."""


@dataclass(frozen=True, slots=True)
class UpdateContext:
    """What an update knows about its place in the run."""

    num_updates: int
    """Optimizer updates made before this one: the age of a token is this minus its version."""
    rollout_version: int | None
    """While the policy still has the weights that the engines held, their version: its tokens are
    compared with the trainer's log-probs. None once the weights have moved."""


class LossStage:
    """Log-probs and loss of a micro-batch, on the ranks that hold the model's output."""

    def __init__(
        self,
        config: AlgorithmConfig,
        ops: OpsConfig,
        *,
        vocab_size: int,
        temperature: float,
        groups: ProcessGroups,
        head: OutputHead | None,
    ) -> None:
        """Choose kernels and clip rule.

        Args:
            config: The algorithm section.
            ops: The ops section.
            vocab_size: True size of the vocabulary.
            temperature: Sampling temperature of the rollouts; logits are divided by it.
            groups: This rank's process groups.
            head: The language-model head where the model returns hidden states, else None.

        Raises:
            ValueError: ``ops.backend`` names kernels that this machine does not have.
        """
        self.config = config
        self._data_group = groups.data
        self._kernels = select_kernels(ops.backend, groups.device)
        self._rule = make_clip_rule(config, groups.device)
        self._chunk_tokens = ops.logits_chunk_tokens
        self._vocab_size = vocab_size
        self._temperature = temperature
        self._tensor_group = groups.tensor
        self._head = head

    @property
    def kernels_name(self) -> str:
        """Which kernels ``ops.backend`` came to: ``cpu``, ``cuda`` or ``reference``."""
        return self._kernels.name

    @property
    def searches_whole_update(self) -> bool:
        """Whether the bounds need every token of the update before the first backward."""
        return self.config.clip == "bapo" and self.config.bapo.scope == "update"

    def logprobs(self, output: Tensor, micro_batch: MicroBatch) -> Tensor:
        """ℓ [T] of the response tokens, without gradient."""
        if self._head is None:
            with torch.no_grad():
                return self._token_logprobs(output, micro_batch).logprob_T
        return chunked_logprobs(
            output,
            self._head,
            micro_batch.target_T,
            rows_T=micro_batch.rows_T,
            vocab_size=self._vocab_size,
            temperature=self._temperature,
            chunk_tokens=self._chunk_tokens,
            kernels=self._kernels,
        ).logprob_T

    def search(self, logprobs: list[Tensor], micro_batches: tuple[MicroBatch, ...]) -> Tensor:
        """Choose the bounds for these tokens of this rank and those of all others.

        A collective over the data-parallel group: one integer all-reduce where the rule searches.

        Args:
            logprobs: ℓ [T] of each micro-batch.
            micro_batches: This rank's micro-batches.

        Returns:
            The bounds, equal on all ranks. Tokens that are not finite or too large are counted in
            them, and refused by the trainer before the optimizer step.
        """
        table = self._rule.new_table(self._kernels)
        if table is not None:
            for logprob_T, micro_batch in zip(logprobs, micro_batches, strict=True):
                behaviour_T, advantage_T, mask_T = (
                    values_T.to(logprob_T.device, non_blocking=True)
                    for values_T in (
                        micro_batch.behaviour_logprob_T,
                        micro_batch.advantage_T,
                        micro_batch.mask_T,
                    )
                )
                accumulate(table, logprob_T, behaviour_T, advantage_T, mask_T)
            dist.all_reduce(table.tensor, group=self._data_group)
        return self._rule.bounds(table)

    def loss(
        self,
        output: Tensor,
        micro_batch: MicroBatch,
        *,
        bounds: Tensor | None,
        context: UpdateContext,
    ) -> tuple[Tensor, TokenReport]:
        """The loss of one micro-batch over the global denominators, and its report.

        Args:
            output: Logits [N, V], overwritten by their gradient; or hidden states.
            micro_batch: The tokens.
            bounds: The bounds of the update; None: choose them for the micro-batches that all
                data-parallel ranks hold at this position (``scope: micro_batch``, fixed clips).
            context: Where the update stands.
        """
        if self._head is None:
            return self._loss_from_logits(output, micro_batch, bounds, context)
        if bounds is None:
            # A search needs all log-probs before the first gradient: one more pass over the chunks.
            searches = self.config.clip == "bapo"
            current = [self.logprobs(output, micro_batch)] if searches else []
            bounds = self.search(current, (micro_batch,) if searches else ())
        factor_T = self._correction_factor(micro_batch)
        loss, loss_sums, logprob_T = chunked_policy_loss(
            output,
            self._head,
            micro_batch.target_T,
            rows_T=micro_batch.rows_T,
            vocab_size=self._vocab_size,
            temperature=self._temperature,
            behaviour_logprob_T=micro_batch.behaviour_logprob_T,
            advantage_T=_weighed(micro_batch.advantage_T, factor_T),
            mask_T=micro_batch.mask_T,
            loss_weight_T=micro_batch.loss_weight_T,
            bounds=bounds,
            dual_clip=self.config.dual_clip,
            entropy_coefficient=self.config.entropy_coefficient,
            chunk_tokens=self._chunk_tokens,
            kernels=self._kernels,
        )
        return loss, _report(logprob_T, micro_batch, context, bounds, loss_sums, factor_T)

    def _loss_from_logits(
        self,
        logits_NV: Tensor,
        micro_batch: MicroBatch,
        bounds: Tensor | None,
        context: UpdateContext,
    ) -> tuple[Tensor, TokenReport]:
        logprob_T, entropy_T = self._token_logprobs(logits_NV, micro_batch)
        current_T = logprob_T.detach()
        if bounds is None:
            bounds = self.search([current_T], (micro_batch,))
        factor_T = self._correction_factor(micro_batch)
        loss, loss_sums = clipped_policy_loss(
            logprob_T,
            behaviour_logprob_T=micro_batch.behaviour_logprob_T,
            advantage_T=_weighed(micro_batch.advantage_T, factor_T),
            mask_T=micro_batch.mask_T,
            loss_weight_T=micro_batch.loss_weight_T,
            bounds=bounds,
            dual_clip=self.config.dual_clip,
            entropy_T=entropy_T,
            entropy_coefficient=self.config.entropy_coefficient,
            kernels=self._kernels,
        )
        return loss, _report(current_T, micro_batch, context, bounds, loss_sums, factor_T)

    def _correction_factor(self, micro_batch: MicroBatch) -> Tensor | None:
        """What the policy loss of each token [T] is multiplied by; None without a correction."""
        correction = self.config.correction
        if correction.kind == "none":
            return None
        return limit_weights(micro_batch.importance_T, correction)

    def _token_logprobs(self, logits_NV: Tensor, micro_batch: MicroBatch) -> TokenLogprobs:
        return vocab_parallel_logprobs(
            logits_NV,
            micro_batch.target_T,
            vocab_size=self._vocab_size,
            rows_T=micro_batch.rows_T,
            temperature=self._temperature,
            group=self._tensor_group,
            kernels=self._kernels,
            overwrite_logits=True,
        )


def _weighed(advantage_T: Tensor, factor_T: Tensor | None) -> Tensor:
    """The advantage that the loss takes: the factor scales a token's policy loss, not its entropy.

    The search has the plain advantage.
    """
    return advantage_T if factor_T is None else advantage_T * factor_T


def _report(
    current_T: Tensor,
    micro_batch: MicroBatch,
    context: UpdateContext,
    bounds: Tensor,
    loss_sums: Tensor,
    factor_T: Tensor | None,
) -> TokenReport:
    """Sums and maxima over the tokens with mask 1; ``current_T`` [T] is ℓ without gradient."""
    staleness_T = (context.num_updates - micro_batch.version_T).double()
    mask_T = micro_batch.mask_T
    mismatch_T, compared_T = _mismatch(current_T, micro_batch, context)
    further = torch.stack(
        [
            masked_sum(staleness_T, mask_T),
            compared_T.sum(dtype=torch.float64),
            masked_sum(mismatch_T, compared_T),
        ]
    )
    correction_sums, correction_max = _correction_report(micro_batch, factor_T)
    return TokenReport(
        sums=torch.cat([loss_sums, further, correction_sums]),
        maxima=torch.stack(
            [
                masked_max(staleness_T, mask_T),
                masked_max(mismatch_T, compared_T),
                correction_max,
            ]
        ),
        bounds=bounds,
        logprob_T=current_T,
    )


def _correction_report(micro_batch: MicroBatch, factor_T: Tensor | None) -> tuple[Tensor, Tensor]:
    """The ``correction`` entries of ``SUM_NAMES`` and ``MAX_NAMES``; 0 without a correction."""
    mask_T, importance_T = micro_batch.mask_T, micro_batch.importance_T
    if factor_T is None:
        zeros = torch.zeros(4, dtype=torch.float64, device=mask_T.device)
        return zeros, zeros[0]
    masked_T = factor_T == 0
    sums = [
        masked_sum(torch.ones_like(mask_T), mask_T),
        masked_sum(factor_T, mask_T),
        masked_sum((factor_T < importance_T) & ~masked_T, mask_T),
        masked_sum(masked_T, mask_T),
    ]
    return torch.stack(sums), masked_max(importance_T, mask_T)


def _mismatch(
    logprob_T: Tensor, micro_batch: MicroBatch, context: UpdateContext
) -> tuple[Tensor, Tensor]:
    """|trainer − engine| [T] and which tokens [T] can be compared: those of the same weights."""
    difference_T = (logprob_T - micro_batch.rollout_logprob_T).abs()
    if context.rollout_version is None:
        return difference_T, torch.zeros_like(micro_batch.mask_T)
    same_T = (micro_batch.version_T == context.rollout_version).to(micro_batch.mask_T.dtype)
    return difference_T, same_T * micro_batch.mask_T
