"""The ``eval`` command: score a model directory without a trainer."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.table import Table

from bapo_megatron.config.check import check_eval_config
from bapo_megatron.files import atomic_write_text
from bapo_megatron.rollout.collector_client import CollectorClient
from bapo_megatron.telemetry.console import uncut_console
from bapo_megatron.telemetry.progress import ProgressLine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bapo_megatron.config.schema import RunConfig
    from bapo_megatron.types import EvalResult


def evaluate_model(config: RunConfig) -> list[EvalResult]:
    """Score every set of ``config.eval`` with the weights in ``config.model.path``.

    Starts a server unless ``rollout.servers`` names some, and writes ``<run_dir>/eval.json``.

    Raises:
        ValueError: no evaluation set is configured, or a file is missing or unreadable.
        RolloutError: a server failed.
    """
    check_eval_config(config)
    config.run_dir.mkdir(parents=True, exist_ok=True)
    with ProgressLine() as progress:
        source = CollectorClient(config, on_progress=progress.update, for_training=False)
        try:
            source.start()
            results = source.evaluate(step=0)
            assert results is not None, "without a trainer the source loads the weights itself"
        finally:
            source.close()
    rows = [asdict(result) for result in results]
    atomic_write_text(config.run_dir / "eval.json", json.dumps(rows, indent=2) + "\n")
    return results


def print_eval_table(results: Sequence[EvalResult]) -> None:
    """Print one row per evaluation set."""
    table = Table(title="Evaluation")
    for heading in ("set", "prompts", "k", "avg@k", "pass@k", "answers found", "tokens", "time"):
        table.add_column(heading, justify="left" if heading == "set" else "right")
    for result in results:
        table.add_row(
            result.name,
            str(result.num_prompts),
            str(result.samples_per_prompt),
            f"{result.avg_at_k:.1%}",
            f"{result.pass_at_k:.1%}",
            f"{result.answer_found_share:.1%}",
            f"{result.response_tokens_mean:.1f}",
            f"{result.wall_s:.1f} s",
        )
    uncut_console().print(table)
