"""One training step: the optimizer updates of one batch.

split → scorers (``trainer.scorers``) → advantages → for each epoch and update: collect what the
objective must know → decide → attempt: forward, backward, faults over all ranks → optimizer step,
or the update is refused. At the end of the step the sums of all its updates are reduced.

With ``speculation`` the loss pass runs with a predicted decision and repeats on a miss.

The host waits for the device once per loss pass, to read the gradient norm and the faults of the
update, and once at the end of the step, for its metrics.

Shape legend: E = decisions of an update, U = updates, K = entries of a statistic, D = entries of a
decision.
"""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from bapo_megatron.algorithm.advantage import Advantages
from bapo_megatron.algorithm.loss import first_nonfinite
from bapo_megatron.config.rollout import StalenessConfig
from bapo_megatron.config.schema import AlgorithmConfig, OpsConfig
from bapo_megatron.data.routes import BatchRoutes, RouteFiles
from bapo_megatron.data.token_columns import COLUMNS, scored
from bapo_megatron.policy.model import PolicyOutput
from bapo_megatron.policy.optimizer import OptimizerStep
from bapo_megatron.policy.train_state import TrainState
from bapo_megatron.runtime.distributed import (
    ProcessGroups,
    broadcast_from_last_stage,
    fail_together,
    first_message,
    reduce_over,
)
from bapo_megatron.trainer.loss import LossInputs, LossStage, UpdateContext
from bapo_megatron.trainer.recompute import measure_mismatch
from bapo_megatron.trainer.records import (
    MeasuredUpdate,
    TokenDump,
    TokenReport,
    Tokens,
    read_measurements,
)
from bapo_megatron.trainer.scorers import (
    BehaviourScorer,
    FrozenScorer,
    Scorer,
    Splits,
    sum_kl,
    with_teacher_advantages,
)
from bapo_megatron.trainer.speculation import Speculation
from bapo_megatron.trainer.split import (
    SplitShape,
    SplitUpdate,
    split_step,
    with_advantages,
    with_demonstrations,
)
from bapo_megatron.types import FinishReason, RolloutBatch, UpdateResult

NUM_FAULTS = 5
"""Counts at the beginning of a verdict, which must be 0 before an optimizer step: non-finite tokens
and losses of the loss pass, non-finite tokens and statistics of the forward-only pass, and refused
decisions. Two flags (1: yes) follow: the decision is not the predicted one; the loss pass and the
forward-only pass gave different statistics."""


@dataclass(frozen=True, slots=True)
class Update:
    """One of a batch's optimizer updates."""

    batch: RolloutBatch
    split: SplitUpdate
    context: UpdateContext
    known_K: Tensor | None
    """Statistics of its tokens at ℓ = μ, on the last stage if decisions are predicted."""

    @property
    def name(self) -> str:
        """For hang reports."""
        return f"update {self.context.num_updates + 1}"


@dataclass(frozen=True, slots=True)
class Attempt:
    """One loss pass of an update, and what became of its gradients."""

    inputs: LossInputs
    """What the objective knew of the update, or, with a prediction, should have known."""
    decisions: Tensor
    """[E, D] float64; zeros before the last stage."""
    reports: list[TokenReport]
    """One for each of this rank's micro-batches; none before the last stage."""
    step: OptimizerStep


