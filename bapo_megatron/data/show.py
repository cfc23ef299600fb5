"""The ``data show`` command: what a run would train and evaluate on, without starting anything."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass
from itertools import islice
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from bapo_megatron.data.chat import load_tokenizer, make_renderer
from bapo_megatron.data.overlap import find_overlaps
from bapo_megatron.data.prompts import load_eval_set, load_train_sets, shared_prompts
from bapo_megatron.data.stream import PromptMixture

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from rich.console import Console

    from bapo_megatron.config.schema import RunConfig
    from bapo_megatron.data.chat import ChatRenderer
    from bapo_megatron.data.overlap import Overlap
    from bapo_megatron.data.prompts import PromptSet, SetReport
    from bapo_megatron.types import Prompt


@dataclass(frozen=True, slots=True)
class TokenLengths:
    """Lengths of a set's rendered prompts; quantiles are lengths that occur (nearest rank)."""

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
    """Of the draws of training."""
    epoch_steps: float | None
    """Steps of training after which every prompt was drawn once, if each draws as many prompts as
    its batch has groups."""
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
    """What reward functions get besides."""


@dataclass(frozen=True, slots=True)
class DataReport:
    """What ``data show`` prints."""

    sets: tuple[SetSummary, ...]
    shared: tuple[str, ...]
    """About prompts that several training sets have, one line each."""
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
        return json.dumps(
            {
                "sets": [asdict(each) for each in self.sets],
                "overlaps": [asdict(overlap) for overlap in self.overlaps],
                "warnings": self.warnings(),
                "prompts": {
                    use: [asdict(prompt) for prompt in prompts]
                    for use, prompts in self.prompts.items()
                },
            },
            indent=2,
            ensure_ascii=False,
        )

    def print(self, console: Console) -> None:
        """Tables and panels on a terminal, else Markdown."""
        console.print(_set_table(self.sets, console.is_terminal))
        for line in self.warnings():
            mark = "[bold yellow]![/]" if console.is_terminal else "-"
            console.print(f"{mark} {escape(line)}", soft_wrap=True, highlight=False)
        for use, prompts in self.prompts.items():
            for prompt in prompts:
                _print_prompt(console, use, prompt, self.special_tokens)


def inspect_data(config: RunConfig, num_rows: int) -> DataReport:
    """Read and render every prompt that the configuration names.

    Args:
        config: A validated configuration whose files exist.
        num_rows: How many prompts of training and of each evaluation set to show.

    Raises:
        ValueError: A row, the tokenizer or the chat template cannot be used.
        OSError: A file cannot be read.
    """
    tokenizer = load_tokenizer(config.model.path, config.data.chat_template)
    renderer = make_renderer(tokenizer, config.data)
    train_sets = load_train_sets(config.data, renderer)
    eval_sets = [
        load_eval_set(dataset, renderer, config.data.max_prompt_tokens)
        for dataset in config.eval.sets
    ]
    summaries = []
    prompts: dict[str, tuple[ShownPrompt, ...]] = {}
    if train_sets:
        mixture = PromptMixture(train_sets, config.seed, config.data.shuffle)
        for prompt_set in train_sets:
            share = mixture.shares[prompt_set.name]
            draws_per_step = share * config.rollout.groups_per_step
            epoch_steps = len(prompt_set.prompts) / draws_per_step
            summaries.append(_summary(prompt_set, "train", share, epoch_steps))
        prompts["train"] = tuple(_shown(p, renderer) for p in islice(mixture, num_rows))
    for prompt_set in eval_sets:
        summaries.append(_summary(prompt_set, "eval", None, None))
        first = prompt_set.prompts[:num_rows]
        prompts[f"eval: {prompt_set.name}"] = tuple(_shown(p, renderer) for p in first)
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
    """Lengths of prompts, of which there is at least one."""
    lengths = sorted(len(prompt.token_ids) for prompt in prompts)

    def quantile(share: float) -> int:
        return lengths[math.ceil(share * len(lengths)) - 1]

    return TokenLengths(lengths[0], quantile(0.5), quantile(0.95), lengths[-1])


def fenced(text: str) -> str:
    """A text as a Markdown code block that nothing in the text ends."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return "\n".join([fence, text.removesuffix("\n"), fence])


def _summary(
    prompt_set: PromptSet, use: str, share: float | None, epoch_steps: float | None
) -> SetSummary:
    return SetSummary(
        name=prompt_set.name,
        use=use,
        kept=len(prompt_set.prompts),
        share=share,
        epoch_steps=epoch_steps,
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


def _set_table(summaries: Sequence[SetSummary], is_terminal: bool) -> Table:
    table = Table(title="Prompts" if is_terminal else None, box=None if is_terminal else _MARKDOWN)
    headings = ("set", "use", "format", "rows", "bad", "too long", "duplicates", "prompts")
    tokens = ("tokens min", "median", "p95", "max")
    for heading in (*headings, *tokens, "share", "steps per epoch"):
        is_text = heading in ("set", "use", "format")
        table.add_column(heading, justify="left" if is_text else "right", no_wrap=not is_terminal)
    for each in summaries:
        report, lengths = each.report, each.tokens
        table.add_row(
            escape(each.name),
            each.use,
            report.row_format,
            f"{report.num_rows:,}",
            f"{report.num_bad:,}",
            f"{report.num_too_long:,}",
            f"{report.num_duplicates:,}",
            f"{each.kept:,}",
            *(f"{n:,}" for n in (lengths.min, lengths.median, lengths.p95, lengths.max)),
            "" if each.share is None else f"{each.share:.2%}",
            "" if each.epoch_steps is None else f"{each.epoch_steps:,.1f}",
        )
    return table


_MARKDOWN = box.MARKDOWN


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
    lines = ["", f"### {about}", "", fenced(prompt.text), "", f"row: {row}"]
    console.out("\n".join(lines), highlight=False)
