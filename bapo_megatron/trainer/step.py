"""One training step: the updates that one batch is used for.

split → (recompute μ) → for each epoch and update: collect what the objective must know →
forward and backward → reduce the reports over all ranks → check → optimizer step

The host waits for the device in one place per update, where the gradient norm and the faults of the
update are read, and once at the end of the step for its metrics.

Shape legend: S = sums, M = maxima, K = decisions of the update, D = entries of a decision.
"""

import math
from collections.abc import Callable, Set
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from bapo_megatron.algorithm.advantage import Advantages
from bapo_megatron.algorithm.objective import first_nonfinite
from bapo_megatron.config.rollout import StalenessConfig
from bapo_megatron.config.schema import AlgorithmConfig, OpsConfig
from bapo_megatron.distributed import ProcessGroups, fail_together, first_message
from bapo_megatron.ops.logprob import TokenLogprobs
from bapo_megatron.policy.megatron_policy import MegatronPolicy
from bapo_megatron.policy.optimizer import OptimizerStep
from bapo_megatron.trainer.loss import Collected, LossStage, UpdateContext
from bapo_megatron.trainer.output import PolicyOutput
from bapo_megatron.trainer.recompute import with_recomputed_behaviour
from bapo_megatron.trainer.records import TokenDump, TokenReport
from bapo_megatron.trainer.split import SplitShape, SplitUpdate, split_step
from bapo_megatron.types import FinishReason, MicroBatch, RolloutBatch, UpdateResult

Tokens = tuple[tuple[MicroBatch, TokenReport], ...]
"""This rank's tokens of an update, for a dump."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one update measured over all ranks, equal on all of them and still on the device."""

    sums: Tensor
    """[S] float64."""
    maxima: Tensor
    """[M] float64."""
    collected: Tensor
    """[2] float64: the faults of the collection pass (``Collected.faults``)."""
    decisions: Tensor
    """[K, D] float64."""


@dataclass(frozen=True, slots=True)
class _Outcome:
    """One update; what it measured stays on the device until the end of the step."""

    sums: dict[str, float]
    """What the host knew by itself."""
    measurement: Measurement | None = None
    """None where no update was made."""
    grad_norm: float = 0.0


