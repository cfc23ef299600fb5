"""What a run must remember to continue, and how it is saved with the weights."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Console

from bapo_megatron.policy.checkpoint import find_latest, load_checkpoint, save_checkpoint
from bapo_megatron.telemetry.metrics import BEFORE_TRAINING
from bapo_megatron.trainer.summary import RunSummary, accuracies, moved_share

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from bapo_megatron.config.schema import RunConfig
    from bapo_megatron.policy.megatron_policy import MegatronPolicy
    from bapo_megatron.rollout.base import RolloutSource
    from bapo_megatron.types import EvalResult, StepMetrics, UpdateResult


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

    def count(self, metrics: StepMetrics, results: Sequence[UpdateResult]) -> None:
        """Add one step."""
        tokens = metrics.values["rollout/generated_tokens"]
        rate = metrics.values.get("throughput/generated_tokens_per_s", 0.0)
        self.generated_tokens += tokens
        self.generation_s += tokens / rate if rate > 0 else 0.0
        self.updates += sum(not result.skipped for result in results)
        seen = Counter(bounds.exit for result in results for bounds in result.bounds)
        self.exits = dict(Counter(self.exits) + seen)

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
    config: RunConfig,
    policy: MegatronPolicy,
    source: RolloutSource | None,
    progress: Progress,
) -> None:
    """Save weights, optimizer, RNG, data position, unfinished samples and totals.

    A collective over all ranks; complete or absent, whenever it is interrupted.
    """
    extra: dict[str, Any] = {}
    if source is not None:
        extra = {"progress": asdict(progress), "rollout": source.state()}
    save_checkpoint(
        config.run_dir / "checkpoints",
        progress.next_step,
        policy,
        extra=extra,
        keep_last=config.checkpoint.keep_last,
    )


def load_run(run_dir: Path, policy: MegatronPolicy, source: RolloutSource | None) -> Progress:
    """Continue from the newest checkpoint; start from the beginning where there is none yet."""
    newest = find_latest(run_dir / "checkpoints")
    if newest is None:
        if source is not None:
            Console(stderr=True).print(f"{run_dir}: no checkpoint yet, starting at step 1")
        return Progress()
    extra = load_checkpoint(newest, policy)
    progress = Progress(**extra["progress"])
    if source is not None:
        source.restore(extra["rollout"])
        Console(stderr=True).print(f"resumed from {newest}: {progress.next_step} steps done")
    return progress
