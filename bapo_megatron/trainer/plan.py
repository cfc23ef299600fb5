"""From a batch of samples to the optimizer updates of a step, on this rank.

Every rank holds the whole batch, so advantages, global denominators and the division into updates,
ranks and micro-batches are computed alike everywhere, without any communication.

Shape legend: B = samples of the batch, G = responses per prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from bapo_megatron.algorithm.advantage import group_advantages
from bapo_megatron.algorithm.loss import Denominators, token_weights
from bapo_megatron.data.micro_batch import build_micro_batches
from bapo_megatron.data.packing import plan_update, split_updates

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bapo_megatron.config.schema import AlgorithmConfig
    from bapo_megatron.data.packing import PackingRules
    from bapo_megatron.types import MicroBatch, RolloutBatch, Sample


@dataclass(frozen=True, slots=True)
class PlannedUpdate:
    """One optimizer update, before it is made."""

    micro_batches: tuple[MicroBatch, ...]
    """This rank's share; equally many on every rank."""
    has_gradient: bool
    """Whether any token of the update, on any rank, has a non-zero advantage."""
    real_tokens: int
    """Prompt and response tokens over all ranks."""
    slots: int
    """Positions of the packed micro-batches of all ranks, padding included."""
    rank_flops: tuple[int, ...]
    """What each data-parallel rank computes in a forward pass over its samples."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How samples are divided over ranks and micro-batches, and which part is this rank's."""

    rules: PackingRules
    data_rank: int = 0
    context_rank: int = 0
    context_size: int = 1


def plan_step(
    batch: RolloutBatch, config: AlgorithmConfig, layout: Layout
) -> tuple[PlannedUpdate, ...]:
    """Divide a batch into the updates of one epoch; further epochs repeat them.

    Raises:
        ValueError: a response is longer than a micro-batch, or the groups do not divide into
            ``updates_per_batch`` equal parts.
    """
    samples = batch.samples
    advantage_B = batch_advantages(batch, config)
    updates = []
    for indices in split_updates(batch, config.updates_per_batch):
        plan = plan_update(samples, indices, layout.rules)
        micro_batches = build_micro_batches(
            samples,
            plan,
            layout.rules,
            data_rank=layout.data_rank,
            context_rank=layout.context_rank,
            context_size=layout.context_size,
            advantages_B=advantage_B,
            loss_weights_B=_loss_weights(samples, indices, config),
        )
        trains = [i for i in indices if len(samples[i].response_token_ids) > 0]
        updates.append(
            PlannedUpdate(
                micro_batches=tuple(micro_batches),
                has_gradient=bool(np.any(advantage_B[trains] != 0)),
                real_tokens=plan.real_tokens,
                slots=plan.slots,
                rank_flops=plan.rank_flops,
            )
        )
    return tuple(updates)


def batch_advantages(batch: RolloutBatch, config: AlgorithmConfig) -> np.ndarray:
    """Advantage of every sample [B], float32, relative to its group.

    Raises:
        ValueError: groups of different sizes.
    """
    rewards = [[sample.reward for sample in group.samples] for group in batch.groups]
    sizes = {len(group) for group in rewards}
    if len(sizes) != 1:
        raise ValueError(
            f"step {batch.step}: groups have {sorted(sizes)} samples; all groups of a batch need "
            "the same number, so collect the batch again with one samples_per_group"
        )
    advantage_PG = group_advantages(torch.tensor(rewards, dtype=torch.float64), config.advantage)
    return advantage_PG.flatten().numpy()


def _loss_weights(
    samples: Sequence[Sample], indices: Sequence[int], config: AlgorithmConfig
) -> np.ndarray:
    """Weight of each token of each sample [B]; 0 for samples outside the update."""
    length_R = torch.tensor([len(samples[i].response_token_ids) for i in indices])
    weight_R = token_weights(
        (length_R > 0).float(),
        length_R,
        config.loss_aggregation,
        Denominators.count(length_R),
        config.token_sum_norm_constant,
    )
    weight_B = np.zeros(len(samples), dtype=np.float32)
    weight_B[list(indices)] = weight_R.numpy()
    return weight_B
