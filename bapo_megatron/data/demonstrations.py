"""Demonstrations: responses that somebody else wrote, as the tokens that the policy would write.

A conversation becomes what sampling would have recorded of it. The prompt of the first turn is a
question's. A turn is what the chat template adds to the turn's prompt, up to the token that ends
it. What leads from one turn to the next is rendered as for agents and environments, so earlier
turns keep their reasoning, and no text becomes tokens twice.

Shape legend: L = tokens of a demonstration.
"""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from os.path import commonprefix
from typing import Any

import numpy as np

from bapo_megatron.config.demonstrations import DemonstrationsConfig, DemonstrationSetConfig
from bapo_megatron.data.chat import ChatRenderer
from bapo_megatron.data.rows import (
    DataError,
    Row,
    check_seen,
    parse_messages,
    parse_question,
    parse_tools,
    read_rows,
    without_nulls,
)
from bapo_megatron.data.tools import Message
from bapo_megatron.runtime.calls import shown_value
from bapo_megatron.runtime.files import parse_json

_OPENED = re.compile(r"<think>\s*(</think>\s*)?$|<\|channel>thought\s*(<channel\|>)$")
"""Reasoning that a prompt opens, and may close."""
_THINK = re.compile(r"</?think>")
_REASONING = ("reasoning_content", "reasoning", "thinking")
"""Fields of reasoning, of which a template reads one."""
Parts = Iterable[tuple[Any, Any]]
"""Token ids, and which of them train: one bool, or one for each."""


@dataclass(frozen=True, slots=True, eq=False)
class Demonstration:
    """A row as tokens."""

    key: str
    """``<file name or Hub id>:<row>``, as of prompts."""
    weight: float
    """Weight of its tokens in the loss, at least 0."""
    token_ids: np.ndarray
    """[L] int32."""
    is_trained: np.ndarray
    """[L] bool; False for the first token, which nothing predicts."""


@dataclass(slots=True)
class DemonstrationReport:
    """Counts of rows."""

    num_rows: int = 0
    num_bad: int = 0
    first_bad: str = ""
    num_too_long: int = 0
    """Rows beyond ``max_tokens``, left out or cut."""
    num_kept: int = 0
    num_trained: int = 0
    """Tokens that train."""

    def summary(self) -> str:
        """Return the counts as one line."""
        line = f"{self.num_kept} of {self.num_rows} demonstrations, {self.num_trained} tokens train"
        if self.num_too_long:
            line += f"; {self.num_too_long} exceed demonstrations.max_tokens (truncation)"
        if self.num_bad:
            line += f"; {self.num_bad} bad rows left out (data.on_bad_row), first: {self.first_bad}"
        return line


