"""What a run must remember to continue: how it is saved with the weights, and which is the best.

``checkpoint.best`` names the metric; ``policy.checkpoint_files`` keeps the best checkpoint.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field

from bapo_megatron.algorithm.bapo import EXIT_METRICS
from bapo_megatron.errors import RolloutError
from bapo_megatron.policy.checkpoint import load_checkpoint
from bapo_megatron.policy.checkpoint_files import (
    BEST_NAME,
    ROLLOUT_NAME,
    STATE_NAME,
    BestCheckpoint,
    CheckpointError,
    DamagedError,
    begin_at,
    damage_of,
    find_best,
    find_checkpoint,
    name_best,
    other_checkpoint,
)
from bapo_megatron.policy.megatron_policy import MegatronPolicy
from bapo_megatron.rollout.messages import RolloutSource
from bapo_megatron.runtime.calls import decode_json
from bapo_megatron.runtime.distributed import ProcessGroups, broadcast_bytes, fail_together
from bapo_megatron.telemetry.console import say
from bapo_megatron.telemetry.metrics import BEFORE_TRAINING
from bapo_megatron.trainer.resume import as_checkpoint_error, choose_checkpoint
from bapo_megatron.types import EvalResult, StepMetrics, UpdateResult


@dataclass(slots=True)
class Progress:
    """Position and totals of a run; part of every checkpoint."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}
    """For ``calls.decode_json``."""
    finished_steps: Annotated[int, Field(ge=0)] = 0
    updates: int = 0
    """Optimizer updates, without skipped ones."""
    generated_tokens: float = 0.0
    """Response tokens generated for training, in a replay: by the earlier run."""
    generation_s: float = 0.0
    exits: dict[str, int] = field(default_factory=dict)
    """Bound searches by exit."""
    accuracy_before: float | None = None
    answer_found_before: float | None = None
    accuracy_after: float | None = None
    answer_found_after: float | None = None
    """avg and share of well-formed answers, right or wrong, of the first evaluation set at the
    start of this run and now; None without an evaluation."""
    num_prompts: int = 0
    """Prompts of the first evaluation set."""
    best: BestCheckpoint | None = None
    """By ``checkpoint.best``; on rank 0."""
    unreported: dict[str, float] | None = None
    """Metrics of the last step, if its evaluation was interrupted and has to be made."""

    @property
    def first_unreported(self) -> int:
        """The step whose metrics come next; 0 before the first one."""
        steps = self.finished_steps
        return steps + (self.unreported is None) if steps else BEFORE_TRAINING

    def count(self, metrics: StepMetrics, results: Sequence[UpdateResult]) -> None:
        """Add one step."""
        tokens = metrics.values["rollout/generated_tokens"]
        rate = metrics.values.get("throughput/generated_tokens_per_s", 0.0)
        self.generated_tokens += tokens
        self.generation_s += tokens / rate if rate > 0 else 0.0
        self.updates += sum(not result.skipped for result in results)
        for decision in (d for result in results for d in result.decisions):
            for name, metric in EXIT_METRICS.items():
                if decision.get(metric):
                    self.exits[name] = self.exits.get(name, 0) + 1

    def record_evaluation(self, step: int, results: list[EvalResult]) -> None:
        """Keep the scores of the first evaluation set before training and the newest after it."""
        first = results[0]
        if step == BEFORE_TRAINING:
            self.accuracy_before = first.avg_at_k
            self.answer_found_before = first.answer_found_share
        else:
            self.accuracy_after = first.avg_at_k
            self.answer_found_after = first.answer_found_share
        self.num_prompts = first.num_prompts


def load_run(
    run_dir: Path, policy: MegatronPolicy, source: RolloutSource | None, *, verify: bool
) -> Progress:
    """Continue from a checkpoint of ``run_dir``; start from the beginning where there is none yet.

    ``source`` is given on the first rank only, which decides which checkpoint it is: not every node
    sees a change of ``latest`` at once. Once it is loaded, newer ones move aside. ``verify``: see
    ``load_checkpoint``.

    Raises:
        CheckpointError: No checkpoint can be continued; raised on every rank.
    """
    root, groups = run_dir / "checkpoints", policy.groups
    name = _agree_on_checkpoint(run_dir, groups)
    if not name:
        return Progress()
    extra = load_checkpoint(root / name, policy, verify=verify)
    with damage_of(root / name):
        try:
            progress = decode_json(Progress, json.dumps(extra.get("progress")).encode())
        except ValueError as error:
            raise DamagedError(f"{STATE_NAME}: extra.progress: {error}") from error
    if source is not None:
        _restore_source(source, root / name)
    with fail_together(groups, CheckpointError), as_checkpoint_error():
        if source is not None:
            _restore_best(root, progress)
            if moved := begin_at(root, root / name):
                say(moved)
            say(f"resumed from {root / name}: {progress.finished_steps} steps done")
    return progress


def _agree_on_checkpoint(run_dir: Path, groups: ProcessGroups) -> str:
    """Return the name of the directory that rank 0 chooses; '' to start from the beginning."""
    name = b"" if groups.rank == 0 else None
    with fail_together(groups, CheckpointError):
        if groups.rank == 0:
            checkpoint, news = choose_checkpoint(run_dir, checks_latest=False)
            name = checkpoint.name.encode() if checkpoint else b""
            if news:
                say(news)
    return broadcast_bytes(name, groups).decode()


def _restore_source(source: RolloutSource, directory: Path) -> None:
    path = directory / ROLLOUT_NAME
    try:
        source.restore(path)
    except RolloutError as error:
        if not str(error).startswith(str(path.absolute())):
            raise  # not the file's fault
        raise CheckpointError(f"{error}: {other_checkpoint(directory)}") from error


def _restore_best(root: Path, progress: Progress) -> None:
    """Let ``best`` name what the resumed checkpoint knows as the best one; rank 0 only.

    They differ after a kill between the two files, and where a run goes on from an older
    checkpoint: what was better later belongs to the try that was abandoned. Where the directory of
    the best one is gone, there is none.
    """
    if progress.best is not None and not find_checkpoint(root, progress.best.step):
        progress.best = None
    if progress.best is None:
        named = find_best(root)
        if named is not None and named.step > progress.finished_steps:
            (root / BEST_NAME).unlink()
    elif find_best(root) != progress.best:
        name_best(root, progress.best)


def take_best(
    progress: Progress, metric: str, evaluated: Mapping[str, float], groups: ProcessGroups
) -> bool:
    """Note the checkpoint of ``progress.finished_steps`` as the best one, if it is.

    A collective over all ranks; call it after every evaluation. Rank 0 gives the metrics, and
    ``progress`` holds the best one so far there. The first of equal ones stays.

    Returns:
        Whether it is, on every rank: then it must be saved.
    """
    if groups.rank > 0:
        return broadcast_bytes(None, groups) == b"1"
    best, value = progress.best, evaluated.get(metric)
    # The value of another metric, from before a resume, compares with nothing.
    known = best.value if best is not None and best.metric == metric else None
    is_best = value is not None and (known is None or value > known)
    if value is not None and is_best:
        progress.best = BestCheckpoint(f"step_{progress.finished_steps}", metric, value)
    broadcast_bytes(b"1" if is_best else b"0", groups)
    return is_best
