"""Splits a batch into the optimizer updates of a step, on this rank.

Every rank holds the whole batch, so advantages, global denominators and the split into updates,
ranks and micro-batches are computed alike everywhere, without any communication.

Shape legend: B = samples of the batch, L = their sequences, C = turns of the policy in these,
R = samples of an update, Q = sampled tokens of a sequence.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from bapo_megatron.algorithm.advantage import Advantages
from bapo_megatron.algorithm.loss import token_weights
from bapo_megatron.config.check import packing_multiples
from bapo_megatron.config.megatron import MegatronConfig, ParallelConfig
from bapo_megatron.config.rollout import StalenessConfig
from bapo_megatron.config.schema import AlgorithmConfig, RunConfig, TrainConfig
from bapo_megatron.data.micro_batch import build_micro_batch, shard_context
from bapo_megatron.data.packing import PackingRules, UpdatePacking, pack_update, split_updates
from bapo_megatron.data.routes import BatchRoutes, RouteFiles
from bapo_megatron.data.staleness import trainable_mask
from bapo_megatron.data.token_columns import DEMONSTRATION
from bapo_megatron.ops.logprob import TokenLogprobs
from bapo_megatron.policy.model import Model
from bapo_megatron.policy.weight_table import sequence_flops
from bapo_megatron.types import FinishReason, MicroBatch, RolloutBatch, Sample

ZeroAdvantage = Literal["trained", "computed", "left_out"]
"""How responses with A = 0 are treated: trained like all others; computed, except in updates that
hold only such; never computed."""


@dataclass(frozen=True, slots=True)
class SplitUpdate:
    """One optimizer update, before it is made."""

    counts: dict[str, float]
    """Sums for ``trainer.records`` over all ranks: sampled tokens, those with m = 0 and m = 1, the
    computed ones of the latter, responses with A > 0 and A < 0 and their tokens. With micro-batches
    also how full they are, and how equal the ranks' work is."""
    indices: tuple[int, ...]
    """Indices of the update's samples in the batch."""
    micro_batches: tuple[MicroBatch, ...] = ()
    """This rank's share; equally many on every rank. Without any, the update is skipped."""
    computed: tuple[int, ...] = ()
    """Indices of the sequences in all ranks' micro-batches, in the batch's."""
    responses: tuple[int, ...] = ()
    """Indices of the samples that have these sequences."""
    scored_flops: float = 0.0
    """FLOPs of the scorers' forward-only passes over its micro-batches."""
    policy: list[TokenLogprobs] | None = None
    """ℓ and H of each micro-batch with the update's weights, if a scorer computed them."""


@dataclass(frozen=True, slots=True)
class SplitShape:
    """How sequences are divided over ranks and micro-batches, and which part is this rank's."""

    rules: PackingRules
    data_rank: int = 0
    context_rank: int = 0
    context_size: int = 1
    sequence_rank: int = 0
    sequence_size: int = 1
    """Ranks that divide the tokens of a micro-batch under sequence parallelism."""

    def pack(
        self,
        sequences: Sequence[Sample],
        indices: Sequence[int],
        advantage_B: np.ndarray,
        loss_weight_B: np.ndarray,
        masks_L: Sequence[np.ndarray] | None = None,
        routes: BatchRoutes | None = None,
    ) -> tuple[UpdatePacking, tuple[MicroBatch, ...]]:
        """Return the packing of ``indices`` over all ranks, and this rank's micro-batches.

        Raises:
            ValueError: Routes are impossible.
        """
        packing = pack_update(sequences, indices, self.rules)
        whole = (
            build_micro_batch(
                sequences, members, advantage_B, loss_weight_B, self.rules, masks_L, routes
            )
            for members in packing.ranks[self.data_rank]
        )
        return packing, tuple(map(self._local, whole))

    def _local(self, whole: MicroBatch) -> MicroBatch:
        local = shard_context(whole, self.context_rank, self.context_size)
        if local.routes is None or self.sequence_size == 1:
            return local
        return replace(local, routes=local.routes.chunk(self.sequence_size)[self.sequence_rank])


def split_shape(
    model: Model, parallel: ParallelConfig, megatron: MegatronConfig, train: TrainConfig
) -> SplitShape:
    """Return how sequences become the micro-batches of this rank."""
    groups = model.groups
    sequence_multiple, total_multiple = packing_multiples(parallel, megatron)
    rules = PackingRules(
        data_size=groups.data_size,
        max_tokens=train.max_tokens_per_micro_batch * parallel.context,
        flops=sequence_flops(model.hf),
        sequence_multiple=sequence_multiple,
        total_multiple=total_multiple,
        # The interleaved schedule runs micro-batches in rounds of one per stage.
        count_multiple=parallel.pipeline if parallel.virtual_pipeline > 1 else 1,
    )
    sequence = (groups.tensor.rank(), groups.tensor.size()) if parallel.sequence else (0, 1)
    return SplitShape(
        rules, groups.data_rank, groups.context.rank(), groups.context.size(), *sequence
    )


