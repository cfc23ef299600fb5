"""Prompt files (jsonl, json, parquet) and the resumable stream of training prompts.

A file is read, checked and rendered once, at the start: a bad row is reported before anything
else is started, and the number of prompts that are too long is known.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bapo_megatron.types import Prompt

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from bapo_megatron.config.data import DatasetConfig
    from bapo_megatron.data.chat import ChatRenderer, Message

_LOG = logging.getLogger(__name__)
_GSM8K_ANSWER = re.compile(r"####[ \t]*([^\n]+?)\s*\Z")
_LONGEST_VALUE = 60


class DataError(ValueError):
    """A prompt file that cannot be used; one line with file, row, field and reason."""


def load_prompts(
    dataset: DatasetConfig, renderer: ChatRenderer, max_prompt_tokens: int
) -> list[Prompt]:
    """Read and render every prompt of a file.

    Prompts with more than ``max_prompt_tokens`` tokens are left out; their number is logged once.

    Args:
        dataset: The file and its columns.
        renderer: Puts the question into the chat template.
        max_prompt_tokens: Longest prompt that is kept.

    Returns:
        The prompts in the file's order; ``prompt_id`` is the file's name and the row, from 0.

    Raises:
        DataError: A row cannot be read, or no prompt is left.
        OSError: The file cannot be opened.
    """
    path = dataset.path
    prompt_ids, answers, conversations = [], [], []
    for row, place, record in _read_records(path):
        answer = _field(record, dataset.answer_column, place, "answer_column")
        question = _field(record, dataset.prompt_column, place, "prompt_column")
        try:
            answers.append(parse_answer(answer))
        except ValueError as error:
            raise _bad_row(place, dataset.answer_column, error) from error
        try:
            conversations.append(renderer.messages(_parse_question(question)))
        except ValueError as error:
            raise _bad_row(place, dataset.prompt_column, error) from error
        prompt_ids.append(f"{path.name}:{row}")
    rendered = renderer.render(conversations)
    prompts = [
        Prompt(prompt_id=prompt_id, token_ids=token_ids, answer=answer, text=text)
        for prompt_id, answer, (text, token_ids) in zip(prompt_ids, answers, rendered, strict=True)
        if len(token_ids) <= max_prompt_tokens
    ]
    num_left_out = len(rendered) - len(prompts)
    summary = (
        f"{num_left_out} of {len(rendered)} prompts are longer than {max_prompt_tokens} tokens"
    )
    if not prompts:
        raise DataError(
            f"{path}: no prompt is left: {summary}; raise data.max_prompt_tokens, or give a file "
            "with prompts"
        )
    if num_left_out:
        _LOG.warning("%s: %s (data.max_prompt_tokens) and were left out", path, summary)
    return prompts


def parse_answer(value: Any) -> str:
    """The reference answer in a data file's answer field, as text.

    GSM8K's worked solutions end in ``#### 42``, of which 42 is taken. A list of accepted answers
    (Skywork writes it as JSON inside a string) stays a JSON list, or becomes its only element.

    Raises:
        ValueError: There is no answer, or it is neither text nor a number.
    """
    if isinstance(value, str):
        accepted = _list_of_texts(value)
        if accepted is not None:
            return parse_answer(accepted)
        solution = _GSM8K_ANSWER.search(value)
        answer = solution[1] if solution else value.strip()
        if not answer:
            raise ValueError("must be an answer, got an empty text")
        return answer
    if isinstance(value, list) and value:
        answers = [parse_answer(entry) for entry in value]
        return answers[0] if len(answers) == 1 else json.dumps(answers, ensure_ascii=False)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"must be a text, a number or a list of them, got {_shown(value)}")
    return str(value)


class PromptStream:
    """Endless prompts, epoch after epoch, each in an order that only the seed decides."""

    def __init__(self, prompts: Sequence[Prompt], seed: int, shuffle: bool) -> None:
        """Start at the first prompt of the first epoch.

        Args:
            prompts: At least one prompt.
            seed: The run's seed.
            shuffle: Whether each epoch has an order of its own, or the file's.
        """
        if not prompts:
            raise ValueError("a prompt stream needs at least one prompt")
        self._prompts = tuple(prompts)
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0
        self._position = 0
        self._order = self._epoch_order()

    def __iter__(self) -> Iterator[Prompt]:
        return self

    def __next__(self) -> Prompt:
        """The next prompt; the stream never ends."""
        if self._position == len(self._prompts):
            self._epoch += 1
            self._position = 0
            self._order = self._epoch_order()
        prompt: Prompt = self._prompts[self._order[self._position]]
        self._position += 1
        return prompt

    @property
    def epoch(self) -> int:
        """Epoch of the latest prompt, from 0."""
        return self._epoch

    def state(self) -> dict[str, Any]:
        """The position, as JSON values for a checkpoint."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "digest": self._digest(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what ``state`` returned.

        Raises:
            ValueError: The state belongs to other prompts, another seed or another order.
        """
        for name, mine in (("seed", self._seed), ("data.shuffle", self._shuffle)):
            saved = state[name.rpartition(".")[2]]
            if saved != mine:
                raise ValueError(
                    f"cannot resume the data position: {name} was {saved} when it was saved and "
                    f"is {mine} now; resume with the same value"
                )
        if state["digest"] != self._digest():
            raise ValueError(
                "cannot resume the data position: the training prompts differ from those it was "
                "saved with; restore the data file, chat template and data settings"
            )
        self._epoch = state["epoch"]
        self._position = state["position"]
        self._order = self._epoch_order()

    def _epoch_order(self) -> np.ndarray:
        if not self._shuffle:
            return np.arange(len(self._prompts))
        return np.random.default_rng([self._seed, self._epoch]).permutation(len(self._prompts))

    def _digest(self) -> str:
        digest = hashlib.sha256()
        for prompt in self._prompts:
            digest.update(repr((prompt.prompt_id, prompt.token_ids, prompt.answer)).encode())
        return digest.hexdigest()


def _read_records(path: Path) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Row number, its place for messages, and the row of each record."""
    reader = {".jsonl": _read_jsonl, ".json": _read_json, ".parquet": _read_parquet}.get(
        path.suffix
    )
    if reader is None:
        raise DataError(f"{path}: must end in .jsonl, .json or .parquet; convert the file")
    for row, place, record in reader(path):
        if not isinstance(record, dict):
            raise DataError(
                f"{place}: must be an object with named fields, got {_shown(record)}; "
                "correct or remove it"
            )
        yield row, place, record


