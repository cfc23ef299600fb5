"""Demonstrations: responses that somebody else wrote, as the tokens that the policy would write.

A conversation becomes what sampling would have recorded of it. The prompt of the first turn is a
question's. A turn is what the chat template adds to the turn's prompt, up to the token that ends
it. What leads from one turn to the next is rendered as for agents and environments, so earlier
turns keep their reasoning, and no text becomes tokens twice.

Shape legend: L = tokens of a demonstration.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from os.path import commonprefix
from typing import Any

import numpy as np

from bapo_megatron.config.demonstrations import DemonstrationsConfig, DemonstrationSetConfig
from bapo_megatron.data.chat import ChatRenderer
from bapo_megatron.data.rows import (
    DataError,
    Row,
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


@dataclass(frozen=True, slots=True, eq=False)
class Demonstration:
    """A row: a conversation, or tokens."""

    key: str
    """``<file name or Hub id>:<row>``, as of prompts."""
    messages: Sequence[Message] = ()
    """A turn with ``weight`` 0 does not train; one that ``is_verbatim`` is the policy's text."""
    tools: Sequence[dict[str, Any]] = ()
    weight: float = 1.0
    """Of its tokens in the loss, at least 0."""
    tokens: tuple[Sequence[int], Sequence[bool]] | None = None
    """Instead of messages: ids, and which of them train."""


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

    def warnings(self, place: str) -> list[str]:
        """Return warnings for the user, one line each."""
        bad = f"are bad and were left out (data.on_bad_row), the first: {self.first_bad}"
        long = "are longer than demonstrations.max_tokens (demonstrations.truncation)"
        counts = ((self.num_bad, bad), (self.num_too_long, long))
        return [f"{place}: {n} of {self.num_rows} rows {what}" for n, what in counts if n]


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

    def render(self, demonstration: Demonstration) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids, [L] int32, and which tokens train, [L] bool; of any length.

        Raises:
            ValueError: The conversation does not alternate, the template does not say what the
                assistant writes, or nothing trains.
        """
        parts = [demonstration.tokens] if demonstration.tokens else self._turns(demonstration)
        ids, masks = zip(*parts, strict=True)
        token_ids = np.concatenate([np.array(part, np.int32) for part in ids])
        is_trained = np.concatenate(list(map(np.broadcast_to, masks, map(len, ids)))).astype(bool)
        if not is_trained[1:].any():  # nothing predicts the first token
            raise ValueError("has no token to train; remove it, or its weights of 0")
        if not 0 <= token_ids.min() <= token_ids.max() < self._chat.vocab_size:
            raise ValueError(
                f"must have token_ids below {self._chat.vocab_size}, the size of the vocabulary, "
                f"got {token_ids.max()}; write them for this model"
            )
        return token_ids, is_trained

    def _turns(self, demonstration: Demonstration) -> Iterator[tuple[Sequence[int], Any]]:
        """Yield what is written before each turn, and the turn, as an agent's record has them."""
        said, tools, chat = demonstration.messages, demonstration.tools, self._chat
        is_turn = [message["role"] == "assistant" for message in said]
        if said[-1].get("is_verbatim"):  # earlier turns are part of the question
            is_turn = [False] * (len(said) - 1) + [True]
        if is_turn[0] or not is_turn[-1] or (True, True) in pairwise(is_turn):
            raise ValueError(
                "must begin with a question, have a message between two turns of the assistant, "
                "and end with a turn; remove messages after the last turn, or join turns"
            )
        first = is_turn.index(True)
        messages = chat.conversation_after(said[:first], said[first:])
        turn_ids: Sequence[int] = ()
        start = 0
        num_added = len(messages) - len(said)  # the system prompt
        for end in (n for n, turns in enumerate(is_turn, start=num_added) if turns):
            if start:
                written = chat.continuation(messages[start:end], tools or None, after=turn_ids)
            else:
                [written] = chat.token_ids([chat.prompt(messages[:end], tools)])
            turn = self._turn(messages[: end + 1], tools)
            [turn_ids] = chat.token_ids([turn])
            yield written, False
            yield turn_ids, self._mask(turn, messages[: end + 1], tools)
            start = end + 1

    def _turn(self, messages: Sequence[Message], tools: Any) -> str:
        """Return what the policy writes as the last message, its end token included."""
        *before, message = [*map(_shortened, messages[:-1]), messages[-1]]
        reasoning, content = _split(message)
        prompt = self._chat.render(before, tools=tools or None)
        opened = _OPENED.search(prompt)
        closes = opened is not None and any(opened.groups())
        if message.get("is_verbatim"):
            content, end = message["content"].rstrip(), self._chat.ended("")
            if opened and not closes:  # which the response need not repeat
                content = re.sub(r"^\s*<think>\s*", "", content)
            return content.removesuffix(end) + end
        if any(message.get(name) for name in _REASONING):
            message = {**message, **dict.fromkeys(_REASONING, reasoning)}
        text = self._chat.render([*before, message], generation_prompt=False, tools=tools or None)
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
        lost = [part for part in (reasoning, *_THINK.split(content)) if part.strip() not in turn]
        lost += [name for name in calls if turn.count(name) < calls.count(name)]
        if lost:
            raise ValueError(
                f"has a turn of which the chat template leaves out {shown_value(lost[0])}; remove "
                "it, give prompt and response, or set data.chat_template"
            )
        return turn

    def _mask(self, turn: str, messages: Sequence[Message], tools: Any) -> Any:
        """Return which tokens of a turn train; calls are what it would not have without them."""
        *before, message = messages
        is_trained = message.get("weight", 1) != 0
        if self.config.train_tool_calls or not message.get("tool_calls") or not is_trained:
            return is_trained
        silent = {name: value for name, value in message.items() if name != "tool_calls"}
        other = self._turn([*before, silent], tools)
        end = len(turn) - len(commonprefix([turn[::-1], other[::-1]]))  # noqa: RUF071
        start = len(commonprefix([turn[:end], other.removesuffix(self._chat.ended(""))]))  # noqa: RUF071
        places = self._chat.token_places(turn)
        return [last <= start or first >= end for first, last in places]


