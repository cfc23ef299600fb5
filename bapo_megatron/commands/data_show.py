"""``bapo-megatron data show``: prompts as a run would use them, and the responses in a dump.

Nothing is started: prompts need the model's tokenizer, a dump needs the texts beside it.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
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
from bapo_megatron.data.dump import DumpError, read_batch, read_texts, texts_path
from bapo_megatron.data.overlap import Overlap, find_overlaps
from bapo_megatron.data.prompts import (
    PromptSet,
    SetReport,
    load_eval_set,
    load_train_sets,
    shared_prompts,
)
from bapo_megatron.data.stream import PromptMixture
from bapo_megatron.evaluation.report import markdown_table, rich_table
from bapo_megatron.telemetry.console import uncut_console
from bapo_megatron.types import Prompt, Sample, SampleText

_HEADINGS = (
    *("set", "use", "format", "rows", "bad", "too long", "duplicates", "prompts"),
    *("tokens min", "median", "p95", "max", "share", "steps per epoch"),
)

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
    report: DataReport | DumpReport
    if file.suffix != ".parquet":
        config = load(file, overrides)
        check_data(config)
        report = inspect_data(config, rows)
    elif overrides:
        raise typer.BadParameter(
            f"{file} is a rollout dump, which takes no '{overrides[0]}'; leave it out"
        )
    else:
        report = inspect_dump(file, rows)
    if as_json:
        typer.echo(report.to_json())
    else:
        report.print(uncut_console())


@dataclass(frozen=True, slots=True)
class TokenLengths:
    """Lengths of a set's rendered prompts."""

    min: int
    median: int
    p95: int
    max: int


@dataclass(frozen=True, slots=True)
class SetSummary:
    """One set."""

    name: str
    use: str
    """``train`` or ``eval``."""
    kept: int
    """Prompts that can be drawn."""
    share: float | None
    """Share of the draws of training."""
    epoch_steps: float | None
    """Training steps until every prompt was drawn once, if a step draws ``groups_per_step``."""
    tokens: TokenLengths
    report: SetReport


@dataclass(frozen=True, slots=True)
class ShownPrompt:
    """One prompt as the engine will see it."""

    source: str
    prompt_id: str
    num_tokens: int
    text: str
    """Its token ids, decoded with every special token."""
    answer: str
    row: Mapping[str, Any]
    """Other columns, which reward functions get."""


@dataclass(frozen=True, slots=True)
class DataReport:
    """What ``data show`` prints."""

    sets: tuple[SetSummary, ...]
    shared: tuple[str, ...]
    """One line for each prompt that several training sets have."""
    overlaps: tuple[Overlap, ...]
    prompts: dict[str, tuple[ShownPrompt, ...]]
    """By use: the first draws of training, and the first prompts of each evaluation set."""
    special_tokens: tuple[str, ...]

    def warnings(self) -> list[str]:
        """What a user should know, one line each."""
        own = [line for each in self.sets for line in each.report.warnings()]
        return [*own, *self.shared] + [overlap.warning() for overlap in self.overlaps]

    def to_json(self) -> str:
        """Everything, as one JSON object."""
        report = asdict(self)
        shown = {name: report[name] for name in ("sets", "overlaps", "prompts")}
        return json.dumps({**shown, "warnings": self.warnings()}, indent=2, ensure_ascii=False)

    def print(self, console: Console) -> None:
        """Tables and panels on a terminal, else Markdown."""
        rows = [_cells(each) for each in self.sets]
        if console.is_terminal:
            escaped = [[escape(cell) for cell in row] for row in rows]
            console.print(rich_table("Prompts", _HEADINGS, escaped, num_left=3))
        else:
            console.out(markdown_table(_HEADINGS, rows, num_left=3), highlight=False, end="")
        for line in self.warnings():
            mark = "[bold yellow]![/]" if console.is_terminal else "-"
            console.print(f"{mark} {escape(line)}", soft_wrap=True, highlight=False)
        for use, prompts in self.prompts.items():
            for prompt in prompts:
                _print_prompt(console, use, prompt, self.special_tokens)


