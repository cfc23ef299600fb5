"""Reads, checks and renders the prompts of data sets, with a report of rows left out.

A set is loaded once, at the start, before anything else is started. Loading logs nothing.
"""

import json
import logging
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from bapo_megatron.config.data import DataConfig, DatasetConfig
from bapo_megatron.config.evaluation import eval_reward
from bapo_megatron.config.reward import RewardConfig
from bapo_megatron.config.schema import RunConfig
from bapo_megatron.data.chat import ChatRenderer
from bapo_megatron.data.rows import (
    DataError,
    EmptyAnswerError,
    Row,
    RowFormat,
    read_rows,
    recognise,
)
from bapo_megatron.reward.base import RowError
from bapo_megatron.reward.rows import check_row
from bapo_megatron.types import Prompt

_LOG = logging.getLogger(__name__)

_MIN_COMMON_ROWS = 50
_MIN_COMMON_SHARE = 0.05
"""A reference of more prompts than this is reported: a constant response is right for them all. The
most common one of GSM8K has 2.8%."""
_ANY_REFERENCE = RewardConfig(no_answers=())


@dataclass(slots=True)
class SetReport:
    """Counts of a set's rows; bad and too long ones, and unwanted duplicates, are left out."""

    place: str
    row_format: str
    num_rows: int = 0
    num_bad: int = 0
    first_bad: str = ""
    """Place, field and reason of the first bad row; empty without one."""
    num_no_answer: int = 0
    """Rows whose reference is not an answer (``reward.no_answers``)."""
    no_answers: dict[str, int] = field(default_factory=dict)
    """These references, the most common ones first."""
    num_too_long: int = 0
    max_prompt_tokens: int = 0
    longest_tokens: int = 0
    """Length of the longest prompt, those that are too long included."""
    num_duplicates: int = 0
    """Rows, neither bad nor too long, whose rendered prompt an earlier row has."""
    duplicates_dropped: bool = False
    duplicates_reason: str = "data.on_duplicate"
    """Why they stay or were left out."""
    num_contradictions: int = 0
    """Rendered prompts whose rows have different answers."""
    first_contradiction: str = ""
    """Two such rows with their answers; empty without any."""
    common_answer: str = ""
    """The reference of most prompts."""
    num_common: int = 0
    """Prompts with this reference."""
    num_kept: int = 0
    num_rendered: int = 0
    """Good rows whose question contains marks of a chat template, which is applied all the same."""
    first_rendered: str = ""
    """Prompt id and mark of the first such row; empty without one."""
    dropped_columns: tuple[str, ...] = ()
    """Columns that reward functions do not get, because they hold bytes."""

    def warnings(self) -> list[str]:
        """Return warnings for the user, one line each."""
        lines = []
        if self.num_bad:
            lines.append(
                f"{self.num_bad} of {self.num_rows} rows are bad and were left out "
                f"(data.on_bad_row), the first: {self.first_bad}"
            )
        if self.num_no_answer:
            lines.append(f"{self.no_answer()} and were left out (reward.no_answers)")
        if self.num_common >= max(_MIN_COMMON_ROWS, _MIN_COMMON_SHARE * self.num_kept):
            lines.append(
                f"the constant answer '{self.common_answer}' is right for {self.num_common} of "
                f"{self.num_kept} prompts ({self.num_common / self.num_kept:.1%}); leave such rows "
                "out (reward.no_answers) unless this is meant, as with choices"
            )
        if self.num_too_long:
            lines.append(f"{self.too_long()} and were left out (data.max_prompt_tokens)")
        if self.num_duplicates:
            action = "were left out" if self.duplicates_dropped else "stay"
            lines.append(
                f"{self.num_duplicates} of {self.num_rows} rows repeat the prompt of an earlier "
                f"one and {action} ({self.duplicates_reason})"
            )
        if self.num_contradictions:
            lines.append(
                f"{self.num_contradictions} prompts have rows with different answers, the first: "
                f"{self.first_contradiction}"
            )
        if self.num_rendered:
            lines.append(
                f"{self.num_rendered} of {self.num_rows} prompts contain the marks of a chat "
                f"template, which is applied to them again, the first: {self.first_rendered}; give "
                "bare questions, or a data.chat_template that prints messages[-1].content alone"
            )
        if self.dropped_columns:
            lines.append(
                f"reward functions do not get the columns {', '.join(self.dropped_columns)}: "
                "bytes are not JSON"
            )
        return [f"{self.place}: {line}" for line in lines]

    def too_long(self) -> str:
        """Return how many prompts are too long, as part of a message."""
        return (
            f"{self.num_too_long} of {self.num_rows - self.num_bad - self.num_no_answer} prompts "
            f"are longer than {self.max_prompt_tokens} tokens"
        )

    def no_answer(self) -> str:
        """Return how many references are not answers, as part of a message."""
        counts = ", ".join(f"'{text}' {number}" for text, number in self.no_answers.items())
        return f"{self.num_no_answer} of {self.num_rows} references are not answers ({counts})"


