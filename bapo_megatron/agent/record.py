"""The record of an agent's episode: a tree of calls, whose paths are the sequences that train.

Every call is known by a chain of hashes over (tools, message 0, message 1, …). A conversation that
begins with a recorded call and its turn, and goes on with tool, user or system messages, continues
that call's tokens; any other begins a new root. So text becomes tokens once, and what the policy
sampled is never tokenised again.

Shape legend: P = prompt tokens, R = response tokens, Q = those of them that the policy sampled,
W = tokens of one call's prompt beyond those of its parent.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from bapo_megatron.data.chat import ChatRenderer
from bapo_megatron.data.staleness import join_spans, num_spanned
from bapo_megatron.data.tools import Message, checked_message
from bapo_megatron.types import FinishReason, VersionSpans, WrittenSpan

_REASONING = re.compile(r"^\s*(<think>)?.*?</think>", re.DOTALL)
"""What clients leave out when they send a turn back; some templates open it in the prompt."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a call asks about."""

    messages: Sequence[Message]
    """As ``checked_message`` returns them; at least one."""
    tools: Sequence[dict[str, Any]] = ()
    """JSON schemas ``{type: function, function: {name, …}}``."""

    def keys(self) -> list[str]:
        """Return the chain's hash after each message."""
        hashes = [_hashed(json.dumps(self.tools, sort_keys=True))]
        for message in self.messages:
            hashes.append(_hashed(hashes[-1] + _canonical(message)))
        return hashes[1:]


def _hashed(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _canonical(message: Message) -> str:
    """Return what must be equal for a message to count as the recorded one.

    Clients send null for empty content, serialise arguments again, and drop or add fields.
    """
    content = message["content"]
    if message["role"] == "assistant":
        content = _REASONING.sub("", content, count=1).strip()
    calls = [
        (call.get("id"), call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls", ())
    ]
    return json.dumps(
        [message["role"], content, calls, message.get("tool_call_id")], sort_keys=True
    )


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


@dataclass(slots=True, eq=False)
class Call:
    """One turn of the policy, finished or not."""

    name: str
    """Its conversation's last key, and the number of equal ones before it."""
    parent: Call | None
    written: np.ndarray
    """[W] int32: tokens between the parent's turn, or the start, and this turn."""
    token_ids: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    """[Q] int32: the turn, as it was sampled."""
    logprobs: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32))
    """[Q] float32."""
    versions: VersionSpans = ()
    finish_reason: FinishReason = FinishReason.ABORT
    """ABORT until the turn ends; LENGTH: it was cut off, and is never extended."""
    max_tokens: int = 0
    """Limit of the turn, in tokens."""
    is_fork: bool = False
    """A root after the first one, although its messages hold a turn: perhaps a rewritten one."""

    @property
    def is_finished(self) -> bool:
        """Whether the turn has ended."""
        return self.finish_reason is not FinishReason.ABORT

    def path(self) -> list[Call]:
        """Return the calls from the root to this one."""
        path = [self]
        while (parent := path[-1].parent) is not None:
            path.append(parent)
        return path[::-1]

    def prompt(self) -> np.ndarray:
        """Return the tokens before the turn, [P] int32."""
        *before, last = self.path()
        parts = [part for call in before for part in (call.written, call.token_ids)]
        return np.concatenate([*parts, last.written])

    def append(
        self, token_ids: np.ndarray, logprobs: np.ndarray, versions: VersionSpans, end: FinishReason
    ) -> None:
        """Add sampled tokens; ``end`` is ABORT unless they end the turn."""
        assert not self.is_finished, "a finished turn is not continued"
        self.token_ids = np.concatenate([self.token_ids, token_ids])
        self.logprobs = np.concatenate([self.logprobs, logprobs])
        self.versions = join_spans([self.versions, versions])
        self.finish_reason = end
        if end is FinishReason.ABORT and len(self.token_ids) >= self.max_tokens:
            self.finish_reason = FinishReason.LENGTH


_ARRAYS = {"written": np.int32, "token_ids": np.int32, "logprobs": np.float32}
_VALUES = ("name", "versions", "finish_reason", "max_tokens", "is_fork")


@dataclass(frozen=True, slots=True)
class SavedCall:
    """A ``Call`` in a checkpoint."""

    name: str
    parent: int | None
    """Its place among the record's calls."""
    written: list[int]
    token_ids: list[int]
    logprobs: list[float]
    versions: VersionSpans
    finish_reason: FinishReason
    max_tokens: int
    is_fork: bool


@dataclass(frozen=True, slots=True)
class SavedRecord:
    """A ``Record`` in a checkpoint."""

    calls: list[SavedCall]
    num_divergences: int


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """A path of the tree, from the first call that no earlier sequence trains."""

    prompt_token_ids: np.ndarray
    """[P] int32: everything before that call's turn."""
    response_token_ids: np.ndarray
    """[R] int32."""
    logprobs: np.ndarray
    """[Q] float32."""
    versions: VersionSpans
    written: tuple[WrittenSpan, ...]


