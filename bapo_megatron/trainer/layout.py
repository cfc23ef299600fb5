"""What a parallel layout asks of micro-batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bapo_megatron.config.multiples import packing_multiples
from bapo_megatron.data.packing import PackingRules
from bapo_megatron.trainer.plan import Layout

if TYPE_CHECKING:
    from bapo_megatron.config.megatron import MegatronConfig, ParallelConfig
    from bapo_megatron.config.schema import TrainConfig
    from bapo_megatron.policy.megatron_policy import MegatronPolicy


def make_layout(
    policy: MegatronPolicy, parallel: ParallelConfig, megatron: MegatronConfig, train: TrainConfig
) -> Layout:
    """Return how samples become the micro-batches of this rank."""
    groups = policy.groups
    multiples = packing_multiples(parallel, megatron)
    rules = PackingRules(
        data_size=groups.data_size,
        max_tokens=train.max_tokens_per_micro_batch * parallel.context,
        flops=policy.hf.sequence_flops,
        sequence_multiple=multiples.per_sequence,
        total_multiple=multiples.total,
        # The interleaved schedule runs micro-batches in rounds of one per stage.
        count_multiple=parallel.pipeline if parallel.virtual_pipeline > 1 else 1,
    )
    return Layout(rules, groups.data_rank, groups.context_rank, groups.context_size)