@dataclass(eq=False, repr=False, kw_only=True)
class BatchTrainer:
    """Runs a batch's optimizer updates in order.

    Raises:
        UserCodeError: The objective or the advantage cannot be used.
    """

    state: TrainState
    """Of a model built with the ``logits_chunk_tokens`` of ``ops``."""
    config: AlgorithmConfig
    ops: OpsConfig
    temperature: float
    """Sampling temperature of the rollouts, by which logits are divided."""
    staleness: StalenessConfig
    shape: SplitShape
    masked_reasons: Set[FinishReason] = frozenset()
    """Responses that ended for one of these do not train."""
    scorers: Sequence[Scorer] = ()
    """Run in order before a batch's updates; the one that recomputes μ is put in front."""
    routes: RouteFiles | None = None
    """Where the experts that engines chose are, which the routers replay."""
    dump: TokenDump | None = None
    note: Callable[[str], None] = lambda _: None
    """Called with the name of each phase, for hang reports."""

    def __post_init__(self) -> None:
        self._model = self.state.model
        self._groups = self._model.groups
        kind = "none" if self.config.objective == "nll" else self.config.advantage
        self._advantages = Advantages(kind, self.config.baseline_shift)
        self.output = PolicyOutput.of(self._model, self.ops, self.temperature)
        self._stage = stage = LossStage(self.config, self.output, self._groups)
        can_predict = stage.loaded.collects and stage.objective.decisive is not None
        mode = stage.objective.speculate if can_predict else "never"
        self._speculation = Speculation(mode, stage.objective, self._groups)
        self._recomputes = self.config.behaviour == "recomputed"
        if self._recomputes:
            behaviour = BehaviourScorer(self._model, self.output, self.config)
            self.scorers = (behaviour, *self.scorers)

    def train(
        self, batch: RolloutBatch, demonstrations: RolloutBatch | None = None
    ) -> list[UpdateResult]:
        """Make ``epochs × updates_per_batch`` updates, in which ``demonstrations`` may join.

        Results are equal on every rank.

        Raises:
            ValueError: The batch or its routes do not fit the configuration, the objective refuses
                an update, or, with ``on_nonfinite: raise``, a value is not finite; it is named with
                its place.
        """
        routes, splits = self._split(batch)
        splits = self._score(splits, batch)
        # Without a response that is computed, scorers have left no columns to fill.
        is_scored = any(split.micro_batches for split in splits) or not scored(self.config)
        if demonstrations is not None and is_scored:
            coefficient = self.config.demonstrations.coefficient
            with fail_together(self._groups, ValueError):
                splits = with_demonstrations(splits, demonstrations, coefficient, self.shape)
        # Later epochs have other weights than the scorers' passes, which were made once.
        later = tuple(replace(split, policy=None, scored_flops=0.0) for split in splits)
        rounds = splits + later * (self.config.epochs - 1)
        num_decided = len(rounds) - self._recomputes
        known_UK = self._known_statistics(splits, batch.version) if num_decided > 0 else None
        updates_before, updates = self.state.num_updates, []
        for number, split in enumerate(rounds):
            # Counted from the batch's version, so that ages are those of the run that made it.
            num_made = self.state.num_updates - updates_before
            is_fresh = self.state.num_updates == batch.version
            update = Update(
                batch,
                split,
                UpdateContext(
                    num_updates=batch.version + num_made,
                    rollout_version=batch.version if is_fresh else None,
                    num_samples=len(batch.samples),
                ),
                known_K=None if known_UK is None else known_UK[number % len(splits)],
            )
            measured, tokens = self._update(update)
            updates.append(measured)
            if self.dump is not None:
                self.dump.write_if_due(tokens, batch, number, self._groups)
        results = read_measurements(
            updates, self._stage.numbers, self._stage.objective, self._groups
        )
        is_fresh = self.state.num_updates == batch.version
        if is_fresh and not any(split.micro_batches for split in splits):
            self.note("training, forward only (mismatch)")
            sums, maxima = measure_mismatch(self._model, self.output, self.shape, batch, routes)
            results[0] = replace(results[0], sums=results[0].sums | sums, maxima=maxima)
        if self._model.routers is not None:
            sums = self._model.routers.take_sums(self._model.hf.num_layers)
            results[0] = replace(results[0], sums=results[0].sums | sums)
        return results

    def _split(self, batch: RolloutBatch) -> tuple[BatchRoutes | None, Splits]:
        """Return what the engines chose, if that is replayed, and the step's updates."""
        with fail_together(self._groups, ValueError):  # a rank reads its own samples' routes only
            routes = None if self.routes is None else self.routes.open(batch.step, batch.sequences)
            splits = split_step(
                batch,
                self._advantages,
                self.config,
                self.staleness,
                self.shape,
                zero_advantage=self._stage.zero_advantage,
                masked_reasons=self.masked_reasons,
                routes=routes,
            )
        return routes, splits

    def _score(self, splits: Splits, batch: RolloutBatch) -> Splits:
        """Run the scorers, and compute the advantages that depend on their columns."""
        for scorer in self.scorers:
            self.note(f"training, forward only ({scorer.name})")
            splits = scorer.score(splits, batch)
            if isinstance(scorer, FrozenScorer) and scorer.keeps_hidden:
                self._stage.teacher_head = scorer.head
        kl, distillation = self.config.kl, self.config.distillation
        if kl.coefficient > 0 and kl.where == "reward":
            sum_B = sum_kl(splits, kl.kind, len(batch.samples), self._groups)
            rewards = [sample.reward for sample in batch.samples]
            # R − coefficient · Σ KL: all tokens of a response share the cost of each. The scale of
            # ``grpo`` is the divergence's, too; in a group of equal rewards it alone decides.
            reward_B = torch.tensor(rewards, dtype=torch.float64) - kl.coefficient * sum_B.cpu()
            reward_PG = reward_B.reshape(len(batch.groups), -1)
            advantages = self._advantages.compute(batch.groups, reward_PG)
            splits = with_advantages(splits, batch.samples, advantages)
        if distillation.is_used and distillation.loss == "tokens":
            splits = with_teacher_advantages(splits, distillation.coefficient, self._groups)
        return splits

    def _known_statistics(self, splits: Sequence[SplitUpdate], version: int) -> Tensor | None:
        """Return what a prediction needs from each update, [U, K], on the last stage."""
        if not self._speculation.predicts or not self._groups.is_last_stage:
            return None
        # Nothing is summed over responses.
        begin = UpdateContext(num_updates=version, rollout_version=None, num_samples=0)
        return self._stage.known_statistics([split.micro_batches for split in splits], begin)

    def _update(self, update: Update) -> tuple[MeasuredUpdate | UpdateResult, Tokens]:
        if not update.split.micro_batches:
            return UpdateResult(update.split.counts, skipped=True), ()
        inputs = self._speculation.decide(update, self._collect)
        attempts = [self._attempt(update, inputs)]
        has_missed, _ = attempts[0].step.verdict[NUM_FAULTS:]
        if inputs.is_predicted and has_missed:
            attempts.append(self._attempt(update, attempts[0].inputs, " again"))
        prediction_counts = self._speculation.learn(update, inputs, attempts[0])
        return self._conclude(update, attempts, prediction_counts)

    def _collect(self, update: Update) -> LossInputs:
        """Collect what the objective must know, by a forward-only pass unless one was made."""
        micro_batches, policy = update.split.micro_batches, update.split.policy
        if not self._stage.loaded.collects:
            return LossInputs(micro_batches)
        if policy is None:
            self.note(f"training, forward only of {update.name}")
            policy = self._model.forward_only(micro_batches, self.output.read)
        inputs, context = LossInputs(micro_batches), update.context
        if self._groups.is_last_stage:
            inputs = self._stage.collect(policy, micro_batches, context)
        return replace(inputs, num_passes=int(update.split.policy is None))

    def _attempt(self, update: Update, inputs: LossInputs, again: str = "") -> Attempt:
        stage = self._stage
        loss_fn = partial(
            stage.loss,
            decision=inputs.decision,
            context=update.context,
            with_statistics=inputs.is_predicted or inputs.is_trial,
        )
        if self.config.load_balancing_coefficient > 0 and self._model.routers is not None:
            num_tokens = update.split.counts["packing_slots"]
            self._model.routers.balance(self.config.load_balancing_coefficient, num_tokens)
        self.note(f"training, forward and backward of {update.name}{again}")
        reports = self.state.forward_backward(inputs.micro_batches, loss_fn)
        self.note(f"training, optimizer step of {update.name}{again}")
        settled, decisions, verdict = check(reports, inputs, stage, self._groups)
        # The gradients of a wrong decision are not those of the update: the first flag is a fault.
        num_faults = NUM_FAULTS + inputs.is_predicted
        step = self.state.optimizer_step(verdict, num_faults)
        return Attempt(settled, decisions, reports, step)

    def _conclude(
        self, update: Update, attempts: list[Attempt], prediction_counts: dict[str, float]
    ) -> tuple[MeasuredUpdate | UpdateResult, Tokens]:
        attempt, flops = attempts[-1], update.split.counts["forward_flops"]
        passes = 3 if self._model.lora is None else 2  # frozen weights have no gradient
        work = {
            "forward_only_flops": update.split.scored_flops + attempt.inputs.num_passes * flops,
            "forward_backward_flops": passes * len(attempts) * flops,
        }
        counts = update.split.counts | prediction_counts | work
        if not attempt.step.applied:
            return UpdateResult(counts | self._skip(update, attempt), skipped=True), ()
        sums, maxima = self._stage.numbers.add(attempt.reports, self._groups.device)
        zero_B = torch.zeros(update.context.num_samples, dtype=torch.int64, device=sums.device)
        log_weight_B = sum((report.log_weight_B for report in attempt.reports), zero_B)
        measured = MeasuredUpdate(
            counts,
            sums,
            maxima,
            attempt.decisions,
            log_weight_B,
            attempt.step.grad_norm,
            update.split.responses,
        )
        # No reports before the last stage.
        return measured, tuple(zip(attempt.inputs.micro_batches, attempt.reports, strict=False))

    def _skip(self, update: Update, attempt: Attempt) -> dict[str, float]:
        """Return the faults of an update that is skipped, as sums; or raise, as configured."""
        faults = attempt.step.verdict[:NUM_FAULTS]
        loss_tokens, losses, collected_tokens, statistics, refused = faults
        # A separate forward-only pass saw other log-probs than the loss did.
        nonfinite_tokens = max(loss_tokens, collected_tokens)
        if nonfinite_tokens == 0 and refused > 0:
            reason, objective = None, self._stage.objective
            if self._groups.is_last_stage:  # which alone has the decisions
                refused_D = next(d for d in attempt.decisions if objective.refuses(d))
                reason = objective.explain_refusal(refused_D.tolist())
            problem = first_message(reason, self._groups)
        elif self.config.on_nonfinite == "skip_update":
            return {"nonfinite_tokens": nonfinite_tokens} if nonfinite_tokens > 0 else {}
        elif nonfinite_tokens > 0:
            place = first_message(_describe_nonfinite(update, attempt.reports), self._groups) or (
                "the log-probs of the forward-only pass are not finite, those of the loss pass are"
            )
            problem = (
                f"{place} ({nonfinite_tokens:.0f} such tokens in the update); "
                "set algorithm.on_nonfinite=skip_update to leave such updates out"
            )
        elif losses + statistics > 0:
            problem = (
                f"algorithm.objective '{self.config.objective}' gave {losses + statistics:.0f} "
                "tokens with finite values a loss or gradient that is NaN or infinite; guard its "
                "divisions, logarithms and exponentials"
            )
        else:
            problem = (
                f"the gradient norm is {attempt.step.grad_norm} although every log-prob is finite; "
                "lower optimizer.lr, or set algorithm.on_nonfinite=skip_update to leave such "
                "updates out"
            )
        raise ValueError(f"step {update.batch.step}: {problem}")