def engine_routes(config: RunConfig, model: Model) -> RouteFiles | None:
    """Return where the experts that engines chose are, if the routers replay them."""
    experts, routers = model.hf.experts, model.routers
    if config.algorithm.router_replay != "rollout" or experts is None or routers is None:
        return None
    directory = config.replay.dumps or config.run_dir / "rollouts"
    return RouteFiles(
        directory, model.hf.num_layers, experts.num, experts.per_token, routers.layers
    )


def split_step(
    batch: RolloutBatch,
    advantages: Advantages,
    config: AlgorithmConfig,
    staleness: StalenessConfig,
    shape: SplitShape,
    *,
    zero_advantage: ZeroAdvantage,
    masked_reasons: Set[FinishReason] = frozenset(),
    routes: BatchRoutes | None = None,
) -> tuple[SplitUpdate, ...]:
    """Divide a batch into the updates of one epoch; further epochs repeat them.

    Tokens that are too old for ``staleness`` do not train, nor do responses that ended for one of
    ``masked_reasons``. Sequences without a token that trains are not computed. The weights count
    all tokens with m = 1, whether or not ``zero_advantage`` has them computed.

    Raises:
        ValueError: A sequence is longer than a micro-batch, or the groups have different sizes or
            do not divide into ``updates_per_batch`` equal parts; or routes are impossible.
    """
    samples, sequences = batch.samples, batch.sequences
    sizes = {len(group.samples) for group in batch.groups}
    if len(sizes) != 1:
        raise ValueError(
            f"step {batch.step}: groups have {sorted(sizes)} samples; all groups of a batch need "
            "the same number, so collect the batch again with one samples_per_group"
        )
    values = advantages.compute(batch.groups)
    advantage_C, advantage_B = _by_call(values, samples)
    turns_L = np.array([sequence.num_turns for sequence in sequences])
    has_advantage_L = np.logical_or.reduceat(advantage_C != 0, np.cumsum(turns_L) - turns_L)
    episode_masks = [
        trainable_mask(sample.episode_versions, batch.version, staleness)
        & (sample.finish_reason not in masked_reasons)
        for sample in samples
    ]
    sampled_B = np.array([sample.episode_sampled for sample in samples])
    trained_B = np.array([np.count_nonzero(mask_Q) for mask_Q in episode_masks])
    ends_L = np.cumsum([sequence.num_sampled for sequence in sequences])
    masks_L = np.split(np.concatenate(episode_masks), ends_L[:-1])
    sample_L = np.repeat(np.arange(len(samples)), [len(sample.sequences) for sample in samples])
    computed_L = np.array([mask_Q.any() for mask_Q in masks_L])
    if zero_advantage == "left_out":
        computed_L &= has_advantage_L
    updates = []
    for indices in split_updates(batch, config.updates_per_batch):
        computed = np.flatnonzero(computed_L & np.isin(sample_L, indices)).tolist()
        responses = np.unique(sample_L[computed]).tolist()
        if zero_advantage == "computed" and not has_advantage_L[computed].any():
            computed, responses = [], []
        sampled, unmasked = float(sampled_B[indices].sum()), float(trained_B[indices].sum())
        counts = {
            "response_tokens": sampled,
            "masked_tokens": sampled - unmasked,
            "unmasked_tokens": unmasked,
            "computed_tokens": float(trained_B[responses].sum()),
            **_signs(samples, indices, advantage_B),
        }
        micro_batches: tuple[MicroBatch, ...] = ()
        if computed:
            weight_B = _loss_weights(trained_B, indices, config)
            packing, micro_batches = shape.pack(
                sequences, computed, advantage_B, weight_B, masks_L, routes
            )
            counts |= _work(packing)
        updates.append(
            SplitUpdate(counts, tuple(indices), micro_batches, tuple(computed), tuple(responses))
        )
    return with_advantages(updates, samples, values) if values.dim() == 1 else tuple(updates)


def _work(packing: UpdatePacking) -> dict[str, float]:
    flops = packing.rank_flops
    return {
        "packing_real": float(packing.real_tokens),
        "packing_slots": float(packing.slots),
        "forward_flops": float(sum(flops)),
        "flops_mean": sum(flops) / len(flops),
        "flops_max": float(max(flops)),
    }


