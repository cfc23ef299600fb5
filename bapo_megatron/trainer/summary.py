"""The closing table of a run and ``summary.json`` with the same numbers."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from bapo_megatron.config.schema import RunConfig
from bapo_megatron.runtime.files import atomic_write_text
from bapo_megatron.runtime.versions import own_software
from bapo_megatron.telemetry.console import say, show
from bapo_megatron.telemetry.sinks import read_metrics
from bapo_megatron.trainer.checkpointing import Progress
from bapo_megatron.types import EvalResult


def report_run(config: RunConfig, progress: Progress, phase_s: dict[str, float]) -> None:
    """Write ``summary.json`` and print the table; ``phase_s`` is of this process only.

    A run that made no update at all is told so, and why.
    """
    rate: float | None = None  # response tokens per second while batches were collected
    if config.replay.dumps is None:
        generation_s = progress.generation_s
        rate = progress.generated_tokens / generation_s if generation_s > 0 else 0.0
    searched = sum(progress.exits.values())
    moved = searched - progress.exits.get("start", 0)
    moved_share = moved / searched if searched else None
    summary = {
        "name": config.name,
        "seed": config.seed,
        "steps": progress.finished_steps,
        "updates": progress.updates,
        "accuracy_before": progress.accuracy_before,
        "accuracy_after": progress.accuracy_after,
        "answer_found_before": progress.answer_found_before,
        "answer_found_after": progress.answer_found_after,
        "num_prompts": progress.num_prompts,
        "generated_tokens": int(progress.generated_tokens),
        "generated_tokens_per_s": rate,
        "search_moved_share": moved_share,
        "phase_s": phase_s,
        **asdict(own_software()),
    }
    atomic_write_text(config.run_dir / "summary.json", json.dumps(summary, indent=2) + "\n")
    if config.log.console:
        show(_table(f"{config.run_dir}, seed {config.seed}", summary))
    if progress.updates == 0:
        rows = read_metrics(config.run_dir / "metrics.jsonl")
        say(f"{_why_untrained(rows)}; read responses with bapo-megatron report {config.run_dir}")


def _table(title: str, summary: Mapping[str, Any]) -> Table:
    table = Table(title=title, show_header=False)
    table.add_column("what")
    table.add_column("value", justify="right")
    before, after = summary["accuracy_before"], summary["accuracy_after"]
    if before is not None and after is not None:
        table.add_row("held-out prompts", str(summary["num_prompts"]))
        table.add_row("accuracy before", f"{before:.1%}")
        table.add_row("accuracy after", f"[bold]{after:.1%}[/bold]")
    before, after = summary["answer_found_before"], summary["answer_found_after"]
    if before is not None and after is not None:
        table.add_row("well-formed answers before", f"{before:.1%}")
        table.add_row("well-formed answers after", f"{after:.1%}")
    table.add_row("steps (optimizer updates)", f"{summary['steps']} ({summary['updates']})")
    if summary["search_moved_share"] is not None:
        table.add_row("searches that moved a bound", f"{summary['search_moved_share']:.0%}")
    if summary["generated_tokens_per_s"] is not None:
        table.add_row("generated tokens/s", f"{summary['generated_tokens_per_s']:,.0f}")
    for name, seconds in summary["phase_s"].items():
        if round(seconds, 1):
            table.add_row(f"time: {name.replace('_', ' ')}", f"{seconds:.1f} s")
    return table


def _why_untrained(rows: Sequence[Mapping[str, float]]) -> str:
    """Say what left a run without any update, from its rows of ``metrics.jsonl``."""

    def mean(name: str) -> float:
        values = [row[name] for row in rows if name in row]
        return math.fsum(values) / len(values) if values else 0.0

    def total(name: str) -> float:
        return math.fsum(row.get(name, 0.0) for row in rows)

    return (
        f"nothing was trained: all {total('train/skipped_updates'):.0f} updates were skipped; "
        f"{1.0 - mean('reward/mixed_groups'):.0%} of the groups had equal rewards, "
        f"{mean('rollout/masked_token_share'):.0%} of the tokens were masked, "
        f"{total('train/nonfinite_tokens'):.0f} were not finite"
    )


def show_evaluation(results: Sequence[EvalResult]) -> None:
    """Print a line for each evaluation set."""
    for result in results:
        score = result.scores[0]
        show(
            f"evaluation of {result.name}: {score.name} {score.value:.1%} ({score.low:.1%} … "
            f"{score.high:.1%}) on {result.num_prompts} prompts ({result.wall_s:.1f} s)"
        )
