"""The file of unfinished episodes in a checkpoint: one row per call, bit for bit.

Every row has its episode's values too; an episode without a call has one row. Samples are built
again from the calls. The metadata hold data position and counters.

Shape legend: P = prompt tokens, W = tokens written before a call's turn, Q = tokens of the turn,
S = its version spans.
"""

import json
import os
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import batched, groupby
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np
import pyarrow as pa
from pydantic import Field

from bapo_megatron.config.rollout import RolloutConfig
from bapo_megatron.data import token_columns
from bapo_megatron.data.columns import DumpError, RowFile
from bapo_megatron.data.record import Call, Completion, Record
from bapo_megatron.data.routes import narrowed
from bapo_megatron.data.stream import MixturePosition
from bapo_megatron.data.token_columns import COLUMNS
from bapo_megatron.rollout.buffer import Episode, PendingGroup, RolloutBuffer
from bapo_megatron.runtime.calls import decode
from bapo_megatron.runtime.files import naming, parse_json
from bapo_megatron.types import (
    Count,
    FinishReason,
    Prompt,
    PromptTokens,
    RolloutStats,
    Sample,
    VersionSpan,
)

FORMAT = 10
"""Before 10 a row was a sequence; before 9 the metadata had other fields."""
_CHUNK_CALLS = 128
"""Rows of a row group, which is in memory twice while a file is written or read."""
_NONE = -1
"""In place of a number: no batch, no call, no parent."""


@dataclass(frozen=True, slots=True)
class RolloutState:
    """The state of batch collection, apart from samples."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "allow_inf_nan": False}
    """For ``calls.decode_json``."""
    prompts: MixturePosition
    generation_s: float
    """Seconds of generation since the last batch."""
    counted: RolloutStats
    """Counters since the last batch; other fields have their defaults."""
    sampled_version: Count | None
    """Weights version of the newest samples."""
    settings: dict[str, Any]
    """``settings_of`` the run that saved it."""


def settings_of(config: RolloutConfig) -> dict[str, Any]:
    """Return the settings that must not change for saved samples to continue."""
    names = ("fixed_lag", "partial_tokens", "environment", "samples_per_group")
    agent = {} if config.agent is None else {"agent": config.environment_name}
    return {name: getattr(config, name) for name in names} | agent


@dataclass(frozen=True, slots=True)
class _Metadata(RolloutState):
    """The metadata of the file, including the counters of the buffer."""

    format: int
    next_group_id: Count
    num_trained: Count
    dropped: dict[str, Count]
    num_earlier: Annotated[int, Field(ge=0, le=1_000_000)]


@dataclass(frozen=True, slots=True)
class SavedRollout:
    """The saved state of the collector."""

    about: RolloutState
    buffer: RolloutBuffer

    def check(self, config: RolloutConfig) -> None:
        """Raise a ``ValueError`` if the samples cannot be continued with these settings."""
        for name, value in settings_of(config).items():
            if (saved := self.about.settings.get(name)) != value:
                raise ValueError(
                    f"rollout.{name}: was {saved} when the samples were saved and is {value} now; "
                    "resume with the same value"
                )
        lengths = [episode.num_tokens for group in self.buffer for episode in group.episodes]
        if (longest := max(lengths, default=0)) > config.max_response_tokens:
            raise ValueError(
                f"rollout.max_response_tokens: must be at least the {longest} tokens of a saved "
                f"sample, got {config.max_response_tokens}; resume with the former value"
            )


@dataclass(frozen=True, slots=True)
class _Values:
    """An episode's values beside its prompt and its calls."""

    num_divergences: Count
    state: Any
    rests_at: Count
    texts: tuple[str, ...] | None
    extracted: str
    reason: str
    finish_reason: FinishReason
    """Of its sample; ABORT until there is one, with defaults in the next three fields."""
    reward: float
    reward_components: dict[str, float]
    answer_found: bool


_OF_EPISODE = ("state", "rests_at", "texts", "extracted", "reason")
_OF_SAMPLE = ("reward", "reward_components", "answer_found")


class _Row(NamedTuple):
    batch: int
    """Number of the earlier batch that trained its group, or ``_NONE``."""
    group: PendingGroup
    episode: Episode
    number: int
    """The call's place among those of its record, or ``_NONE``."""
    parent: int
    call: Call
    sequence: Sample
    """The sequence that begins with this call; empty for later calls, and until the end."""

    @property
    def routes(self) -> np.ndarray:
        routes = self.call.turn.routes
        return np.empty((0, 0)) if routes is None else routes


def _values(row: _Row) -> str:
    episode, sample = row.episode, row.episode.sample or _EMPTY
    values = {name: getattr(episode, name) for name in _OF_EPISODE}
    values |= {name: getattr(sample, name) for name in ("finish_reason", *_OF_SAMPLE)}
    return json.dumps(values | {"num_divergences": episode.record.num_divergences})


def _prompt_values(row: _Row) -> str:
    values = asdict(row.episode.prompt)
    del values["token_ids"]
    return json.dumps(values)