@dataclass(frozen=True, slots=True)
class PromptSet:
    """The prompts of one set, in its order."""

    name: str
    prompts: tuple[Prompt, ...]
    report: SetReport
    weight: float = 1.0


def load_eval_sets(config: RunConfig, renderer: ChatRenderer) -> Iterator[PromptSet]:
    """Read and render each set of ``eval.sets``, one after the other; see ``load_set``.

    Each distinct prompt is there once, and none of them may be left out. With an environment, which
    reads the other columns, rows with one prompt are different problems.
    """
    reward, keeps_all = eval_reward(config.reward, config.eval), config.rollout.has_environment
    reason = "an evaluation has each prompt once, sampled eval.samples_per_prompt times"
    if keeps_all:
        reason = "an environment may read their other columns"
    data = DataConfig(
        max_prompt_tokens=config.data.max_prompt_tokens,
        on_duplicate="keep" if keeps_all else "drop",
    )
    for dataset in config.eval.sets:
        prompt_set = load_set(dataset, renderer, data, reward=reward, duplicates_reason=reason)
        report = prompt_set.report
        if report.num_no_answer:
            raise DataError(
                f"{report.place}: {report.no_answer()}, and an evaluation leaves none out; remove "
                "these rows, or change reward.no_answers"
            )
        if report.num_too_long:
            raise DataError(
                f"{report.place}: {report.too_long()}, the longest has {report.longest_tokens}, "
                "and an evaluation leaves none out; raise data.max_prompt_tokens"
            )
        yield prompt_set


def load_train_sets(
    data: DataConfig, renderer: ChatRenderer, reward: RewardConfig = _ANY_REFERENCE
) -> list[PromptSet]:
    """Read and render every training set, in the order of the configuration; see ``load_set``."""
    return [
        load_set(dataset, renderer, data, dataset.weight, reward) for dataset in data.train_sets
    ]


def log_warnings(prompt_sets: Sequence[PromptSet], further: Sequence[str] = ()) -> None:
    """Log ``further`` and the warnings about the sets of a mixture, a record per line."""
    lines = [line for prompt_set in prompt_sets for line in prompt_set.report.warnings()]
    for line in (*further, *lines, *shared_prompts(prompt_sets)):
        _LOG.warning("%s", line)


def shared_prompts(prompt_sets: Sequence[PromptSet]) -> list[str]:
    """Return a line for each set with rendered prompts that an earlier set of the mixture has."""
    lines = []
    first_of: dict[str, tuple[str, str]] = {}
    for prompt_set in prompt_sets:
        ids: dict[str, str] = {}
        for prompt in prompt_set.prompts:
            ids.setdefault(prompt.text, prompt.prompt_id)
        shared = [text for text in ids if text in first_of]
        if shared:
            name, prompt_id = first_of[shared[0]]
            lines.append(
                f"training set '{prompt_set.name}': {len(shared)} of {len(ids)} prompts are in an "
                f"earlier set too, the first: {ids[shared[0]]} is {prompt_id} of '{name}'"
            )
        for text, prompt_id in ids.items():
            first_of.setdefault(text, (prompt_set.name, prompt_id))
    return lines


