"""``bapo-megatron samples show``: a step's responses, for reading in a terminal.

The dump is first looked at (``inspect_step``, what ``--json`` prints), then printed for people.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console

from bapo_megatron.commands.entries import print_entry, print_lines, print_rows
from bapo_megatron.commands.options import JsonOption
from bapo_megatron.config.schema import ADVANTAGES
from bapo_megatron.config.settings import read_settings
from bapo_megatron.data.columns import DumpError
from bapo_megatron.data.dump import texts_path
from bapo_megatron.telemetry.console import uncut_console, visible_json
from bapo_megatron.tools.report.rollouts import (
    ORDERS,
    DumpedStep,
    Order,
    dump_files,
    read_step,
)
from bapo_megatron.types import FinishReason, Sample

_NUM_SHOWN = 4
_MAX_BEGINNING_CHARS = 60
"""Characters of a response in a row of ``--brief``."""
_HEADINGS = (
    *("group", "index", "prompt", "exit", "beginning of the response"),
    *("reward", "advantage", "tokens", "age"),
)
_NUM_LEFT = 5

app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Read a step's responses in the terminal."""


@app.command("show")
def show(
    run: Annotated[
        Path, typer.Argument(metavar="RUN|DUMP.parquet", help="Directory of a run, or one dump.")
    ],
    step: Annotated[int | None, typer.Option(help="By default the newest that is kept.")] = None,
    sort: Annotated[
        Order | None, typer.Option(help="Largest first; by default in the order of the batch.")
    ] = None,
    reverse: Annotated[bool, typer.Option("--reverse", help="Reverse the order.")] = False,
    group: Annotated[int | None, typer.Option(help="Only responses of this group.")] = None,
    source: Annotated[str | None, typer.Option(help="Only those of this data set.")] = None,
    ended: Annotated[
        FinishReason | None, typer.Option("--exit", help="Only those that ended for this reason.")
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option("--limit", "-n", min=0, help=f"By default {_NUM_SHOWN}; --brief: all."),
    ] = None,
    brief: Annotated[bool, typer.Option("--brief", help="A row for each response.")] = False,
    advantage: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Estimator instead of the run's. A function of yours (package.module:function) "
            "is only called if it is named here.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Print responses of a step: texts by turns, rewards with their parts, advantages, ages."""
    if advantage is not None and ":" not in advantage and advantage not in ADVANTAGES:
        raise typer.BadParameter(
            f"--advantage '{advantage}': name one of {', '.join(ADVANTAGES)}, or a function of "
            "yours as package.module:function"
        )
    path = _find_dump(run, step)
    found = read_step(path, _settings_of(path), advantage)
    if sort == "advantage" and not found.estimator:
        raise typer.BadParameter(
            "--sort advantage: the estimator is not known, or is a function of yours, which is "
            "not called by itself; name it with --advantage"
        )

    def is_wanted(sample: Sample) -> bool:
        return (
            group in (None, sample.group_id)
            and source in (None, sample.prompt.source)
            and ended in (None, sample.finish_reason)
        )

    chosen = [sample for sample in found.batch.samples if is_wanted(sample)]
    if sort is not None:
        order = ORDERS[sort]
        chosen.sort(key=lambda sample: -order(found, sample))
    if reverse:
        chosen.reverse()
    if limit is None:
        limit = len(chosen) if brief else _NUM_SHOWN
    report = inspect_step(path, found, chosen, limit)
    if as_json:
        typer.echo(visible_json(report))
    else:
        print_step(uncut_console(), report, is_brief=brief)


def _find_dump(run: Path, step: int | None) -> Path:
    """The dump of a step of a run, or the one that is given.

    Raises:
        ValueError: There is none.
    """
    if run.suffix == ".parquet":
        if step is not None:
            raise typer.BadParameter(f"{run} is one dump, which takes no --step; leave it out")
        return run
    dumps = dump_files(run)
    if not dumps:
        raise ValueError(
            f"{run / 'rollouts'}: no dump of a step; give the directory of a run with "
            "rollout.dump=true"
        )
    step = max(dumps) if step is None else step
    if step not in dumps:
        raise ValueError(
            f"{run / 'rollouts'}: no dump of step {step}; there are {len(dumps):,}, from step "
            f"{min(dumps)} to {max(dumps)} (rollout.keep_dumps removes early ones)"
        )
    return dumps[step]


def _settings_of(dump: Path) -> dict[str, Any]:
    """The settings of the run whose dump it is; none for one that lies elsewhere."""
    folder = dump.absolute().parent
    config = folder.parent / "config.yaml"
    return read_settings(config) if folder.name == "rollouts" and os.path.lexists(config) else {}


def inspect_step(
    path: Path, step: DumpedStep, chosen: Sequence[Sample], max_samples: int
) -> dict[str, Any]:
    """Return a step and the first ``max_samples`` of its ``chosen`` samples as JSON values.

    Raises:
        DumpError: The texts belong to another dump.
    """
    batch = step.batch
    return {
        "path": str(path),
        "step": batch.step,
        "version": batch.version,
        "num_groups": len(batch.groups),
        "num_samples": len(batch.samples),
        "num_chosen": len(chosen),
        "has_texts": bool(step.texts),
        "estimator": step.estimator or None,
        "samples": [_shown_sample(path, step, sample) for sample in chosen[:max_samples]],
    }


def _shown_sample(path: Path, step: DumpedStep, sample: Sample) -> dict[str, Any]:
    """A response; prompt, answer and the parts' texts are None where the dump has no texts."""
    text = step.text(sample)
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
        "advantage": step.advantage(sample),
        "answer_found": sample.answer_found,
        "extracted": None if text is None else text.extracted,
        "reason": None if text is None else text.reason,
        "answer": None if text is None else text.answer,
        "age": step.age(sample),
        "versions": [(span.version, span.num_tokens) for span in sample.versions],
        "sampled_tokens": sample.num_sampled,
        "trained_tokens": int(np.count_nonzero(step.trains(sample))),
        "written_tokens": sample.num_written,
        "prompt": None if text is None else text.prompt_text,
        "parts": [
            {"author": ("policy", "environment")[number % 2], "num_tokens": length, "text": part}
            for number, (length, part) in enumerate(zip(lengths, written, strict=True))
        ],
    }