def inspect_data(config: RunConfig, num_rows: int) -> DataReport:
    """Read and render all prompts; keep ``num_rows`` of training and of each evaluation set.

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
    summaries = []
    prompts: dict[str, tuple[ShownPrompt, ...]] = {}
    if train_sets:
        mixture = PromptMixture(train_sets, config.seed, config.data.shuffle)
        summaries += [_summary(each, "train", mixture, config) for each in train_sets]
        prompts["train"] = tuple(_shown(p, renderer) for p in islice(mixture, num_rows))
    for each in eval_sets:
        summaries.append(_summary(each, "eval", None, config))
        first = each.prompts[:num_rows]
        prompts[f"eval: {each.name}"] = tuple(_shown(p, renderer) for p in first)
    return DataReport(
        sets=tuple(summaries),
        shared=tuple(shared_prompts(train_sets)),
        overlaps=tuple(find_overlaps(train_sets, [(s.name, s.prompts) for s in eval_sets])),
        prompts=prompts,
        special_tokens=tuple(
            sorted(token.content for token in tokenizer.added_tokens_decoder.values())
        ),
    )


def token_lengths(prompts: Sequence[Prompt]) -> TokenLengths:
    """Token lengths of prompts (at least one); quantiles by nearest rank."""
    lengths = sorted(len(prompt.token_ids) for prompt in prompts)

    def quantile(share: float) -> int:
        return lengths[math.ceil(share * len(lengths)) - 1]

    return TokenLengths(lengths[0], quantile(0.5), quantile(0.95), lengths[-1])


def _fenced(text: str) -> str:
    """A text as a Markdown code block that nothing inside can end."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return "\n".join([fence, text.removesuffix("\n"), fence])


def _summary(
    prompt_set: PromptSet, use: str, mixture: PromptMixture | None, config: RunConfig
) -> SetSummary:
    kept = len(prompt_set.prompts)
    share = None if mixture is None else mixture.shares[prompt_set.name]
    return SetSummary(
        name=prompt_set.name,
        use=use,
        kept=kept,
        share=share,
        epoch_steps=kept / (share * config.rollout.groups_per_step) if share else None,
        tokens=token_lengths(prompt_set.prompts),
        report=prompt_set.report,
    )


def _shown(prompt: Prompt, renderer: ChatRenderer) -> ShownPrompt:
    return ShownPrompt(
        source=prompt.source,
        prompt_id=prompt.prompt_id,
        num_tokens=len(prompt.token_ids),
        text=renderer.decode(prompt.token_ids),
        answer=prompt.answer,
        row=prompt.row,
    )


def _cells(summary: SetSummary) -> list[str]:
    report, lengths, steps = summary.report, summary.tokens, summary.epoch_steps
    counts = (report.num_rows, report.num_bad, report.num_too_long, report.num_duplicates)
    tokens = (lengths.min, lengths.median, lengths.p95, lengths.max)
    return [
        summary.name,
        summary.use,
        report.row_format,
        *(f"{count:,}" for count in (*counts, summary.kept, *tokens)),
        "" if summary.share is None else f"{summary.share:.2%}",
        "" if steps is None else f"{steps:,.1f}",
    ]


def _print_prompt(
    console: Console, use: str, prompt: ShownPrompt, special_tokens: Sequence[str]
) -> None:
    about = f"{use} · {prompt.prompt_id} · {prompt.num_tokens} tokens · answer {prompt.answer}"
    row = json.dumps(prompt.row, ensure_ascii=False)
    if console.is_terminal:
        text = Text(prompt.text)
        text.highlight_words(special_tokens, "bold magenta")
        content = Group(text, Text(f"row: {row}", style="dim"))
        console.print(Panel(content, title=escape(about), title_align="left"), highlight=False)
        return
    lines = ["", f"### {about}", "", _fenced(prompt.text), "", f"row: {row}"]
    console.out("\n".join(lines), highlight=False)