# Large: a row group may hold more than 2 GB of texts.
_COLUMNS: dict[str, tuple[Any, Callable[[_Row], Any]]] = {
    "batch": (pa.int32(), attrgetter("batch")),
    "group_id": (pa.int64(), attrgetter("group.group_id")),
    "carries": (pa.int32(), attrgetter("group.carries")),
    "index": (pa.int64(), attrgetter("episode.index")),
    "prompt": (pa.large_string(), _prompt_values),
    "prompt_token_ids": (pa.list_(pa.int32()), attrgetter("episode.prompt.token_ids")),
    "episode": (pa.large_string(), _values),
    "call": (pa.int32(), attrgetter("number")),
    "parent": (pa.int32(), attrgetter("parent")),
    "name": (pa.string(), attrgetter("call.name")),
    "turn_end": (pa.string(), attrgetter("call.finish_reason.value")),
    "max_tokens": (pa.int32(), attrgetter("call.max_tokens")),
    "is_fork": (pa.bool_(), attrgetter("call.is_fork")),
    "written": (pa.list_(pa.int32()), attrgetter("call.written")),
    "token_ids": (pa.list_(pa.int32()), attrgetter("call.turn.token_ids")),
    "logprobs": (pa.list_(pa.float32()), attrgetter("call.turn.logprobs")),
    "versions": (pa.list_(pa.int32()), lambda row: [v for v, _ in row.call.turn.versions]),
    "version_tokens": (pa.list_(pa.int32()), lambda row: [n for _, n in row.call.turn.versions]),
}
"""One value per call, or a list: [P], [W], [Q], [Q], [S], [S]. ``prompt`` and ``episode`` are JSON:
the other fields of ``Prompt``, and ``_Values``."""
_REMEDY = "this checkpoint cannot be continued"
_ROUTES: dict[str, tuple[Any, Callable[[_Row], Any]]] = {
    # Too many for lists, whose offsets have 32 bits.
    "routes": (pa.large_binary(), lambda row: row.routes.astype("<i2").tobytes()),
    "routed_tokens": (pa.int32(), lambda row: len(row.routes)),
}
"""``Completion.routes``, and its number of rows; 0 if there are none."""
_OPTIONAL = _ROUTES | {
    name: (
        kind,
        lambda row, name=name, value=value: value(
            row.call.turn if COLUMNS[name].is_sampled else row.sequence
        ),
    )
    for name, (kind, value) in token_columns.row_columns().items()
}
_FILE = RowFile("rollout buffer", _REMEDY, FORMAT, _COLUMNS, _Metadata, optional=_OPTIONAL)
_EMPTY = Record().sample(0, 0, PromptTokens("", np.empty(0, np.int32)), FinishReason.ABORT)


def write_saved(path: Path, saved: SavedRollout) -> None:
    """Write a state, which must not change meanwhile, and flush it to disk.

    Raises:
        OSError: The file cannot be written.
    """
    buffer = saved.buffer
    about = {
        **asdict(saved.about),
        "next_group_id": buffer.next_group_id,
        "num_trained": buffer.num_trained,
        "dropped": dict(buffer.dropped),
        "num_earlier": len(buffer.earlier),
    }
    rows = list(_rows(buffer))
    parts = (part for row in rows for part in (row.call.turn, row.sequence))
    names = [column.name for column in token_columns.present(parts)]
    names += _ROUTES if any(len(row.routes) for row in rows) else []
    with naming(path), path.open("wb") as stream:
        _FILE.write(stream, batched(rows, _CHUNK_CALLS), about, names)
        stream.flush()
        os.fsync(stream.fileno())


def read_saved(path: Path) -> SavedRollout:
    """Read a file that ``write_saved`` wrote.

    Raises:
        DumpError: It is damaged, or of another format.
    """
    about, rows = _FILE.read(path, str(path))
    batches = defaultdict[int, list[PendingGroup]](list)
    for (batch, group_id), members in groupby(rows, lambda row: (row["batch"], row["group_id"])):
        batches[batch].append(_group(group_id, list(members), str(path)))
    buffer = RolloutBuffer(
        groups={group.group_id: group for group in batches.pop(_NONE, ())},
        earlier=deque(tuple(batches.pop(number, ())) for number in range(about.num_earlier)),
        next_group_id=about.next_group_id,
        num_trained=about.num_trained,
        dropped=Counter(about.dropped),
    )
    if batches or buffer.next_group_id != buffer.num_accounted:
        raise DumpError(
            f"{path}: next_group_id must be the number of groups that are trained, dropped or "
            f"waiting, {buffer.num_accounted}, got {buffer.next_group_id}, and batch below "
            f"num_earlier, {about.num_earlier}; {_REMEDY}"
        )
    return SavedRollout(about, buffer)