class DemonstrationRenderer:
    """Turns demonstrations into token ids, and says which of them train."""

    def __init__(self, chat: ChatRenderer, config: DemonstrationsConfig) -> None:
        """Keep the chat template; ``ValueError`` if its tokenizer cannot join texts."""
        self._chat, self.config = chat, config
        [one] = chat.token_ids(["1"])
        if (text := chat.decode([*one, *one])) != "11":
            raise ValueError(
                "model.path: the tokenizer must put no space before a text, got "
                f"{shown_value(text)} for '1' and '1'; save it without its prefix space"
            )

    def read(self, row: Row, columns: DemonstrationSetConfig) -> Demonstration:
        """Return a row's tokens, however many; ``DataError`` where it cannot be used."""
        if row.fields is None:
            raise DataError(f"{row.place}: {row.problem}; correct or remove it")
        fields = without_nulls(row.fields) if row.fills_nulls else row.fields
        column = "weight"
        try:
            weight = fields.get(column, 1.0)
            if not isinstance(weight, int | float) or not 0 <= weight < math.inf:
                raise ValueError(f"must be a number, at least 0, got {shown_value(weight)}")
            if fields.get(column := "token_ids") is not None:
                ids, mask = np.array(fields[column]), np.array(fields.get("is_trained"))
                limit = self._chat.vocab_size
                is_list = ids.ndim == 1 and ids.shape == mask.shape and ids.dtype.kind == "i"
                if not is_list or not 0 <= ids.min() <= ids.max() < limit:
                    raise ValueError(
                        f"must be ids below {limit}, as many as column 'is_trained' has"
                    )
                parts: Parts = [(ids, mask)]
            else:
                tools = parse_tools(fields.get(column := "tools"))
                if (said := fields.get(column := columns.messages_column)) is not None:
                    said = parse_json(said) if isinstance(said, str) else said
                    messages = parse_messages(said)
                    for message, raw in zip(messages, said, strict=True):
                        message["weight"] = raw.get("weight", 1)
                    if bad := [m["weight"] for m in messages if m["weight"] not in (0, 1)]:
                        raise ValueError(f"must hold weights of 0 or 1, got {shown_value(bad[0])}")
                    parts = self.turns(messages, tools)
                else:
                    column = columns.prompt_column or "prompt"
                    question = parse_question(fields.get(column))
                    response = fields.get(column := columns.response_column)
                    if not isinstance(response, str) or not response.strip():
                        raise ValueError(f"must be a response, got {shown_value(response)}")
                    parts = self.response(question, response, tools)
            token_ids, is_trained = self.joined(parts)
        except ValueError as error:
            problem = f"column '{column}' {error}; correct or remove this row"
            raise DataError(f"{row.place}: {problem}") from error
        check_seen(row, fields, columns.row_columns, lambda: self._chat.decode(token_ids.tolist()))
        return Demonstration(row.prompt_id, weight, token_ids, is_trained)

    def joined(self, parts: Parts) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of parts, [L] int32, and which tokens train, [L] bool.

        Raises:
            ValueError: Nothing trains, or a part cannot be rendered.
        """
        ids, masks = zip(*parts, strict=True)
        token_ids = np.concatenate([np.array(part, np.int32) for part in ids])
        is_trained = np.concatenate(list(map(np.broadcast_to, masks, map(len, ids)))).astype(bool)
        is_trained[:1] = False
        if not is_trained.any():
            raise ValueError("has no token to train")
        return token_ids, is_trained

    def response(self, question: str | Sequence[Message], text: str, tools: Any = ()) -> Parts:
        """Return a question's prompt, and a response as it is, with the token that ends it."""
        prompt = self._chat.prompt(self._chat.conversation_after(question, ()), tools)
        if (opened := _OPENED.search(prompt)) and not any(opened.groups()):
            text = re.sub(r"^\s*<think>\s*", "", text)  # which it need not repeat
        end = self._chat.ended("")
        written, turn = self._chat.token_ids([prompt, text.rstrip().removesuffix(end) + end])
        return [(written, False), (turn, True)]

    def turns(self, said: Sequence[Message], tools: Any = ()) -> Parts:
        """Yield what precedes each turn, and the turn, as an agent's record has them.

        Raises:
            ValueError: The conversation does not alternate, or the template does not say what the
                assistant writes.
        """
        chat = self._chat
        is_turn = [message["role"] == "assistant" for message in said]
        if is_turn[0] or not is_turn[-1] or (True, True) in pairwise(is_turn):
            raise ValueError(
                "must begin with a question, have a message between two turns of the assistant, "
                "and end with a turn; remove messages after the last turn, or join turns"
            )
        first = is_turn.index(True)
        messages = chat.conversation_after(said[:first], said[first:])
        first += len(messages) - len(said)  # a system prompt
        question, between = messages[:first], list[Message]()
        prompt = chat.prompt(question, tools)
        [before_ids] = chat.token_ids([prompt])
        turn_ids: tuple[int, ...] = ()
        for message in messages[first:]:
            if message["role"] != "assistant":
                between.append(message)
                continue
            if between:
                before_ids = chat.continuation(between, tools or None, after=turn_ids)
                is_alike = _OPENED.findall(chat.decode(before_ids)) == _OPENED.findall(prompt)
                if _reasoning(message) and not is_alike:
                    raise ValueError(
                        "has reasoning in a turn whose prompt does not open it as the first one "
                        "does; give prompt and response"
                    )
            turn = self._turn(question, message, tools)
            [turn_ids], between = chat.token_ids([turn]), []
            yield before_ids, False
            yield turn_ids, self._mask(turn, question, message, tools)

    def _turn(self, question: list[Message], message: Message, tools: Any) -> str:
        """Return what the policy writes as ``message``, its end token included.

        It is rendered after the question alone: turns between may make a template drop some.
        """
        reasoning = _reasoning(message)
        prompt = self._chat.render(question, tools=tools or None)
        opened = _OPENED.search(prompt)
        closes = opened is not None and any(opened.groups())
        if any(message.get(name) for name in _REASONING):
            message = {**message, **dict.fromkeys(_REASONING, reasoning)}
        whole = [*question, message]
        text = self._chat.render(whole, generation_prompt=False, tools=tools or None)
        start = opened.start() if opened and closes != bool(reasoning) else len(prompt)
        if not text.startswith(prompt) and text.startswith(prompt[:start]):
            # The template leaves reasoning out of turns, an empty one too.
            closing = f"{reasoning}\n</think>\n\n" if reasoning else ""
            text = prompt + closing + text[start:].rpartition("</think>")[2].lstrip()
        if not text.startswith(prompt):
            raise ValueError(
                f"has a turn that the chat template does not begin with its prompt, which ends in "
                f"{shown_value(prompt[-30:])}; give reasoning if the prompt opens it, or set "
                "data.chat_template_arguments, or give prompt and response"
            )
        calls = [call["function"]["name"] for call in message.get("tool_calls", ())]
        turn = self._chat.ended(text.removeprefix(prompt), has_calls=bool(calls))
        said = (reasoning, *_THINK.split(message["content"]))
        lost = [part for part in said if part.strip() not in turn]
        lost += [name for name in calls if turn.count(name) < calls.count(name)]
        if lost:
            raise ValueError(
                f"has a turn of which the chat template leaves out {shown_value(lost[0])}; remove "
                "it, give prompt and response, or set data.chat_template"
            )
        return turn

    def _mask(self, turn: str, question: list[Message], message: Message, tools: Any) -> Any:
        """Return which tokens of a turn train; calls are what it would not have without them."""
        is_trained = message.get("weight", 1) != 0
        if self.config.train_tool_calls or not message.get("tool_calls") or not is_trained:
            return is_trained
        silent = {name: value for name, value in message.items() if name != "tool_calls"}
        other = self._turn(question, silent, tools)
        end = len(turn) - len(commonprefix([turn[::-1], other[::-1]]))  # noqa: RUF071
        start = len(commonprefix([turn[:end], other.removesuffix(self._chat.ended(""))]))  # noqa: RUF071
        places = self._chat.token_places(turn)
        return [last <= start or first >= end for first, last in places]