@dataclass(eq=False, repr=False, kw_only=True)
class BatchTrainer:
    """Runs a batch's optimizer updates in order.

    Raises:
        UserCodeError: The objective or the advantage cannot be used.
    """

    policy: MegatronPolicy
    """Built with the ``logits_chunk_tokens`` of ``ops``."""
    config: AlgorithmConfig
    ops: OpsConfig
    temperature: float
    """That of the rollouts, by which logits are divided."""
    staleness: StalenessConfig
    shape: SplitShape
    masked_reasons: Set[FinishReason] = frozenset()
    """Responses that ended for one of these do not train."""
    dump: TokenDump | None = None
    note: Callable[[str], None] = lambda _: None
    """Takes what comes now, for people who look for a hang."""

    def __post_init__(self) -> None:
        self._groups = self.policy.groups
        self._advantages = Advantages(self.config.advantage, self.config.baseline_shift)
        self.output = PolicyOutput.of(self.policy, self.ops, self.temperature)
        self._stage = LossStage(self.config, self.output, self._groups)

    def train(self, batch: RolloutBatch) -> list[UpdateResult]:
        """Make ``epochs × updates_per_batch`` updates; results are equal on every rank.

        Raises:
            ValueError: The batch does not fit the configuration, the objective refuses an update,
                or, with ``on_nonfinite: raise``, a value is not finite; it is named with its place.
        """
        updates = split_step(
            batch,
            self._advantages,
            self.config,
            self.staleness,
            self.shape,
            zero_advantage=self._stage.zero_advantage,
            masked_reasons=self.masked_reasons,
        )
        updates_before = self.policy.num_updates
        first_pass: list[TokenLogprobs] | None = None
        recomputes = self.config.behaviour == "recomputed"
        if recomputes:
            passes = [self._recompute_behaviour(u, len(batch.samples)) for u in updates]
            updates = tuple(update for update, _ in passes)
            first_pass = passes[0][1]  # it ran with the weights of the first update
            del passes
        outcomes = []
        for number in range(self.config.epochs * len(updates)):
            update = updates[number % len(updates)]
            # Counted from the batch's version, so that ages are those of the run that made it.
            made = self.policy.num_updates - updates_before
            same_weights = self.policy.num_updates == batch.version
            context = UpdateContext(
                num_updates=batch.version + made,
                rollout_version=batch.version if same_weights else None,
            )
            policy = None if number else first_pass
            num_passes = int(recomputes and number < len(updates))
            outcome, tokens = self._update(batch, update, context, policy, num_passes)
            outcomes.append(outcome)
            if self.dump is not None and self.dump.is_due(batch.step):
                with fail_together(self._groups):
                    self.dump.write(tokens, batch.step, number, self._groups)
        # One copy brings the measurements of the step to the host.
        measurements = [o.measurement for o in outcomes if o.measurement is not None]
        measured = iter(read_measurements(measurements, self._stage))
        results = []
        for outcome in outcomes:
            result = UpdateResult({}, {}, (), grad_norm=0.0, skipped=True)
            if outcome.measurement is not None:
                result = replace(next(measured), grad_norm=outcome.grad_norm)
            results.append(replace(result, sums=result.sums | outcome.sums))
        return results

    def _recompute_behaviour(
        self, update: SplitUpdate, num_samples: int
    ) -> tuple[SplitUpdate, list[TokenLogprobs]]:
        """Replace μ by the trainer's own log-probs at the start of the step; returns these too."""
        self.note("training, forward only (behaviour)")
        policy = self.policy.forward_only(update.micro_batches, self.output.read)
        if not update.micro_batches or not self._groups.is_last_stage:
            return update, policy
        micro_batches = with_recomputed_behaviour(
            update.micro_batches,
            [logprob_T for logprob_T, _ in policy],
            self.config.correction,
            num_samples=num_samples,
            context_group=self._groups.context,
        )
        return replace(update, micro_batches=micro_batches), policy

    def _update(
        self,
        batch: RolloutBatch,
        update: SplitUpdate,
        context: UpdateContext,
        policy: list[TokenLogprobs] | None,
        num_passes: int,
    ) -> tuple[_Outcome, Tokens]:
        """Make one update.

        ``policy`` has its ℓ and H where a pass with these weights was made. ``num_passes`` without
        gradients were made for it before.
        """
        stage, place = self._stage, f"update {context.num_updates + 1}"
        if not update.micro_batches:
            return _Outcome(update.counts), ()
        collected = Collected(update.micro_batches)
        if stage.collects:
            if policy is None:
                self.note(f"training, forward only of {place}")
                policy = self.policy.forward_only(update.micro_batches, self.output.read)
                num_passes += 1
            if self._groups.is_last_stage:
                size = len(batch.samples)
                collected = stage.collect(policy, update.micro_batches, context, num_samples=size)
        micro_batches, decision = collected.micro_batches, collected.decision

        def loss_fn(output: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, TokenReport]:
            return stage.loss(output, micro_batch, decision=decision, context=context)

        self.note(f"training, forward and backward of {place}")
        reports = self.policy.forward_backward(micro_batches, loss_fn)
        flops = update.packing["forward_flops"]
        work = {"forward_only_flops": num_passes * flops, "forward_backward_flops": 3 * flops}
        update = replace(update, counts=update.counts | work)
        self.note(f"training, optimizer step of {place}")
        measurement = reduce_reports(
            reports,
            collected.faults,
            stage,
            self._groups,
            num_decisions=len(micro_batches) if stage.objective.needs == "micro_batch" else 1,
        )
        made = self.policy.optimizer_step(find_faults(measurement, stage))
        if not made.applied:
            return _Outcome(self._skip(batch, update, reports, measurement, made)), ()
        tokens = tuple(zip(micro_batches, reports, strict=False))  # none before the last stage
        return _Outcome(update.counts | update.packing, measurement, made.grad_norm), tokens

    def _skip(
        self,
        batch: RolloutBatch,
        update: SplitUpdate,
        reports: list[TokenReport],
        measurement: Measurement,
        made: OptimizerStep,
    ) -> dict[str, float]:
        """Return the sums of an update that was not made, or raise, as configured."""
        nonfinite_tokens, nonfinite_losses, refused_decisions = made.faults
        if nonfinite_tokens == 0 and refused_decisions > 0:
            raise ValueError(f"step {batch.step}: {_explain_refusal(measurement, self._stage)}")
        if self.config.on_nonfinite == "skip_update":
            faults = {"nonfinite_tokens": nonfinite_tokens} if nonfinite_tokens > 0 else {}
            return update.counts | update.packing | faults
        if nonfinite_tokens > 0:
            found = _describe_nonfinite(batch, update, reports)
            place = first_message(found, self._groups) or (
                "the log-probs of the collection pass are not finite, those of the loss pass are"
            )
            raise ValueError(
                f"step {batch.step}: {place} ({nonfinite_tokens:.0f} such tokens in the update); "
                "set algorithm.on_nonfinite=skip_update to leave such updates out"
            )
        if nonfinite_losses > 0:
            raise ValueError(
                f"step {batch.step}: algorithm.objective '{self.config.objective}' gave "
                f"{nonfinite_losses:.0f} tokens with finite values a loss or gradient "
                "that is NaN or infinite; guard its divisions, logarithms and exponentials"
            )
        raise ValueError(
            f"step {batch.step}: the gradient norm is {made.grad_norm} although every "
            "log-prob is finite; lower optimizer.lr, or set "
            "algorithm.on_nonfinite=skip_update to go on without such updates"
        )