def check(
    reports: Sequence[TokenReport], inputs: LossInputs, stage: LossStage, groups: ProcessGroups
) -> tuple[LossInputs, Tensor, Tensor]:
    """Return the decision of an update, and the verdict on the gradients of its loss pass.

    A collective of all ranks: one integer all-reduce over the data-parallel group of the last
    stage, and a broadcast from there over the pipeline. Earlier stages have no reports.

    Returns:
        ``inputs`` with its prediction settled; the decisions of the update, [E, D] float64; and
        the verdict, [``NUM_FAULTS`` + 2] float64 on the device, equal on all ranks.
    """
    settled = replace(inputs, prediction=None, is_predicted=False, is_trial=False)
    verdict = torch.zeros(NUM_FAULTS + 2, dtype=torch.float64, device=groups.device)
    if not groups.is_last_stage:
        num_decisions = len(inputs.micro_batches) if stage.decides_locally else 1
        decisions = verdict.new_zeros(num_decisions, stage.loaded.decision_size)
    else:
        total_K, faults = _add_up(reports, inputs.faults, stage)
        verdict[: NUM_FAULTS - 1] = faults
        if inputs.is_predicted:
            decision = stage.objective.decide(total_K)
            settled = replace(settled, decision=decision, total=total_K)
        decisions = torch.stack([report.decision for report in reports])
        if not stage.decides_locally:
            decisions = decisions[:1] if settled.decision is None else settled.decision[None]
        for decision in decisions if stage.loaded.decision_size else ():
            if (is_refused := stage.objective.refuses(decision)) is not None:
                verdict[NUM_FAULTS - 1] += is_refused
        if inputs.prediction is not None:
            assert settled.decision is not None, "it was collected, or follows from the loss pass"
            differs_D = inputs.prediction != settled.decision
            verdict[NUM_FAULTS] = differs_D[stage.objective.decisive].any()
        if inputs.is_trial:
            assert settled.total is not None, "a trial collects"
            verdict[NUM_FAULTS + 1] = (total_K != settled.total).any()
    broadcast_from_last_stage(verdict, groups)
    return settled, decisions, verdict


