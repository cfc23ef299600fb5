"""Saves and restores the state of a run with its weights, and tracks the best checkpoint.

``checkpoint.best`` names the metric; ``policy.checkpoint_files`` keeps the best checkpoint.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated

from pydantic import Field

from bapo_megatron.config.evaluation import EvalConfig
from bapo_megatron.config.schema import CheckpointConfig, RunConfig
from bapo_megatron.errors import RolloutError
from bapo_megatron.policy import checkpoint_files as files
from bapo_megatron.policy.checkpoint import CheckpointSaver, load_checkpoint
from bapo_megatron.policy.train_state import TrainState
from bapo_megatron.rollout.messages import RolloutSource
from bapo_megatron.runtime.calls import decode_json
from bapo_megatron.runtime.distributed import any_rank, broadcast_bytes, fail_together
from bapo_megatron.telemetry.console import say
from bapo_megatron.telemetry.metrics import BEFORE_TRAINING
from bapo_megatron.trainer.opening import as_checkpoint_error, choose_checkpoint, note_save
from bapo_megatron.types import EvalResult, StepMetrics, UpdateResult


@dataclass(slots=True)
class RunProgress:
    """Position and totals of a run; part of every checkpoint."""

    finished_steps: Annotated[int, Field(ge=0)] = 0
    updates: int = 0
    """Optimizer updates, without skipped ones."""
    generated_tokens: float = 0.0
    """Response tokens generated for training, in a replay: by the earlier run."""
    generation_s: float = 0.0
    accuracy_before: float | None = None
    accuracy_after: float | None = None
    """avg@k of the first evaluation set at the start of this run and now; None without one."""
    num_prompts: int = 0
    """Prompts of the first evaluation set."""
    best: files.BestCheckpoint | None = None
    """By ``checkpoint.best``; on rank 0."""
    unreported: dict[str, float] | None = None
    """Metrics of the last step, if its evaluation was interrupted and is still to be made."""

    @property
    def first_unreported(self) -> int:
        """The step whose metrics are reported next; 0 before the first one."""
        steps = self.finished_steps
        return steps + (self.unreported is None) if steps else BEFORE_TRAINING

    def count(self, metrics: StepMetrics, results: Sequence[UpdateResult]) -> None:
        """Add one step."""
        tokens = metrics.values.get("rollout/generated_tokens", 0.0)
        rate = metrics.values.get("throughput/generated_tokens_per_s", 0.0)
        self.generated_tokens += tokens
        self.generation_s += tokens / rate if rate > 0 else 0.0
        self.updates += sum(not result.skipped for result in results)

    def record_evaluation(self, step: int, results: list[EvalResult]) -> None:
        """Keep the scores of the first evaluation set before training and the newest after it."""
        self.num_prompts = results[0].num_prompts
        if step == BEFORE_TRAINING:
            self.accuracy_before = results[0].avg_at_k
        else:
            self.accuracy_after = results[0].avg_at_k


def is_due(section: EvalConfig | CheckpointConfig, step: int, last_step: int) -> bool:
    """Whether the section's evaluation or checkpoint is due after ``step``."""
    is_nth = section.every_steps > 0 and step % section.every_steps == 0
    return is_nth or (step == last_step and section.at_end)


