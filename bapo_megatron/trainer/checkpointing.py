"""Which checkpoint is the best one by ``checkpoint.best``; ``policy.checkpoint_files`` keeps it.

What a run must remember to continue, and how it is saved with the weights.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from bapo_megatron.distributed import broadcast_bytes
from bapo_megatron.policy.checkpoint import load_checkpoint
from bapo_megatron.policy.checkpoint_files import (
    BEST_NAME,
    BestCheckpoint,
    find_best,
    find_latest,
    is_there,
    name_best,
)
from bapo_megatron.telemetry.console import say
from bapo_megatron.telemetry.metrics import BEFORE_TRAINING
from bapo_megatron.trainer.summary import RunSummary, accuracies, moved_share

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from bapo_megatron.config.schema import RunConfig
    from bapo_megatron.distributed import ProcessGroups
    from bapo_megatron.policy.checkpoint import CheckpointSaver
    from bapo_megatron.policy.megatron_policy import MegatronPolicy
    from bapo_megatron.rollout.messages import RolloutSource
    from bapo_megatron.types import EvalResult, StepMetrics, UpdateResult


def take_best(
    progress: Progress, metric: str, evaluated: Mapping[str, float], groups: ProcessGroups
) -> bool:
    """Note the checkpoint of ``progress.next_step`` as the best one, if it is.

    A collective over all ranks; call it after every evaluation. The first of equal ones stays.

    Args:
        progress: Holds the best one so far, on rank 0.
        metric: ``checkpoint.best``.
        evaluated: The evaluation's metrics, on rank 0.
        groups: This rank's groups.

    Returns:
        Whether it is, on every rank: then it must be saved.
    """
    answer: bytes | None = None
    if groups.rank == 0:
        best, value = progress.best, evaluated.get(metric)
        # The value of another metric, from before a resume, compares with nothing.
        known = best.value if best is not None and best.metric == metric else None
        is_best = value is not None and (known is None or value > known)
        if is_best:
            assert value is not None
            progress.best = BestCheckpoint(f"step_{progress.next_step}", metric, value)
        answer = b"1" if is_best else b"0"
    return broadcast_bytes(answer, groups) == b"1"


def restore_best(root: Path, progress: Progress) -> None:
    """Let ``best`` name what the resumed checkpoint knows as the best one; rank 0 only.

    They differ after a kill between the two files, and where a run goes on from an older
    checkpoint: what was better later belongs to the try that was abandoned.

    Args:
        root: Directory of the run's checkpoints.
        progress: As it was loaded; ``best`` is none afterwards where its directory is gone.
    """
    if progress.best is not None and not is_there(root, progress.best.step):
        progress.best = None
    if progress.best is None:
        named = find_best(root)
        if named is not None and named.step > progress.next_step:
            (root / BEST_NAME).unlink()
    elif find_best(root) != progress.best:
        name_best(root, progress.best)


_EXIT = re.compile(r"bapo/exit_(\w+)_share")


@dataclass(slots=True)
class Progress:
    """Position and totals of a run; part of every checkpoint."""

    next_step: int = 0
    updates: int = 0
    generated_tokens: float = 0.0
    generation_s: float = 0.0
    exits: dict[str, int] = field(default_factory=dict)
    """Bound searches by exit."""
    accuracy_before: float | None = None
    answer_found_before: float | None = None
    accuracy_after: float | None = None
    answer_found_after: float | None = None
    num_prompts: int = 0
    best: BestCheckpoint | None = None
    """By ``checkpoint.best``; on rank 0."""

    def count(self, metrics: StepMetrics, results: Sequence[UpdateResult]) -> None:
        """Add one step."""
        tokens = metrics.values["rollout/generated_tokens"]
        rate = metrics.values.get("throughput/generated_tokens_per_s", 0.0)
        self.generated_tokens += tokens
        self.generation_s += tokens / rate if rate > 0 else 0.0
        self.updates += sum(not result.skipped for result in results)
        for decision in (d for result in results for d in result.decisions):
            for name, share in decision.items():
                if share and (exit_name := _EXIT.fullmatch(name)):
                    self.exits[exit_name[1]] = self.exits.get(exit_name[1], 0) + 1

    def record_evaluation(self, step: int, results: list[EvalResult]) -> None:
        """Keep the scores of the first evaluation set before training and the newest after it."""
        accuracy, answer_found = accuracies(results)
        if step == BEFORE_TRAINING:
            self.accuracy_before, self.answer_found_before = accuracy, answer_found
        else:
            self.accuracy_after, self.answer_found_after = accuracy, answer_found
        self.num_prompts = results[0].num_prompts

    def summary(self, config: RunConfig, phase_s: dict[str, float]) -> RunSummary:
        """The totals of the run; ``phase_s`` is of this process only."""
        rate: float | None = None
        if config.replay.dumps is None:
            rate = self.generated_tokens / self.generation_s if self.generation_s > 0 else 0.0
        return RunSummary(
            name=config.name,
            seed=config.seed,
            steps=self.next_step,
            updates=self.updates,
            accuracy_before=self.accuracy_before,
            accuracy_after=self.accuracy_after,
            answer_found_before=self.answer_found_before,
            answer_found_after=self.answer_found_after,
            num_prompts=self.num_prompts,
            generated_tokens=int(self.generated_tokens),
            generated_tokens_per_s=rate,
            search_moved_share=moved_share(self.exits),
            phase_s=phase_s,
        )


def save_run(
    saver: CheckpointSaver,
    policy: MegatronPolicy,
    source: RolloutSource | None,
    progress: Progress,
    *,
    is_best: bool,
) -> None:
    """Save weights, optimizer, RNG, data position, unfinished samples and totals.

    With ``is_best`` as the one that ``progress.best`` names.

    A collective over all ranks; complete or absent, whenever it is interrupted.
    """
    extra: dict[str, Any] = {}
    if source is not None:
        extra = {"progress": asdict(progress), "rollout": source.state()}
    best = (progress.best.metric, progress.best.value) if is_best and progress.best else None
    saver.save(progress.next_step, policy, extra, best)


def load_run(root: Path, policy: MegatronPolicy, source: RolloutSource | None) -> Progress:
    """Continue from the newest checkpoint; start from the beginning where there is none yet.

    Args:
        root: Directory of the run's checkpoints.
        policy: Receives the weights and the optimizer's state.
        source: Receives the data position; None on all ranks but the first, which decides which
            checkpoint is the newest: not every node sees a change of ``latest`` at once.
    """
    newest = find_latest(root) if source is not None else None
    name = broadcast_bytes(
        (newest.name if newest else "").encode() if source is not None else None, policy.groups
    ).decode()
    if not name:
        if source is not None:
            say(f"{root}: no checkpoint yet, starting at step 1")
        return Progress()
    extra = load_checkpoint(root / name, policy)
    fields = dict(extra["progress"])
    best = fields.pop("best", None)
    progress = Progress(**fields, best=BestCheckpoint(**best) if best else None)
    if source is not None:
        restore_best(root, progress)
        source.restore(extra["rollout"])
        say(f"resumed from {newest}: {progress.next_step} steps done")
    return progress


def how_to_continue(config: RunConfig) -> str:
    """What follows "interrupted" in the message about a run that was."""
    newest = find_latest(config.run_dir / "checkpoints")
    if newest is None:
        return ", before the first checkpoint"
    return f"; the same command with --resume continues from {newest}"