def with_demonstrations(
    splits: Sequence[SplitUpdate], batch: RolloutBatch, coefficient: float, shape: SplitShape
) -> tuple[SplitUpdate, ...]:
    """Add its part of the demonstrations to each update, in micro-batches of their own.

    Their loss is coefficient · Σ w (−ℓ) / Σ 1 over the tokens of the update's demonstrations, w the
    weight of each. To the objective they are tokens with m = 0, of the first sample.

    Raises:
        ValueError: A demonstration is longer than a micro-batch.
    """
    added, samples = [], batch.samples
    columns = next((mb.columns for split in splits for mb in split.micro_batches), {})
    for split, indices in zip(splits, split_updates(batch, len(splits)), strict=True):
        scale = coefficient / sum(samples[i].num_sampled for i in indices)
        weight_B = np.array([scale * sample.reward for sample in samples], dtype=np.float32)
        packing, packed = shape.pack(samples, indices, weight_B, weight_B)
        micro_batches, policy = list(split.micro_batches), list(split.policy or ())
        for mb in packed:
            no_T = torch.zeros_like(mb.mask_T)
            marked = {name: c.new_zeros(len(no_T), *c.shape[1:]) for name, c in columns.items()}
            marked[DEMONSTRATION] = mb.loss_weight_T
            masked = replace(mb, mask_T=no_T, loss_weight_T=no_T, advantage_T=no_T, columns=marked)
            micro_batches.append(replace(masked, sample_T=no_T.long()))
            policy.append(TokenLogprobs(no_T, no_T))
        work = {name: split.counts.get(name, 0.0) + n for name, n in _work(packing).items()}
        changed = replace(split, micro_batches=tuple(micro_batches), counts=split.counts | work)
        added.append(replace(changed, policy=None if split.policy is None else policy))
    return tuple(added)


def with_advantages(
    splits: Sequence[SplitUpdate], samples: Sequence[Sample], advantages: Tensor
) -> tuple[SplitUpdate, ...]:
    """Replace the advantages of updates, and their counts by sign.

    Every sample of the batch that trains must be computed already (``ZeroAdvantage``: ``trained``).
    ``advantages`` are as ``Advantages.compute`` returns them.
    """
    advantage_C, advantage_B = _by_call(advantages, samples)
    length_B = torch.tensor([sample.episode_tokens for sample in samples])
    start_B, start_C, start = length_B.cumsum(0) - length_B, list[int](), 0
    for sequence in (s for sample in samples for s in sample.sequences):  # laid end to end
        start_C += [start, *(start + first + length for first, length in sequence.written)]
        start += len(sequence.response_token_ids)

    def of_tokens(mb: MicroBatch) -> Tensor:
        device = mb.sample_T.device
        place_T = start_B.to(device)[mb.sample_T] + mb.position_T
        call_T = torch.searchsorted(torch.tensor(start_C, device=device), place_T, right=True) - 1
        return torch.from_numpy(advantage_C).to(device)[call_T]

    replaced = []
    for split in splits:
        micro_batches = tuple(replace(mb, advantage_T=of_tokens(mb)) for mb in split.micro_batches)
        counts = split.counts | _signs(samples, split.indices, advantage_B)
        replaced.append(replace(split, micro_batches=micro_batches, counts=counts))
    return tuple(replaced)


def _by_call(advantages: Tensor, samples: Sequence[Sample]) -> tuple[np.ndarray, np.ndarray]:
    """Return [C] and [B] float32 of ``Advantages.compute``'s result; the second may be means."""
    num_B = np.array([sample.episode_turns for sample in samples])
    values = advantages.flatten().numpy()
    if advantages.dim() == 2:
        return np.repeat(values, num_B), values
    sum_B = np.add.reduceat(values.astype(np.float64), np.cumsum(num_B) - num_B)
    return values, (sum_B / num_B).astype(np.float32)


def _signs(
    samples: Sequence[Sample], indices: Sequence[int], advantage_B: np.ndarray
) -> dict[str, float]:
    """Count responses and tokens by the sign of the advantage."""
    length_R = np.array([samples[i].episode_sampled for i in indices])
    advantage_R, counts = advantage_B[list(indices)], {}
    for name, has_sign_R in (("positive", advantage_R > 0), ("negative", advantage_R < 0)):
        counts[f"{name}_responses"] = float(np.count_nonzero(has_sign_R))
        counts[f"{name}_length"] = float(length_R[has_sign_R].sum())
    return counts


def _loss_weights(trained_B: np.ndarray, indices: list[int], config: AlgorithmConfig) -> np.ndarray:
    """Weight of each token that trains [B], from Σm of each sample; 0 outside the update."""
    trained_R = torch.from_numpy(trained_B[indices])
    kind, constant = config.loss_aggregation, config.token_sum_norm_constant
    weight_R = token_weights((trained_R > 0).float(), trained_R, kind, trained_R, constant)
    weight_B = np.zeros(len(trained_B), dtype=np.float32)
    weight_B[indices] = weight_R.numpy()
    return weight_B