class Checkpoints:
    """Saves a run and continues it; every method is a collective over all ranks."""

    def __init__(self, config: RunConfig, state: TrainState, source: RolloutSource | None) -> None:
        self._config, self._last_step = config.checkpoint, config.train.steps
        self._run_dir, self._root = config.run_dir, config.run_dir / "checkpoints"
        self._state, self._groups, self._source = state, state.model.groups, source
        self.progress = RunProgress()
        on_publish = partial(note_save, config.run_dir)
        self.saver = CheckpointSaver(self._root, config.checkpoint, on_publish=on_publish)

    def load(self) -> RunProgress:
        """Continue from a checkpoint; start from the beginning if there is none yet.

        Newer ones move aside, once it is loaded.

        Raises:
            CheckpointError: No checkpoint can be continued; raised on every rank.
        """
        chosen: bytes | None = None  # by rank 0: not every node sees a new ``latest`` at once
        with fail_together(self._groups, files.CheckpointError):
            if self._groups.rank == 0:
                checkpoint, news = choose_checkpoint(self._run_dir, checks_latest=False)
                chosen = checkpoint.name.encode() if checkpoint else b""
                if news:
                    say(news)
        name = broadcast_bytes(chosen, self._groups).decode()
        if not name:
            return self.progress
        directory = self._root / name
        extra = load_checkpoint(directory, self._state, verify=self._config.verify)
        with files.damage_of(directory):
            try:
                self.progress = decode_json(RunProgress, json.dumps(extra.get("progress")).encode())
            except ValueError as error:
                raise files.DamagedError(f"{files.STATE_NAME}: extra.progress: {error}") from error
        if self._source is not None:
            path = directory / files.ROLLOUT_NAME
            try:
                self._source.restore(path)
            except RolloutError as error:
                if not str(error).startswith(str(path.absolute())):
                    raise  # not the file's fault
                remedy = files.other_checkpoint(directory)
                raise files.CheckpointError(f"{error}; {remedy}") from error
        with fail_together(self._groups, files.CheckpointError), as_checkpoint_error():
            if self._source is not None:
                self._restore_best()
                if moved := files.begin_at(self._root, directory):
                    say(moved)
                steps, last = self.progress.finished_steps, self._last_step
                rest = f"; train.steps is {last}: none is left, raise it to train on"
                say(f"resumed from {directory}: {steps} steps done{rest if steps >= last else ''}")
        return self.progress

    def _restore_best(self) -> None:
        """Reset ``best`` to what it was at the resumed checkpoint; rank 0 only.

        They differ after a kill between the two files, and if a run continues from an older
        checkpoint: what was better later is abandoned.
        """
        root, progress = self._root, self.progress
        if progress.best is not None and not files.find_checkpoint(root, progress.best.step):
            progress.best = None
        if progress.best is None:
            best = files.find_best(root)
            if best is not None and best.step > progress.finished_steps:
                (root / files.BEST_NAME).unlink()
        elif files.find_best(root) != progress.best:
            files.name_best(root, progress.best)

    def end_step(self, step: int) -> None:
        """Count a step, and publish a checkpoint that was written in the background."""
        self.saver.poll()
        self.progress.finished_steps = step

    def save_if_due(self, evaluated: Mapping[str, float] | None) -> None:
        """Save after every ``checkpoint.every_steps`` steps, the last one, and the best one.

        ``evaluated`` are the metrics of the step's evaluation, on rank 0; None if it has none.
        """
        due = is_due(self._config, self.progress.finished_steps, self._last_step)
        is_best = evaluated is not None and self._is_best(evaluated)
        if due or is_best:
            self.save(is_best=is_best)

    def save(self, *, is_best: bool = False) -> None:
        """Save everything, with ``is_best`` as the checkpoint that ``progress.best`` names."""
        self.saver.save(
            self.progress.finished_steps,
            self._state,
            {"progress": asdict(self.progress)},
            self.progress.best if is_best else None,
            save_rollout=None if self._source is None else self._source.save,
        )

    def name_if_best(self, evaluated: Mapping[str, float]) -> None:
        """Name the checkpoint of the last step, which was saved before it was evaluated."""
        if self._is_best(evaluated):
            self.saver.wait()  # it may still be written
            with fail_together(self._groups):
                if self.progress.best is not None and self._source is not None:
                    files.name_best(self._root, self.progress.best)

    def _is_best(self, evaluated: Mapping[str, float]) -> bool:
        """Record the last step's checkpoint as the best one, if it is; return that on every rank.

        Rank 0 has the metrics, and the best one so far. The first of equal ones stays.
        """
        metric = self._config.best
        if not metric:
            return False
        best, value, is_best = self.progress.best, evaluated.get(metric), False
        if evaluated and value is None:
            say(
                f"checkpoint.best: step {self.progress.finished_steps} cannot be the best, since "
                f"its evaluation has no {metric} (docs/evaluation.md); choose another score"
            )
        # A value of another metric, from before a resume, is not comparable.
        if value is not None and (best is None or best.metric != metric or value > best.value):
            name, is_best = f"step_{self.progress.finished_steps}", True
            self.progress.best = files.BestCheckpoint(name, metric, value)
        return any_rank(is_best, self._groups.control)
