"""The file of unfinished samples in a checkpoint: one row per sequence, bit for bit.

Its columns are those of a rollout dump plus the collector's state of the sample. The metadata hold
data position and counters.
"""

import json
import os
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import batched, groupby
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np
import pyarrow as pa
from pydantic import Field

from bapo_megatron.agent.record import Record, SavedRecord
from bapo_megatron.config.rollout import RolloutConfig
from bapo_megatron.data.columns import DumpError, RowFile
from bapo_megatron.data.dump import (
    OPTIONAL_COLUMNS,
    SAMPLE_COLUMNS,
    check_sequences,
    optional_names,
    sample_of,
)
from bapo_megatron.data.routes import narrowed
from bapo_megatron.data.stream import MixturePosition
from bapo_megatron.rollout.buffer import PendingGroup, PendingSample, RolloutBuffer
from bapo_megatron.runtime.calls import decode
from bapo_megatron.runtime.files import naming, parse_json
from bapo_megatron.types import Count, Prompt, RolloutStats, Sample

FORMAT = 9
"""Before 9 the metadata had other fields; before 8 the samples were in state.json."""
_CHUNK_SAMPLES = 128
"""Rows of a row group, which is in memory twice while a file is written or read."""
_WAITING = -1


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
        lengths = [pending.num_tokens for group in self.buffer for pending in group.samples]
        if (longest := max(lengths, default=0)) > config.max_response_tokens:
            raise ValueError(
                f"rollout.max_response_tokens: must be at least the {longest} tokens of a saved "
                f"sample, got {config.max_response_tokens}; resume with the former value"
            )


class _Row(NamedTuple):
    batch: int
    """Number of the earlier batch that trained its group, or ``_WAITING``."""
    group: PendingGroup
    pending: PendingSample
    sequence: Sample


def _of_sequence(value_of: Callable[[Sample], Any]) -> Callable[[_Row], Any]:
    return lambda row: value_of(row.sequence)


def _as_json(field: str) -> Callable[[_Row], Any]:
    return lambda row: json.dumps(getattr(row.pending, field))


_PLAIN = {
    "has_begun": pa.bool_(),
    "awaits_answer": pa.bool_(),
    "rests_at": pa.int32(),
    "extracted": pa.string(),
    "reason": pa.string(),
}
"""Fields of a ``PendingSample`` that are stored as plain columns."""
_JSON: dict[str, Any] = {"texts": tuple[str, ...] | None, "state": Any}
"""Fields that are stored as JSON, and their types."""
# Large: a row group may hold more than 2 GB of texts.
_COLUMNS: dict[str, tuple[Any, Callable[[_Row], Any]]] = {
    "batch": (pa.int32(), attrgetter("batch")),
    "carries": (pa.int32(), attrgetter("group.carries")),
    **{name: (kind, _of_sequence(value)) for name, (kind, value) in SAMPLE_COLUMNS.items()},
    "prompt_text": (pa.string(), attrgetter("pending.prompt.text")),
    "answer": (pa.string(), attrgetter("pending.prompt.answer")),
    "prompt_row": (pa.large_string(), lambda row: json.dumps(row.pending.prompt.row)),
    **{name: (kind, attrgetter(f"pending.{name}")) for name, kind in _PLAIN.items()},
    **{name: (pa.large_string(), _as_json(name)) for name in _JSON},
}
_REMEDY = "this checkpoint cannot be continued"
_ROUTES: dict[str, tuple[Any, Callable[[Sample], Any]]] = {
    # Too many for lists, whose offsets have 32 bits.
    "routes": (pa.large_binary(), lambda sample: _routes_of(sample).astype("<i2").tobytes()),
    "routed_tokens": (pa.int32(), lambda sample: len(_routes_of(sample))),
}
"""``Sample.routes``, and its number of rows; 0 if there are none."""
_RECORD = "record"
"""``PendingSample.record`` as JSON."""
_GROUP_PROMPT = "group_prompt_token_ids"
"""The prompt of the data set, where sequences have others."""
_OPTIONAL: dict[str, tuple[Any, Callable[[_Row], Any]]] = {
    name: (kind, _of_sequence(value))
    for name, (kind, value) in (OPTIONAL_COLUMNS | _ROUTES).items()
}
_OPTIONAL[_GROUP_PROMPT] = pa.list_(pa.int32()), attrgetter("pending.prompt.token_ids")
_OPTIONAL[_RECORD] = (
    pa.large_string(),
    lambda row: json.dumps(row.pending.record and asdict(row.pending.record.to_saved())),
)
_FILE = RowFile("rollout buffer", _REMEDY, FORMAT, _COLUMNS, _Metadata, optional=_OPTIONAL)


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
    groups = [*buffer, *(group for batch in buffer.earlier for group in batch)]
    waiting = [pending for group in groups for pending in group.samples]
    for pending in waiting:
        pending.settle()
    sequences = [sequence for pending in waiting for sequence in pending.sample.sequences]
    names = optional_names(sequences)
    names += _ROUTES if any(sequence.routes is not None for sequence in sequences) else []
    names += [_GROUP_PROMPT] if any(map(_has_own_prompt, waiting)) else []
    names += [_RECORD] if any(pending.record is not None for pending in waiting) else []
    with naming(path), path.open("wb") as stream:
        _FILE.write(stream, batched(_rows(buffer), _CHUNK_SAMPLES), about, names)
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
        groups={group.group_id: group for group in batches.pop(_WAITING, ())},
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
    for number, group in (*groups, *((_WAITING, group) for group in buffer)):
        for pending in group.samples:
            for sequence in pending.sample.sequences:
                yield _Row(number, group, pending, sequence)


