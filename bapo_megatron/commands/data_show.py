"""``bapo-megatron data show``: prompts as a run would use them.

Nothing is started. They are first looked at (``inspect_data``, what ``--json`` prints), then
printed for people.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from itertools import islice
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from bapo_megatron.commands.entries import print_entry, print_rows
from bapo_megatron.commands.options import ConfigArgument, JsonOption, OverridesArgument, load
from bapo_megatron.config.check import check_data
from bapo_megatron.config.schema import RunConfig
from bapo_megatron.data.chat import ChatRenderer, load_tokenizer
from bapo_megatron.data.overlap import find_overlaps
from bapo_megatron.data.prompts import load_eval_set, load_train_sets, shared_prompts
from bapo_megatron.data.stream import PromptMixture
from bapo_megatron.telemetry.console import uncut_console, visible, visible_json
from bapo_megatron.types import Prompt

_HEADINGS = (
    *("set", "use", "format", "rows", "bad", "too long", "duplicates", "prompts"),
    *("tokens min", "median", "p95", "max", "share", "steps per epoch"),
)

app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Show the prompts of a run before it starts."""


@app.command("show")
def show(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    rows: Annotated[
        int,
        typer.Option(
            "--rows",
            "-n",
            min=0,
            help="Prompts to print, of training and of each evaluation set.",
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
    found, special_tokens = inspect_data(run_config, rows)
    if as_json:
        typer.echo(visible_json(found))
    else:
        print_data(uncut_console(), found, special_tokens)


def inspect_data(config: RunConfig, num_rows: int) -> tuple[dict[str, Any], list[str]]:
    """Read and render all prompts; keep ``num_rows`` of training and of each evaluation set.

    Returns:
        The sets, overlaps of training with evaluation, prompts by use (the first draws of training,
        the first prompts of each evaluation set) and warnings; and the tokenizer's special tokens.

    Raises:
        ValueError: A row, the tokenizer or the chat template cannot be used.
        OSError: A file cannot be read.
    """
    tokenizer = load_tokenizer(config.model.path, config.data.chat_template)
    renderer = ChatRenderer(tokenizer, config.data)
    train_sets = load_train_sets(config.data, renderer)
    eval_sets = [
        load_eval_set(dataset, renderer, config.data.max_prompt_tokens)
        for dataset in config.eval.sets
    ]
    summaries: list[dict[str, Any]] = []
    shares: dict[str, float] = {}
    prompts: dict[str, list[dict[str, Any]]] = {}
    if train_sets:
        mixture = PromptMixture(train_sets, config.seed, config.data.shuffle)
        shares = mixture.shares
        prompts["train"] = [_shown(p, renderer) for p in islice(mixture, num_rows)]
    for use, each in [("train", s) for s in train_sets] + [("eval", s) for s in eval_sets]:
        share, kept = shares[each.name] if use == "train" else None, len(each.prompts)
        summaries.append(
            {
                "name": each.name,
                "use": use,
                "kept": kept,
                "share": share,
                # Until every prompt was drawn once, if a step draws one for each of its groups.
                "epoch_steps": kept / (share * config.rollout.groups_per_step) if share else None,
                "tokens": token_lengths(each.prompts),
                "report": asdict(each.report),
            }
        )
        if use == "eval":
            prompts[f"eval: {each.name}"] = [_shown(p, renderer) for p in each.prompts[:num_rows]]
    overlaps = find_overlaps(train_sets, [(s.name, s.prompts) for s in eval_sets])
    warnings = [line for each in (*train_sets, *eval_sets) for line in each.report.warnings()]
    warnings += [*shared_prompts(train_sets), *(overlap.warning() for overlap in overlaps)]
    report = {
        "sets": summaries,
        "overlaps": [asdict(overlap) for overlap in overlaps],
        "prompts": prompts,
        "warnings": warnings,
    }
    return report, sorted(token.content for token in tokenizer.added_tokens_decoder.values())


def token_lengths(prompts: Sequence[Prompt]) -> dict[str, int]:
    """Token lengths of prompts (at least one); quantiles by nearest rank."""
    lengths = sorted(len(prompt.token_ids) for prompt in prompts)
    shares = {"median": 0.5, "p95": 0.95, "max": 1.0}
    quantiles = {name: lengths[math.ceil(s * len(lengths)) - 1] for name, s in shares.items()}
    return {"min": lengths[0], **quantiles}


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


def print_data(console: Console, data: dict[str, Any], special_tokens: Sequence[str]) -> None:
    """Print what ``inspect_data`` found."""
    rows = []
    for each in data["sets"]:
        counts = [each["report"][f"num_{n}"] for n in ("rows", "bad", "too_long", "duplicates")]
        rows.append(
            [
                each["name"],
                each["use"],
                each["report"]["row_format"],
                *(f"{count:,}" for count in (*counts, each["kept"], *each["tokens"].values())),
                "" if each["share"] is None else f"{each['share']:.2%}",
                "" if each["epoch_steps"] is None else f"{each['epoch_steps']:,.1f}",
            ]
        )
    print_rows(console, "Prompts", _HEADINGS, rows, num_left=3)
    for line in data["warnings"]:
        mark = "[bold yellow]![/]" if console.is_terminal else "-"
        console.print(f"{mark} {escape(visible(line))}", soft_wrap=True, highlight=False)
    for use, prompts in data["prompts"].items():
        for prompt in prompts:
            place = f"{use} · {prompt['prompt_id']} · {prompt['num_tokens']} tokens"
            row = f"row: {json.dumps(prompt['row'], ensure_ascii=False)}"
            parts = [("prompt", prompt["text"]), ("row", row)]
            print_entry(console, f"{place} · answer {prompt['answer']}", parts, special_tokens)
