"""One training step: the updates that one batch is used for.

plan → (recompute μ) → for each epoch and update: collect ℓ → search the bounds →
forward and backward → check → optimizer step

The host waits for the device in one place per update, where the gradient norm and the faults of the
update are read, and once at the end of the step for its metrics.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bapo_megatron.algorithm.masked import first_nonfinite
from bapo_megatron.distributed import first_message
from bapo_megatron.policy.megatron_policy import LossOutput
from bapo_megatron.trainer.loss_stage import LossStage, TokenReport, UpdateContext
from bapo_megatron.trainer.plan import plan_step
from bapo_megatron.trainer.recompute import with_recomputed_behaviour
from bapo_megatron.trainer.reduction import Measurement, read_measurements, reduce_reports
from bapo_megatron.types import UpdateResult

if TYPE_CHECKING:
    from torch import Tensor

    from bapo_megatron.config.rollout import StalenessConfig
    from bapo_megatron.config.schema import AlgorithmConfig, OpsConfig
    from bapo_megatron.policy.megatron_policy import MegatronPolicy
    from bapo_megatron.trainer.plan import Layout, PlannedUpdate
    from bapo_megatron.types import MicroBatch, RolloutBatch


class NonFiniteError(ValueError):
    """A log-prob, an advantage or the gradient norm is NaN or infinite."""


@dataclass(frozen=True, slots=True)
class _Outcome:
    """One update; what it measured stays on the device until the end of the step."""

    measurement: Measurement | None
    """None where no update was made."""
    sums: dict[str, float]
    """What the host knew by itself."""
    grad_norm: float = 0.0
    skipped: bool = True


class BatchTrainer:
    """Makes the optimizer updates of one batch after the other."""

    def __init__(
        self,
        policy: MegatronPolicy,
        config: AlgorithmConfig,
        ops: OpsConfig,
        *,
        temperature: float,
        staleness: StalenessConfig,
        layout: Layout,
        masks_truncated: bool = False,
    ) -> None:
        """Prepare for batches.

        Args:
            policy: The model and its optimizer.
            config: The algorithm section.
            ops: The ops section; the policy was built with its ``logits_chunk_tokens``.
            temperature: Sampling temperature of the rollouts; logits are divided by it.
            staleness: Which tokens are too old to train.
            layout: How samples become this rank's micro-batches.
            masks_truncated: Whether no token of a truncated response trains.
        """
        self._policy = policy
        self._config = config
        self._groups = policy.groups
        self._staleness = staleness
        self._layout = layout
        self._masks_truncated = masks_truncated
        self._stage = LossStage(
            config,
            ops,
            vocab_size=policy.vocab_size,
            temperature=temperature,
            groups=policy.groups,
            head=policy.head,
        )

    @property
    def kernels_name(self) -> str:
        """Which kernels the loss stage runs."""
        return self._stage.kernels_name

    def train(self, batch: RolloutBatch) -> list[UpdateResult]:
        """Make ``epochs × updates_per_batch`` updates; results are equal on every rank.

        Raises:
            NonFiniteError: with ``on_nonfinite: raise``, naming sample, position and value.
            ValueError: the batch does not fit the configuration.
        """
        updates = plan_step(
            batch,
            self._config,
            self._staleness,
            self._layout,
            masks_truncated=self._masks_truncated,
        )
        updates_before = self._policy.num_updates
        if self._config.behaviour == "recomputed":
            num_samples = len(batch.samples)
            updates = tuple(self._recompute_behaviour(update, num_samples) for update in updates)
        outcomes = []
        for number in range(self._config.epochs * len(updates)):
            update = updates[number % len(updates)]
            # Counted from the batch's version, so that ages are those of the run that made it.
            made = self._policy.num_updates - updates_before
            same_weights = self._policy.num_updates == batch.version
            context = UpdateContext(
                num_updates=batch.version + made,
                rollout_version=batch.version if same_weights else None,
            )
            outcomes.append(self._update(batch, update, context, is_first=number == 0))
        return _read(outcomes)

    def _recompute_behaviour(self, update: PlannedUpdate, num_samples: int) -> PlannedUpdate:
        """Replace μ by the trainer's own log-probs at the start of the step."""
        if not update.micro_batches:
            return update
        logprobs = self._policy.forward_only(update.micro_batches, self._stage.logprobs)
        if not self._groups.is_last_stage:
            return update
        micro_batches = with_recomputed_behaviour(
            update.micro_batches,
            logprobs,
            self._config.correction,
            num_samples=num_samples,
            context_group=self._groups.context,
        )
        return replace(update, micro_batches=micro_batches)

    def _update(
        self, batch: RolloutBatch, update: PlannedUpdate, context: UpdateContext, *, is_first: bool
    ) -> _Outcome:
        has_bonus = self._config.entropy_coefficient > 0 and update.trained_tokens > 0
        if not update.has_gradient and not has_bonus:
            return _Outcome(measurement=None, sums=_token_counts(update))
        bounds: Tensor | None = None
        if self._stage.searches_whole_update:
            collected = self._collect(update, is_first=is_first)
            if self._groups.is_last_stage:
                bounds = self._stage.search(collected, update.micro_batches)

        def loss_fn(output: Tensor, micro_batch: MicroBatch) -> LossOutput[TokenReport]:
            return LossOutput(
                *self._stage.loss(output, micro_batch, bounds=bounds, context=context)
            )

        reports = self._policy.forward_backward(update.micro_batches, loss_fn)
        num_searches = 1 if self._stage.searches_whole_update else len(update.micro_batches)
        measurement = reduce_reports(reports, num_searches, self._groups)
        step = self._policy.optimizer_step(measurement.faults)
        sums = _token_counts(update) | _packing(update)
        if step.applied:
            return _Outcome(measurement, sums, step.grad_norm, skipped=False)
        nonfinite_tokens, refused_searches = step.faults
        if nonfinite_tokens > 0:
            return self._refuse(batch, update, reports, nonfinite_tokens)
        if refused_searches > 0:
            raise ValueError(f"step {batch.step}: {_explain_refusal(measurement)}")
        if self._config.on_nonfinite == "raise":
            raise NonFiniteError(
                f"step {batch.step}: the gradient norm is {step.grad_norm} although every "
                "log-prob is finite; lower optimizer.lr, or set "
                "algorithm.on_nonfinite=skip_update to go on without such updates"
            )
        return _Outcome(measurement=None, sums=sums)

    def _collect(self, update: PlannedUpdate, *, is_first: bool) -> list[Tensor]:
        """ℓ [T] of every micro-batch, which the bounds need before the first backward."""
        if is_first and self._config.behaviour == "recomputed":
            # The pass at the start of the step ran with these weights: ℓ = μ.
            return [micro_batch.behaviour_logprob_T for micro_batch in update.micro_batches]
        return self._policy.forward_only(update.micro_batches, self._stage.logprobs)

    def _refuse(
        self,
        batch: RolloutBatch,
        update: PlannedUpdate,
        reports: list[TokenReport],
        nonfinite_tokens: float,
    ) -> _Outcome:
        """Raise or skip, as configured, an update with non-finite values."""
        if self._config.on_nonfinite == "skip_update":
            sums = _token_counts(update) | {"nonfinite_tokens": nonfinite_tokens}
            return _Outcome(measurement=None, sums=sums)
        found = _describe_nonfinite(batch, update, reports)
        place = first_message(found, self._groups) or (
            "the log-probs of the collection pass are not finite, those of the loss pass are"
        )
        raise NonFiniteError(
            f"step {batch.step}: {place} ({nonfinite_tokens:.0f} such tokens in the update); set "
            "algorithm.on_nonfinite=skip_update to leave such updates out"
        )


