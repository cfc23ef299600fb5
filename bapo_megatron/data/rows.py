"""Rows of files, the Hugging Face Hub and generators; question and answer in a row's columns.

``read_rows`` reads the rows of a set, with their places for messages; ``recognise`` finds the
format of the columns (docs/data.md describes each).
"""

import ast
import datetime
import decimal
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from bapo_megatron.config.data import DatasetConfig, TrainSetConfig
from bapo_megatron.config.rollout import checked_tools
from bapo_megatron.data.columns import PARQUET_ERRORS
from bapo_megatron.data.tools import UNSEEN, Message, checked_message
from bapo_megatron.errors import first_line
from bapo_megatron.reward.extraction import last_boxed
from bapo_megatron.runtime.calls import shown_value
from bapo_megatron.runtime.files import open_regular, parse_json, read_lines, read_regular
from bapo_megatron.runtime.processes import describe_exit

_MAX_REASON = 300
_BATCH_ROWS = 1024
"""Rows that are held as Python values at a time; a row may have columns of megabytes."""
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|(?P<bare>[^\s{}$]+))")
_JSON_MESSAGES = re.compile(r'\s*\[\s*\{\s*"(?:role|content)"\s*:')
"""The start of chat messages that are JSON inside a text."""
_PYTHON_LIST = re.compile(r"\s*\[(?:\s*'(?:[^'\\]|\\[\\'])*'\s*(?:,|(?=\])))+\s*\]\s*")
"""A list of texts as Python prints it."""
_QUESTIONS = ("prompt", "question", "problem")
_ANSWERS = ("answer", "label", "solutions")
"""Columns that ``auto`` takes, whatever their case; ``label`` is slime's, ``solutions`` AReaL's."""
_NOT_JSON = object()


class DataError(ValueError):
    """Prompts that cannot be used; one line with file, row, field and reason."""


class EmptyAnswerError(DataError):
    """A row's answer is null or empty."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a set, readable or not."""

    prompt_id: str
    """``<file name or Hub id>:<row, from 0>``."""
    place: str
    """The row for messages, such as ``data/train.jsonl:17`` (lines count from 1)."""
    fields: dict[str, Any] | None
    """Its columns; None where the row cannot be read."""
    problem: str = ""
    fills_nulls: bool = False
    """Whether its structs have null for each field that only other rows have, as Arrow's do."""


def read_rows(dataset: DatasetConfig) -> Iterator[Row]:
    """Read a set row by row: files in the order of their names, a set of the Hub, or problems.

    ``config.check`` has seen the files and their suffixes.

    Raises:
        DataError: A file or set as a whole cannot be read.
        OSError: A file cannot be opened.
    """
    if dataset.gym:
        yield from _generate(dataset)
        return
    if dataset.path is None:
        yield from _read_hub(dataset)
        return
    readers = {".jsonl": _read_jsonl, ".json": _read_json, ".parquet": _read_parquet}
    for path in dataset.files():
        yield from readers[path.suffix](path)


def _read_jsonl(path: Path) -> Iterator[Row]:
    """One JSON object per line; blank lines count as rows but hold no prompt."""
    with open_regular(path) as lines:
        for number, line in enumerate(read_lines(lines, path)):
            if line.strip():
                yield _row(f"{path.name}:{number}", f"{path}:{number + 1}", _parse_json(line))


def _read_json(path: Path) -> Iterator[Row]:
    records = _parse_json(read_regular(path))
    if isinstance(records, ValueError):
        raise DataError(f"{path}: {records}; correct the file")
    if not isinstance(records, list):
        raise DataError(f"{path}: must be a JSON list of objects, got {shown_value(records)}")
    for number, record in enumerate(records):
        yield _row(f"{path.name}:{number}", f"{path}: entry {number}", record)


def _read_parquet(path: Path) -> Iterator[Row]:
    with open_regular(path) as stream:
        try:
            batches = pq.ParquetFile(stream).iter_batches(batch_size=_BATCH_ROWS)
            yield from _rows_of_batches(batches, path.name, str(path))
        except PARQUET_ERRORS as error:
            raise DataError(
                f"{path}: not a readable parquet file ({first_line(error)}); write or download it "
                "again"
            ) from error


