"""One training step: the updates that one batch is used for.

plan → (recompute μ) → for each epoch and update: collect what the objective must know →
forward and backward → check → optimizer step

The host waits for the device in one place per update, where the gradient norm and the faults of the
update are read, and once at the end of the step for its metrics.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bapo_megatron.algorithm.finite import first_nonfinite
from bapo_megatron.distributed import fail_together, first_message
from bapo_megatron.policy.megatron_policy import LossOutput
from bapo_megatron.trainer.loss_stage import (
    Collected,
    LossStage,
    PolicyOutput,
    TokenReport,
    UpdateContext,
)
from bapo_megatron.trainer.plan import plan_step
from bapo_megatron.trainer.recompute import with_recomputed_behaviour
from bapo_megatron.trainer.reduction import (
    FAULTS,
    Measurement,
    find_faults,
    read_measurements,
    reduce_reports,
)
from bapo_megatron.trainer.token_dump import TokenDump
from bapo_megatron.types import UpdateResult

if TYPE_CHECKING:
    from collections.abc import Set

    from torch import Tensor

    from bapo_megatron.config.rollout import StalenessConfig
    from bapo_megatron.config.schema import AlgorithmConfig, OpsConfig
    from bapo_megatron.ops.logprob import TokenLogprobs
    from bapo_megatron.policy.megatron_policy import MegatronPolicy
    from bapo_megatron.policy.optimizer import OptimizerStep
    from bapo_megatron.trainer.plan import Layout, PlannedUpdate
    from bapo_megatron.types import FinishReason, MicroBatch, RolloutBatch

    Tokens = tuple[tuple[MicroBatch, TokenReport], ...]
    """This rank's tokens of an update, for a dump."""


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
    """Runs a batch's optimizer updates in order."""

    def __init__(
        self,
        policy: MegatronPolicy,
        config: AlgorithmConfig,
        ops: OpsConfig,
        *,
        temperature: float,
        staleness: StalenessConfig,
        layout: Layout,
        masked_reasons: Set[FinishReason] = frozenset(),
        dump: TokenDump | None = None,
    ) -> None:
        """Prepare for batches.

        Args:
            policy: The model and its optimizer.
            config: The algorithm section.
            ops: The ops section; the policy was built with its ``logits_chunk_tokens``.
            temperature: Sampling temperature of the rollouts; logits are divided by it.
            staleness: Which tokens are too old to train.
            layout: How samples become this rank's micro-batches.
            masked_reasons: Responses that ended for one of these do not train.
            dump: Writes the tokens of some steps; None: of none.

        Raises:
            UserCodeError: The objective cannot be used.
        """
        self._policy = policy
        self._config = config
        self._groups = policy.groups
        self._staleness = staleness
        self._layout = layout
        self._masked_reasons = masked_reasons
        self._dump = dump
        self._output = PolicyOutput(
            ops,
            vocab_size=policy.vocab_size,
            temperature=temperature,
            groups=policy.groups,
            head=policy.head,
        )
        self._stage = LossStage(config, self._output, policy.groups)

    @property
    def kernels_name(self) -> str:
        """Which kernels the loss stage runs: ``cpu``, ``cuda`` or ``reference``."""
        return self._output.kernels.name

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
            masked_reasons=self._masked_reasons,
        )
        updates_before = self._policy.num_updates
        first_pass: list[TokenLogprobs] | None = None
        if self._config.behaviour == "recomputed":
            num_samples = len(batch.samples)
            passes = [self._recompute_behaviour(update, num_samples) for update in updates]
            updates = tuple(update for update, _ in passes)
            # That pass ran with the weights of the first update.
            first_pass = passes[0][1]
            del passes
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
            known = first_pass if number == 0 else None
            outcome, tokens = self._update(batch, update, context, known)
            outcomes.append(outcome)
            if self._dump is not None and self._dump.is_due(batch.step):
                with fail_together(self._groups):
                    self._dump.write(tokens, batch.step, number, self._groups)
        return self._read(outcomes)

    def _recompute_behaviour(
        self, update: PlannedUpdate, num_samples: int
    ) -> tuple[PlannedUpdate, list[TokenLogprobs]]:
        """Replace μ by the trainer's own log-probs at the start of the step; returns these too."""
        policy = self._policy.forward_only(update.micro_batches, self._output.read)
        if not update.micro_batches or not self._groups.is_last_stage:
            return update, policy
        micro_batches = with_recomputed_behaviour(
            update.micro_batches,
            [logprob_T for logprob_T, _ in policy],
            self._config.correction,
            num_samples=num_samples,
            context_group=self._groups.context,
        )
        return replace(update, micro_batches=micro_batches), policy

    def _update(
        self,
        batch: RolloutBatch,
        update: PlannedUpdate,
        context: UpdateContext,
        policy: list[TokenLogprobs] | None,
    ) -> tuple[_Outcome, Tokens]:
        """Make one update; ``policy`` has its ℓ and H where a pass with these weights was made."""
        stage = self._stage
        trains_all = self._config.entropy_coefficient > 0 or stage.objective.trains_zero_advantage
        if not update.has_gradient and not (trains_all and update.trained_tokens > 0):
            return _Outcome(measurement=None, sums=_token_counts(update)), ()
        collected = self._collect(update, context, policy, num_samples=len(batch.samples))
        micro_batches = update.micro_batches if collected is None else collected.micro_batches
        decision = None if collected is None else collected.decision

        def loss_fn(output: Tensor, micro_batch: MicroBatch) -> LossOutput[TokenReport]:
            return LossOutput(*stage.loss(output, micro_batch, decision=decision, context=context))

        reports = self._policy.forward_backward(micro_batches, loss_fn)
        measurement = reduce_reports(
            reports,
            None if collected is None else collected.faults,
            stage,
            self._groups,
            num_decisions=len(micro_batches) if stage.objective.needs == "micro_batch" else 1,
        )
        made = self._policy.optimizer_step(find_faults(measurement, stage))
        sums = _token_counts(update) | _packing(update)
        if made.applied:
            tokens = tuple(zip(micro_batches, reports, strict=False))  # none before the last stage
            return _Outcome(measurement, sums, made.grad_norm, skipped=False), tokens
        if made.faults[FAULTS.index("nonfinite_tokens")] > 0:
            return self._refuse(batch, update, reports, made.faults[0]), ()
        self._raise_fault(batch.step, measurement, made)
        return _Outcome(measurement=None, sums=sums), ()

    def _collect(
        self,
        update: PlannedUpdate,
        context: UpdateContext,
        policy: list[TokenLogprobs] | None,
        *,
        num_samples: int,
    ) -> Collected | None:
        """What the objective must know of the whole update; None where that is nothing."""
        if not self._stage.collects:
            return None
        if policy is None:
            policy = self._policy.forward_only(update.micro_batches, self._output.read)
        if not self._groups.is_last_stage:
            return None
        return self._stage.collect(policy, update.micro_batches, context, num_samples=num_samples)

    def _raise_fault(self, step: int, measurement: Measurement, made: OptimizerStep) -> None:
        """Raise for an update of finite tokens that was not made, unless it is to be skipped."""
        faults = dict(zip(FAULTS, made.faults, strict=True))
        if faults["refused_decisions"] > 0:
            raise ValueError(f"step {step}: {self._explain_refusal(measurement)}")
        if self._config.on_nonfinite != "raise":
            return
        if faults["nonfinite_losses"] > 0:
            raise NonFiniteError(
                f"step {step}: algorithm.objective '{self._config.objective}' gave "
                f"{faults['nonfinite_losses']:.0f} tokens with finite values a loss or gradient "
                "that is NaN or infinite; guard its divisions, logarithms and exponentials"
            )
        raise NonFiniteError(
            f"step {step}: the gradient norm is {made.grad_norm} although every "
            "log-prob is finite; lower optimizer.lr, or set "
            "algorithm.on_nonfinite=skip_update to go on without such updates"
        )

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

    def _read(self, outcomes: list[_Outcome]) -> list[UpdateResult]:
        """Bring the measurements of a step to the host, in one copy."""
        made = [outcome.measurement for outcome in outcomes if outcome.measurement is not None]
        values = iter(read_measurements(made, self._stage))
        results = []
        for outcome in outcomes:
            measured = next(values) if outcome.measurement is not None else None
            results.append(
                UpdateResult(
                    sums=outcome.sums if measured is None else measured.sums | outcome.sums,
                    maxima={} if measured is None else measured.maxima,
                    decisions=()
                    if measured is None
                    else tuple(map(self._report_decision, measured.decisions)),
                    grad_norm=outcome.grad_norm,
                    skipped=outcome.skipped,
                )
            )
        return results

    def _report_decision(self, decision: tuple[float, ...]) -> dict[str, float]:
        return dict(self._stage.objective.report_decision(decision))

    def _explain_refusal(self, measurement: Measurement) -> str:
        """Why the objective refused an update of finite tokens; reads the device."""
        [measured] = read_measurements([measurement], self._stage)
        objective = self._stage.objective
        for row, decision in zip(measurement.decisions, measured.decisions, strict=True):
            is_refused = objective.refuses(row)
            if is_refused is not None and bool(is_refused):
                return objective.explain_refusal(decision)
        raise AssertionError("no decision was refused")


def _token_counts(update: PlannedUpdate) -> dict[str, float]:
    """How many tokens the update has, and how many of them are too old to train."""
    return {
        "response_tokens": float(update.response_tokens),
        "masked_tokens": float(update.response_tokens - update.trained_tokens),
        **update.lengths,
    }


def _packing(update: PlannedUpdate) -> dict[str, float]:
    """How full the micro-batches are, and how equal the ranks' work."""
    return {
        "packing_real": float(update.real_tokens),
        "packing_slots": float(update.slots),
        "flops_mean": sum(update.rank_flops) / len(update.rank_flops),
        "flops_max": float(max(update.rank_flops)),
    }


def _describe_nonfinite(
    batch: RolloutBatch, update: PlannedUpdate, reports: list[TokenReport]
) -> str | None:
    """Sample, position and value of this rank's first non-finite value."""
    if not reports:
        return None
    for report, micro_batch in zip(reports, update.micro_batches, strict=True):
        checked = {
            "behaviour log-prob": micro_batch.behaviour_logprob_T,
            "log-prob": report.policy.logprob_T,
            "entropy": report.policy.entropy_T,
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
