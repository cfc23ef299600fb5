"""From a data set to rendered prompts, and a report of what was left out or looks wrong.

A set is read, checked and rendered once, at the start: a bad row is reported before anything else
is started, and the number of prompts that are too long is known.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from bapo_megatron.data.rows import DataError, bad_field, read_rows, recognise
from bapo_megatron.types import Prompt

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from bapo_megatron.config.data import DataConfig, DatasetConfig
    from bapo_megatron.data.chat import ChatRenderer, Message
    from bapo_megatron.data.rows import Row, RowFormat

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SetReport:
    """What became of the rows of one set.

    Kept prompts are the rows without those that are bad, too long or, if asked for, duplicates.
    """

    place: str
    """The file, pattern or Hub id."""
    row_format: str
    """The format that was named or recognised."""
    num_rows: int
    num_bad: int
    first_bad: str
    """Place, field and reason of the first bad row; empty without one."""
    num_too_long: int
    max_prompt_tokens: int
    longest_tokens: int
    """Of all prompts, those that are too long included."""
    num_duplicates: int
    """Rows, neither bad nor too long, whose rendered prompt an earlier row has."""
    duplicates_dropped: bool
    num_contradictions: int
    """Rendered prompts whose rows have different answers."""
    first_contradiction: str
    """Two such rows with their answers; empty without any."""
    dropped_columns: tuple[str, ...]
    """Columns that reward functions do not get, because they hold bytes."""

    def warnings(self) -> list[str]:
        """What a user should know, one line each."""
        lines = []
        if self.num_bad:
            lines.append(
                f"{self.place}: {self.num_bad} of {self.num_rows} rows are bad and were left out "
                f"(data.on_bad_row), the first: {self.first_bad}"
            )
        if self.num_too_long:
            lines.append(
                f"{self.place}: {self._too_long()} and were left out (data.max_prompt_tokens)"
            )
        if self.num_duplicates:
            action = "were left out" if self.duplicates_dropped else "stay (data.on_duplicate)"
            lines.append(
                f"{self.place}: {self.num_duplicates} of {self.num_rows} rows repeat the prompt of "
                f"an earlier one and {action}"
            )
        if self.num_contradictions:
            lines.append(
                f"{self.place}: {self.num_contradictions} prompts have rows with different "
                f"answers, the first: {self.first_contradiction}"
            )
        if self.dropped_columns:
            lines.append(
                f"{self.place}: reward functions do not get the columns "
                f"{', '.join(self.dropped_columns)}: bytes are no JSON"
            )
        return lines

    def refusal(self) -> str:
        """The error of a set without any prompt left."""
        bad = f", {self.num_bad} rows are bad (the first: {self.first_bad})" if self.num_bad else ""
        return (
            f"{self.place}: no prompt is left: {self._too_long()}{bad}; raise "
            "data.max_prompt_tokens, or give a file with prompts"
        )

    def refusal_to_evaluate(self) -> str:
        """The error of an evaluation set whose score would lack problems."""
        return (
            f"{self.place}: {self._too_long()}, the longest has {self.longest_tokens}, and an "
            "evaluation leaves none out; raise data.max_prompt_tokens"
        )

    def _too_long(self) -> str:
        return (
            f"{self.num_too_long} of {self.num_rows - self.num_bad} prompts are longer than "
            f"{self.max_prompt_tokens} tokens"
        )


@dataclass(frozen=True, slots=True)
class PromptSet:
    """The prompts of one set, in its order."""

    name: str
    prompts: tuple[Prompt, ...]
    report: SetReport
    weight: float = 1.0


def load_eval_set(
    dataset: DatasetConfig, renderer: ChatRenderer, max_prompt_tokens: int
) -> PromptSet:
    """Read and render every prompt of an evaluation set, without a word about it.

    Args:
        dataset: The set and its columns.
        renderer: Puts the question into the chat template.
        max_prompt_tokens: Longest prompt; none is left out.

    Returns:
        The prompts in the set's order; ``prompt_id`` is the file's name and the row, from 0.

    Raises:
        DataError: A row cannot be read, or a prompt is too long.
        OSError: A file cannot be opened.
    """
    loaded = load_set(dataset, renderer, max_prompt_tokens)
    if loaded.report.num_too_long:
        raise DataError(loaded.report.refusal_to_evaluate())
    return loaded


def load_train_sets(data: DataConfig, renderer: ChatRenderer) -> list[PromptSet]:
    """Read and render every training set, in the order of the configuration, without a word.

    Raises:
        DataError: A row cannot be read (``on_bad_row: raise``), or no prompt of a set is left.
        OSError: A file cannot be opened.
    """
    return [
        load_set(
            dataset,
            renderer,
            data.max_prompt_tokens,
            on_bad_row=data.on_bad_row,
            on_duplicate=data.on_duplicate,
            weight=dataset.weight,
        )
        for dataset in data.train_sets
    ]


def log_warnings(prompt_sets: Sequence[PromptSet]) -> None:
    """Log what a user should know about the sets of a mixture, a record per line."""
    for prompt_set in prompt_sets:
        for line in prompt_set.report.warnings():
            _LOG.warning("%s", line)
    for line in shared_prompts(prompt_sets):
        _LOG.warning("%s", line)


def shared_prompts(prompt_sets: Sequence[PromptSet]) -> list[str]:
    """A line for each set with prompts that an earlier set of the mixture has, as rendered."""
    lines = []
    first_of: dict[str, tuple[str, str]] = {}
    for prompt_set in prompt_sets:
        own: dict[str, str] = {}
        for prompt in prompt_set.prompts:
            own.setdefault(prompt.text, prompt.prompt_id)
        shared = [text for text in own if text in first_of]
        if shared:
            name, prompt_id = first_of[shared[0]]
            lines.append(
                f"training set '{prompt_set.name}': {len(shared)} of {len(own)} prompts are in an "
                f"earlier set too, the first: {own[shared[0]]} is {prompt_id} of '{name}'"
            )
        for text, prompt_id in own.items():
            first_of.setdefault(text, (prompt_set.name, prompt_id))
    return lines


def load_set(
    dataset: DatasetConfig,
    renderer: ChatRenderer,
    max_prompt_tokens: int,
    *,
    on_bad_row: Literal["raise", "skip"] = "raise",
    on_duplicate: Literal["keep", "drop"] = "keep",
    weight: float = 1.0,
) -> PromptSet:
    """Read and render the prompts of a set, without a word about it.

    Args:
        dataset: The set and its columns.
        renderer: Puts the question into the chat template.
        max_prompt_tokens: Longest prompt that is kept.
        on_bad_row: What becomes of a row that cannot be used.
        on_duplicate: What becomes of a row whose rendered prompt an earlier one has.
        weight: The set's weight in a mixture.

    Raises:
        DataError: A row cannot be used (``raise``), or no prompt is left.
        OSError: A file cannot be opened.
    """
    loading = _Loading(dataset, renderer, drops_duplicates=on_duplicate == "drop")
    for row in read_rows(dataset):
        try:
            loading.add(row)
        except DataError as error:
            if on_bad_row == "raise":
                raise
            loading.bad.append(str(error))
    return loading.finish(max_prompt_tokens, weight)


@dataclass(slots=True)
class _Loading:
    """A set while it is read; each distinct question is rendered and tokenised once."""

    dataset: DatasetConfig
    renderer: ChatRenderer
    drops_duplicates: bool
    row_format: RowFormat | None = None
    num_rows: int = 0
    bad: list[str] = field(default_factory=list)
    dropped_columns: set[str] = field(default_factory=set)
    text_of: dict[str, str] = field(default_factory=dict)
    """Rendered text by question (as JSON)."""
    read: list[tuple[str, str, str, dict[str, Any]]] = field(default_factory=list)
    """Of each good row: prompt id, text, answer, the other columns."""

    def add(self, row: Row) -> None:
        """Read a row.

        Raises:
            DataError: It cannot be used.
        """
        self.num_rows += 1
        if row.fields is None:
            raise DataError(f"{row.place}: {row.problem}; correct or remove it")
        row_format = self.row_format or recognise(self.dataset, row.fields)
        if row_format is None:
            raise DataError(
                f"{row.place}: the columns {', '.join(row.fields) or '(none)'} are of no known "
                "format; set prompt_column and answer_column (docs/data.md)"
            )
        self.row_format = row_format
        example = row_format.read(row, self.dataset.row_columns, self.dropped_columns)
        num_texts = len(self.text_of)
        text = self._text(row, example.question, row_format.prompt_column)
        is_dropped = self.drops_duplicates and len(self.text_of) == num_texts
        rest = {} if is_dropped else example.rest  # a gigabyte in a set that repeats its prompts
        self.read.append((row.prompt_id, text, example.answer, rest))

    def finish(self, max_prompt_tokens: int, weight: float) -> PromptSet:
        """The set.

        Raises:
            DataError: No prompt is left.
        """
        texts = list(dict.fromkeys(text for _, text, _, _ in self.read))
        token_ids_of = dict(zip(texts, self.renderer.token_ids(texts), strict=True))
        name = self.dataset.label
        prompts: list[Prompt] = []
        num_too_long = num_duplicates = 0
        first_of: dict[str, Prompt] = {}
        contradictions: dict[str, str] = {}
        for prompt_id, text, answer, rest in self.read:
            token_ids = token_ids_of[text]
            if len(token_ids) > max_prompt_tokens:
                num_too_long += 1
                continue
            prompt = Prompt(prompt_id, token_ids, answer, text, source=name, row=rest)
            first = first_of.setdefault(text, prompt)
            if first is not prompt:
                num_duplicates += 1
                if first.answer != answer:
                    contradictions.setdefault(text, _contradiction(first, prompt))
                if self.drops_duplicates:
                    continue
            prompts.append(prompt)
        report = SetReport(
            place=str(self.dataset.path or self.dataset.hub),
            row_format=self.row_format.name if self.row_format else self.dataset.row_format,
            num_rows=self.num_rows,
            num_bad=len(self.bad),
            first_bad=self.bad[0] if self.bad else "",
            num_too_long=num_too_long,
            max_prompt_tokens=max_prompt_tokens,
            longest_tokens=max(map(len, token_ids_of.values()), default=0),
            num_duplicates=num_duplicates,
            duplicates_dropped=self.drops_duplicates,
            num_contradictions=len(contradictions),
            first_contradiction=next(iter(contradictions.values()), ""),
            dropped_columns=tuple(sorted(self.dropped_columns)),
        )
        if not prompts:
            raise DataError(report.refusal())
        return PromptSet(name, tuple(prompts), report, weight)

    def _text(self, row: Row, question: str | Sequence[Message], column: str) -> str:
        key = json.dumps(question)
        if key not in self.text_of:
            try:
                self.text_of[key] = self.renderer.text(question)
            except ValueError as error:
                raise bad_field(row, column, error) from error
        return self.text_of[key]


def _contradiction(first: Prompt, other: Prompt) -> str:
    return f"{first.prompt_id} has '{first.answer}', {other.prompt_id} has '{other.answer}'"
