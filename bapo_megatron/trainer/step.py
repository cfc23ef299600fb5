"""One training step: the updates that one batch is used for.

split → (recompute μ) → for each epoch and update: collect what the objective must know →
forward and backward → count faults over all ranks → optimizer step. At the end of the step the
sums of all its updates are reduced.

Where a prediction may take the place of what the objective must know (``speculation``), forward and
backward come first, and again where it was wrong.

The host waits for the device in one place per loss pass, where the gradient norm and the faults of
the update are read, and once at the end of the step for its metrics.
"""

from collections.abc import Callable, Set
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bapo_megatron.algorithm.advantage import Advantages
from bapo_megatron.algorithm.objective import first_nonfinite
from bapo_megatron.algorithm.prediction import Prediction
from bapo_megatron.config.rollout import StalenessConfig
from bapo_megatron.config.schema import AlgorithmConfig, OpsConfig
from bapo_megatron.ops.logprob import TokenLogprobs
from bapo_megatron.policy.megatron_policy import MegatronPolicy
from bapo_megatron.policy.optimizer import OptimizerStep
from bapo_megatron.runtime.distributed import fail_together, first_message
from bapo_megatron.trainer.loss import Collected, LossStage
from bapo_megatron.trainer.measurement import (
    NUM_FAULTS,
    Measurement,
    judge,
    measure,
    read_measurements,
)
from bapo_megatron.trainer.output import PolicyOutput
from bapo_megatron.trainer.recompute import with_recomputed_behaviour
from bapo_megatron.trainer.records import TokenDump, TokenReport
from bapo_megatron.trainer.safe_tokens import UpdateContext
from bapo_megatron.trainer.speculation import Speculation
from bapo_megatron.trainer.split import SplitShape, SplitUpdate, split_step
from bapo_megatron.types import FinishReason, MicroBatch, RolloutBatch, UpdateResult

Tokens = tuple[tuple[MicroBatch, TokenReport], ...]
"""This rank's tokens of an update, for a dump."""


@dataclass(frozen=True, slots=True)
class _Outcome:
    """One update; what it measured stays on the device until the end of the step."""

    sums: dict[str, float]
    """What the host knew by itself."""
    measurement: Measurement | None = None
    """None where no update was made."""
    grad_norm: float = 0.0


@dataclass(frozen=True, slots=True)
class _Preparation:
    """What was done for an update before its own passes."""

    policy: list[TokenLogprobs] | None
    """Its ℓ and H, where a pass with these weights was made."""
    num_passes: int
    """Passes without gradients that were made for it."""
    known_K: Tensor | None
    """Statistics of its tokens with ℓ = μ, on the last stage where decisions are predicted."""