def _token_counts(update: PlannedUpdate) -> dict[str, float]:
    """How many tokens the update has, and how many of them are too old to train."""
    return {
        "response_tokens": float(update.response_tokens),
        "masked_tokens": float(update.response_tokens - update.trained_tokens),
    }


def _packing(update: PlannedUpdate) -> dict[str, float]:
    """How full the micro-batches are, and how equal the ranks' work."""
    return {
        "packing_real": float(update.real_tokens),
        "packing_slots": float(update.slots),
        "flops_mean": sum(update.rank_flops) / len(update.rank_flops),
        "flops_max": float(max(update.rank_flops)),
    }


def _read(outcomes: list[_Outcome]) -> list[UpdateResult]:
    """Bring the measurements of a step to the host, in one copy."""
    made = [outcome.measurement for outcome in outcomes if outcome.measurement is not None]
    values = iter(read_measurements(made))
    results = []
    for outcome in outcomes:
        sums, bounds = next(values) if outcome.measurement is not None else ({}, ())
        results.append(
            UpdateResult(
                sums=sums | outcome.sums,
                bounds=bounds,
                grad_norm=outcome.grad_norm,
                skipped=outcome.skipped,
            )
        )
    return results


def _explain_refusal(measurement: Measurement) -> str:
    """Why a search of finite tokens was refused; reads the device."""
    [(_, bounds)] = read_measurements([measurement])
    refused = next(b for b in bounds if b.exit == "refused")
    if refused.out_of_range_tokens > 0:
        return (
            f"{refused.out_of_range_tokens} tokens have |weight · advantage| >= 256 or a mask "
            "other than 0 and 1, beyond the exact sums of the bound search; scale the rewards down"
        )
    if refused.tokens >= 1 << 31:
        return (
            f"the bound search saw {refused.tokens} tokens, 2^31 or more; use smaller batches or "
            "raise algorithm.updates_per_batch"
        )
    return (
        "the contribution table holds a negative sum, which no tokens can give; its all-reduce "
        "went wrong, so check that all ranks run the same version"
    )


def _describe_nonfinite(
    batch: RolloutBatch, update: PlannedUpdate, reports: list[TokenReport]
) -> str | None:
    """Sample, position and value of this rank's first non-finite value."""
    if not reports:
        return None
    for report, micro_batch in zip(reports, update.micro_batches, strict=True):
        checked = {
            "behaviour log-prob": micro_batch.behaviour_logprob_T,
            "log-prob": report.logprob_T,
            "advantage": micro_batch.advantage_T,
        }
        for name, values_T in checked.items():
            token = first_nonfinite(values_T, micro_batch.mask_T.to(values_T.device))
            if token is not None:
                sample = batch.samples[int(micro_batch.sample_T[token])]
                return (
                    f"sample {sample.index} of group {sample.group_id} "
                    f"({sample.prompt.prompt_id}), response token "
                    f"{int(micro_batch.position_T[token])}: {name} is {float(values_T[token])}"
                )
    return None