def load_set(
    dataset: DatasetConfig,
    renderer: ChatRenderer,
    data: DataConfig,
    weight: float = 1.0,
    reward: RewardConfig = _ANY_REFERENCE,
    *,
    duplicates_reason: str = "data.on_duplicate",
) -> PromptSet:
    """Read and render the prompts of a set, in its order, by the rules of ``data``.

    Rows whose reference is one of ``reward.refused_answers``, or empty where there are any, are
    left out.

    Raises:
        DataError: A row cannot be used (``on_bad_row: raise``), or no prompt is left.
        OSError: A file cannot be opened.
    """
    report = SetReport(
        str(dataset.path or dataset.hub or dataset.label),
        dataset.row_format,
        max_prompt_tokens=data.max_prompt_tokens,
        duplicates_dropped=data.on_duplicate == "drop",
        duplicates_reason=duplicates_reason,
    )
    rows = list(_read(dataset, renderer, data, report, reward))
    texts = list(dict.fromkeys(text for _, text, _, _ in rows))
    token_ids_of = dict(zip(texts, renderer.token_ids(texts), strict=True))
    report.longest_tokens = max(map(len, token_ids_of.values()), default=0)
    prompts: list[Prompt] = []
    first_of: dict[str, Prompt] = {}
    contradictions: dict[str, str] = {}
    for prompt_id, text, answer, columns in rows:
        token_ids = token_ids_of[text]
        if len(token_ids) > report.max_prompt_tokens:
            report.num_too_long += 1
            continue
        prompt = Prompt(prompt_id, token_ids, answer, text, dataset.label, columns)
        first = first_of.setdefault(text, prompt)
        if first is not prompt:
            report.num_duplicates += 1
            if first.answer != answer:
                conflict = f"{first.prompt_id} has '{first.answer}', {prompt_id} has '{answer}'"
                contradictions.setdefault(text, conflict)
            if report.duplicates_dropped:
                continue
        prompts.append(prompt)
    report.num_contradictions = len(contradictions)
    report.first_contradiction = next(iter(contradictions.values()), "")
    if prompts:
        answers = Counter(prompt.answer for prompt in prompts)
        [(report.common_answer, report.num_common)] = answers.most_common(1)
        report.num_kept = len(prompts)
    else:
        bad = f", {report.num_bad} rows are bad (the first: {report.first_bad})"
        raise DataError(
            f"{report.place}: no prompt is left: {report.too_long()}{bad if report.num_bad else ''}"
            f"{f', {report.no_answer()}' if report.num_no_answer else ''}"
            "; raise data.max_prompt_tokens, or give a file with prompts"
        )
    return PromptSet(dataset.label, tuple(prompts), report, weight)


def _read(
    dataset: DatasetConfig,
    renderer: ChatRenderer,
    data: DataConfig,
    report: SetReport,
    reward: RewardConfig,
) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    """Yield prompt id, rendered text, answer and the other columns of each good row."""
    row_format: RowFormat | None = None

    @cache
    def render(asked: str) -> str:
        """The text of a question and tools, given as JSON: each distinct one is rendered once."""
        question, tools = json.loads(asked)
        text = renderer.text(question, tools)
        added[text] = renderer.added_columns(question)
        if mark := renderer.template_mark(question):
            marks[text] = mark
        return text

    refused, unusable = set(map(_letters, reward.refused_answers)), Counter[str]()
    marks: dict[str, str] = {}
    added: dict[str, dict[str, Any]] = {}
    seen: set[str] = set()
    dropped: set[str] = set()
    for row in read_rows(dataset):
        report.num_rows += 1
        try:
            row_format = _recognised(dataset, row, row_format)
            report.row_format = row_format.name
            text, answer, columns = row_format.read(
                row, dataset.row_columns, dropped, lambda *asked: render(json.dumps(asked))
            )
            _check(reward, row.place, answer, columns)
        except DataError as error:
            if refused and isinstance(error, EmptyAnswerError):
                unusable[""] += 1
                continue
            if data.on_bad_row == "raise":
                raise
            report.num_bad += 1
            report.first_bad = report.first_bad or str(error)
            continue
        if _letters(answer) in refused:
            unusable[answer] += 1
            continue
        if text in marks:
            report.num_rendered += 1
            report.first_rendered = report.first_rendered or f"{row.prompt_id} has {marks[text]}"
        if report.duplicates_dropped and text in seen:
            columns = {}  # a gigabyte in a set that repeats its prompts
        seen.add(text)
        yield row.prompt_id, text, answer, {**columns, **added[text]}
    report.dropped_columns = tuple(sorted(dropped))
    report.num_no_answer, report.no_answers = unusable.total(), dict(unusable.most_common(5))


def _recognised(dataset: DatasetConfig, row: Row, row_format: RowFormat | None) -> RowFormat:
    """Return the format of a readable row: that of the rows before it, if any."""
    if row.fields is None:
        raise DataError(f"{row.place}: {row.problem}; correct or remove it")
    row_format = row_format or recognise(dataset, row.fields)
    if row_format is None:
        raise DataError(
            f"{row.place}: the columns {', '.join(row.fields) or '(none)'} are of no known format; "
            "set prompt_column and answer_column (docs/data.md)"
        )
    return row_format


def _check(reward: RewardConfig, place: str, answer: str, columns: dict[str, Any]) -> None:
    try:
        check_row(reward, answer, columns)
    except RowError as error:
        raise DataError(f"{place}: {error}; correct or remove this row") from error


def _letters(answer: str) -> str:
    """The answer's letters and digits, case-folded; the answer itself where it has none."""
    return re.sub(r"\\[A-Za-z]+|[\W_]", "", answer).casefold() or answer
