"""One training step: the updates that one batch is used for.

plan → (recompute μ) → for each epoch and update: collect ℓ → search the bounds →
forward and backward → check → optimizer step
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from bapo_megatron.algorithm.masked import first_nonfinite
from bapo_megatron.distributed import first_message
from bapo_megatron.policy.megatron_policy import LossOutput
from bapo_megatron.telemetry.metrics import MAX_PREFIX
from bapo_megatron.trainer.loss_stage import MAX_NAMES, SUM_NAMES, LossStage, UpdateContext
from bapo_megatron.trainer.plan import Layout, PlannedUpdate, plan_step
from bapo_megatron.types import UpdateResult

if TYPE_CHECKING:
    from torch import Tensor

    from bapo_megatron.config.schema import AlgorithmConfig
    from bapo_megatron.policy.megatron_policy import MegatronPolicy
    from bapo_megatron.trainer.loss_stage import TokenReport
    from bapo_megatron.types import ClipBounds, MicroBatch, RolloutBatch


class NonFiniteError(ValueError):
    """A log-prob, an advantage or the gradient norm is NaN or infinite."""


class BatchTrainer:
    """Makes the optimizer updates of one batch after the other."""

    def __init__(
        self,
        policy: MegatronPolicy,
        config: AlgorithmConfig,
        *,
        temperature: float,
        max_tokens_per_micro_batch: int,
        pad_to_multiple: int,
    ) -> None:
        """Prepare for batches.

        Args:
            policy: The model and its optimizer.
            config: The algorithm section.
            temperature: Sampling temperature of the rollouts; logits are divided by it.
            max_tokens_per_micro_batch: Token budget of one forward pass on one rank.
            pad_to_multiple: Every micro-batch is padded to a multiple of this many tokens.
        """
        self._policy = policy
        self._config = config
        groups = policy.groups
        self._layout = Layout(
            data_rank=groups.data_rank,
            data_size=groups.data_size,
            max_tokens_per_micro_batch=max_tokens_per_micro_batch,
            pad_to_multiple=pad_to_multiple,
        )
        self._stage = LossStage(config, policy.vocab_size, temperature, groups.tensor, groups.data)

    def train(self, batch: RolloutBatch) -> list[UpdateResult]:
        """Make ``epochs × updates_per_batch`` updates; results are equal on every rank.

        Raises:
            NonFiniteError: with ``on_nonfinite: raise``, naming sample, position and value.
            ValueError: the batch does not fit the configuration.
        """
        updates = plan_step(batch, self._config, self._layout)
        updates_before = self._policy.num_updates
        if self._config.behaviour == "recomputed":
            updates = tuple(self._recompute_behaviour(update) for update in updates)
        results = []
        for number in range(self._config.epochs * len(updates)):
            update = updates[number % len(updates)]
            # Counted from the batch's version, so that ages are those of the run that made it.
            made = self._policy.num_updates - updates_before
            same_weights = self._policy.num_updates == batch.version
            context = UpdateContext(
                num_updates=batch.version + made,
                rollout_version=batch.version if same_weights else None,
            )
            results.append(self._update(batch, update, context, is_first=number == 0))
        return results

    def _recompute_behaviour(self, update: PlannedUpdate) -> PlannedUpdate:
        """Replace μ by the trainer's own log-probs at the start of the step."""
        logprobs = self._policy.forward_only(update.micro_batches, self._stage.logprobs)
        micro_batches = tuple(
            replace(micro_batch, behaviour_logprob_T=logprob_T)
            for micro_batch, logprob_T in zip(update.micro_batches, logprobs, strict=True)
        )
        return replace(update, micro_batches=micro_batches)

    def _update(
        self, batch: RolloutBatch, update: PlannedUpdate, context: UpdateContext, *, is_first: bool
    ) -> UpdateResult:
        if not update.has_gradient and self._config.entropy_coefficient == 0:
            return UpdateResult(sums={}, bounds=(), grad_norm=0.0, skipped=True)
        bounds: ClipBounds | None = None
        if self._searches_whole_update:
            collected = self._collect(update, is_first=is_first)
            bounds = self._stage.search(collected, update.micro_batches)
            if bounds is None:
                return self._refuse(batch, update, collected)

        def loss_fn(logits_NV: Tensor, micro_batch: MicroBatch) -> LossOutput[TokenReport]:
            return LossOutput(
                *self._stage.loss(logits_NV, micro_batch, bounds=bounds, context=context)
            )

        reports = self._policy.forward_backward(update.micro_batches, loss_fn)
        packing = {"packing/real": float(update.real_tokens), "packing/slots": float(update.slots)}
        sums = packing | self._reduce(reports)
        if sums["nonfinite_tokens"] > 0:
            return self._refuse(batch, update, [report.logprob_T for report in reports])
        outcome = self._policy.optimizer_step()
        if not outcome.applied:
            if self._config.on_nonfinite == "raise":
                raise NonFiniteError(
                    f"step {batch.step}: the gradient norm is {outcome.grad_norm} although every "
                    "log-prob is finite; lower optimizer.lr, or set "
                    "algorithm.on_nonfinite=skip_update to go on without such updates"
                )
            return UpdateResult(sums=packing, bounds=(), grad_norm=0.0, skipped=True)
        searched = (bounds,) if bounds is not None else tuple(r.bounds for r in reports)
        return UpdateResult(sums=sums, bounds=searched, grad_norm=outcome.grad_norm, skipped=False)

    @property
    def _searches_whole_update(self) -> bool:
        return self._config.clip == "bapo" and self._config.bapo.scope == "update"

    def _collect(self, update: PlannedUpdate, *, is_first: bool) -> list[Tensor]:
        """ℓ [T] of every micro-batch, which the bounds need before the first backward."""
        if is_first and self._config.behaviour == "recomputed":
            # The pass at the start of the step ran with these weights: ℓ = μ.
            return [micro_batch.behaviour_logprob_T for micro_batch in update.micro_batches]
        return self._policy.forward_only(update.micro_batches, self._stage.logprobs)

    def _reduce(self, reports: list[TokenReport]) -> dict[str, float]:
        """Add up the micro-batches' reports over all data-parallel ranks: two collectives."""
        sums = torch.stack([report.sums for report in reports]).sum(dim=0)
        maxima = torch.stack([report.maxima for report in reports]).amax(dim=0)
        dist.all_reduce(sums, group=self._stage.data_group)
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=self._stage.data_group)
        named_maxima = [f"{MAX_PREFIX}{name}" for name in MAX_NAMES]
        return dict(zip(SUM_NAMES, sums.tolist(), strict=True)) | dict(
            zip(named_maxima, maxima.tolist(), strict=True)
        )

    def _count_nonfinite(self, logprobs: list[Tensor], update: PlannedUpdate) -> int:
        """Tokens with a non-finite ℓ, μ or A over all data-parallel ranks."""
        count = torch.zeros((), dtype=torch.int64, device=self._policy.device)
        for logprob_T, micro_batch in zip(logprobs, update.micro_batches, strict=True):
            for values_T in _checked(logprob_T, micro_batch).values():
                count += ((micro_batch.mask_T > 0) & ~torch.isfinite(values_T)).sum()
        dist.all_reduce(count, group=self._stage.data_group)
        return int(count.item())

    def _refuse(
        self, batch: RolloutBatch, update: PlannedUpdate, logprobs: list[Tensor]
    ) -> UpdateResult:
        """Raise or skip, as configured, an update with non-finite values."""
        count = self._count_nonfinite(logprobs, update)
        if self._config.on_nonfinite == "skip_update":
            return UpdateResult(
                sums={"nonfinite_tokens": float(count)}, bounds=(), grad_norm=0.0, skipped=True
            )
        found = _describe_nonfinite(batch, update, logprobs)
        place = first_message(found, self._policy.groups)
        raise NonFiniteError(
            f"step {batch.step}: {place} ({count} such values in the update); set "
            "algorithm.on_nonfinite=skip_update to leave such updates out"
        )


def _checked(logprob_T: Tensor, micro_batch: MicroBatch) -> dict[str, Tensor]:
    return {
        "behaviour log-prob": micro_batch.behaviour_logprob_T,
        "log-prob": logprob_T,
        "advantage": micro_batch.advantage_T,
    }


def _describe_nonfinite(
    batch: RolloutBatch, update: PlannedUpdate, logprobs: list[Tensor]
) -> str | None:
    """Sample, position and value of this rank's first non-finite value."""
    for logprob_T, micro_batch in zip(logprobs, update.micro_batches, strict=True):
        for name, values_T in _checked(logprob_T, micro_batch).items():
            token = first_nonfinite(values_T, micro_batch.mask_T)
            if token is not None:
                sample = batch.samples[int(micro_batch.sample_T[token])]
                return (
                    f"sample {sample.index} of group {sample.group_id} "
                    f"({sample.prompt.prompt_id}), response token "
                    f"{int(micro_batch.position_T[token])}: {name} is {float(values_T[token])}"
                )
    return None
