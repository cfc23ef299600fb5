"""The training loop: ``train`` reads like the diagram in docs/architecture.md.

Rank 0 owns what talks to the outside: the rollout source, the sinks, the files of the run. The
other ranks take part in the collectives.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NoReturn, Self

import torch

from bapo_megatron.config.schema import RunConfig
from bapo_megatron.config.settings import flat_settings, masked_reasons
from bapo_megatron.data.columns import DumpError
from bapo_megatron.data.dump import decode_batch
from bapo_megatron.errors import RolloutError, StoppedError
from bapo_megatron.policy import cpu_compat
from bapo_megatron.policy.adapters import peft_obstacle
from bapo_megatron.policy.hf_weights import find_kept
from bapo_megatron.policy.megatron_setup import seed_everything
from bapo_megatron.policy.model import Model
from bapo_megatron.policy.train_state import TrainState
from bapo_megatron.rollout.messages import RolloutSource
from bapo_megatron.runtime.distributed import (
    ProcessGroups,
    any_rank,
    barrier,
    broadcast_answer,
    broadcast_buffer,
    broadcast_bytes,
    fail_together,
    init_distributed,
    own_store,
    record_collectives,
    shutdown_distributed,
    write_collectives,
)
from bapo_megatron.runtime.files import atomic_write_text
from bapo_megatron.runtime.processes import stacks_appended_to
from bapo_megatron.telemetry.console import say, show
from bapo_megatron.telemetry.hang import HangWatch
from bapo_megatron.telemetry.metrics import (
    BEFORE_TRAINING,
    batch_metrics,
    eval_metrics,
    without_sampling,
)
from bapo_megatron.telemetry.run_dir import record_start
from bapo_megatron.telemetry.sinks import MetricsSinks
from bapo_megatron.trainer import reporting
from bapo_megatron.trainer.checkpointing import Checkpoints, is_due
from bapo_megatron.trainer.opening import Opening
from bapo_megatron.trainer.recompute import heldout_metrics, score_probes
from bapo_megatron.trainer.records import TokenDump, update_metrics
from bapo_megatron.trainer.scorers import frozen_scorers, reference_updater
from bapo_megatron.trainer.split import engine_routes, split_shape
from bapo_megatron.trainer.step import BatchTrainer
from bapo_megatron.trainer.stopping import STOPPED_NAME, Stopping
from bapo_megatron.types import EncodedBatch, EvalResult, RolloutBatch, StepMetrics, UpdateResult
from bapo_megatron.weight_sync.send import SyncReport, WeightSync, sync_metrics

# What all ranks do next: the first byte of rank 0's broadcast.
_DONE, _SYNC_WEIGHTS, _FAILED, _STOPPED = b"D", b"W", b"F", b"S"

_MAX_SILENCE_S = 5.0
"""Rank 0 tells the others at least this often that it is still waiting for its source, and learns
whether one of them was asked to stop."""


def train(config: RunConfig, stopping: Stopping, opening: Opening) -> None:
    """Train from the first step, or from the checkpoint to resume from, to the last step.

    Every rank calls it. Whatever it starts ends with it, also after an error or an interrupt.

    Raises:
        StoppedError: The run was asked to stop; its state is saved.
    """
    with Run.open(config, stopping, opening) as run:
        run.begin()
        stopping.listen_to_interrupts()
        for step in range(run.progress.finished_steps + 1, run.config.train.steps + 1):
            with run.timer.phase("rollout"):
                batch = run.next_batch(step)
            lr = run.state.lr
            with run.timer.phase("training"):
                results = run.train(batch)
                adapters = run.state.model.adapter_metrics()
            with run.timer.phase("evaluation"):
                run.complete_evaluation()
            with run.timer.phase("weight_sync"):
                run.generation.sync_weights()
            with run.timer.phase("evaluation"):
                evaluated = eval_metrics(run.evaluate_if_due(step)) | run.measure(step)
            values = batch_metrics(batch, run.timer.end_step()) | update_metrics(results)
            values = without_sampling(values) if config.imitates else values
            values |= adapters | {"train/lr": lr}
            run.report(StepMetrics(step, values), evaluated, results)
            with run.timer.phase("checkpoint"):  # its time is part of the next row
                run.save_if_due(step, evaluated)
        run.finish()


class Run:
    """A training run on one rank; made by ``Run.open``."""

    def __init__(
        self,
        config: RunConfig,
        groups: ProcessGroups,
        state: TrainState,
        opening: Opening,
        stopping: Stopping,
        stack: ExitStack,
    ) -> None:
        self.config, self.state, self.timer = config, state, opening.timer
        self._opening, self._groups, self._stack = opening, groups, stack
        self._demonstrations = opening.demonstrations
        self._peak_flops = reporting.find_peak_flops(config, groups)
        shape = split_shape(state.model, config.parallel, config.megatron, config.train)
        scorers = frozen_scorers(config, state.model)
        self.trainer = BatchTrainer(
            state=state,
            config=config.algorithm,
            ops=config.ops,
            temperature=config.train_temperature,
            staleness=config.rollout.staleness,
            shape=shape,
            masked_reasons=masked_reasons(flat_settings(config)),
            scorers=scorers,
            routes=engine_routes(config, state.model),
            dump=TokenDump(config.run_dir, config.train.dump_tokens),
            note=self.timer.pulse.note,
        )
        self._reference = reference_updater(config, state.model, scorers)
        self.checkpoints = Checkpoints(config, state, opening.source)
        self.progress = self.checkpoints.progress
        score = partial(score_probes, state.model, config.ops, shape)
        sync = WeightSync(
            config.rollout.weight_sync,
            config.run_dir,
            score,
            groups.device,
            sends_adapters=config.sends_adapters,
        )
        self.generation = Generation(config, state, opening, sync, stopping)
        self._sinks: MetricsSinks | None = None
        self._has_evaluation = bool(config.eval.sets) and self.generation.has_servers
        self._evaluating = 0
        """The step whose evaluation runs beside the next one; 0: none."""

    @classmethod
    @contextmanager
    def open(cls, config: RunConfig, stopping: Stopping, opening: Opening) -> Iterator[Self]:
        """Meet the other ranks and build the policy, while servers load; end it all at exit."""
        logs, source, pulse = config.run_dir / "logs", opening.source, opening.timer.pulse
        with ExitStack() as stack:
            record_collectives(logs)
            if not torch.cuda.is_available():
                cpu_compat.install()  # lets Megatron-core run without CUDA
            with stopping.joining():
                groups = init_distributed(config.parallel)
            # Only now: a rank that has met rank 0 knows that rank 0 holds the run directory.
            stack.enter_context(stacks_appended_to(logs / f"stacks_rank_{groups.rank}.txt"))
            watch = HangWatch(
                pulse,
                own_store("bapo_megatron/hang"),
                groups.rank,
                groups.world_size,
                config.log.hang_s,
                partial(write_collectives, logs, groups.rank),
            )
            stack.callback(watch.start())
            with fail_together(groups, StoppedError):
                stopping.check()
                # Before the policy needs the memory.
                if config.rollout.colocated and source is not None:
                    source.release_memory()
            if config.num_demonstrations:
                demonstrations = opening.demonstrations
                steps = None if demonstrations is None else str(demonstrations.num_steps).encode()
                config = config.with_steps(int(broadcast_bytes(steps, groups)))
            updates_per_step = config.algorithm.updates_per_batch * config.algorithm.epochs
            seed_everything(config.seed, groups)
            model = Model.build(
                config.model,
                config.parallel,
                config.megatron,
                groups,
                returns_hidden_states=config.ops.logits_chunk_tokens > 0,
            )
            model.on_micro_batch = pulse.beat
            total_updates = config.train.steps * updates_per_step
            state = TrainState.build(model, config.optimizer, config.megatron, total_updates)
            run = cls(config, groups, state, opening, stopping, stack)
            stack.callback(run.checkpoints.saver.close)
            stack.callback(run.generation.close)
            try:
                yield run
            except StoppedError:  # by all ranks alike
                shutdown_distributed()
                raise
            # Only after success: if this rank fails, the others must not notice before the process
            # has cleaned up and said why.
            shutdown_distributed()

    def begin(self) -> None:
        """Restore a checkpoint if asked, sync the weights, evaluate; errors are raised at once."""
        config = self.config
        if config.resume:
            with fail_together(self._groups, StoppedError):
                self.progress = self.checkpoints.load()
            if self._reference is not None:
                self._reference.restore(self.progress.finished_steps)
        with self.timer.phase("engine_start"):
            self.generation.wait_ready()
        self.generation.check()
        if self.generation.source is not None:
            record_start(config.run_dir, self.progress.finished_steps, self._groups.world_size)
            self._sinks = reporting.open_sinks(config, self.progress, self._opening.show_row)
            self._stack.callback(self._sinks.close)
            self._stack.callback(self._write_late, {})  # if the run ends first
            if config.log.console:
                model = self.state.model
                if kept := find_kept(model.hf, model.model_dir):
                    parts = re.findall(r"^(?:model\.)?(layers\.\d+|\w+)", "\n".join(kept), re.M)
                    names = ", ".join(sorted(set(parts)))
                    show(f"{len(kept)} tensors ({names}) are not trained; exports keep them")
        with self.timer.phase("weight_sync"):
            self.generation.sync_weights()
            self.generation.sync_reports.clear()  # not part of a step
        if config.eval.at_start and self.progress.finished_steps == 0:
            with self.timer.phase("evaluation"):
                scores = eval_metrics(self._evaluate(BEFORE_TRAINING))
                before = scores | self.measure(BEFORE_TRAINING)
            if self._sinks is not None and before:
                self._sinks.write(StepMetrics(BEFORE_TRAINING, before))
        if self.progress.unreported is not None:
            self._complete_step(self.progress.finished_steps, self.progress.unreported)
        self.generation.check()
        if self._opening.progress is not None and config.log.console:
            self._opening.progress.move_to(config.run_dir / "logs" / "progress")
        self.timer.end_step()

    def _complete_step(self, step: int, values: dict[str, float]) -> None:
        with self.timer.phase("evaluation"):
            evaluated = eval_metrics(self._evaluate(step, resume=True))
        self.generation.check()
        self.progress.unreported = None
        if self._sinks is not None:
            self._sinks.write(StepMetrics(step, values | evaluated))
        self.save_if_due(step, evaluated)

    def next_batch(self, step: int) -> RolloutBatch:
        """Collect the batch; where generation fails for good, all ranks save and raise."""
        batch = self.generation.next_batch(step)
        if batch is None:
            self._save_and_fail()
        return batch

    def train(self, batch: RolloutBatch) -> list[UpdateResult]:
        """Run a batch's updates, then make the policy the reference if that is due."""
        mixed, source = None, self._demonstrations
        if self.config.num_demonstrations and not self.config.imitates:
            encoded = None if source is None else source.collect(batch.step)
            mixed = receive_batch(encoded, self.state.model, batch.step)
        results = self.trainer.train(batch, mixed)
        if self._reference is not None:
            self._reference.after_step(batch.step)
        return results

    def evaluate_if_due(self, step: int) -> list[EvalResult]:
        """Evaluate if ``step`` is due; rank 0 gets the results.

        With ``eval.overlap`` an evaluation before the last step only begins.
        """
        if not self._must_evaluate(step):
            return []
        if not self.config.eval.overlap or step == self.config.train.steps:
            return self._evaluate(step)
        if self.generation.begin_evaluation(step):
            self._evaluating = step
        return []

    def measure(self, step: int) -> dict[str, float]:
        """Return the metrics of held-out demonstrations on rank 0, if they are due."""
        config, trainer = self.config, self.trainer
        is_now = step == BEFORE_TRAINING or is_due(config.eval, step, config.train.steps)
        names = [dataset.label for dataset in config.demonstrations.heldout]
        if not (is_now and config.num_demonstrations and names):
            return {}
        batches = self._heldout_batches()
        values = heldout_metrics(names, batches, self.state.model, trainer.output, trainer.shape)
        return {} if self._demonstrations is None else values

    def _heldout_batches(self) -> Iterator[RolloutBatch]:
        source = self._demonstrations
        count = None if source is None else str(source.num_heldout_batches).encode()
        for number in range(1, int(broadcast_bytes(count, self._groups)) + 1):
            encoded = None if source is None else source.heldout(number)
            yield receive_batch(encoded, self.state.model, number)

    def complete_evaluation(self) -> None:
        """Wait for the evaluation beside this step; abandon it if its weights are gone."""
        if not self._evaluating:
            return
        evaluated = eval_metrics(self._evaluate(self._evaluating, syncs=False))
        self._write_late(evaluated)
        self.checkpoints.name_if_best(evaluated)

    def _write_late(self, evaluated: dict[str, float]) -> None:
        """Write the metrics of the step whose evaluation runs beside the next one."""
        step, values = self._evaluating, self.progress.unreported
        self._evaluating, self.progress.unreported = 0, None
        if step and values is not None and self._sinks is not None:
            if not evaluated:
                say(f"evaluation of step {step} abandoned; its samples so far are in eval/")
            self._sinks.write(StepMetrics(step, values | evaluated))

    def _evaluate(self, step: int, *, resume: bool = False, syncs: bool = True) -> list[EvalResult]:
        """Evaluate, record and print the scores; see ``Generation.evaluate``."""
        if not self._has_evaluation:
            return []
        results = self.generation.evaluate(step, resume=resume, syncs=syncs)
        if results:
            self.progress.record_evaluation(step, results)
            if self.config.log.console:
                reporting.show_evaluation(results)
        return results

    def _must_evaluate(self, step: int) -> bool:
        return self._has_evaluation and is_due(self.config.eval, step, self.config.train.steps)

    def report(
        self, metrics: StepMetrics, evaluated: dict[str, float], results: Sequence[UpdateResult]
    ) -> None:
        """Write the step's metrics, or keep them until its evaluation is made."""
        self.progress.count(metrics, results)
        costs = reporting.cost_metrics(metrics.values, self._groups, self._peak_flops)
        if self._sinks is not None:
            others = evaluated | sync_metrics(self.generation.sync_reports) | costs
            if self._demonstrations is not None:
                epoch = metrics.step / self._demonstrations.steps_per_epoch
                others["demonstrations/epoch"] = epoch
            row = StepMetrics(metrics.step, metrics.values | others)
            is_stopped = isinstance(self.generation.failure, StoppedError)
            if self._evaluating or (is_stopped and self._must_evaluate(row.step)):
                self.progress.unreported = dict(row.values)
            else:
                self._sinks.write(row)
            self.generation.sync_reports.clear()

    def save_if_due(self, step: int, evaluated: dict[str, float]) -> None:
        """Save a checkpoint if one is due; save and end a run that is to stop."""
        self.checkpoints.end_step(step)
        generation = self.generation
        if generation.failure is None and step < self.config.train.steps:
            generation.failure = generation.agree_to_stop()
        if generation.failure is not None:
            self._save_and_fail()
        is_evaluated = self._must_evaluate(step) and not self._evaluating
        self.checkpoints.save_if_due(evaluated if is_evaluated else None)

    def _save_and_fail(self) -> NoReturn:
        """Save everything, if this run saves anything, and raise why generation ends."""
        failure = self.generation.failure
        assert failure is not None
        if self.config.checkpoint.every_steps or self.config.checkpoint.at_end:
            self.checkpoints.save()  # even if one has the same step: there are new samples
            self.checkpoints.saver.wait()
            if isinstance(failure, StoppedError):
                if self.generation.source is not None:
                    atomic_write_text(self.config.run_dir / STOPPED_NAME, f"{failure}\n")
                barrier(self._groups)  # a launcher may end all ranks when one has ended
        raise failure

    def finish(self) -> None:
        """Complete the last checkpoint, export the trained model and print the summary."""
        with self.timer.phase("checkpoint"):
            self.checkpoints.saver.wait()
        if self.config.checkpoint.at_end:
            with self.timer.phase("export"):
                self.state.model.export_hf(self.config.run_dir / "hf")
                model, directory = self.state.model, self.config.run_dir / "adapter"
                if model.lora is not None:
                    model.export_adapter(directory)
                    obstacle = peft_obstacle(model.hf, model.lora.config)
                    if self.generation.source is not None and obstacle:
                        say(f"PEFT cannot load {directory}: {obstacle}; use hf/, which is merged")
        if self.generation.source is not None:
            gpus = torch.distributed.get_world_size() if torch.cuda.is_available() else 0
            reporting.report_run(self.config, self.progress, self.timer.total_s, gpus)