def _reasoning(message: Message) -> str:
    """Return the reasoning of an assistant's message, without space around it."""
    reasoning = next((message[name] for name in _REASONING if message.get(name)), "")
    if not reasoning and "</think>" in message["content"]:
        reasoning = message["content"].partition("</think>")[0].rpartition("<think>")[2]
    return reasoning.strip()


def read_demonstrations(
    dataset: DemonstrationSetConfig,
    renderer: DemonstrationRenderer,
    report: DemonstrationReport,
    *,
    skips_bad: bool = False,
) -> Iterator[Demonstration]:
    """Yield each usable row of a set, up to ``max_tokens``, one at a time.

    Raises:
        DataError: A row cannot be used, unless ``skips_bad``; or a file cannot be read.
        OSError: A file cannot be opened.
    """
    limit, truncation = renderer.config.max_tokens, renderer.config.truncation
    for row in read_rows(dataset):
        report.num_rows += 1
        try:
            whole = renderer.read(row, dataset)
        except DataError as error:
            if not skips_bad:
                raise
            report.num_bad += 1
            report.first_bad = report.first_bad or str(error)
            continue
        is_trained, is_long = whole.is_trained[:limit], len(whole.token_ids) > limit
        report.num_too_long += is_long
        if is_trained.any() and not (is_long and truncation == "drop"):
            report.num_kept += 1
            report.num_trained += int(is_trained.sum())
            yield replace(whole, token_ids=whole.token_ids[:limit], is_trained=is_trained)
