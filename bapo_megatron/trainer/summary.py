"""The closing table of a run and ``summary.json`` with the same numbers."""

import json
from collections.abc import Sequence
from dataclasses import asdict

from rich.table import Table

from bapo_megatron.config.schema import RunConfig
from bapo_megatron.files import atomic_write_text
from bapo_megatron.telemetry.console import show
from bapo_megatron.trainer.checkpointing import Progress
from bapo_megatron.types import EvalResult
from bapo_megatron.versions import own_software


def report_run(config: RunConfig, progress: Progress, phase_s: dict[str, float]) -> None:
    """Write ``summary.json`` and print the table; ``phase_s`` is of this process only."""
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
    if not config.log.console:
        return
    table = Table(title=f"{config.run_dir}, seed {config.seed}", show_header=False)
    table.add_column("what")
    table.add_column("value", justify="right")
    if progress.accuracy_before is not None and progress.accuracy_after is not None:
        table.add_row("held-out prompts", str(progress.num_prompts))
        table.add_row("accuracy before", f"{progress.accuracy_before:.1%}")
        table.add_row("accuracy after", f"[bold]{progress.accuracy_after:.1%}[/bold]")
    if progress.answer_found_before is not None and progress.answer_found_after is not None:
        table.add_row("well-formed answers before", f"{progress.answer_found_before:.1%}")
        table.add_row("well-formed answers after", f"{progress.answer_found_after:.1%}")
    table.add_row("steps (optimizer updates)", f"{progress.finished_steps} ({progress.updates})")
    if moved_share is not None:
        table.add_row("searches that moved a bound", f"{moved_share:.0%}")
    if rate is not None:
        table.add_row("generated tokens/s", f"{rate:,.0f}")
    for name, seconds in phase_s.items():
        if round(seconds, 1):
            table.add_row(f"time: {name.replace('_', ' ')}", f"{seconds:.1f} s")
    show(table)


def show_evaluation(results: Sequence[EvalResult]) -> None:
    """Print a line for each evaluation set."""
    for result in results:
        low, high = result.scores[0].low, result.scores[0].high
        show(
            f"evaluation of {result.name}: avg@{result.samples_per_prompt} {result.avg_at_k:.1%} "
            f"({low:.1%} … {high:.1%}) on {result.num_prompts} prompts ({result.wall_s:.1f} s)"
        )
