"""``bapo-megatron generate``: sample the training prompts without a trainer."""

import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, NamedTuple, Self

import typer
from rich.console import Console
from rich.table import Table

from bapo_megatron.commands.options import ConfigArgument, OverridesArgument, load
from bapo_megatron.config.check import check_generate_config
from bapo_megatron.config.rollout import ReplayConfig
from bapo_megatron.config.schema import RunConfig
from bapo_megatron.data.dump import decode_batch
from bapo_megatron.engine.base import START_VERSION
from bapo_megatron.engine.load import load_kind
from bapo_megatron.files import atomic_write_text
from bapo_megatron.rollout.client import CollectorClient
from bapo_megatron.telemetry.console import ProgressLine, uncut_console
from bapo_megatron.telemetry.metrics import is_solved
from bapo_megatron.types import FinishReason, RolloutBatch, RolloutStats


def command(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    steps: Annotated[int, typer.Option(min=1, help="Batches to generate.")] = 1,
) -> None:
    """Generate batches with model.path and the training prompts, without a trainer."""
    generate_batches(load(config, overrides), steps).print(uncut_console())


class BatchTotals(NamedTuple):
    """Counts and sums of one batch; all that is kept of it in memory."""

    groups: int
    samples: int
    response_tokens: int
    response_tokens_max: int
    truncated: int
    answers_found: int
    reward_sum: float
    solved_groups: int
    mixed_groups: int
    cost: RolloutStats

    @classmethod
    def of(cls, batch: RolloutBatch) -> Self:
        """Count ``batch``."""
        samples = batch.samples
        lengths = [sample.num_sampled for sample in samples]
        rewards = [[sample.reward for sample in group.samples] for group in batch.groups]
        return cls(
            groups=len(batch.groups),
            samples=len(samples),
            response_tokens=sum(lengths),
            response_tokens_max=max(lengths),
            truncated=sum(sample.finish_reason is FinishReason.LENGTH for sample in samples),
            answers_found=sum(sample.answer_found for sample in samples),
            reward_sum=math.fsum(sample.reward for sample in samples),
            solved_groups=sum(is_solved(group) for group in batch.groups),
            mixed_groups=sum(min(group) < max(group) for group in rewards),
            cost=batch.stats,
        )


@dataclass(frozen=True, slots=True)
class GenerationSummary:
    """What was generated and what it cost; the keys of ``generate.json``."""

    steps: int
    """Batches."""
    groups: int
    samples: int
    response_tokens_mean: float
    response_tokens_max: int
    truncated_share: float
    """Share of samples that reached ``max_response_tokens``."""
    answer_found_share: float
    reward_mean: float
    solved_groups_share: float
    """Share of groups whose samples are all correct."""
    mixed_groups_share: float
    """Share of groups with different rewards: those that teach something."""
    generated_tokens: int
    """Response tokens received, including those of samples that are in no batch."""
    generation_s: float
    """Wall time in which they were received."""
    generated_tokens_per_s: float
    wall_s: float
    """Wall time since the servers were ready; includes grading and writing."""
    resumed_samples: int
    unfinished_samples: int
    """Samples in the buffer after the last batch: they are in no dump."""
    dropped_groups: int
    lost_requests: int
    """Requests that were continued on another server because theirs failed."""
    reward_timeouts: int

    def print(self, console: Console) -> None:
        """Print a table."""
        table = Table(title="Generation", show_header=False)
        table.add_column("what")
        table.add_column("value", justify="right")
        for what, value in (
            ("groups (samples)", f"{self.groups:,} ({self.samples:,})"),
            ("response tokens, mean", f"{self.response_tokens_mean:,.1f}"),
            ("response tokens, longest", f"{self.response_tokens_max:,}"),
            ("truncated", f"{self.truncated_share:.1%}"),
            ("answers found", f"{self.answer_found_share:.1%}"),
            ("mean reward", f"{self.reward_mean:.4f}"),
            ("solved groups", f"{self.solved_groups_share:.1%}"),
            ("mixed groups", f"{self.mixed_groups_share:.1%}"),
            ("generated tokens", f"{self.generated_tokens:,}"),
            ("generated tokens/s", f"{self.generated_tokens_per_s:,.0f}"),
            ("time", f"{self.wall_s:.1f} s"),
            ("resumed samples", f"{self.resumed_samples:,}"),
            ("unfinished samples at the end", f"{self.unfinished_samples:,}"),
            ("dropped groups", f"{self.dropped_groups:,}"),
            ("requests of lost servers", f"{self.lost_requests:,}"),
            ("graders out of time", f"{self.reward_timeouts:,}"),
        ):
            table.add_row(what, value)
        console.print(table)


