"""One training step: the updates that one batch is used for.

plan → (recompute μ) → for each epoch and update: collect what the objective must know →
forward and backward → check → optimizer step

The host waits for the device in one place per update, where the gradient norm and the faults of the
update are read, and once at the end of the step for its metrics.

From the reports of one update's micro-batches to what it measured over all ranks.

Shape legend: S = sums, M = maxima, K = decisions of the update, D = entries of a decision.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from bapo_megatron.algorithm.objective import first_nonfinite
from bapo_megatron.distributed import fail_together, first_message
from bapo_megatron.policy.megatron_policy import LossOutput
from bapo_megatron.trainer.loss import (
    Collected,
    LossStage,
    PolicyOutput,
    TokenReport,
    UpdateContext,
)
from bapo_megatron.trainer.recompute import with_recomputed_behaviour
from bapo_megatron.trainer.records import TokenDump
from bapo_megatron.trainer.split import plan_step
from bapo_megatron.types import UpdateResult

if TYPE_CHECKING:
    from collections.abc import Set

    from torch import Tensor

    from bapo_megatron.config.rollout import StalenessConfig
    from bapo_megatron.config.schema import AlgorithmConfig, OpsConfig
    from bapo_megatron.distributed import ProcessGroups
    from bapo_megatron.ops.logprob import TokenLogprobs
    from bapo_megatron.policy.megatron_policy import MegatronPolicy
    from bapo_megatron.policy.optimizer import OptimizerStep
    from bapo_megatron.trainer.loss import LossStage, TokenReport
    from bapo_megatron.trainer.split import Layout, PlannedUpdate
    from bapo_megatron.types import FinishReason, MicroBatch, RolloutBatch

    Tokens = tuple[tuple[MicroBatch, TokenReport], ...]
    """This rank's tokens of an update, for a dump."""


FAULTS = ("nonfinite_tokens", "nonfinite_losses", "refused_decisions")
"""Counts that must be 0 before an optimizer step."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one update measured over all ranks, equal on all of them and still on the device."""

    sums: Tensor
    """[S] float64."""
    maxima: Tensor
    """[M] float64."""
    collected: Tensor
    """[2] float64: the faults of the collection pass (``loss_stage.Collected``)."""
    decisions: Tensor
    """[K, D] float64."""

    def flatten(self) -> Tensor:
        """All of it, one after the other."""
        return torch.cat([self.sums, self.maxima, self.collected, self.decisions.flatten()])


def reduce_reports(
    reports: list[TokenReport],
    collected: Tensor | None,
    stage: LossStage,
    groups: ProcessGroups,
    *,
    num_decisions: int,
) -> Measurement:
    """Add up the reports over micro-batches and data-parallel ranks, and tell all stages.

    A collective of all ranks. Only those of the last pipeline stage have reports; the other stages
    must know of faults as well.

    Args:
        reports: One per micro-batch on ranks of the last stage, elsewhere [].
        collected: The faults that this rank found before the loss; None where there was no
            collection pass.
        stage: Names what the reports hold.
        groups: This rank's groups.
        num_decisions: K; with 1 all reports hold the same decision, else each has its own.
    """
    numbers = stage.numbers
    shapes = (
        (len(numbers.sum_names),),
        (len(numbers.max_names),),
        (2,),
        (num_decisions, stage.decision_size),
    )
    if groups.is_last_stage:
        sums = torch.stack([report.sums for report in reports]).sum(dim=0)
        maxima = torch.stack([report.maxima for report in reports]).amax(dim=0)
        found = torch.zeros(2, dtype=torch.float64, device=groups.device)
        if collected is not None:
            found += collected
        counted = torch.cat([sums, found])
        dist.all_reduce(counted, group=groups.data)
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=groups.data)
        decisions = torch.stack([report.decision for report in reports[:num_decisions]])
        packed = torch.cat([counted[:-2], maxima, counted[-2:], decisions.flatten()])
    else:
        size = sum(torch.Size(shape).numel() for shape in shapes)
        packed = torch.empty(size, dtype=torch.float64, device=groups.device)
    if groups.pipeline_size > 1:
        last = dist.get_global_rank(groups.pipeline, groups.pipeline_size - 1)
        dist.broadcast(packed, src=last, group=groups.pipeline)
    parts = torch.split_with_sizes(packed, [torch.Size(shape).numel() for shape in shapes])
    return Measurement(*(part.view(shape) for part, shape in zip(parts, shapes, strict=True)))


def find_faults(measurement: Measurement, stage: LossStage) -> Tensor:
    """Return the counts of ``FAULTS`` of an update, [3] float64, on the device."""
    names = stage.numbers.sum_names
    in_loss = measurement.sums[names.index("nonfinite_tokens")]
    # The collection pass saw the log-probs of another pass than the loss where it came before it.
    tokens = torch.maximum(in_loss, measurement.collected[0])
    losses = measurement.sums[names.index("nonfinite_losses")] + measurement.collected[1]
    refused = torch.zeros_like(losses)
    for decision in measurement.decisions:
        is_refused = stage.objective.refuses(decision) if len(decision) else None
        if is_refused is not None:
            refused = refused + is_refused
    return torch.stack([tokens, losses, refused])


@dataclass(frozen=True, slots=True)
class Measured:
    """A ``Measurement`` on the host."""

    sums: dict[str, float]
    maxima: dict[str, float]
    decisions: tuple[tuple[float, ...], ...]
    """[K][D]."""


def read_measurements(measurements: list[Measurement], stage: LossStage) -> list[Measured]:
    """Bring measurements to the host, all in one copy."""
    if not measurements:
        return []
    values = iter(torch.cat([m.flatten() for m in measurements]).tolist())
    results = []
    for measurement in measurements:
        sums = {name: next(values) for name in stage.numbers.sum_names}
        maxima = {name: next(values) for name in stage.numbers.max_names}
        for _ in measurement.collected:  # faults, not numbers
            next(values)
        num_decisions, size = measurement.decisions.shape
        decisions = tuple(tuple(next(values) for _ in range(size)) for _ in range(num_decisions))
        results.append(Measured(sums, maxima, decisions))
    return results


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