def receive_batch(encoded: EncodedBatch | None, model: Model, step: int) -> RolloutBatch:
    """Send rank 0's batch of a step to all ranks and decode it there; a collective.

    Raises:
        DumpError: It is damaged, of another step, or not for this model; on all ranks.
    """
    name = broadcast_bytes(encoded.name.encode() if encoded else None, model.groups).decode()
    content = broadcast_buffer(encoded.content if encoded else None, model.groups)
    batch = decode_batch(EncodedBatch(name, content), model.hf.vocab_size)
    if batch.step != step:
        raise DumpError(f"{name}: holds step {batch.step}, not {step}; give the file its name back")
    return batch


class Generation:
    """Rank 0's rollout source for all ranks: collectives, except ``check`` and ``close``.

    Rank 0 asks the source and tells the others what to do next. No rank waits for a server inside a
    collective that has a time limit, and a run that is to stop is not kept waiting.
    """

    def __init__(
        self,
        config: RunConfig,
        state: TrainState,
        opening: Opening,
        sync: WeightSync,
        stopping: Stopping,
    ) -> None:
        self.source = opening.source
        self.failure: RolloutError | OSError | StoppedError | None = None
        """Why the run ends as soon as everything is saved; known to all ranks, which then make no
        more requests."""
        self.sync_reports: list[SyncReport] = []
        """On rank 0."""
        self.has_servers = config.has_engines
        self._is_colocated = config.rollout.colocated
        self._groups, self._state, self._sync = state.model.groups, state, sync
        self._stopping, self._pulse = stopping, opening.timer.pulse
        self._wait_on_s = min(_MAX_SILENCE_S, config.parallel.timeout_s / 4)

    def wait_ready(self) -> None:
        """Wait until the servers can take weights."""
        self._ask(lambda source: source.wait_ready(), may_lack_weights=False)

    def next_batch(self, step: int) -> RolloutBatch | None:
        """Collect the batch on rank 0 and send its bytes to every rank; None: see ``failure``."""
        encoded = self._ask(lambda source: source.collect(step))
        if self.failure is not None:
            return None
        try:
            return receive_batch(encoded, self._state.model, step)
        except DumpError as error:
            self.failure = RolloutError(str(error))  # on all ranks alike
            return None

    def sync_weights(self, *, again: bool = False) -> None:
        """Sync the current weights to the servers, with ``again`` also to those that have them.

        A ``failure`` ends the run at the next ``next_batch`` or ``save_if_due``, which save first.
        """
        if not self.has_servers or self.failure is not None:
            return
        if self._is_colocated:
            # Memory that any rank's allocator caches is missing when servers reclaim theirs.
            torch.cuda.empty_cache()
            barrier(self._groups)
            again = True  # released weights are lost, whether or not there are newer ones
        try:
            collector = None if self.source is None else self.source.weights
            report = self._sync.sync(self._state, collector, again=again)
        except (RolloutError, OSError) as error:
            self.failure = error
        else:
            if report is not None:
                self.sync_reports.append(report)

    def begin_evaluation(self, step: int) -> bool:
        """Start the evaluation beside the next batch; return whether it started."""
        self._ask(lambda source: source.begin_evaluation(step), may_lack_weights=False)
        return self.failure is None

    def evaluate(self, step: int, *, resume: bool = False, syncs: bool = True) -> list[EvalResult]:
        """Evaluate on rank 0, which gets the results; see ``_ask`` for ``syncs``."""
        return self._ask(lambda source: source.evaluate(step, resume=resume), syncs=syncs) or []

    def check(self) -> None:
        """Raise ``failure``, if there is one."""
        if self.failure is not None:
            raise self.failure

    def agree_to_stop(self) -> StoppedError | None:
        """Return why the run is to stop, if any rank knows."""
        if self.source is None:
            self._pulse.beat()
        return self._stopping.agree(lambda flag: any_rank(flag, self._groups.control))

    def close(self) -> None:
        """Stop what generates; only then leave the group of its servers, which may hang."""
        if self.source is not None:
            self.source.close()
            self._sync.close()

    def _ask[AnswerT](
        self,
        ask: Callable[[RolloutSource], AnswerT | None],
        *,
        may_lack_weights: bool = True,
        syncs: bool = True,
    ) -> AnswerT | None:
        """Return the answer of rank 0's source, on rank 0; None after a ``failure``.

        If it lacks weights, for which it answers None, all ranks sync them and it is asked again,
        unless ``syncs`` is off.
        """
        source, answer = self.source, None

        def reply() -> bytes:
            nonlocal answer
            assert source is not None, "only rank 0 has one"
            try:
                self._stopping.check()
                answer = ask(source)
                if answer is not None or not may_lack_weights:
                    return _DONE
                self._stopping.check()  # an interrupted call answers None, too
                return _SYNC_WEIGHTS
            except (RolloutError, StoppedError) as error:
                self.failure = error
                kind = _FAILED if isinstance(error, RolloutError) else _STOPPED
                return kind + str(error).encode()

        while self.failure is None:
            message = broadcast_answer(
                reply if source else None, self._groups, self._wait_on_s, self.agree_to_stop
            )
            kind, content = message[:1], message[1:]
            if kind == _SYNC_WEIGHTS and syncs:
                self.sync_weights(again=True)
            elif kind in (_DONE, _SYNC_WEIGHTS):
                break
            elif self.failure is None:
                failure = RolloutError if kind == _FAILED else StoppedError
                self.failure = failure(content.decode())
        return answer
