"""``bapo-megatron generate``: sample the training prompts without a trainer."""

import json
import math
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
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
from bapo_megatron.types import FinishReason, RolloutBatch

_ROWS = {
    "groups (samples)": "{groups:,} ({samples:,})",
    "response tokens, mean": "{response_tokens_mean:,.1f}",
    "response tokens, longest": "{response_tokens_max:,}",
    "truncated": "{truncated_share:.1%}",
    "answers found": "{answer_found_share:.1%}",
    "mean reward": "{reward_mean:.4f}",
    "solved groups": "{solved_groups_share:.1%}",
    "mixed groups": "{mixed_groups_share:.1%}",
    "generated tokens": "{generated_tokens:,}",
    "generated tokens/s": "{generated_tokens_per_s:,.0f}",
    "time": "{wall_s:.1f} s",
    "resumed samples": "{resumed_samples:,}",
    "unfinished samples at the end": "{unfinished_samples:,}",
    "dropped groups": "{dropped_groups:,}",
    "requests of lost servers": "{lost_requests:,}",
    "graders out of time": "{reward_timeouts:,}",
}
"""What is printed of the summary."""


def command(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    steps: Annotated[int, typer.Option(min=1, help="Batches to generate.")] = 1,
) -> None:
    """Generate batches with model.path and the training prompts, without a trainer."""
    summary = generate_batches(load(config, overrides), steps)
    table = Table(title="Generation", show_header=False)
    table.add_column("what")
    table.add_column("value", justify="right")
    for what, form in _ROWS.items():
        table.add_row(what, form.format_map(summary))
    uncut_console().print(table)


def generate_batches(config: RunConfig, steps: int) -> dict[str, Any]:
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
    batches: list[dict[str, Any]] = []
    with ProgressLine() as progress:
        source = CollectorClient(config, on_progress=progress.update)
        try:
            source.start()
            source.ensure_weights()
            started_s = time.monotonic()
            for step in range(1, steps + 1):
                while (encoded := source.collect(step)) is None:  # every server had to restart
                    source.sync_weights(config.model.path, START_VERSION)
                batches.append(totals_of(decode_batch(encoded)))
            wall_s = time.monotonic() - started_s
        finally:
            source.close()
    summary = summarise(batches, wall_s)
    atomic_write_text(config.run_dir / "generate.json", json.dumps(summary, indent=2) + "\n")
    return summary


def totals_of(batch: RolloutBatch) -> dict[str, Any]:
    """Count a batch; nothing else is kept of it in memory."""
    samples = batch.samples
    lengths = [sample.num_sampled for sample in samples]
    rewards = [[sample.reward for sample in group.samples] for group in batch.groups]
    return {
        "groups": len(batch.groups),
        "samples": len(samples),
        "response_tokens": sum(lengths),
        "response_tokens_max": max(lengths),
        "truncated": sum(sample.finish_reason is FinishReason.LENGTH for sample in samples),
        "answers_found": sum(sample.answer_found for sample in samples),
        "reward": math.fsum(sample.reward for sample in samples),
        "solved_groups": sum(map(is_solved, batch.groups)),
        "mixed_groups": sum(min(group) < max(group) for group in rewards),
        "dropped_groups": sum(batch.stats.dropped_groups.values()),
        "stats": batch.stats,
    }


def summarise(batches: Sequence[Mapping[str, Any]], wall_s: float) -> dict[str, Any]:
    """Sum up ``totals_of`` batches (at least one), which took ``wall_s``, for ``generate.json``."""

    def total(name: str) -> Any:
        return sum(batch[name] for batch in batches)

    stats = [batch["stats"] for batch in batches]
    groups, samples = total("groups"), total("samples")
    generated_tokens = sum(cost.generated_tokens for cost in stats)
    generation_s = math.fsum(cost.generation_s for cost in stats)
    return {
        "steps": len(batches),
        "groups": groups,
        "samples": samples,
        "response_tokens_mean": total("response_tokens") / samples,
        "response_tokens_max": max(batch["response_tokens_max"] for batch in batches),
        # Of the samples: those that reached max_response_tokens.
        "truncated_share": total("truncated") / samples,
        "answer_found_share": total("answers_found") / samples,
        "reward_mean": math.fsum(batch["reward"] for batch in batches) / samples,
        # Of the groups: those whose samples are all correct, and those with different rewards,
        # which teach something.
        "solved_groups_share": total("solved_groups") / groups,
        "mixed_groups_share": total("mixed_groups") / groups,
        # Received from the servers, whether or not their samples are in a batch.
        "generated_tokens": generated_tokens,
        "generation_s": generation_s,
        "generated_tokens_per_s": generated_tokens / generation_s if generation_s > 0 else 0.0,
        # Since the servers were ready; includes grading and writing.
        "wall_s": wall_s,
        "resumed_samples": sum(cost.resumed_samples for cost in stats),
        # In the buffer after the last batch: they are in no dump.
        "unfinished_samples": stats[-1].unfinished_samples,
        "dropped_groups": total("dropped_groups"),
        # Requests that were continued on another server because theirs failed.
        "lost_requests": sum(cost.lost_requests for cost in stats),
        "reward_timeouts": sum(cost.reward_timeouts for cost in stats),
    }
