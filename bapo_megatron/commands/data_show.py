"""``bapo-megatron data show``: prompts as a run would use them, without starting anything."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import islice
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.text import Text

from bapo_megatron.commands.options import ConfigArgument, JsonOption, OverridesArgument, load
from bapo_megatron.config.check import check_data
from bapo_megatron.config.schema import RunConfig
from bapo_megatron.data.chat import ChatRenderer, load_tokenizer
from bapo_megatron.data.demonstrations import (
    DemonstrationRenderer,
    DemonstrationReport,
    read_demonstrations,
)
from bapo_megatron.data.overlap import find_overlaps
from bapo_megatron.data.prompts import load_eval_sets, load_train_sets, shared_prompts
from bapo_megatron.data.stream import PromptMixture
from bapo_megatron.telemetry.console import print_entry, print_table, uncut_console, visible
from bapo_megatron.types import Prompt

_HEADINGS = (
    *("set", "use", "format", "rows", "bad", "no answer", "too long", "duplicates", "prompts"),
    *("tokens min", "median", "p95", "max", "share", "steps per epoch"),
)

_COUNTS = ("rows", "bad", "no_answer", "too_long", "duplicates")


def show(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    rows: Annotated[
        int,
        typer.Option(
            "--rows", "-n", min=0, help="Prompts to print from training and each eval set."
        ),
    ] = 1,
    as_json: JsonOption = False,
) -> None:
    """Read and render every prompt of CONFIG; needs the model's tokenizer, but no GPU or server.

    Prints counts, token lengths, shares, what was left out, training prompts that also occur in
    evaluation sets, and prompts as the engine will see them: the first draws of training.
    """
    run_config = load(config, overrides)
    check_data(run_config)
    report = inspect_data(run_config, rows)
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        print_data(uncut_console(), report)


def inspect_data(config: RunConfig, num_rows: int) -> dict[str, Any]:
    """Read and render all prompts; keep ``num_rows`` of training and of each evaluation set.

    Returns:
        The sets, overlaps of training with evaluation, prompts by use (the first draws of training,
        the first prompts of each evaluation set) and warnings, as JSON values.

    Raises:
        ValueError: A row, the tokenizer or the chat template cannot be used.
        OSError: A file cannot be read.
    """
    tokenizer = load_tokenizer(config.model.path, config.data.chat_template)
    renderer = ChatRenderer(tokenizer, config.data, config.rollout)
    train_sets = load_train_sets(config.data, renderer, config.reward)
    eval_sets = list(load_eval_sets(config, renderer))
    shares: dict[str, float] = {}
    prompts: dict[str, list[dict[str, Any]]] = {}
    if train_sets:
        mixture = PromptMixture(train_sets, config.seed, config.data.shuffle)
        shares = mixture.shares
        prompts["train"] = [_shown(p, renderer) for p in islice(mixture, num_rows)]
    for dataset in eval_sets:
        rendered = [_shown(prompt, renderer) for prompt in dataset.prompts[:num_rows]]
        prompts[f"eval: {dataset.name}"] = rendered
    summaries = []
    for use, dataset in [("train", s) for s in train_sets] + [("eval", s) for s in eval_sets]:
        share, num_kept = shares[dataset.name] if use == "train" else None, len(dataset.prompts)
        # Until every prompt was drawn once, if a step draws one for each of its groups.
        epoch_steps = num_kept / (share * config.rollout.groups_per_step) if share else None
        summaries.append(
            {
                "name": dataset.name,
                "use": use,
                "kept": num_kept,
                "share": share,
                "epoch_steps": epoch_steps,
                "tokens": token_lengths(dataset.prompts),
                "report": asdict(dataset.report),
            }
        )
    overlaps = find_overlaps(train_sets, [(s.name, s.prompts) for s in eval_sets])
    warnings = renderer.warnings()
    warnings += [line for s in (*train_sets, *eval_sets) for line in s.report.warnings()]
    warnings += [*shared_prompts(train_sets), *(overlap.warning() for overlap in overlaps)]
    return {
        "sets": summaries,
        "overlaps": [asdict(overlap) for overlap in overlaps],
        "prompts": prompts,
        "demonstrations": _demonstrations(config, renderer, num_rows),
        "warnings": warnings,
    }


def _demonstrations(config: RunConfig, chat: ChatRenderer, num_rows: int) -> dict[str, Any]:
    """Counts of ``demonstrations``, and the first rows of each set in parts."""
    renderer, report = DemonstrationRenderer(chat, config.demonstrations), DemonstrationReport()
    skips_bad, rows = config.data.on_bad_row == "skip", []
    for dataset in (*config.demonstrations.train, *config.demonstrations.heldout):
        read = read_demonstrations(dataset, renderer, report, skips_bad=skips_bad)
        for number, one in enumerate(read):
            if number < num_rows:
                edges = (np.flatnonzero(np.diff(one.is_trained)) + 1).tolist()
                texts = [chat.decode(part.tolist()) for part in np.split(one.token_ids, edges)]
                trains = one.is_trained[[0, *edges]].tolist()
                parts = list(zip(trains, texts, strict=True))
                rows.append({"key": one.key, "weight": one.weight, "parts": parts})
    return {"report": asdict(report), "summary": report.summary(), "rows": rows}


def token_lengths(prompts: Sequence[Prompt]) -> dict[str, int]:
    """Token lengths of prompts (at least one); quantiles by nearest rank."""
    lengths = [len(prompt.token_ids) for prompt in prompts]
    quantiles = np.quantile(lengths, [0.0, 0.5, 0.95, 1.0], method="inverted_cdf")
    return dict(zip(("min", "median", "p95", "max"), map(int, quantiles), strict=True))


def _shown(prompt: Prompt, renderer: ChatRenderer) -> dict[str, Any]:
    """A prompt as the engine will see it: its token ids, decoded with every special token."""
    return {
        "source": prompt.source,
        "prompt_id": prompt.prompt_id,
        "num_tokens": len(prompt.token_ids),
        "text": renderer.decode(prompt.token_ids),
        "answer": prompt.answer,
        "row": prompt.row,
    }


def print_data(console: Console, report: dict[str, Any]) -> None:
    """Print the report of ``inspect_data``."""
    rows = []
    for entry in report["sets"]:
        counts = [entry["report"][f"num_{n}"] for n in _COUNTS]
        rows.append(
            [
                entry["name"],
                entry["use"],
                entry["report"]["row_format"],
                *(f"{count:,}" for count in (*counts, entry["kept"], *entry["tokens"].values())),
                "" if entry["share"] is None else f"{entry['share']:.2%}",
                "" if entry["epoch_steps"] is None else f"{entry['epoch_steps']:,.1f}",
            ]
        )
    print_table(console, "Prompts", _HEADINGS, rows, num_left=3)
    for line in report["warnings"]:
        console.print(Text(f"- {visible(line)}", "yellow"), soft_wrap=True)
    for use, prompts in report["prompts"].items():
        for prompt in prompts:
            place = f"{use} · {prompt['prompt_id']} · {prompt['num_tokens']} tokens"
            row = f"row: {json.dumps(prompt['row'], ensure_ascii=False)}"
            parts = [("fact", row), ("prompt", prompt["text"])]
            print_entry(console, f"{place} · answer {prompt['answer']}", parts)
    if (shown := report["demonstrations"])["report"]["num_rows"]:
        console.print(Text(visible(shown["summary"])), soft_wrap=True)
    for row in shown["rows"]:
        parts = []
        for trains, text in row["parts"]:
            kind = "trained" if trains else "not trained"
            parts += [("heading", kind), (kind, text)]
        print_entry(console, f"demonstration · {row['key']} · weight {row['weight']}", parts)
