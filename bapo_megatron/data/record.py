"""The record of an episode: a tree of calls, whose paths are the sequences that train.

A plain response is one call. An environment's answer is what is written before the next call, so
its record is a path. An agent's calls are known by a chain of hashes over (tools, message 0,
message 1, …): a conversation that begins with a recorded call and its turn, and goes on with tool,
user or system messages, continues that call's tokens; any other begins a new root. So text becomes
tokens once, and what the policy sampled is never tokenised again.

Shape legend: P = prompt tokens, R = response tokens, Q = those of them that the policy sampled,
W = tokens of one call's prompt beyond those of its parent.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from pydantic import FiniteFloat

from bapo_megatron.data import token_columns
from bapo_megatron.data.chat import ChatRenderer
from bapo_megatron.data.routes import narrowed
from bapo_megatron.data.staleness import join_spans, spans_of, token_versions
from bapo_megatron.data.tools import Message, checked_message, with_errors
from bapo_megatron.runtime.calls import decode
from bapo_megatron.types import FinishReason, PromptTokens, Sample, VersionSpans, WrittenSpan

_UNTRAINED = "u"
_REASONING_START = re.compile(r"<think(?:\s[^<>]*)?>")
_REASONING_END = "</think>"


@dataclass(frozen=True, slots=True)
class Completion:
    """The tokens of one request, or a piece of them."""

    token_ids: np.ndarray
    """[R] int32; an end-of-sequence token comes last."""
    logprobs: np.ndarray
    """[R] float32, finite: log_softmax(logits / T); empty if not asked for."""
    versions: VersionSpans
    """The weights version of each token."""
    finish_reason: FinishReason
    """ABORT for every piece but the last."""
    routes: np.ndarray | None = None
    """[rows, layers · experts per token] int8 or int16: the experts of the tokens from
    ``GenerateRequest.routes_from`` on, layer by layer; over all pieces, of every token but the
    last, which is not processed. −1 where they are not known; meaningless in layers without
    experts."""
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    """[R, K] Token columns that the engine filled, by name (``data.token_columns``)."""

    @property
    def num_sampled(self) -> int:
        """R."""
        return len(self.token_ids)


class EnoughTokensError(Exception):
    """Raised by a receiver of pieces if the response has ended before its request."""


def join(parts: Sequence[Completion], finish_reason: FinishReason) -> Completion:
    """Join pieces into one completion."""
    if len(parts) == 1:
        return replace(parts[0], finish_reason=finish_reason)
    routes = [part.routes for part in parts if part.routes is not None]
    return Completion(
        np.concatenate([np.empty(0, np.int32), *(part.token_ids for part in parts)]),
        np.concatenate([np.empty(0, np.float32), *(part.logprobs for part in parts)]),
        join_spans(part.versions for part in parts),
        finish_reason,
        np.concatenate(routes) if routes else None,
        {
            column.name: token_columns.concatenated(column, parts)
            for column in token_columns.present(parts)
        },
    )


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a call asks about."""

    messages: Sequence[Message]
    """As ``checked_message`` returns them; at least one."""
    tools: Sequence[dict[str, Any]] = ()
    """JSON schemas ``{type: function, function: {name, …}}``."""
    is_trained: bool = True
    """Whether the turn that answers it trains."""
    stop: Sequence[str] = ()
    """Strings at which the turn ends; not in the keys."""

    def keys(self, *, spaced: bool = True) -> list[str]:
        """Return the chain's hash after each message; unless ``spaced``, turns lose white space."""
        hashes = [_hashed(json.dumps(self.tools, sort_keys=True))]
        for message in self.messages:
            hashes.append(_hashed(hashes[-1] + _canonical(message, spaced=spaced)))
        return hashes[1:]