def generate_batches(config: RunConfig, steps: int) -> GenerationSummary:
    """Generate ``steps`` batches (at least one) with the weights in ``config.model.path``.

    Starts servers unless ``rollout.servers`` names some. With ``rollout.dump``, each batch is
    complete as ``<run_dir>/rollouts/step_<n>.parquet`` before the next one begins. The statistics
    are written to ``<run_dir>/generate.json`` at the end.

    Raises:
        ValueError: The configuration cannot be used, or the run directory holds other dumps.
        RolloutError: Generation failed; earlier batches are kept.
    """
    check_generate_config(config)
    load_kind(config.rollout.engine).check(config)
    dumps = config.run_dir / "rollouts"
    if any(dumps.glob("step_*.parquet")):
        raise ValueError(f"{dumps} already holds rollouts; change run_dir, or move them away")
    config.run_dir.mkdir(parents=True, exist_ok=True)
    # Nothing is generated for later steps, nobody else needs the servers' memory, and every group
    # is dumped once.
    train = config.train.model_copy(update={"steps": steps})
    rollout = config.rollout.model_copy(update={"colocated": False})
    config = config.model_copy(
        update={"train": train, "rollout": rollout, "replay": ReplayConfig()}
    )
    totals: list[BatchTotals] = []
    with ProgressLine() as progress:
        source = CollectorClient(config, on_progress=progress.update)
        try:
            source.start()
            source.ensure_weights()
            started_s = time.monotonic()
            for step in range(steps):
                while (encoded := source.collect(step)) is None:  # every server had to restart
                    source.sync_weights(config.model.path, START_VERSION)
                totals.append(BatchTotals.of(decode_batch(encoded)))
            wall_s = time.monotonic() - started_s
        finally:
            source.close()
    summary = summarise(totals, wall_s)
    report = json.dumps(asdict(summary), indent=2)
    atomic_write_text(config.run_dir / "generate.json", report + "\n")
    return summary


def summarise(totals: Sequence[BatchTotals], wall_s: float) -> GenerationSummary:
    """Sum up batches, of which there is at least one; ``wall_s`` is the time of all of them."""
    stats = [batch.cost for batch in totals]
    groups = sum(batch.groups for batch in totals)
    samples = sum(batch.samples for batch in totals)
    generated_tokens = sum(cost.generated_tokens for cost in stats)
    generation_s = math.fsum(cost.generation_s for cost in stats)
    return GenerationSummary(
        steps=len(totals),
        groups=groups,
        samples=samples,
        response_tokens_mean=sum(batch.response_tokens for batch in totals) / samples,
        response_tokens_max=max(batch.response_tokens_max for batch in totals),
        truncated_share=sum(batch.truncated for batch in totals) / samples,
        answer_found_share=sum(batch.answers_found for batch in totals) / samples,
        reward_mean=math.fsum(batch.reward_sum for batch in totals) / samples,
        solved_groups_share=sum(batch.solved_groups for batch in totals) / groups,
        mixed_groups_share=sum(batch.mixed_groups for batch in totals) / groups,
        generated_tokens=generated_tokens,
        generation_s=generation_s,
        generated_tokens_per_s=generated_tokens / generation_s if generation_s > 0 else 0.0,
        wall_s=wall_s,
        resumed_samples=sum(cost.resumed_samples for cost in stats),
        unfinished_samples=stats[-1].unfinished_samples,
        dropped_groups=sum(sum(cost.dropped_groups.values()) for cost in stats),
        lost_requests=sum(cost.lost_requests for cost in stats),
        reward_timeouts=sum(cost.reward_timeouts for cost in stats),
    )