def _read_hub(dataset: DatasetConfig) -> Iterator[Row]:
    """A data set of the Hub, or of the library's cache where there is no network."""
    import datasets  # takes seconds, and most runs read files

    place = f"{dataset.hub} ({dataset.subset + ', ' if dataset.subset else ''}{dataset.split})"
    try:
        data_set = datasets.load_dataset(
            dataset.hub, name=dataset.subset or None, split=dataset.split
        )
    except (datasets.exceptions.DatasetsError, OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:_MAX_REASON]
        raise DataError(
            f"{place}: cannot be loaded ({reason}); check hub, subset and split, or load it once "
            f"into {datasets.config.HF_DATASETS_CACHE} where there is a network"
        ) from error
    # As arrow, so that images and sound are not decoded.
    batches = data_set.with_format("arrow").iter(batch_size=_BATCH_ROWS)
    yield from _rows_of_batches(batches, dataset.hub, place)


def _generate(dataset: DatasetConfig) -> Iterator[Row]:
    """Problems of reasoning-gym, which a process of their own generates."""
    # Some tasks depend on the order of sets of strings.
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    request = {
        "tasks": [task.model_dump(mode="json") for task in dataset.gym],
        "size": dataset.size,
        "seed": dataset.seed,
        "is_held_out": not isinstance(dataset, TrainSetConfig),
    }
    process = subprocess.run(
        [sys.executable, "-m", "bapo_megatron.data.gym", str(os.getpid())],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    if process.returncode:
        reason = (process.stderr.strip() or describe_exit(process.returncode)).splitlines()[-1]
        raise DataError(f"{dataset.label}: gym: {reason}")
    for number, line in enumerate(process.stdout.splitlines()):
        yield Row(
            f"{dataset.label}:{number}", f"{dataset.label}: problem {number}", json.loads(line)
        )


def _rows_of_batches(batches: Iterator[Any], name: str, place: str) -> Iterator[Row]:
    """The rows of arrow tables or record batches."""
    first = 0
    for batch in batches:
        try:
            records = batch.to_pylist()
        except (ValueError, OverflowError) as error:  # invalid UTF-8, dates beyond Python's
            raise DataError(
                f"{place}: rows {first} to {first + batch.num_rows - 1} cannot be read "
                f"({first_line(error)}); correct the file"
            ) from error
        for number, record in enumerate(records, start=first):
            yield Row(f"{name}:{number}", f"{place}: row {number}", record, fills_nulls=True)
        first += batch.num_rows


def _parse_json(content: bytes | str) -> Any:
    """The value of the JSON, or the error that says why it cannot be read."""
    try:
        return parse_json(content)
    except ValueError as error:
        return error


def _row(prompt_id: str, place: str, record: Any) -> Row:
    """A row from its fields, or from the error that says why they cannot be read."""
    if isinstance(record, dict):
        return Row(prompt_id, place, record)
    problem = f"must be an object with named fields, got {shown_value(record)}"
    return Row(prompt_id, place, None, str(record) if isinstance(record, ValueError) else problem)


def parse_answer(value: Any) -> str:
    """Return the reference answer in a data file's answer field, as text.

    GSM8K's worked solutions end in ``#### 42``, of which 42 is taken. A list of accepted answers
    (Skywork writes it as JSON inside a string, others as Python) becomes a JSON list, or its only
    element.

    Raises:
        ValueError: There is no answer, or it is neither text nor a number.
    """
    if isinstance(value, str):
        accepted = _parse_json(value) if value.lstrip().startswith('["') else None
        if _PYTHON_LIST.fullmatch(value):
            accepted = ast.literal_eval(value.strip())
        if isinstance(accepted, list) and all(isinstance(text, str) for text in accepted):
            return parse_answer(accepted)
        is_object = value.lstrip().startswith("{") and value.rstrip().endswith("}")  # tests of code
        marked = None if is_object else _marked_answer(value)
        answer = value.strip() if marked is None else marked
        if not answer:
            raise ValueError(f"must be an answer, got {shown_value(value)}")
        return _utf8(answer)
    if isinstance(value, list) and value:
        if any(isinstance(entry, list) for entry in value):
            raise ValueError("must be a text, a number or a list of them, got a list of lists")
        answers = [parse_answer(entry) for entry in value]
        return answers[0] if len(answers) == 1 else json.dumps(answers, ensure_ascii=False)
    is_number = isinstance(value, int | float | decimal.Decimal) and not isinstance(value, bool)
    # An integer is finite, but may be too large for ``isfinite``.
    if not is_number or not (isinstance(value, int) or math.isfinite(value)):
        raise ValueError(f"must be a text, a number or a list of them, got {shown_value(value)}")
    return str(value)


def worked_answer(value: Any) -> str:
    """Return the answer behind the ``####`` that ends a worked solution, or raise ValueError."""
    if not _marked_answer(value):
        raise ValueError(f"must be a text that ends in '#### answer', got {shown_value(value)}")
    return parse_answer(value)


def boxed_answer(value: Any) -> str:
    r"""Return what the last ``\boxed{…}`` of a worked solution holds; its braces are balanced.

    ``\fbox{…}`` and ``\boxed 5`` are read as well: MATH has some.

    Raises:
        ValueError: There is none, or it is empty or not closed.
    """
    boxes = list(_BOX.finditer(value)) if isinstance(value, str) else []
    if not boxes:
        raise ValueError(f"must be a text with a \\boxed answer, got {shown_value(value)}")
    box = boxes[-1]
    answer = box["bare"] or last_boxed(rf"\boxed{{{value[box.end() :]}")
    if not answer:
        shown = shown_value(value[box.start() :])
        raise ValueError(f"has a last \\boxed that is empty or never closed: {shown}")
    return _utf8(answer)


@dataclass(frozen=True, slots=True)
class RowFormat:
    """Where the rows of a set hold question and answer."""

    name: str
    """As ``row_format`` names it."""
    prompt_column: str
    answer_column: str
    parse_answer: Callable[[Any], str] = parse_answer

    def read(
        self,
        row: Row,
        row_columns: tuple[str, ...] | None,
        dropped: set[str],
        render: Callable[[str | list[Message], list[dict[str, Any]]], str],
    ) -> tuple[str, str, dict[str, Any]]:
        """Return a row's rendered question, its answer and its other columns; uses up its fields.

        Args:
            row: A readable row.
            row_columns: The other columns to keep, as JSON values; None: all of them.
            dropped: Collects the names of columns whose values JSON cannot hold.
            render: Takes a text, or chat messages that end before the assistant's turn, and the
                row's tools.

        Raises:
            DataError: A field is missing or cannot be used; ``EmptyAnswerError``: the answer is
                empty.
        """
        assert row.fields is not None, "unreadable rows have no fields"
        fields, present = row.fields, ", ".join(row.fields) or "none"
        answer_value = _take(row, self.answer_column, "answer_column", present)
        question_value = _take(row, self.prompt_column, "prompt_column", present)
        tools_value = fields.get("tools")
        if row.fills_nulls:
            question_value, tools_value = map(without_nulls, (question_value, tools_value))
        column = self.answer_column
        try:
            answer = self.parse_answer(answer_value)
            column = "tools"
            tools = parse_tools(tools_value)
            column = self.prompt_column
            text = render(parse_question(question_value), tools)
        except ValueError as error:
            is_blank = column == self.answer_column and (
                answer_value is None or (isinstance(answer_value, str) and not answer_value.strip())
            )
            raise (EmptyAnswerError if is_blank else DataError)(
                f"{row.place}: column '{column}' {error}; correct or remove this row"
            ) from error
        check_seen(row, fields, row_columns, lambda: text)
        names = tuple(fields) if row_columns is None else row_columns
        if missing := [name for name in names if name not in fields]:
            raise DataError(
                f"{row.place}: no column '{missing[0]}', only {', '.join(fields) or 'none'} beside "
                "question and answer; correct the data, or row_columns"
            )
        return text, answer, _to_json({name: fields[name] for name in names}, "", dropped)


def check_seen(
    row: Row,
    fields: Mapping[str, Any],
    row_columns: tuple[str, ...] | None,
    shown_text: Callable[[], str],
) -> None:
    """Refuse a row with a column that the model should see, such as images, and would not.

    Raises:
        DataError: Neither does the text show its value, nor ``row_columns`` name it.
    """
    for name, value in fields.items():
        is_named = name in (row_columns or ())
        if name.lower() in UNSEEN and not is_named and not _is_shown(value, shown_text()):
            raise DataError(
                f"{row.place}: column '{name}' is not in the prompt, so the model would not "
                f"see {shown_value(value)}; put its text there, or name it in row_columns if "
                "only rewards, an environment or an agent read it"
            )


def recognise(dataset: DatasetConfig, fields: Mapping[str, Any]) -> RowFormat | None:
    """Find the format of a set by its settings and the columns of a row.

    Returns None where ``row_format`` is ``auto`` and the columns match no known format.
    """
    if dataset.gym:  # a task may mean every space of its answers
        return RowFormat("gym", "question", "answer", str)
    if dataset.row_format == "columns" or dataset.prompt_column or dataset.answer_column:
        return RowFormat(
            "columns", dataset.prompt_column or "prompt", dataset.answer_column or "answer"
        )
    # AIME files have "Problem" and "Answer".
    names = {name.lower(): name for name in reversed(list(fields))}
    problem, answer = names.get("problem", "problem"), names.get("answer", "answer")
    has_answer = fields.get(answer) is not None
    formats = {
        "verl": RowFormat("verl", "prompt", "reward_model.ground_truth"),
        "gsm8k": RowFormat("gsm8k", "question", "answer", worked_answer),
        "math": RowFormat("math", problem, names.get("solution", "solution"), boxed_answer),
    }
    if has_answer:
        formats["math"] = RowFormat("math", problem, answer)
    if dataset.row_format != "auto":
        return formats[dataset.row_format]
    truth = _struct(fields.get("reward_model"))
    if "prompt" in fields and truth is not None and "ground_truth" in truth:
        return formats["verl"]
    if "question" in fields and _marked_answer(fields.get("answer")):
        return formats["gsm8k"]
    if problem in fields and (has_answer or "solution" in names):
        return formats["math"]
    question, reference = (
        next((names[name] for name in candidates if name in names), "")
        for candidates in (_QUESTIONS, _ANSWERS)
    )
    return RowFormat("columns", question, reference) if question and reference else None


def _take(row: Row, column: str, setting: str, present: str) -> Any:
    """Remove a column, or a field inside a struct by its dotted path, from the row's fields."""
    fields: Any = row.fields
    if column in fields:
        return fields.pop(column)
    *parents, leaf = column.split(".")
    for part in parents:
        struct = _struct(fields.get(part)) if fields is not None else None
        if struct is not None:
            fields[part] = struct  # parsed, if it was JSON text
        fields = struct
    if fields is None or leaf not in fields:
        raise DataError(
            f"{row.place}: no column '{column}', only {present}; correct the data, or set {setting}"
        )
    return fields.pop(leaf)


def _struct(value: Any) -> dict[str, Any] | None:
    """A struct, which may be JSON inside a text; None for any other value."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        value = _parse_json(value)
    return value if isinstance(value, dict) else None


def parse_question(value: Any) -> str | list[Message]:
    """Return a question, or chat messages up to one; ``ValueError`` for other values."""
    if isinstance(value, str):
        messages = _parse_json(value) if _JSON_MESSAGES.match(value) else None
        if isinstance(messages, list):
            return parse_question(messages)
        if not value.strip():
            raise ValueError("must be a question, got an empty text")
        return _utf8(value)
    messages = parse_messages(value)
    role, content = messages[-1]["role"], messages[-1]["content"]
    if role in ("assistant", "system"):
        raise ValueError(
            f"must end before the assistant's turn, got a last message by the {role}: "
            f"{shown_value(content)}"
        )
    return messages


def parse_messages(value: Any) -> list[Message]:
    """Return a list of chat messages in the form of templates; ``ValueError`` for other values."""
    if not isinstance(value, list) or not value:
        raise ValueError(f"must be a text or a list of chat messages, got {shown_value(value)}")
    messages = [checked_message(message) for message in value]
    _utf8(json.dumps(messages, ensure_ascii=False))
    return messages


def parse_tools(value: Any) -> list[Any]:
    """Return JSON schemas of tools, or those in a text of JSON; ``ValueError`` for other values."""
    if isinstance(value, str) and value:
        value = parse_json(value)
    return checked_tools(value if isinstance(value, list) else [value] if value else [])


def without_nulls(value: Any) -> Any:
    """Return the value without null fields of structs."""
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    return [without_nulls(entry) for entry in value] if isinstance(value, list) else value


def _is_shown(value: Any, text: str) -> bool:
    """Whether a prompt holds each text and number in a value."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return all(_is_shown(entry, text) for entry in value)
    return value is None or str(value).strip() in text


def _utf8(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        problem = f"holds half of a surrogate pair, which is not text: {shown_value(text)}"
        raise ValueError(problem) from error
    return text


def _marked_answer(solution: Any) -> str | None:
    """What follows the first ``####`` of a text's last line, without spaces; None without ``####``.

    Linear in the length; a regular expression is not.
    """
    if not isinstance(solution, str):
        return None
    _, mark, answer = solution.rstrip().rpartition("\n")[2].partition("####")
    return answer.lstrip(" \t") if mark else None


def _to_json(value: Any, name: str, dropped: set[str]) -> Any:
    """A column's value as JSON, or ``_NOT_JSON``: JSON has no bytes (images, sound)."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode(errors="replace").decode()
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        prefix = f"{name}." if name else ""
        items = {str(key): _to_json(item, f"{prefix}{key}", dropped) for key, item in value.items()}
        return {key: item for key, item in items.items() if item is not _NOT_JSON}
    if isinstance(value, list | tuple):
        entries = [_to_json(entry, name, dropped) for entry in value]
        return [entry for entry in entries if entry is not _NOT_JSON]
    if isinstance(value, datetime.date | datetime.time):  # a datetime is a date
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, decimal.Decimal):
        return str(value)
    dropped.add(name)
    return _NOT_JSON