def _add_up(
    reports: Sequence[TokenReport], collection_faults: Tensor | None, stage: LossStage
) -> tuple[Tensor, Tensor]:
    """Return statistics [K] and faults [``NUM_FAULTS`` − 1] of a loss pass over all ranks, int64.

    Without ``with_statistics`` K is 0.
    """
    loss_faults = torch.stack([report.sums[stage.numbers.faults] for report in reports]).sum(dim=0)
    parts = [loss_faults.to(torch.int64)]
    parts.append(torch.zeros_like(parts[0]) if collection_faults is None else collection_faults)
    statistics = [report.statistics for report in reports if report.statistics is not None]
    assert len(statistics) in (0, len(reports)), "all reports have statistics, or none"
    parts += [torch.stack(statistics).sum(dim=0)] if statistics else []
    added = torch.cat(parts)
    reduce_over(stage.data_group, added)
    return added[NUM_FAULTS - 1 :], added[: NUM_FAULTS - 1]


def _describe_nonfinite(update: Update, reports: list[TokenReport]) -> str | None:
    # No reports before the last stage.
    for report, micro_batch in zip(reports, update.split.micro_batches, strict=False):
        checked = {
            "behaviour log-prob": micro_batch.behaviour_logprob_T,
            **{
                column.label: micro_batch.columns[name]
                for name, column in COLUMNS.items()
                if column.label and name in micro_batch.columns
            },
            "log-prob": report.policy.logprob_T,
            "entropy": report.policy.entropy_T,
            "advantage": micro_batch.advantage_T,
        }
        for name, values_T in checked.items():
            token = first_nonfinite(values_T, micro_batch.mask_T.to(values_T.device))
            if token is not None:
                sample = update.batch.samples[int(micro_batch.sample_T[token])]
                position, value = int(micro_batch.position_T[token]), float(values_T[token])
                prompt = sample.prompt.prompt_id
                return f"{sample.place} ({prompt}), response token {position}: {name} is {value}"
    return None