def print_step(console: Console, report: Mapping[str, Any], *, is_brief: bool = False) -> None:
    """Print what ``inspect_step`` found."""
    chosen, num_shown = report["num_chosen"], len(report["samples"])
    lines = [
        f"{report['path']} · step {report['step']} · version {report['version']} · "
        f"{report['num_groups']:,} groups · {report['num_samples']:,} samples · {chosen:,} chosen "
        f"· {num_shown:,} shown",
    ]
    if report["estimator"] is None:
        lines.append("No advantages: the run's estimator is not known, or is its own function.")
    if not report["has_texts"]:
        lines.append("No texts beside the dump: numbers of tokens only.")
    print_lines(console, lines)
    if is_brief:
        rows = [_row_of(sample) for sample in report["samples"]]
        print_rows(console, "Responses", _HEADINGS, rows, num_left=_NUM_LEFT)
        return
    for sample in report["samples"]:
        _print_sample(console, sample)


def _row_of(sample: Mapping[str, Any]) -> list[str]:
    text = " ".join((sample["parts"][0]["text"] or "").split())
    return [
        str(sample["group_id"]),
        str(sample["index"]),
        sample["prompt_id"],
        sample["finish_reason"],
        text if len(text) <= _MAX_BEGINNING_CHARS else f"{text[:_MAX_BEGINNING_CHARS]}…",
        f"{sample['reward']:g}",
        _signed(sample["advantage"]),
        f"{sample['sampled_tokens'] + sample['written_tokens']:,}",
        f"{sample['age']:,}",
    ]


def _signed(advantage: float | None) -> str:
    return "?" if advantage is None else f"{advantage:+.4g}"


def _print_sample(console: Console, sample: Mapping[str, Any]) -> None:
    place = f"group {sample['group_id']} · sample {sample['index']} · {sample['prompt_id']}"
    title = f"{place} · {sample['finish_reason']} · reward {sample['reward']:g}"
    components = (f"{name} {value:g}" for name, value in sample["reward_components"].items())
    versions = (f"{version} ({num_tokens})" for version, num_tokens in sample["versions"])
    tokens = (
        f"{sample['sampled_tokens']:,} sampled, of them {sample['trained_tokens']:,} in the loss, "
        f"{sample['written_tokens']:,} written"
    )
    extracted = sample["extracted"] or ("found" if sample["answer_found"] else "not found")
    reason = f" ({sample['reason']})" if sample["reason"] else ""
    parts = [
        ("fact", f"advantage: {_signed(sample['advantage'])}"),
        ("fact", f"reward components: {' · '.join(components) or 'none'}"),
        ("fact", f"answer: {extracted}{reason}"),
    ]
    if sample["prompt"] is not None:
        parts.append(("fact", f"reference: {sample['answer']}"))
    parts += [
        ("fact", f"weights versions (tokens): {' · '.join(versions) or 'none'}"),
        ("fact", f"age of the oldest token: {sample['age']:,} updates"),
        ("fact", f"tokens: {tokens}"),
    ]
    if sample["prompt"] is not None:
        parts += [("heading", "prompt"), ("prompt", sample["prompt"])]
    for number, part in enumerate(sample["parts"]):
        turn = f"turn {1 + number // 2} · " if part["author"] == "policy" else ""
        parts.append(("heading", f"{turn}{part['author']} · {part['num_tokens']:,} tokens"))
        if part["text"] is not None:
            parts.append((part["author"], part["text"]))
    print_entry(console, title, parts)