def _hashed(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _canonical(message: Message, *, spaced: bool) -> str:
    """Return what must be equal for a message to count as the recorded one.

    Clients send null for empty content, serialise arguments again, drop or add fields, and leave
    reasoning out or move it.
    """
    content = message["content"]
    if message["role"] == "assistant":
        content = _without_reasoning(content).strip()
        content = content if spaced else "".join(content.split())
    calls = [(call.get("id"), call["function"]) for call in message.get("tool_calls", ())]
    calls = _DOUBLES.decode(json.dumps(calls)) if calls else calls
    fields = [message["role"], content, calls, message.get("tool_call_id")]
    return json.dumps(fields, sort_keys=True)


def _without_reasoning(content: str) -> str:
    """Return a turn without its ``<think>…</think>``; a template may open the first."""
    *closed, rest = content.split(_REASONING_END)
    kept: list[str] = []
    for text in closed:
        before, *reasoning = _REASONING_START.split(text, maxsplit=1)
        kept.append(before) if reasoning else kept.clear()
    return "".join([*kept, rest])


def _double(text: str) -> float | None:
    """Return a number as JavaScript reads it and writes it again."""
    value = float(text)
    if not math.isfinite(value):
        return None
    return int(value) if value.is_integer() else value


_DOUBLES = json.JSONDecoder(parse_int=_double, parse_float=_double, parse_constant=_double)


def checked_messages(messages: Sequence[Any]) -> list[Message]:
    """Return a request's messages in the form of templates and hashes; ``ValueError`` for others.

    Null content is empty, a developer is the system, and nothing but role, content, name, calls
    and their ids is kept.
    """
    checked = []
    for message in messages:
        if isinstance(message, dict):
            is_empty = message.get("content") in (None, [])
            # Templates know no developer, and drop what they do not know.
            is_system = message.get("role") == "developer"
            changes = {"content": ""} if is_empty else {}
            message = message | changes | ({"role": "system"} if is_system else {})
        checked.append(checked_message(message))
    return checked


def call_rewards(value: Any) -> dict[str, float]:
    """Return the rewards in an agent's value by the names of calls, instead of responses' ids.

    Raises:
        ValueError: They are not finite numbers by id.
    """
    rewards = value.get("call_rewards", {}) if isinstance(value, dict) else {}
    try:
        by_id = decode(dict[str, FiniteFloat], rewards)
    except ValueError as error:
        raise ValueError(f"call_rewards must map ids of responses to numbers: {error}") from error
    return {re.split("[-_]", key)[-1]: reward for key, reward in by_id.items()}


@dataclass(slots=True, eq=False)
class Call:
    """One turn of the policy, finished or not."""

    name: str
    """An agent's: its conversation's last key, after ``_UNTRAINED`` if it does not train, and the
    number of equal ones before it; else empty."""
    parent: Call | None
    written: np.ndarray
    """[W] int32: tokens between the parent's turn, or the start, and this turn."""
    finish_reason: FinishReason = FinishReason.ABORT
    """ABORT until the turn ends; LENGTH: it was cut off, and is never extended."""
    max_tokens: int = 0
    """Limit of the turn, in tokens."""
    is_fork: bool = False
    """A root after the first one, although its messages hold a turn: perhaps a rewritten one."""
    num_tokens: int = 0
    """Q."""
    stop: Sequence[str] = field(default=(), kw_only=True)
    """Strings at which the turn ends."""
    _parts: list[Completion] = field(default_factory=list)
    # Joined once: appending a thousand parts one by one would copy the turn a thousand times.

    @property
    def is_finished(self) -> bool:
        """Whether the turn has ended."""
        return self.finish_reason is not FinishReason.ABORT

    @property
    def is_trained(self) -> bool:
        """Whether its turn trains; otherwise it is prompt of the calls that continue it."""
        return not self.name.startswith(_UNTRAINED)

    @property
    def turn(self) -> Completion:
        """What has been sampled so far, joined."""
        if len(self._parts) != 1:
            turn = join(self._parts, FinishReason.ABORT)
            routes = None if turn.routes is None else narrowed(turn.routes)
            self._parts = [replace(turn, routes=routes)]
        return self._parts[0]

    def path(self) -> list[Call]:
        """Return the calls from the root to this one."""
        path = [self]
        while (parent := path[-1].parent) is not None:
            path.append(parent)
        return path[::-1]

    def prompt(self) -> np.ndarray:
        """Return the tokens before the turn, [P] int32."""
        *before, last = self.path()
        parts = [part for call in before for part in (call.written, call.turn.token_ids)]
        return np.concatenate([*parts, last.written])

    @property
    def routed(self) -> int:
        """Number of the tokens so far whose experts are known (``Completion.routes``)."""
        routes = (call.turn.routes for call in self.path())
        return sum(len(values) for values in routes if values is not None)

    def append(self, part: Completion) -> None:
        """Add sampled tokens; a turn of ``max_tokens`` ends even if it was aborted."""
        if self.is_finished and not len(part.token_ids):
            return  # its server was lost between the last token and the finish reason
        assert not self.is_finished, "a finished turn is not continued"
        self._parts.append(part)
        self.num_tokens += len(part.token_ids)
        self.finish_reason = part.finish_reason
        if not self.is_finished and self.num_tokens >= self.max_tokens:
            self.finish_reason = FinishReason.LENGTH

    def until_stop(self, part: Completion, text_of: Callable[[Sequence[int]], str]) -> Completion:
        """Return a piece up to the token that completes a stop string of the turn, if one does.

        The whole turn is searched, so this depends neither on pieces nor on token boundaries.
        """
        if not self.stop:
            return part
        first, token_ids = self.num_tokens, [*self.turn.token_ids, *part.token_ids]

        def has_stop(num_tokens: int) -> bool:
            # Without half a character at the end.
            text = text_of(token_ids[:num_tokens]).rstrip("\ufffd")
            return any(stop in text for stop in self.stop)

        if not has_stop(len(token_ids)):
            return part
        num_new = bisect_left(range(first + 1, len(token_ids)), True, key=has_stop) + 1
        routes = part.routes
        if routes is not None:  # not of the last token, as always
            routes = routes[: max(0, len(self.prompt()) + first + num_new - 1 - self.routed)]
        return Completion(
            part.token_ids[:num_new],
            part.logprobs[:num_new],
            spans_of(token_versions(part.versions)[:num_new]),
            FinishReason.STOP_STRING,
            routes,
            {name: values[:num_new] for name, values in part.columns.items()},
        )

    def copy(self, parent: Call | None) -> Call:
        """Return a copy that later parts do not affect, with a copy of its parent."""
        return replace(self, parent=parent, _parts=self._parts.copy())


@dataclass(slots=True, eq=False)
class Record:
    """The calls of one episode.

    After a restart an agent runs again: its equal calls are those of the record, and what it does
    not ask for again is dropped at its end.
    """

    calls: list[Call] = field(default_factory=list)
    """Those that were asked for, in this order."""
    earlier: dict[str, Call] = field(default_factory=dict)
    """Calls from before a restart that it has not asked for yet, by name."""
    num_divergences: int = 0
    """Earlier calls that the agent did not repeat."""
    _asked: Counter[str] = field(default_factory=Counter)
    _turns: dict[str, Call] = field(default_factory=dict)
    """Finished calls by the key after their turn."""

    @property
    def num_tokens(self) -> int:
        """Tokens that count towards the limit: all but the prompts of roots."""
        return sum(
            call.num_tokens + (0 if call.parent is None else len(call.written))
            for call in self.all_calls()
        )

    @property
    def versions(self) -> VersionSpans:
        """The spans of all calls that train, which need not ascend from one to the next."""
        calls = (call for call in self.all_calls() if call.is_trained)
        return tuple(span for call in calls for span in call.turn.versions)

    def write(self, token_ids: Sequence[int]) -> None:
        """Add a call after these tokens, which continues the latest one."""
        parent = self.calls[-1] if self.calls else None
        self.calls.append(Call("", parent, np.asarray(token_ids, np.int32)))

    def begin(self, conversation: Conversation, renderer: ChatRenderer) -> Call:
        """Return the call that answers a conversation: a recorded one, or a new one.

        Raises:
            ValueError: The chat template refuses the messages.
        """
        keys = conversation.keys()
        key = keys[-1] if conversation.is_trained else _UNTRAINED + keys[-1]
        name = f"{key}.{self._asked[key]}"
        if (call := self.earlier.get(name)) is None:
            call = self._new_call(name, conversation, keys, renderer)
            self.calls.append(call)
        else:
            for member in call.path():
                if self.earlier.pop(member.name, None) is not None:
                    self.calls.append(member)
        self._asked[key] += 1
        call.stop = conversation.stop
        return call

    def withdraw(self, call: Call) -> None:
        """Forget a new call that gets no turn."""
        self.calls.remove(call)
        self._asked[call.name.partition(".")[0]] -= 1

    def note_turn(self, call: Call, conversation: Conversation, turn: Message) -> None:
        """Let later conversations continue a finished call, whose turn they see as ``turn``."""
        if call.finish_reason in (FinishReason.STOP, FinishReason.STOP_STRING):
            messages = [*conversation.messages, *checked_messages([turn])]
            told = replace(conversation, messages=messages)
            self._turns.setdefault(told.keys()[-1], call)
            # Where reasoning was taken out of a text, clients put some white space, or none.
            if any(_REASONING_END in message["content"] for message in messages):
                self._turns.setdefault(told.keys(spaced=False)[-1], call)

    def close(self) -> None:
        """Drop, at the end, calls that an agent did not repeat or did not wait for."""
        self.num_divergences += len(self.earlier)
        self.earlier = {}
        parents = {id(call.parent) for call in self.calls}  # of empty turns too
        self.calls = [
            call
            for call in self.calls
            if call.is_finished and (call.num_tokens or id(call) in parents)
        ]

    def all_calls(self) -> list[Call]:
        """Return the calls asked for and the earlier ones, parents before their children."""
        return [*self.calls, *self.earlier.values()]

    def _new_call(
        self, name: str, conversation: Conversation, keys: Sequence[str], renderer: ChatRenderer
    ) -> Call:
        messages = conversation.messages
        for is_spaced in (True, False):
            keys = keys if is_spaced else conversation.keys(spaced=False)
            place = next((n for n in reversed(range(len(keys))) if keys[n] in self._turns), -1)
            tail = messages[place + 1 :]
            has_turn = any(message["role"] == "assistant" for message in tail)
            if not has_turn:
                break
        if place < 0 or has_turn or not tail:
            token_ids = renderer.conversation(messages, conversation.tools)
            is_fork = bool(self.calls) and (has_turn or not tail)
            return Call(name, None, np.array(token_ids, np.int32), is_fork=is_fork)
        parent = self._turns[keys[place]]
        turn = parent.turn.token_ids.tolist()
        has_end = parent.finish_reason is FinishReason.STOP
        if conversation.tools:
            tail = with_errors(renderer.calls(turn, conversation.tools), tail)
        token_ids = renderer.continuation(tail, conversation.tools, after=turn, has_end=has_end)
        return Call(name, parent, np.array(token_ids, np.int32))

    def sequences(self) -> list[list[Call]]:
        """Return the calls that train with each leaf, in call order: the last turn comes last.

        A leaf is a call that trains and that no such call continues. Every call trains once: later
        sequences have what they share as prompt. Others are between calls that train.
        """
        calls = [call for call in self.calls if call.is_trained]
        latest: dict[int, Call | None] = {}  # that trains, up to each call
        for call in self.calls:
            latest[id(call)] = call if call.is_trained else latest.get(id(call.parent))
        parents = {id(latest.get(id(call.parent))) for call in calls}
        trained: set[int] = set()
        sequences = []
        for leaf in (call for call in calls if id(call) not in parents):
            path = leaf.path()
            new = (n for n, call in enumerate(path) if call.is_trained and id(call) not in trained)
            sequences.append(path[next(new) :])
            trained.update(map(id, sequences[-1]))
        return sequences

    def sample(
        self, group_id: int, index: int, prompt: PromptTokens, reason: FinishReason
    ) -> Sample:
        """Return the episode's sequences; without a call, an empty response to ``prompt``."""
        sequences = [
            _sequence(group_id, index, prompt, reason, number, calls)
            for number, calls in enumerate(self.sequences() or [[Call("", None, prompt.token_ids)]])
        ]
        sequences[0].branches = tuple(sequences[1:])
        return sequences[0]

    def restart(self) -> None:
        """Begin again, for an agent that starts again from its task."""
        self.earlier = {call.name: call for call in self.all_calls()}
        self.calls, self._asked, self._turns = [], Counter(), {}

    def copy(self) -> Record:
        """Return a copy that later changes do not affect, for a restart."""
        copies: dict[int | None, Call] = {}
        for call in self.all_calls():
            copies[id(call)] = call.copy(copies.get(id(call.parent)))
        calls = [copies[id(call)] for call in self.calls]
        earlier = {name: copies[id(call)] for name, call in self.earlier.items()}
        return Record(calls, earlier, self.num_divergences)


def _sequence(
    group_id: int,
    index: int,
    prompt: PromptTokens,
    reason: FinishReason,
    number: int,
    calls: Sequence[Call],
) -> Sample:
    first, *later = calls
    tokens, written, length = [first.turn.token_ids], [], first.num_tokens
    start = length  # of what is written before the next turn that trains
    for call in later:
        tokens += [call.written, call.turn.token_ids]
        length += len(call.written)
        if call.is_trained:
            written.append(WrittenSpan(start, length - start))
        length += call.num_tokens
        start = length if call.is_trained else start
    token_ids = first.prompt()
    if not np.array_equal(token_ids, prompt.token_ids):
        prompt = replace(prompt, token_ids=token_ids)
    turn = join([call.turn for call in calls if call.is_trained], reason)
    routes = [call.turn.routes for call in calls[-1].path() if call.turn.routes is not None]
    return Sample(
        group_id=group_id,
        index=index,
        prompt=prompt,
        response_token_ids=np.concatenate(tokens) if later else turn.token_ids,
        behaviour_logprobs=turn.logprobs,
        versions=turn.versions,
        finish_reason=reason,
        written=tuple(written),
        columns=dict(turn.columns),
        routes=narrowed(np.concatenate(routes)) if routes else None,
        number=number,
    )