_CONTROL_PICTURES = {
    **{code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"},
    0x7F: 0x2421,
    **dict.fromkeys(range(0x80, 0xA0), 0xFFFD),
}
"""Replacements of the characters that a terminal would obey."""


@dataclass(frozen=True, slots=True)
class ShownPart:
    """What policy or environment wrote in a turn."""

    author: str
    """``policy`` or ``environment``."""
    num_tokens: int
    text: str | None
    """Without special tokens; None where the dump has no texts."""


@dataclass(frozen=True, slots=True)
class ShownSample:
    """One response."""

    group_id: int
    index: int
    prompt_id: str
    source: str
    finish_reason: str
    reward: float
    reward_components: dict[str, float]
    versions: tuple[tuple[int, int], ...]
    """(weights version, sampled tokens)."""
    sampled_tokens: int
    written_tokens: int
    prompt: str | None
    answer: str | None
    parts: tuple[ShownPart, ...]

    def title(self) -> str:
        """Which sample it is, and how it ended."""
        place = f"group {self.group_id} · sample {self.index} · {self.prompt_id}"
        return f"{place} · {self.finish_reason} · reward {self.reward:g}"

    def facts(self) -> list[str]:
        """One line each: rewards, versions, numbers of tokens, the answer."""
        components = (f"{name} {value:g}" for name, value in self.reward_components.items())
        versions = (f"{version} ({num_tokens})" for version, num_tokens in self.versions)
        return [
            f"reward components: {' · '.join(components) or 'none'}",
            f"weights versions (tokens): {' · '.join(versions) or 'none'}",
            f"tokens: {self.sampled_tokens:,} sampled, {self.written_tokens:,} written",
            *([] if self.answer is None else [f"answer: {self.answer}"]),
        ]

    def blocks(self) -> list[tuple[str, str | None]]:
        """Headings with their texts: the prompt, then the parts."""
        found: list[tuple[str, str | None]] = []
        if self.prompt is not None:
            found.append(("prompt", self.prompt))
        for number, part in enumerate(self.parts):
            turn = f"turn {1 + number // 2} · " if part.author == "policy" else ""
            found.append((f"{turn}{part.author} · {part.num_tokens:,} tokens", part.text))
        return found


@dataclass(frozen=True, slots=True)
class DumpReport:
    """What ``data show`` prints about a dump."""

    path: str
    step: int
    version: int
    num_groups: int
    num_samples: int
    has_texts: bool
    samples: tuple[ShownSample, ...]
    """The first samples."""

    def to_json(self) -> str:
        """Everything, as one JSON object."""
        return json.dumps(asdict(self), indent=2, ensure_ascii=False)

    def print(self, console: Console) -> None:
        """Panels on a terminal, else Markdown."""
        about = f"step {self.step} · version {self.version} · {self.num_groups:,} groups"
        lines = [f"{self.path} · {about} · {self.num_samples:,} samples"]
        if not self.has_texts:
            lines.append("No texts beside the dump: numbers of tokens only.")
        if not console.is_terminal:
            console.out("\n\n".join(lines), highlight=False)
            for sample in self.samples:
                console.out(_markdown(sample), highlight=False)
            return
        console.print(_text("\n".join(lines)), highlight=False)
        for sample in self.samples:
            console.print(_panel(sample), highlight=False)


def inspect_dump(path: Path, num_samples: int) -> DumpReport:
    """Read a dump and the texts beside it, if any; keep the first ``num_samples`` samples.

    Raises:
        DumpError: It is not an intact dump, or the texts belong to another one.
        OSError: It cannot be read.
    """
    batch = read_batch(path)
    has_texts = texts_path(path).exists()
    texts = {(t.group_id, t.index): t for t in read_texts(path)} if has_texts else {}
    first = batch.samples[:num_samples]
    return DumpReport(
        path=str(path),
        step=batch.step,
        version=batch.version,
        num_groups=len(batch.groups),
        num_samples=len(batch.samples),
        has_texts=has_texts,
        samples=tuple(_shown_sample(s, texts.get((s.group_id, s.index)), path) for s in first),
    )


def _shown_sample(sample: Sample, text: SampleText | None, path: Path) -> ShownSample:
    lengths = [len(part) for part in sample.segments()]
    written: tuple[str | None, ...] = (None,) * len(lengths)
    if text is not None:
        written = text.turns or (text.response_text,)
        if len(written) != len(lengths):
            raise DumpError(
                f"{texts_path(path)}: sample {sample.index} of group {sample.group_id} has "
                f"{len(written)} texts, its tokens are of {len(lengths)} parts; give the dump that "
                "the texts were written with"
            )
    authors = ("policy", "environment")
    return ShownSample(
        group_id=sample.group_id,
        index=sample.index,
        prompt_id=sample.prompt.prompt_id,
        source=sample.prompt.source,
        finish_reason=sample.finish_reason.value,
        reward=sample.reward,
        reward_components=sample.reward_components,
        versions=tuple((span.version, span.num_tokens) for span in sample.versions),
        sampled_tokens=sample.num_sampled,
        written_tokens=sample.num_written,
        prompt=None if text is None else text.prompt_text,
        answer=None if text is None else text.answer,
        parts=tuple(
            ShownPart(authors[number % 2], length, part)
            for number, (length, part) in enumerate(zip(lengths, written, strict=True))
        ),
    )


def _markdown(sample: ShownSample) -> str:
    lines = ["", f"### {sample.title()}", "", *(f"- {fact}" for fact in sample.facts())]
    for heading, text in sample.blocks():
        lines += (
            ["", f"**{heading}**"] if text is None else ["", f"**{heading}**", "", _fenced(text)]
        )
    return "\n".join(lines)


def _panel(sample: ShownSample) -> Panel:
    content = [_text(fact, "dim") for fact in sample.facts()]
    for heading, text in sample.blocks():
        style = "cyan" if heading.startswith("environment") else ""
        content.append(_text(f"\n{heading}", "bold"))
        if text is not None:
            content.append(_text(text, style))
    return Panel(Group(*content), title=_text(sample.title()), title_align="left")


def _text(text: str, style: str = "") -> Text:
    """Shown as it is: neither markup nor control sequences."""
    return Text(text.translate(_CONTROL_PICTURES), style)