def _group(group_id: int, rows: list[dict[str, Any]], name: str) -> PendingGroup:
    first = rows[0]
    prompt = Prompt(
        first["prompt_id"],
        tuple(first.get(_GROUP_PROMPT, first["prompt_token_ids"]).tolist()),
        first["answer"],
        first["prompt_text"],
        first["source"],
        _read(first, "prompt_row", name, partial(_decoded, dict[str, Any])),
    )
    tokens, samples = prompt.tokens(), list[PendingSample]()
    for row in rows:
        sample = sample_of(row, tokens, name)
        # Copied: a view would keep the whole row group in memory.
        sample.response_token_ids = sample.response_token_ids.copy()
        sample.behaviour_logprobs = sample.behaviour_logprobs.copy()
        columns = {name: values.copy() for name, values in sample.columns.items()}
        fields = {field: row[field] for field in _PLAIN}
        fields |= {f: _read(row, f, name, partial(_decoded, kind)) for f, kind in _JSON.items()}
        pending = PendingSample(sample, prompt, **fields)
        # In the file an unscored sample has defaults, for fewer tokens than it may get.
        sample.columns = columns if pending.is_scored else {}
        if num_rows := row.get("routed_tokens", 0):
            sample.routes = _read(row, "routes", name, partial(_decoded_routes, num_rows))
        if _RECORD in row:
            pending.record = _read(row, _RECORD, name, _decoded_record)
        if sample.number and samples:
            samples[-1].sample.branches += (sample,)
        else:
            samples.append(pending)
    for pending in samples:
        check_sequences(pending.sample, name)
    return PendingGroup(group_id, samples, first["carries"])


def _has_own_prompt(pending: PendingSample) -> bool:
    return not np.array_equal(pending.sample.prompt.token_ids, pending.prompt.token_ids)


def _routes_of(sample: Sample) -> np.ndarray:
    return np.empty((0, 0)) if sample.routes is None else sample.routes


def _decoded_routes(num_rows: int, content: bytes) -> np.ndarray:
    values = np.frombuffer(content, "<i2")
    if num_rows < 0 or not len(values) or len(values) % num_rows:
        raise ValueError(f"{len(values)} experts for {num_rows} tokens")
    return narrowed(values.reshape(num_rows, -1))


def _decoded_record(text: str) -> Record | None:
    saved = _decoded(SavedRecord | None, text)
    return None if saved is None else Record.from_saved(saved)


def _decoded(kind: Any, text: str) -> Any:
    return decode(kind, parse_json(text))


def _read(row: dict[str, Any], column: str, name: str, parse: Callable[[Any], Any]) -> Any:
    """Parse a value of a sample's row; its errors name the file, the sample and the column."""
    try:
        return parse(row[column])
    except ValueError as error:
        raise DumpError(
            f"{name}: sample {row['index']} of group {row['group_id']}: {column}: {error}; "
            f"{_REMEDY}"
        ) from error
