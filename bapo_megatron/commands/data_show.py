"""``bapo-megatron data show``: prompts as a run would use them, and the responses in a dump.

Nothing is started: prompts need the model's tokenizer, a dump needs the texts beside it. Both are
first looked at (``inspect_…``, what ``--json`` prints), then printed for people.
"""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.markup import escape
from rich.panel import Panel
from rich.text import Text

from bapo_megatron.commands.options import JsonOption, OverridesArgument, load
from bapo_megatron.config.check import check_data
from bapo_megatron.config.schema import RunConfig
from bapo_megatron.data.chat import ChatRenderer, load_tokenizer
from bapo_megatron.data.columns import DumpError
from bapo_megatron.data.dump import read_batch, texts_by_sample, texts_path
from bapo_megatron.data.overlap import find_overlaps
from bapo_megatron.data.prompts import load_eval_set, load_train_sets, shared_prompts
from bapo_megatron.data.stream import PromptMixture
from bapo_megatron.evaluation.report import markdown_table, rich_table
from bapo_megatron.telemetry.console import uncut_console
from bapo_megatron.types import Prompt, Sample, SampleText

_HEADINGS = (
    *("set", "use", "format", "rows", "bad", "too long", "duplicates", "prompts"),
    *("tokens min", "median", "p95", "max", "share", "steps per epoch"),
)
_STYLES = {"heading": "bold", "fact": "dim", "row": "dim", "environment": "cyan"}
"""Look of the parts of an entry on a terminal; further kinds are plain text."""
_CONTROL_PICTURES = {
    **{code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"},
    0x7F: 0x2421,
    **dict.fromkeys(range(0x80, 0xA0), 0xFFFD),
}
"""Replacements of the characters that a terminal would obey."""

app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Show the prompts of a run before it starts, or the responses in a dump."""


@app.command("show")
def show(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG|DUMP.parquet", help="YAML file of a run, or a rollout dump of one."
        ),
    ],
    overrides: OverridesArgument = None,
    rows: Annotated[
        int,
        typer.Option(
            "--rows",
            "-n",
            min=0,
            help="Prompts to print, of training and of each evaluation set; or samples to print.",
        ),
    ] = 1,
    as_json: JsonOption = False,
) -> None:
    """Read and render every prompt of CONFIG; needs the model's tokenizer, but no GPU or server.

    Prints counts, token lengths, shares, what was left out, training prompts that also occur in
    evaluation sets, and prompts as the engine will see them: the first draws of training.

    With a rollout dump: its first samples, by turns of policy and environment.
    """
    is_dump = file.suffix == ".parquet"
    special_tokens: list[str] = []
    if is_dump and overrides:
        raise typer.BadParameter(
            f"{file} is a rollout dump, which takes no '{overrides[0]}'; leave it out"
        )
    if is_dump:
        found = inspect_dump(file, rows)
    else:
        config = load(file, overrides)
        check_data(config)
        found, special_tokens = inspect_data(config, rows)
    if as_json:
        typer.echo(json.dumps(found, indent=2, ensure_ascii=False))
    elif is_dump:
        print_dump(uncut_console(), found)
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
    if console.is_terminal:
        escaped = [[escape(cell) for cell in row] for row in rows]
        console.print(rich_table("Prompts", _HEADINGS, escaped, num_left=3))
    else:
        console.out(markdown_table(_HEADINGS, rows, num_left=3), highlight=False, end="")
    for line in data["warnings"]:
        mark = "[bold yellow]![/]" if console.is_terminal else "-"
        console.print(f"{mark} {escape(line)}", soft_wrap=True, highlight=False)
    for use, prompts in data["prompts"].items():
        for prompt in prompts:
            place = f"{use} · {prompt['prompt_id']} · {prompt['num_tokens']} tokens"
            row = f"row: {json.dumps(prompt['row'], ensure_ascii=False)}"
            parts = [("prompt", prompt["text"]), ("row", row)]
            _print_entry(console, f"{place} · answer {prompt['answer']}", parts, special_tokens)


def inspect_dump(path: Path, num_samples: int) -> dict[str, Any]:
    """Read a dump and the texts beside it, if any; keep the first ``num_samples`` samples.

    Raises:
        DumpError: It is not an intact dump, or the texts belong to another one.
        OSError: It cannot be read.
    """
    batch = read_batch(path)
    texts = texts_by_sample(path)
    first = batch.samples[:num_samples]
    return {
        "path": str(path),
        "step": batch.step,
        "version": batch.version,
        "num_groups": len(batch.groups),
        "num_samples": len(batch.samples),
        "has_texts": texts is not None,
        "samples": [
            _shown_sample(s, (texts or {}).get((s.group_id, s.index)), path) for s in first
        ],
    }


def _shown_sample(sample: Sample, text: SampleText | None, path: Path) -> dict[str, Any]:
    """A response; prompt, answer and the parts' texts are None where the dump has no texts."""
    lengths = [len(part) for part in sample.segments()]
    written: Sequence[str | None] = [None] * len(lengths)
    if text is not None:
        written = text.turns or (text.response_text,)
        if len(written) != len(lengths):
            raise DumpError(
                f"{texts_path(path)}: sample {sample.index} of group {sample.group_id} has "
                f"{len(written)} texts, its tokens are of {len(lengths)} parts; give the dump that "
                "the texts were written with"
            )
    return {
        "group_id": sample.group_id,
        "index": sample.index,
        "prompt_id": sample.prompt.prompt_id,
        "source": sample.prompt.source,
        "finish_reason": sample.finish_reason.value,
        "reward": sample.reward,
        "reward_components": sample.reward_components,
        "versions": [(span.version, span.num_tokens) for span in sample.versions],
        "sampled_tokens": sample.num_sampled,
        "written_tokens": sample.num_written,
        "prompt": None if text is None else text.prompt_text,
        "answer": None if text is None else text.answer,
        "parts": [
            {"author": ("policy", "environment")[number % 2], "num_tokens": length, "text": part}
            for number, (length, part) in enumerate(zip(lengths, written, strict=True))
        ],
    }


def print_dump(console: Console, dump: dict[str, Any]) -> None:
    """Print what ``inspect_dump`` found."""
    about = f"step {dump['step']} · version {dump['version']} · {dump['num_groups']:,} groups"
    lines = [f"{dump['path']} · {about} · {dump['num_samples']:,} samples"]
    if not dump["has_texts"]:
        lines.append("No texts beside the dump: numbers of tokens only.")
    if console.is_terminal:
        console.print(_text("\n".join(lines)), highlight=False)
    else:
        console.out("\n\n".join(lines), highlight=False)
    for sample in dump["samples"]:
        place = f"group {sample['group_id']} · sample {sample['index']} · {sample['prompt_id']}"
        title = f"{place} · {sample['finish_reason']} · reward {sample['reward']:g}"
        components = (f"{name} {value:g}" for name, value in sample["reward_components"].items())
        versions = (f"{version} ({num_tokens})" for version, num_tokens in sample["versions"])
        sampled, written = sample["sampled_tokens"], sample["written_tokens"]
        parts = [
            ("fact", f"reward components: {' · '.join(components) or 'none'}"),
            ("fact", f"weights versions (tokens): {' · '.join(versions) or 'none'}"),
            ("fact", f"tokens: {sampled:,} sampled, {written:,} written"),
        ]
        if sample["prompt"] is not None:
            parts.append(("fact", f"answer: {sample['answer']}"))
            parts += [("heading", "prompt"), ("prompt", sample["prompt"])]
        for number, part in enumerate(sample["parts"]):
            turn = f"turn {1 + number // 2} · " if part["author"] == "policy" else ""
            parts.append(("heading", f"{turn}{part['author']} · {part['num_tokens']:,} tokens"))
            if part["text"] is not None:
                parts.append((part["author"], part["text"]))
        _print_entry(console, title, parts)


def _print_entry(
    console: Console,
    title: str,
    parts: Sequence[tuple[str, str]],
    special_tokens: Sequence[str] = (),
) -> None:
    """Print parts, each of a kind and a text: a panel on a terminal, else Markdown."""
    if console.is_terminal:
        shown = []
        for kind, text in parts:
            shown.append(_text("\n" * (kind == "heading") + text, _STYLES.get(kind, "")))
            if kind == "prompt" and special_tokens:
                shown[-1].highlight_words(special_tokens, "bold magenta")
        panel = Panel(Group(*shown), title=_text(title), title_align="left")
        console.print(panel, highlight=False)
        return
    lines, before = ["", f"### {title}"], ""
    for kind, text in parts:
        if not kind == before == "fact":
            lines.append("")
        marked = {"heading": f"**{text}**", "fact": f"- {text}", "row": text}
        lines.append(marked[kind] if kind in marked else _fenced(text))
        before = kind
    console.out("\n".join(lines), highlight=False)


def _fenced(text: str) -> str:
    """A text as a Markdown code block that nothing inside can end."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return "\n".join([fence, text.removesuffix("\n"), fence])


def _text(text: str, style: str = "") -> Text:
    """Shown as it is: neither markup nor control sequences."""
    return Text(text.translate(_CONTROL_PICTURES), style)
