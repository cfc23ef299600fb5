"""From a batch of samples to the optimizer updates of a step, on this rank.

Every rank holds the whole batch, so advantages, global denominators and the division into updates,
ranks and micro-batches are computed alike everywhere, without any communication.

Shape legend: B = samples of the batch, G = responses per prompt.

What a parallel layout asks of micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from bapo_megatron.algorithm.advantage import Advantages
from bapo_megatron.algorithm.loss import Denominators, token_weights
from bapo_megatron.config.check import packing_multiples
from bapo_megatron.data.micro_batch import build_micro_batches
from bapo_megatron.data.packing import PackingRules, plan_update, split_updates
from bapo_megatron.data.staleness import trainable_mask

if TYPE_CHECKING:
    from collections.abc import Sequence, Set

    from bapo_megatron.config.megatron import MegatronConfig, ParallelConfig
    from bapo_megatron.config.rollout import StalenessConfig
    from bapo_megatron.config.schema import AlgorithmConfig, TrainConfig
    from bapo_megatron.data.packing import PackingRules
    from bapo_megatron.policy.megatron_policy import MegatronPolicy
    from bapo_megatron.types import FinishReason, MicroBatch, RolloutBatch, Sample


@dataclass(frozen=True, slots=True)
class PlannedUpdate:
    """One optimizer update, before it is made."""

    response_tokens: int
    """Sampled tokens over all ranks, those that are too old to train included."""
    lengths: dict[str, float] = field(default_factory=dict)
    """Responses with A > 0 and A < 0, and their tokens (``trainer.numbers``)."""
    trained_tokens: int = 0
    """Those with m = 1; where there is none, the update has no micro-batches."""
    micro_batches: tuple[MicroBatch, ...] = ()
    """This rank's share; equally many on every rank."""
    has_gradient: bool = False
    """Whether any token that trains, on any rank, has a non-zero advantage."""
    real_tokens: int = 0
    """Prompt and response tokens of the micro-batches of all ranks."""
    slots: int = 0
    """Positions of the packed micro-batches of all ranks, padding included."""
    rank_flops: tuple[int, ...] = ()
    """What each data-parallel rank computes in a forward pass over its samples."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How samples are divided over ranks and micro-batches, and which part is this rank's."""

    rules: PackingRules
    data_rank: int = 0
    context_rank: int = 0
    context_size: int = 1


def plan_step(
    batch: RolloutBatch,
    config: AlgorithmConfig,
    staleness: StalenessConfig,
    layout: Layout,
    *,
    masked_reasons: Set[FinishReason] = frozenset(),
) -> tuple[PlannedUpdate, ...]:
    """Divide a batch into the updates of one epoch; further epochs repeat them.

    Responses without a token that trains are not computed.

    Args:
        batch: The step's batch.
        config: The algorithm section.
        staleness: Which tokens are too old to train.
        layout: How samples become this rank's micro-batches.
        masked_reasons: Responses that ended for one of these do not train.

    Raises:
        ValueError: a response is longer than a micro-batch, or the groups do not divide into
            ``updates_per_batch`` equal parts.
    """
    samples = batch.samples
    advantage_B = batch_advantages(batch, Advantages(config.advantage))
    masks_B = [
        trainable_mask(sample.versions, batch.version, staleness)
        & (sample.finish_reason not in masked_reasons)
        for sample in samples
    ]
    trained_B = np.array([np.count_nonzero(mask_Q) for mask_Q in masks_B])
    updates = []
    for indices in split_updates(batch, config.updates_per_batch):
        response_tokens = sum(len(masks_B[i]) for i in indices)
        trains = [i for i in indices if trained_B[i] > 0]
        lengths = _lengths(samples, indices, advantage_B)
        if not trains:
            updates.append(PlannedUpdate(response_tokens, lengths))
            continue
        plan = plan_update(samples, trains, layout.rules)
        micro_batches = build_micro_batches(
            samples,
            plan,
            layout.rules,
            data_rank=layout.data_rank,
            context_rank=layout.context_rank,
            context_size=layout.context_size,
            advantages_B=advantage_B,
            loss_weights_B=_loss_weights(trained_B, indices, config),
            masks_B=masks_B,
        )
        updates.append(
            PlannedUpdate(
                response_tokens=response_tokens,
                lengths=lengths,
                trained_tokens=int(trained_B[trains].sum()),
                micro_batches=tuple(micro_batches),
                has_gradient=bool(np.any(advantage_B[trains] != 0)),
                real_tokens=plan.real_tokens,
                slots=plan.slots,
                rank_flops=plan.rank_flops,
            )
        )
    return tuple(updates)


def batch_advantages(batch: RolloutBatch, advantages: Advantages) -> np.ndarray:
    """Advantage of every sample [B], float32, relative to its group.

    Raises:
        ValueError: groups of different sizes.
    """
    sizes = {len(group.samples) for group in batch.groups}
    if len(sizes) != 1:
        raise ValueError(
            f"step {batch.step}: groups have {sorted(sizes)} samples; all groups of a batch need "
            "the same number, so collect the batch again with one samples_per_group"
        )
    return advantages.compute(batch.groups).flatten().numpy()


def _lengths(
    samples: Sequence[Sample], indices: Sequence[int], advantage_B: np.ndarray
) -> dict[str, float]:
    """Responses and their tokens by the sign of the advantage."""
    length_R = np.array([samples[i].num_sampled for i in indices])
    advantage_R = advantage_B[list(indices)]
    found = {}
    for name, is_meant_R in (("positive", advantage_R > 0), ("negative", advantage_R < 0)):
        found[f"{name}_responses"] = float(np.count_nonzero(is_meant_R))
        found[f"{name}_length"] = float(length_R[is_meant_R].sum())
    return found


def _loss_weights(
    trained_B: np.ndarray, indices: Sequence[int], config: AlgorithmConfig
) -> np.ndarray:
    """Weight of each token that trains [B], from Σm of each sample; 0 outside the update."""
    trained_R = torch.from_numpy(trained_B[list(indices)])
    weight_R = token_weights(
        (trained_R > 0).float(),
        trained_R,
        config.loss_aggregation,
        Denominators.count(trained_R),
        config.token_sum_norm_constant,
    )
    weight_B = np.zeros(len(trained_B), dtype=np.float32)
    weight_B[list(indices)] = weight_R.numpy()
    return weight_B


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
