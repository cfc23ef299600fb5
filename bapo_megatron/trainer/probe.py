"""Log-probs of given samples by the trainer, for ``weight_sync.verify``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from bapo_megatron.data.micro_batch import build_micro_batches
from bapo_megatron.data.packing import plan_update
from bapo_megatron.distributed import gather_objects
from bapo_megatron.trainer.loss_stage import PolicyOutput
from bapo_megatron.weight_sync.verify import TEMPERATURE, TokenScores

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bapo_megatron.config.schema import OpsConfig
    from bapo_megatron.policy.megatron_policy import MegatronPolicy
    from bapo_megatron.trainer.plan import Layout
    from bapo_megatron.types import Sample


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