def _shortened(message: Message) -> Message:
    """Return a message of the prompt without what later turns may make a template leave out."""
    if message["role"] != "assistant":
        return message
    kept = {name: value for name, value in message.items() if name not in _REASONING}
    return kept | ({"content": ""} if message.get("tool_calls") else {})


def _split(message: Message) -> tuple[str, str]:
    """Return the reasoning of an assistant's message, without space around it, and the rest."""
    reasoning = next((message[name] for name in _REASONING if message.get(name)), "")
    content = message["content"]
    if not reasoning and "</think>" in content:
        reasoning, _, content = content.partition("</think>")
        reasoning = reasoning.rpartition("<think>")[2]
    return reasoning.strip(), content


def read_demonstration(row: Row, columns: DemonstrationSetConfig) -> Demonstration:
    """Return what a row holds; ``DataError`` where it cannot be used."""
    if row.fields is None:
        raise DataError(f"{row.place}: {row.problem}; correct or remove it")
    fields = without_nulls(row.fields) if row.fills_nulls else row.fields
    key, column = row.prompt_id, columns.weight_column
    try:
        weight = fields.get(column, 1.0)
        if not isinstance(weight, int | float) or not 0 <= weight < math.inf:
            raise ValueError(f"must be a number, at least 0, got {shown_value(weight)}")
        if token_ids := fields.get(column := "token_ids"):
            if len(is_trained := fields.get("is_trained", ())) != len(token_ids):
                raise ValueError("must be as long as column 'is_trained'")
            return Demonstration(key, weight=weight, tokens=(token_ids, is_trained))
        tools = parse_tools(fields.get(column := columns.tools_column))
        if (said := fields.get(column := columns.messages_column)) is not None:
            said = parse_json(said) if isinstance(said, str) else said
            weights = ({"weight": raw.get("weight", 1)} for raw in said)
            messages = [m | weight for m, weight in zip(parse_messages(said), weights, strict=True)]
            return Demonstration(key, messages, tools, weight)
        asked = parse_question(fields.get(column := columns.prompt_column or "prompt"))
        question = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
        response = fields.get(column := columns.response_column)
        if not isinstance(response, str) or not response.strip():
            raise ValueError(f"must be the text of a response, got {shown_value(response)}")
        turn = {"role": "assistant", "content": response, "is_verbatim": True}
        return Demonstration(key, [*question, turn], tools, weight)
    except ValueError as error:
        raise DataError(f"{row.place}: column '{column}' {error}; correct or remove it") from error


def read_demonstrations(
    dataset: DemonstrationSetConfig,
    renderer: DemonstrationRenderer,
    report: DemonstrationReport,
    *,
    skips_bad: bool = False,
) -> Iterator[tuple[Demonstration, np.ndarray, np.ndarray]]:
    """Yield each usable row of a set with its ids and mask, up to ``max_tokens``, one at a time.

    Raises:
        DataError: A row cannot be used, unless ``skips_bad``; or a file cannot be read.
        OSError: A file cannot be opened.
    """
    config = renderer.config
    for row in read_rows(dataset):
        report.num_rows += 1
        try:
            demonstration = read_demonstration(row, dataset)
            rendered = renderer.render(demonstration)
        except ValueError as error:
            line = str(error) if isinstance(error, DataError) else f"{row.place}: {error}"
            if not skips_bad:
                raise DataError(line) from error
            report.num_bad += 1
            report.first_bad = report.first_bad or line
            continue
        token_ids, is_trained = (values[: config.max_tokens] for values in rendered)
        is_cut = len(token_ids) < len(rendered[0])
        report.num_too_long += is_cut
        if is_trained[1:].any() and not (is_cut and config.truncation == "drop"):
            report.num_kept += 1
            report.num_trained += int(is_trained.sum())
            yield demonstration, token_ids, is_trained