@dataclass(slots=True, eq=False)
class Record:
    """The calls of one episode.

    After a restart the agent runs again: its equal calls are those of the record, and what it does
    not ask for again is dropped at its end.
    """

    calls: list[Call] = field(default_factory=list)
    """Those that the agent has asked for, in this order."""
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
            len(call.token_ids) + (0 if call.parent is None else len(call.written))
            for call in self.all_calls()
        )

    @property
    def versions(self) -> VersionSpans:
        """The spans of all calls, which need not ascend from one to the next."""
        return tuple(span for call in self.all_calls() for span in call.versions)

    def begin(self, conversation: Conversation, renderer: ChatRenderer) -> Call:
        """Return the call that answers a conversation: a recorded one, or a new one.

        Raises:
            ValueError: The chat template refuses the messages.
        """
        keys = conversation.keys()
        name = f"{keys[-1]}.{self._asked[keys[-1]]}"
        if (call := self.earlier.get(name)) is None:
            call = self._new_call(name, conversation, keys, renderer)
            self.calls.append(call)
        else:
            self._repeat(call)
        self._asked[keys[-1]] += 1
        return call

    def withdraw(self, call: Call) -> None:
        """Forget a new call that gets no turn."""
        self.calls.remove(call)
        self._asked[call.name.partition(".")[0]] -= 1

    def note_turn(self, call: Call, conversation: Conversation, turn: Message) -> None:
        """Let later conversations continue a finished call, whose turn they see as ``turn``."""
        if call.finish_reason is FinishReason.STOP:
            messages = [*conversation.messages, *checked_messages([turn])]
            [*_, key] = replace(conversation, messages=messages).keys()
            self._turns.setdefault(key, call)

    def close(self) -> None:
        """Drop, at the agent's end, calls that it did not repeat or did not wait for."""
        self.num_divergences += len(self.earlier)
        self.earlier = {}
        self.calls = [call for call in self.calls if call.is_finished and len(call.token_ids)]

    def all_calls(self) -> list[Call]:
        """Return the calls asked for and the earlier ones, parents before their children."""
        return [*self.calls, *self.earlier.values()]

    def _repeat(self, call: Call) -> None:
        for member in call.path():
            if self.earlier.pop(member.name, None) is not None:
                self.calls.append(member)

    def _new_call(
        self, name: str, conversation: Conversation, keys: Sequence[str], renderer: ChatRenderer
    ) -> Call:
        messages = conversation.messages
        place = next((n for n in reversed(range(len(keys))) if keys[n] in self._turns), -1)
        tail = messages[place + 1 :]
        has_turn = any(message["role"] == "assistant" for message in tail)
        if place < 0 or has_turn or not tail:
            token_ids = renderer.conversation(messages, conversation.tools)
            is_fork = bool(self.calls) and (has_turn or not tail)
            return Call(name, None, np.array(token_ids, np.int32), is_fork=is_fork)
        parent = self._turns[keys[place]]
        turn = parent.token_ids.tolist()
        token_ids = renderer.continuation(tail, conversation.tools, after=turn)
        return Call(name, parent, np.array(token_ids, np.int32))

    def sequences(self) -> list[TokenSequence]:
        """Return the sequences of all leaves in call order, so that the last turn comes last.

        Every sampled token trains once: later sequences have what they share as prompt.
        """
        parents = {id(call.parent) for call in self.calls}
        leaves = [call for call in self.calls if id(call) not in parents]
        trained: set[int] = set()
        sequences = []
        for leaf in leaves:
            path = leaf.path()
            first = next(n for n, call in enumerate(path) if id(call) not in trained)
            trained.update(map(id, path))
            sequences.append(_sequence(path[first].prompt(), path[first:]))
        return sequences

    def restart(self) -> None:
        """Begin again, for an agent that starts again from its task in the same life of the run."""
        self.earlier = {call.name: call for call in self.all_calls()}
        self.calls, self._asked, self._turns = [], Counter(), {}

    def restarted(self) -> Record:
        """Return a copy for an agent that starts again from its task."""
        copies: dict[int | None, Call] = {}
        for call in self.all_calls():
            # Arrays are replaced, never modified.
            copies[id(call)] = replace(call, parent=copies.get(id(call.parent)))
        earlier = {call.name: call for call in copies.values()}
        return Record(earlier=earlier, num_divergences=self.num_divergences)

    def to_saved(self) -> SavedRecord:
        """Return all that a restart needs, exactly."""
        calls = self.all_calls()
        numbers = {id(call): number for number, call in enumerate(calls)}
        saved = [
            SavedCall(
                parent=numbers.get(id(call.parent)),
                **{name: getattr(call, name).tolist() for name in _ARRAYS},
                **{name: getattr(call, name) for name in _VALUES},
            )
            for call in calls
        ]
        return SavedRecord(saved, self.num_divergences)

    @classmethod
    def from_saved(cls, saved: SavedRecord) -> Record:
        """Return a record for an agent that starts again.

        Raises:
            ValueError: A call precedes its parent, or a token lacks its log-prob.
        """
        calls: list[Call] = []
        for number, entry in enumerate(saved.calls):
            if entry.parent is not None and not 0 <= entry.parent < number:
                raise ValueError(f"call {number} must come after its parent, got {entry.parent}")
            lengths = {len(entry.token_ids), len(entry.logprobs), num_spanned(entry.versions)}
            if len(lengths) != 1:
                raise ValueError(f"call {number} must have a log-prob and a version per token")
            parent = None if entry.parent is None else calls[entry.parent]
            values: dict[str, Any] = {name: getattr(entry, name) for name in _VALUES}
            for name, kind in _ARRAYS.items():
                values[name] = np.array(getattr(entry, name), kind)
            calls.append(Call(parent=parent, **values))
        earlier = {call.name: call for call in calls}
        return cls(earlier=earlier, num_divergences=saved.num_divergences)


def _sequence(prompt: np.ndarray, calls: Sequence[Call]) -> TokenSequence:
    tokens, written, length = [calls[0].token_ids], [], len(calls[0].token_ids)
    for call in calls[1:]:
        written.append(WrittenSpan(length, len(call.written)))
        tokens += [call.written, call.token_ids]
        length += len(call.written) + len(call.token_ids)
    return TokenSequence(
        prompt_token_ids=prompt,
        response_token_ids=np.concatenate(tokens),
        logprobs=np.concatenate([call.logprobs for call in calls]),
        versions=join_spans([call.versions for call in calls]),
        written=tuple(written),
    )
