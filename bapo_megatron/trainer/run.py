"""Everything that a running training holds, and the actions that the loop calls.

Rank 0 owns what talks to the outside: the rollout source, the sinks, the files of the run. The
other ranks take part in the collectives.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from typing import NoReturn, Self

import torch

from bapo_megatron.config.schema import RunConfig
from bapo_megatron.config.settings import flat_settings, masked_reasons, public_settings
from bapo_megatron.errors import StoppedError
from bapo_megatron.policy import cpu_compat
from bapo_megatron.policy.checkpoint import CheckpointSaver
from bapo_megatron.policy.checkpoint_files import name_best
from bapo_megatron.policy.megatron_policy import MegatronPolicy
from bapo_megatron.runtime.distributed import (
    ProcessGroups,
    barrier,
    fail_together,
    init_distributed,
    own_store,
    record_collectives,
    shutdown_distributed,
    write_collectives,
)
from bapo_megatron.runtime.files import atomic_write_text
from bapo_megatron.runtime.processes import stacks_appended_to
from bapo_megatron.runtime.versions import own_software
from bapo_megatron.telemetry.console import Pulse, say, show
from bapo_megatron.telemetry.hang import HangWatch
from bapo_megatron.telemetry.metrics import BEFORE_TRAINING, eval_metrics
from bapo_megatron.telemetry.sinks import MetricsSinks
from bapo_megatron.telemetry.starts import record_start
from bapo_megatron.trainer.checkpointing import Progress, load_run, take_best
from bapo_megatron.trainer.costs import cost_metrics, find_peak_flops
from bapo_megatron.trainer.generation import Generation
from bapo_megatron.trainer.opening import Opening
from bapo_megatron.trainer.recompute import ProbeScorer
from bapo_megatron.trainer.records import TokenDump
from bapo_megatron.trainer.resume import note_save
from bapo_megatron.trainer.sample_table import sample_rows
from bapo_megatron.trainer.split import split_shape
from bapo_megatron.trainer.step import BatchTrainer
from bapo_megatron.trainer.stopping import STOPPED_NAME, Stopping
from bapo_megatron.trainer.summary import report_run, show_evaluation
from bapo_megatron.types import (
    EvalResult,
    RolloutBatch,
    StepMetrics,
    UpdateResult,
)
from bapo_megatron.weight_sync.send import WeightSync, sync_metrics


class Run:
    """A training run on one rank; made by ``Run.open``."""

    def __init__(
        self,
        config: RunConfig,
        groups: ProcessGroups,
        policy: MegatronPolicy,
        opening: Opening,
        stopping: Stopping,
        stack: ExitStack,
    ) -> None:
        """Put the parts together."""
        self.config = config
        self.policy = policy
        self.timer = timer = opening.timer
        self._progress_line, self._show_row = opening.progress, opening.show_row
        self._peak_flops = find_peak_flops(config, groups)
        shape = split_shape(policy, config.parallel, config.megatron, config.train)
        self.trainer = BatchTrainer(
            policy=policy,
            config=config.algorithm,
            ops=config.ops,
            temperature=config.rollout.temperature,
            staleness=config.rollout.staleness,
            shape=shape,
            masked_reasons=masked_reasons(flat_settings(config)),
            dump=TokenDump(config.run_dir, config.train.dump_tokens),
            note=timer.pulse.note,
        )
        self.progress = Progress()
        self.saver = CheckpointSaver(
            config.run_dir / "checkpoints",
            config.checkpoint,
            on_publish=partial(note_save, config.run_dir),
        )
        self._groups = groups
        self._stack = stack
        self._sinks: MetricsSinks | None = None
        self._evaluating = 0
        """The step whose evaluation runs beside the next one; 0: none."""
        sync = WeightSync(
            config.rollout.weight_sync,
            config.run_dir,
            ProbeScorer(policy, config.ops, shape).score,
            groups.device,
        )
        self._generation = Generation(
            config, groups, policy, opening.source, sync, stopping, timer.pulse
        )

    @classmethod
    @contextmanager
    def open(cls, config: RunConfig, stopping: Stopping, opening: Opening) -> Iterator[Self]:
        """Meet the other ranks and build the policy, while servers load; end it all at exit."""
        logs, source, timer = config.run_dir / "logs", opening.source, opening.timer
        with ExitStack() as stack:
            record_collectives(logs)
            if not torch.cuda.is_available():
                cpu_compat.install()  # lets Megatron-core run without CUDA
            with stopping.joining():
                groups = init_distributed(config.parallel)
            # Only now: a rank that has met rank 0 knows that it holds the run directory.
            stack.enter_context(stacks_appended_to(logs / f"stacks_rank_{groups.rank}.txt"))
            stack.callback(_watch_for_hangs(config, groups, timer.pulse))
            with fail_together(groups, StoppedError):
                if (stopped := stopping.error()) is not None:
                    raise stopped
                # Before the policy needs the memory.
                if config.rollout.colocated and source is not None:
                    source.release_memory()
            policy = _build_policy(config, groups)
            policy.on_micro_batch = timer.pulse.beat
            run = cls(config, groups, policy, opening, stopping, stack)
            stack.callback(run.saver.close)
            stack.callback(run._generation.close)
            try:
                yield run
            except StoppedError:  # by all ranks alike
                shutdown_distributed()
                raise
            # Only after success: where this rank fails, the others learn it when the process has
            # cleaned up and said why, not while it does.
            shutdown_distributed()

    def begin(self) -> None:
        """Restore a checkpoint if asked, push the weights, evaluate.

        Nothing comes that could be saved, so what ends the run here is raised at once.
        """
        if self.config.resume:
            run_dir, verify = self.config.run_dir, self.config.checkpoint.verify
            with fail_together(self._groups, StoppedError):
                source = self._generation.source
                self.progress = load_run(run_dir, self.policy, source, verify=verify)
        with self.timer.phase("server_start"):
            self._generation.wait_ready()
        self._raise_failure()
        if self._generation.source is not None:
            finished = self.progress.finished_steps
            record_start(self.config.run_dir, finished, self._groups.world_size)
            dumps = self.config.replay.dumps or self.config.run_dir / "rollouts"
            self._sinks = MetricsSinks(
                self.config.run_dir,
                self.config.name,
                self.config.log,
                first_step=self.progress.first_unreported,
                total_steps=self.config.train.steps,
                settings=public_settings(self.config) | own_software().settings(),
                sample_rows=partial(sample_rows, dumps),
                show_row=self._show_row,
            )
            self._stack.callback(self._sinks.close)
            self._stack.callback(self._write_late, {})  # where the run ends before
            if self.config.log.console:
                kernels = self.trainer.output.kernels.name
                show(f"loss stage: {kernels} kernels")
        with self.timer.phase("weight_sync"):
            self.push_weights()
            self._generation.pushes.clear()  # no part of a step
        if self.config.eval.at_start and self.progress.finished_steps == 0:
            with self.timer.phase("evaluation"):
                before = self._evaluate(BEFORE_TRAINING)
            if self._sinks is not None and before:
                self._sinks.write(StepMetrics(BEFORE_TRAINING, eval_metrics(before)))
        if self.progress.unreported is not None:
            self._complete_step(self.progress.finished_steps, self.progress.unreported)
        self._raise_failure()
        if self._progress_line is not None and self.config.log.console:
            self._progress_line.move_to(self.config.run_dir / "logs" / "progress")
        self.timer.end_step()

    def _complete_step(self, step: int, values: dict[str, float]) -> None:
        """Make the evaluation that was interrupted, and write the step's metrics."""
        with self.timer.phase("evaluation"):
            evaluated = eval_metrics(self._evaluate(step, resume=True))
        self._raise_failure()
        self.progress.unreported = None
        if self._sinks is not None:
            self._sinks.write(StepMetrics(step, values | evaluated))
        self.save_if_due(step, evaluated)

    def _raise_failure(self) -> None:
        if self._generation.failure is not None:
            raise self._generation.failure

    def next_batch(self, step: int) -> RolloutBatch:
        """Collect the batch of ``step``.

        Where generation fails for good, everything is saved before all ranks raise.
        """
        batch = self._generation.next_batch(step)
        if batch is None:
            self._save_and_fail()
        return batch

    def _save_and_fail(self) -> NoReturn:
        """Save everything, if this run saves anything, and raise why generation ends.

        It saves also where the newest checkpoint has the same steps: samples have come since.
        """
        failure = self._generation.failure
        assert failure is not None
        if self.config.checkpoint.every_steps or self.config.checkpoint.at_end:
            self._save()
            self.saver.wait()
            if isinstance(failure, StoppedError):
                if self._generation.source is not None:
                    atomic_write_text(self.config.run_dir / STOPPED_NAME, f"{failure}\n")
                barrier(self._groups)  # a launcher may end all ranks when one has ended
        raise failure

    def _save(self, *, is_best: bool = False) -> None:
        """Save weights, optimizer, RNG, data position, unfinished samples and totals.

        A collective over all ranks; complete or absent, whenever it is interrupted. ``is_best``
        makes it the one that ``progress.best`` names.
        """
        source = self._generation.source
        self.saver.save(
            self.progress.finished_steps,
            self.policy,
            {"progress": asdict(self.progress)},
            self.progress.best if is_best else None,
            save_rollout=None if source is None else source.save,
        )

    def push_weights(self) -> None:
        """Give the current weights to the servers, if there are any.

        A failure ends the run at the next ``next_batch`` or ``save_if_due``, which save first.
        """
        self._generation.push_weights()

    def evaluate_if_due(self, step: int) -> list[EvalResult]:
        """Evaluate if ``step`` is due: a collective over all ranks, with the results on rank 0.

        With ``eval.overlap`` the evaluation only begins, except that of the last step; see
        ``complete_evaluation``.
        """
        if not self._must_evaluate(step):
            return []
        if not self.config.eval.overlap or step == self.config.train.steps:
            return self._evaluate(step)

        if self._generation.begin_evaluation(step):
            self._evaluating = step
        return []

    def complete_evaluation(self) -> None:
        """Wait for the evaluation that runs beside this step, and write the metrics of its own.

        A collective over all ranks, before new weights are pushed: those that it needs are still in
        the servers, but no longer in the policy. Where no server has them any more, it is given up.
        """
        if not self._evaluating:
            return
        metric = self.config.checkpoint.best
        evaluated = eval_metrics(self._evaluate(self._evaluating, pushes=False))
        self._write_late(evaluated)
        if metric and take_best(self.progress, metric, evaluated, self._groups):
            self.saver.wait()  # its checkpoint may still be written
            with fail_together(self._groups):
                if self.progress.best is not None and self._generation.source is not None:
                    name_best(self.config.run_dir / "checkpoints", self.progress.best)

    def _write_late(self, evaluated: dict[str, float]) -> None:
        """Write the metrics of the step whose evaluation runs beside the next one."""
        step, values = self._evaluating, self.progress.unreported
        self._evaluating, self.progress.unreported = 0, None
        if step and values is not None and self._sinks is not None:
            if not evaluated:
                say(f"the evaluation of step {step} is given up; what it sampled is in eval/")
            self._sinks.write(StepMetrics(step, values | evaluated))

    def _must_evaluate(self, step: int) -> bool:
        evaluation, has_servers = self.config.eval, self._generation.has_servers
        is_due = self._is_due(step, evaluation.every_steps, evaluation.at_end)
        return bool(evaluation.sets) and has_servers and is_due

    def _is_due(self, step: int, every_steps: int, at_end: bool) -> bool:
        is_last = step == self.config.train.steps
        return (every_steps > 0 and step % every_steps == 0) or (is_last and at_end)

    def save_if_due(self, step: int, evaluated: dict[str, float]) -> None:
        """Save a checkpoint after every ``checkpoint.every_steps`` steps and after the last one.

        It also saves where the step's evaluation, whose metrics rank 0 gives, is the best one by
        ``checkpoint.best``, and completes checkpoints that earlier steps began to write in the
        background. A run that is to stop before its last step is saved and ends.
        """
        self.saver.poll()
        self.progress.finished_steps = step
        generation = self._generation
        if generation.failure is None and step < self.config.train.steps:
            generation.failure = generation.agree_to_stop()
        if generation.failure is not None:
            self._save_and_fail()
        checkpoint = self.config.checkpoint
        due = self._is_due(step, checkpoint.every_steps, checkpoint.at_end)
        is_best = False
        if checkpoint.best and self._must_evaluate(step) and not self._evaluating:
            is_best = take_best(self.progress, checkpoint.best, evaluated, self._groups)
        if due or is_best:
            self._save(is_best=is_best)

    def report(
        self, metrics: StepMetrics, evaluated: dict[str, float], results: Sequence[UpdateResult]
    ) -> None:
        """Write the step's metrics (rank 0) and count what the summary reports; a collective.

        If its evaluation was interrupted, or runs beside the next step, they are part of the
        checkpoint instead.
        """
        self.progress.count(metrics, results)
        costs = cost_metrics(metrics.values, self._groups, self._peak_flops)
        if self._sinks is not None:
            others = evaluated | sync_metrics(self._generation.pushes) | costs
            row = StepMetrics(metrics.step, metrics.values | others)
            is_stopped = isinstance(self._generation.failure, StoppedError)
            if self._evaluating or (is_stopped and self._must_evaluate(row.step)):
                self.progress.unreported = dict(row.values)
            else:
                self._sinks.write(row)
            self._generation.pushes.clear()

    def finish(self) -> None:
        """Complete the last checkpoint, export the trained model and print the summary."""
        with self.timer.phase("checkpoint"):
            self.saver.wait()
        if self.config.checkpoint.at_end:
            with self.timer.phase("export"):
                self.policy.export_hf(self.config.run_dir / "hf")
        if self._generation.source is not None:
            report_run(self.config, self.progress, self.timer.total_s)

    def _evaluate(
        self, step: int, *, resume: bool = False, pushes: bool = True
    ) -> list[EvalResult]:
        """Evaluate, and say and note how good the policy is; see ``Generation.evaluate``."""
        if not self.config.eval.sets or not self._generation.has_servers:
            return []
        found = self._generation.evaluate(step, resume=resume, pushes=pushes)
        if not found:
            return []
        self.progress.record_evaluation(step, found)
        if self.config.log.console:
            show_evaluation(found)
        return found


def _watch_for_hangs(config: RunConfig, groups: ProcessGroups, pulse: Pulse) -> Callable[[], None]:
    """Watch this rank's progress from now on; return what ends it."""
    write_more = partial(write_collectives, config.run_dir / "logs", groups.rank)
    store = own_store("bapo_megatron/hang")
    watch = HangWatch(pulse, store, groups.rank, groups.world_size, config.log.hang_s, write_more)
    return watch.start()


def _build_policy(config: RunConfig, groups: ProcessGroups) -> MegatronPolicy:
    updates = config.algorithm.updates_per_batch * config.algorithm.epochs
    return MegatronPolicy.build(
        config.model,
        config.parallel,
        config.optimizer,
        megatron=config.megatron,
        total_updates=config.train.steps * updates,
        seed=config.seed,
        groups=groups,
        returns_hidden_states=config.ops.logits_chunk_tokens > 0,
    )