def _read_jsonl(path: Path) -> Iterator[tuple[int, str, Any]]:
    """One JSON object per line; blank lines count as rows but hold no prompt."""
    with path.open("rb") as lines:
        for row, line in enumerate(lines):
            if line.strip():
                place = f"{path}:{row + 1}"
                yield row, place, _parse_json(line, place)


def _read_json(path: Path) -> Iterator[tuple[int, str, Any]]:
    """A JSON list of objects."""
    records = _parse_json(path.read_bytes(), str(path))
    if not isinstance(records, list):
        raise DataError(f"{path}: must be a JSON list of objects, got {_shown(records)}")
    for row, record in enumerate(records):
        yield row, f"{path}: entry {row}", record


def _read_parquet(path: Path) -> Iterator[tuple[int, str, Any]]:
    try:
        file = pq.ParquetFile(path)
        row = 0
        for batch in file.iter_batches():
            for record in batch.to_pylist():
                yield row, f"{path}: row {row}", record
                row += 1
    except pa.ArrowException as error:
        reason = str(error).partition("\n")[0]
        raise DataError(f"{path}: not a readable parquet file ({reason}); give it again") from error


def _parse_json(content: bytes, place: str) -> Any:
    try:
        return json.loads(content)
    except UnicodeDecodeError as error:
        raise DataError(f"{place}: not UTF-8 ({error.reason}); correct or remove it") from error
    except (json.JSONDecodeError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "nested too deeply"
        raise DataError(f"{place}: not valid JSON ({reason}); correct or remove it") from error


def _field(record: dict[str, Any], column: str, place: str, setting: str) -> Any:
    """A column, or a field inside a struct by its dotted path."""
    if column in record:
        return record[column]
    value: Any = record
    for part in column.split("."):
        if not isinstance(value, dict) or part not in value:
            raise DataError(
                f"{place}: no column '{column}', only {', '.join(record) or 'none'}; "
                f"correct the data, or set {setting}"
            )
        value = value[part]
    return value


def _parse_question(value: Any) -> str | list[Message]:
    """A question as text, or as chat messages."""
    if isinstance(value, str) and value.strip():
        return value
    if not isinstance(value, list) or not value:
        raise ValueError(f"must be a text or a list of chat messages, got {_shown(value)}")
    messages = []
    for message in value:
        role = message.get("role") if isinstance(message, dict) else None
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(role, str) or not isinstance(content, str):
            raise ValueError(f"must hold messages with role and content, got {_shown(message)}")
        messages.append({"role": role, "content": content})
    return messages


def _list_of_texts(text: str) -> list[str] | None:
    """The texts of a JSON list of texts; none for anything else, such as the interval [1, 2]."""
    if not text.lstrip().startswith('["'):
        return None
    try:
        values = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        return None
    return values if all(isinstance(value, str) for value in values) else None


def _bad_row(place: str, column: str, error: ValueError) -> DataError:
    return DataError(f"{place}: column '{column}' {error}; correct or remove this row")


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= _LONGEST_VALUE else text[:_LONGEST_VALUE] + "…"
