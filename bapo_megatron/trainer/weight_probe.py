"""Log-probs of given sequences by the trainer, to be compared with those of the servers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from bapo_megatron.data.micro_batch import build_micro_batches
from bapo_megatron.data.packing import plan_update
from bapo_megatron.distributed import gather_objects
from bapo_megatron.trainer.loss_stage import LossStage
from bapo_megatron.types import FinishReason, PromptTokens, Sample, VersionSpan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bapo_megatron.config.schema import AlgorithmConfig, OpsConfig
    from bapo_megatron.policy.megatron_policy import MegatronPolicy
    from bapo_megatron.trainer.plan import Layout

TEMPERATURE = 1.0
"""SGLang reports input tokens at this temperature, whatever the sampling temperature is."""


class WeightProbe:
    """Computes what servers with the same weights must compute."""

    def __init__(
        self, policy: MegatronPolicy, algorithm: AlgorithmConfig, ops: OpsConfig, layout: Layout
    ) -> None:
        """Prepare the loss stage; arguments as of ``BatchTrainer``."""
        self._policy = policy
        self._layout = layout
        self._stage = LossStage(
            algorithm,
            ops,
            vocab_size=policy.vocab_size,
            temperature=TEMPERATURE,
            groups=policy.groups,
            head=policy.head,
        )

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]] | None:
        """Log-probs of all tokens but the first of each sequence; a collective over all ranks.

        Args:
            sequences: At least one; each of two tokens or more.

        Returns:
            They are complete on rank 0; None elsewhere.
        """
        samples = [_as_sample(token_ids) for token_ids in sequences]
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
            (micro_batch.sample_T.numpy(), micro_batch.position_T.numpy(), logprob_T.cpu().numpy())
            for micro_batch, logprob_T in zip(
                micro_batches,
                # Empty on all stages but the last.
                self._policy.forward_only(micro_batches, self._stage.logprobs) or [],
                strict=False,
            )
        ]
        gathered = gather_objects(own, self._policy.groups)
        if gathered is None:
            return None
        found = [np.full(len(token_ids) - 1, np.nan) for token_ids in sequences]
        for of_rank in gathered:
            for sample_T, position_T, logprob_T in of_rank:
                for number in np.unique(sample_T):
                    is_own_T = sample_T == number
                    found[number][position_T[is_own_T]] = logprob_T[is_own_T]
        return [logprobs.tolist() for logprobs in found]


def _as_sample(token_ids: Sequence[int]) -> Sample:
    """A prompt of one token and the rest as its response."""
    response_ids = np.array(token_ids[1:], dtype=np.int32)
    return Sample(
        group_id=0,
        index=0,
        prompt=PromptTokens("probe", np.array(token_ids[:1], dtype=np.int32)),
        response_token_ids=response_ids,
        behaviour_logprobs=np.zeros(len(response_ids), dtype=np.float32),
        versions=(VersionSpan(0, len(response_ids)),),
        finish_reason=FinishReason.STOP,
    )
