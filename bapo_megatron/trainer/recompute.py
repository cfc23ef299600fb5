"""μ by the trainer itself, and what follows from its difference to the engine's log-probs.

Shape legend: T = response tokens of a micro-batch, B = samples of the batch.

Log-probs of given samples by the trainer, for ``weight_sync.verify``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from bapo_megatron.algorithm.loss import LOG_LIMIT, log_weights
from bapo_megatron.algorithm.objective import add_over_responses, response_sums
from bapo_megatron.data.micro_batch import build_micro_batches
from bapo_megatron.data.packing import plan_update
from bapo_megatron.distributed import gather_objects
from bapo_megatron.trainer.loss import PolicyOutput
from bapo_megatron.weight_sync.verify import TEMPERATURE, TokenScores

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from bapo_megatron.config.schema import CorrectionConfig, OpsConfig
    from bapo_megatron.policy.megatron_policy import MegatronPolicy
    from bapo_megatron.trainer.split import Layout
    from bapo_megatron.types import MicroBatch, Sample


def with_recomputed_behaviour(
    micro_batches: Sequence[MicroBatch],
    logprobs: Sequence[Tensor],
    correction: CorrectionConfig,
    *,
    num_samples: int,
    context_group: dist.ProcessGroup | None,
) -> tuple[MicroBatch, ...]:
    """Replace μ by the trainer's log-probs and, with a correction, weigh tokens by importance.

    With ``kind: sequence`` a collective over the context-parallel ranks, which hold parts of the
    same responses.

    Args:
        micro_batches: This rank's micro-batches of one update.
        logprobs: [T] log-probs at the start of the step, for each of them.
        correction: The correction section.
        num_samples: B.
        context_group: Ranks that divide every sequence.

    Returns:
        The micro-batches. With a correction, an engine's log-prob that is not finite stays μ: the
        token has no weight, and is reported as any whose μ is not finite.
    """
    if correction.kind == "none":
        return tuple(
            replace(micro_batch, behaviour_logprob_T=logprob_T)
            for micro_batch, logprob_T in zip(micro_batches, logprobs, strict=True)
        )
    weighed = []
    for micro_batch, logprob_T in zip(micro_batches, logprobs, strict=True):
        rollout_T = micro_batch.rollout_logprob_T.to(logprob_T.device)
        mask_T = micro_batch.mask_T.to(logprob_T.device)
        log_weight_T = log_weights(logprob_T, rollout_T, mask_T)
        behaviour_T = torch.where(rollout_T.isfinite(), logprob_T, rollout_T)
        weighed.append((replace(micro_batch, behaviour_logprob_T=behaviour_T), log_weight_T))
    if correction.kind == "sequence":
        weighed = _over_sequences(weighed, num_samples, context_group)
    return tuple(
        replace(micro_batch, importance_T=log_weight_T.exp())
        for micro_batch, log_weight_T in weighed
    )


def _over_sequences(
    weighed: list[tuple[MicroBatch, Tensor]],
    num_samples: int,
    context_group: dist.ProcessGroup | None,
) -> list[tuple[MicroBatch, Tensor]]:
    """Replace the log weight of each token by that of its whole response."""
    sum_B = torch.zeros(num_samples, dtype=torch.int64, device=weighed[0][1].device)
    samples = [micro_batch.sample_T.to(sum_B.device) for micro_batch, _ in weighed]
    for sample_T, (_, log_weight_T) in zip(samples, weighed, strict=True):
        add_over_responses(sum_B, log_weight_T, sample_T)
    dist.all_reduce(sum_B, group=context_group)
    return [
        (micro_batch, response_sums(sum_B, sample_T).clamp(-LOG_LIMIT, LOG_LIMIT).float())
        for sample_T, (micro_batch, _) in zip(samples, weighed, strict=True)
    ]


class ProbeScorer:
    """Scores samples with the current weights, at the temperature of the comparison."""

    def __init__(self, policy: MegatronPolicy, ops: OpsConfig, layout: Layout) -> None:
        """Choose kernels; arguments as of ``BatchTrainer``."""
        self._policy = policy
        self._layout = layout
        self._output = PolicyOutput(
            ops,
            vocab_size=policy.vocab_size,
            temperature=TEMPERATURE,
            groups=policy.groups,
            head=policy.head,
        )

    def score(self, samples: Sequence[Sample]) -> list[TokenScores] | None:
        """Score every response token; a collective over all ranks.

        Returns:
            The parts of all ranks on rank 0; None elsewhere.
        """
        layout = self._layout
        plan = plan_update(samples, range(len(samples)), layout.rules)
        nothing_B = np.zeros(len(samples), dtype=np.float32)
        micro_batches = build_micro_batches(
            samples,
            plan,
            layout.rules,
            data_rank=layout.data_rank,
            context_rank=layout.context_rank,
            context_size=layout.context_size,
            advantages_B=nothing_B,
            loss_weights_B=nothing_B,
        )
        own = [
            TokenScores(
                micro_batch.sample_T.numpy(),
                micro_batch.position_T.numpy(),
                logprob_T.cpu().numpy(),
            )
            for micro_batch, logprob_T in zip(
                micro_batches,
                # Empty on all stages but the last.
                self._policy.forward_only(micro_batches, self._output.logprobs) or [],
                strict=False,
            )
        ]
        gathered = gather_objects(own, self._policy.groups)
        return None if gathered is None else [part for parts in gathered for part in parts]