def reduce_reports(
    reports: list[TokenReport],
    collected: Tensor | None,
    stage: LossStage,
    groups: ProcessGroups,
    *,
    num_decisions: int,
) -> Measurement:
    """Add up the reports over micro-batches and data-parallel ranks, and tell all stages.

    A collective of all ranks: those of the last pipeline stage have a report of each micro-batch,
    the others [], but must know of faults as well.

    Args:
        reports: This rank's.
        collected: ``Collected.faults`` of this rank; None where there was no collection pass.
        stage: Names what the reports hold.
        groups: This rank's groups.
        num_decisions: K; with 1 all reports hold the same decision, else each has its own.
    """
    num_sums, num_maxima = len(stage.numbers.sum_names), len(stage.numbers.max_names)
    shapes = ((num_sums,), (num_maxima,), (2,), (num_decisions, stage.decision_size))
    sizes = [math.prod(shape) for shape in shapes]
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
        packed = torch.empty(sum(sizes), dtype=torch.float64, device=groups.device)
    if groups.pipeline_size > 1:
        last = dist.get_global_rank(groups.pipeline, groups.pipeline_size - 1)
        dist.broadcast(packed, src=last, group=groups.pipeline)
    parts = torch.split_with_sizes(packed, sizes)
    return Measurement(*(part.view(shape) for part, shape in zip(parts, shapes, strict=True)))


def find_faults(measurement: Measurement, stage: LossStage) -> Tensor:
    """Return counts that must be 0 before an optimizer step, [3] float64, on the device.

    Tokens and losses that are not finite, and refused decisions.
    """
    names = stage.numbers.sum_names
    in_loss = measurement.sums[names.index("nonfinite_tokens")]
    # A collection pass of its own saw other log-probs than the loss did.
    tokens = torch.maximum(in_loss, measurement.collected[0])
    losses = measurement.sums[names.index("nonfinite_losses")] + measurement.collected[1]
    refused = torch.zeros_like(losses)
    for decision in measurement.decisions:
        is_refused = stage.objective.refuses(decision) if len(decision) else None
        if is_refused is not None:
            refused = refused + is_refused
    return torch.stack([tokens, losses, refused])


def read_measurements(measurements: list[Measurement], stage: LossStage) -> list[UpdateResult]:
    """Bring measurements to the host, all in one copy."""
    if not measurements:
        return []
    flat = [torch.cat([m.sums, m.maxima, m.decisions.flatten()]) for m in measurements]
    values = iter(torch.cat(flat).tolist())
    results = []
    for measurement in measurements:
        sums = {name: next(values) for name in stage.numbers.sum_names}
        maxima = {name: next(values) for name in stage.numbers.max_names}
        num_decisions, size = measurement.decisions.shape
        decisions = tuple(
            dict(stage.objective.report_decision([next(values) for _ in range(size)]))
            for _ in range(num_decisions)
        )
        results.append(UpdateResult(sums, maxima, decisions, grad_norm=0.0, skipped=False))
    return results


def _explain_refusal(measurement: Measurement, stage: LossStage) -> str:
    """Say why the objective refused an update of finite tokens; reads the device."""
    for decision in measurement.decisions:
        is_refused = stage.objective.refuses(decision)
        if is_refused is not None and bool(is_refused):
            return stage.objective.explain_refusal(decision.tolist())
    raise AssertionError("no decision was refused")


def _describe_nonfinite(
    batch: RolloutBatch, update: SplitUpdate, reports: list[TokenReport]
) -> str | None:
    """Name sample, position and value of this rank's first non-finite value."""
    # No reports before the last stage.
    for report, micro_batch in zip(reports, update.micro_batches, strict=False):
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