def _rows(buffer: RolloutBuffer) -> Iterator[_Row]:
    """The rows of the groups of earlier batches, then of those in the buffer."""
    groups = [(number, group) for number, batch in enumerate(buffer.earlier) for group in batch]
    for batch, group in (*groups, *((_NONE, group) for group in buffer)):
        for episode in group.episodes:
            calls, begun = episode.record.all_calls(), _begun(episode)
            if not calls:
                nothing = Call("", None, np.empty(0, np.int32))
                yield _Row(batch, group, episode, _NONE, _NONE, nothing, _EMPTY)
            numbers = {id(call): number for number, call in enumerate(calls)}
            for number, call in enumerate(calls):
                parent = numbers.get(id(call.parent), _NONE)
                sequence = begun.get(id(call), _EMPTY)
                yield _Row(batch, group, episode, number, parent, call, sequence)


def _begun(episode: Episode) -> dict[int, Sample]:
    """The sequences of an episode, once it has ended, by the ``id`` of their first call."""
    if episode.sample is None:
        return {}
    starts = [id(first) for first, *_ in episode.record.sequences()]
    return dict(zip(starts, episode.sample.sequences, strict=False))  # one is without a call


def _group(group_id: int, rows: list[dict[str, Any]], name: str) -> PendingGroup:
    first, episodes = rows[0], list[Episode]()
    tokens = {"token_ids": first["prompt_token_ids"].tolist()}
    prompt = _read(first, "prompt", name, partial(_decoded, Prompt, **tokens))
    for index, members in groupby(rows, itemgetter("index")):
        episodes.append(_episode(Episode(group_id, index, prompt), list(members), name))
    return PendingGroup(group_id, episodes, first["carries"])


def _episode(episode: Episode, rows: list[dict[str, Any]], name: str) -> Episode:
    """Set everything but the prompt."""
    values: _Values = _read(rows[0], "episode", name, partial(_decoded, _Values))
    calls = list[Call]()
    for row in rows:
        if row["call"] != _NONE:
            calls.append(_read(row, "call", name, partial(_call, row, calls)))
    episode.record = Record(calls, num_divergences=values.num_divergences)
    for field in _OF_EPISODE:
        setattr(episode, field, getattr(values, field))
    if values.finish_reason is not FinishReason.ABORT:
        episode.finish(values.finish_reason)
        sample = episode.finished()
        for field in _OF_SAMPLE:
            setattr(sample, field, getattr(values, field))
    # In the file an unscored episode has defaults, for fewer values than it may get.
    begun = _begun(episode) if episode.is_scored else {}
    for call, row in zip(calls, rows, strict=False):
        if (sequence := begun.get(id(call))) is not None:
            read = partial(_columns, row, sequence.num_sampled, is_sampled=False)
            sequence.columns |= _read(row, "call", name, read)
    return episode


def _columns(
    row: dict[str, Any], num_tokens: int, _: int, *, is_sampled: bool
) -> dict[str, np.ndarray]:
    """Read the columns of a call's turn (``is_sampled``), or of the sequence it begins."""
    chosen = {name: row.get(name) for name, c in COLUMNS.items() if c.is_sampled == is_sampled}
    columns = token_columns.read_columns(chosen, num_tokens)
    # Copied, like a call's arrays: a view would keep the whole row group in memory.
    return {name: values.copy() for name, values in columns.items()}


def _call(row: dict[str, Any], earlier: Sequence[Call], number: int) -> Call:
    """Read a call, whose parent is among the earlier ones."""
    parent, ids, logprobs = row["parent"], row["token_ids"].copy(), row["logprobs"].copy()
    counts = row["version_tokens"].tolist()
    if not _NONE <= parent < len(earlier) or number != len(earlier):
        raise ValueError(f"must come in order and after its parent, got {number} of {parent}")
    if not len(ids) == len(logprobs) == sum(counts) or len(counts) != len(row["versions"]):
        raise ValueError("must have a log-prob and a version per token")
    spans = tuple(map(VersionSpan, row["versions"].tolist(), counts))
    routes = None
    if num_rows := row.get("routed_tokens", 0):
        values = np.frombuffer(row["routes"], "<i2")
        if num_rows < 0 or not len(values) or len(values) % num_rows:
            raise ValueError(f"routes: {len(values)} experts for {num_rows} tokens")
        routes = narrowed(values.reshape(num_rows, -1))
    columns = _columns(row, len(ids), number, is_sampled=True)
    known = {name: values for name, values in columns.items() if values.size}
    end = FinishReason(row["turn_end"])
    return Call(
        row["name"],
        None if parent == _NONE else earlier[parent],
        row["written"].copy(),
        end,
        row["max_tokens"],
        row["is_fork"],
        len(ids),
        [Completion(ids, logprobs, spans, end, routes, known)],
    )


def _decoded(kind: Any, text: str, **further: Any) -> Any:
    return decode(kind, decode(dict[str, Any], parse_json(text)) | further)


def _read(row: dict[str, Any], column: str, name: str, parse: Callable[[Any], Any]) -> Any:
    """Parse a value of an episode's row; its errors name the file, the sample and the column."""
    try:
        return parse(row[column])
    except ValueError as error:
        raise DumpError(
            f"{name}: sample {row['index']} of group {row['group_id']}: {column}: {error}; "
            f"{_REMEDY}"
        ) from error