@dataclass(frozen=True, slots=True)
class _Attempt:
    """One loss pass of an update, and what became of its gradients."""

    collected: Collected
    """What the objective knew of the update, or, with a prediction, should have known."""
    reports: list[TokenReport]
    """One for each of this rank's micro-batches; none before the last stage."""
    measurement: Measurement
    made: OptimizerStep


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
        self._stage = stage = LossStage(self.config, self.output, self._groups)
        mode = "never" if stage.predictor is None else stage.objective.speculate
        self._speculation = Speculation(mode, self._groups)

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
        num_updates, known_UK = self.config.epochs * len(updates), None
        predicts = self._speculation.predicts and num_updates > (first_pass is not None)
        if predicts and self._groups.is_last_stage:
            begins = UpdateContext(num_updates=batch.version, rollout_version=None)
            known_UK = self._stage.known_statistics([u.micro_batches for u in updates], begins)
        outcomes = []
        for number in range(num_updates):
            update = updates[number % len(updates)]
            # Counted from the batch's version, so that ages are those of the run that made it.
            made = self.policy.num_updates - updates_before
            same_weights = self.policy.num_updates == batch.version
            context = UpdateContext(
                num_updates=batch.version + made,
                rollout_version=batch.version if same_weights else None,
            )
            preparation = _Preparation(
                policy=None if number else first_pass,
                num_passes=int(recomputes and number < len(updates)),
                known_K=None if known_UK is None else known_UK[number % len(updates)],
            )
            outcome, tokens = self._update(batch, update, context, preparation)
            outcomes.append(outcome)
            if self.dump is not None and self.dump.is_due(batch.step):
                with fail_together(self._groups):
                    self.dump.write(tokens, batch, number, self._groups)
        # One copy brings the measurements of the step to the host.
        measurements = [o.measurement for o in outcomes if o.measurement is not None]
        measured = iter(read_measurements(measurements, self._stage, self._groups))
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
        preparation: _Preparation,
    ) -> tuple[_Outcome, Tokens]:
        """Make one update."""
        stage, own = self._stage, update.micro_batches
        if not own:
            return _Outcome(update.counts), ()
        place, size = f"update {context.num_updates + 1}", len(batch.samples)
        num_passes, num_loss_passes = preparation.num_passes, 1
        searches = stage.collects and preparation.policy is None
        predictions: dict[str, float] = {}
        if searches and self._speculation.predicts:
            attempt, predictions = self._attempt_predicted(
                own, context, place, size, preparation.known_K
            )
            num_passes += not predictions["relied"]
            num_loss_passes += predictions["relied"] > predictions["hits"]
        else:
            num_passes += searches
            collected = Collected(own)
            if stage.collects:
                collected = self._collect(own, context, place, size, preparation.policy)
            attempt = self._attempt(collected, context, place)
        flops = update.packing["forward_flops"]
        work = {
            "forward_only_flops": num_passes * flops,
            "forward_backward_flops": 3 * num_loss_passes * flops,
        }
        update = replace(update, counts=update.counts | predictions | work)
        reports, made = attempt.reports, attempt.made
        if not made.applied:
            return _Outcome(self._skip(batch, update, reports, attempt.measurement, made)), ()
        # No reports before the last stage.
        tokens = tuple(zip(attempt.collected.micro_batches, reports, strict=False))
        counts = update.counts | update.packing
        return _Outcome(counts, attempt.measurement, made.grad_norm), tokens

    def _collect(
        self,
        micro_batches: tuple[MicroBatch, ...],
        context: UpdateContext,
        place: str,
        num_samples: int,
        policy: list[TokenLogprobs] | None = None,
    ) -> Collected:
        """Collect what the objective must know, by a pass without gradients unless one was made."""
        if policy is None:
            self.note(f"training, forward only of {place}")
            policy = self.policy.forward_only(micro_batches, self.output.read)
        if not self._groups.is_last_stage:
            return Collected(micro_batches)
        return self._stage.collect(policy, micro_batches, context, num_samples=num_samples)

    def _attempt_predicted(
        self,
        micro_batches: tuple[MicroBatch, ...],
        context: UpdateContext,
        place: str,
        num_samples: int,
        known_K: Tensor | None,
    ) -> tuple[_Attempt, dict[str, float]]:
        """Predict the decision of an update and, where it pays, rely on that, twice if it misses.

        Returns:
            The attempt that counts, and whether the prediction was right and was relied on.
        """
        speculation, predictor = self._speculation, self._stage.predictor
        relies, is_trial = speculation.relies, speculation.is_trial
        prediction = None
        if predictor is not None and known_K is not None:
            prediction = predictor.predict(known_K)
        began_s = speculation.clock_s()
        collected = Collected(micro_batches)
        if not relies:
            collected = self._collect(micro_batches, context, place, num_samples)
        collected_s = speculation.clock_s()
        attempt = self._attempt(
            collected, context, place, prediction, relies=relies, compares=is_trial
        )
        missed, differs = (bool(remark) for remark in attempt.made.remarks)
        speculation.count(missed=missed)
        if is_trial:
            loss_s = speculation.clock_s() - collected_s
            speculation.end_trial(collected_s - began_s, loss_s, differs=differs)
        if relies and missed:
            attempt = self._attempt(attempt.collected, context, f"{place} again")
        if predictor is not None and attempt.collected.total is not None:
            predictor.learn(attempt.collected.total)
        counts = {"predictions": 1.0, "hits": float(not missed), "relied": float(relies)}
        return attempt, counts

    def _attempt(
        self,
        collected: Collected,
        context: UpdateContext,
        place: str,
        prediction: Prediction | None = None,
        *,
        relies: bool = False,
        compares: bool = False,
    ) -> _Attempt:
        """Compute the gradients of an update, and make it if there is no fault.

        With ``relies`` the prediction, which the last stage has, takes the place of the decision,
        and must be right. With ``compares`` the statistics of this pass are compared with those
        that were collected.
        """
        stage = self._stage
        decision = prediction.decision if relies and prediction else collected.decision
        adds_up = relies or compares

        def loss_fn(output: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, TokenReport]:
            return stage.loss(
                output, micro_batch, decision=decision, context=context, adds_up=adds_up
            )

        self.note(f"training, forward and backward of {place}")
        reports = self.policy.forward_backward(collected.micro_batches, loss_fn)
        self.note(f"training, optimizer step of {place}")
        faults = remarks = None
        if self._groups.is_last_stage:
            total_K, faults = stage.add_up(reports, collected.faults)
            if relies:
                settled = stage.objective.decide(total_K)
                collected = replace(collected, decision=settled, total=total_K)
                reports = [replace(report, decision=settled) for report in reports]
            if prediction is not None:
                assert collected.decision is not None
                missed = prediction.misses(collected.decision)
                differs = torch.zeros_like(missed)
                if compares:
                    assert collected.total is not None
                    differs = (total_K != collected.total).any()
                remarks = torch.stack([missed, differs])
        is_local = stage.objective.needs == "micro_batch"
        num_decisions = len(collected.micro_batches) if is_local else 1
        measurement = measure(reports, stage, self._groups, num_decisions)
        verdict = judge(measurement.decisions, faults, remarks, stage, self._groups)
        # The first remark: with a wrong decision these are not the gradients of the update.
        made = self.policy.optimizer_step(verdict[: NUM_FAULTS + relies], verdict[NUM_FAULTS:])
        return _Attempt(collected, reports, measurement, made)

    def _skip(
        self,
        batch: RolloutBatch,
        update: SplitUpdate,
        reports: list[TokenReport],
        measurement: Measurement,
        made: OptimizerStep,
    ) -> dict[str, float]:
        """Return the sums of an update that was not made, or raise, as configured."""
        loss_tokens, losses, collected_tokens, statistics, refused = made.faults[:NUM_FAULTS]
        # A collection pass of its own saw other log-probs than the loss did.
        nonfinite_tokens = max(loss_tokens, collected_tokens)
        nonfinite_losses = losses + statistics
        if nonfinite_tokens == 0 and refused > 0:
            # The last stage alone has the decisions.
            is_last = self._groups.is_last_stage
            own = _explain_refusal(measurement, self._stage) if is_last else None
            raise ValueError(f"step {batch.step}: {first_message(own, self._groups)}")
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
