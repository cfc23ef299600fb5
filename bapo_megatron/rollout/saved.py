"""The file of unfinished samples in a checkpoint: a row per sample, bit for bit.

Its columns are those of a rollout dump and what only the collector knows about a sample. Data
position and counters are in its metadata.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, astuple, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, Self

import pyarrow as pa
from pydantic import Field

from bapo_megatron.config.rollout import RolloutConfig
from bapo_megatron.data.columns import DumpError, RowFile
from bapo_megatron.data.dump import SAMPLE_COLUMNS, sample_of
from bapo_megatron.data.stream import MixturePosition
from bapo_megatron.rollout.buffer import PendingGroup, PendingSample, RolloutBuffer
from bapo_megatron.runtime.calls import decode
from bapo_megatron.runtime.files import naming, parse_json
from bapo_megatron.types import Count, Prompt, Sample

FORMAT = 8
"""Earlier formats were JSON, part of the checkpoint's state.json."""
_CHUNK_TOKENS = 4_000_000
"""Response tokens of a row group: what is held twice while a file is written or read."""
_WAITING = -1


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts so far; the difference from those of the previous batch is what a batch cost."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}
    """For ``calls.decode_json``."""
    generated_tokens: Count = 0
    resumed_samples: Count = 0
    regenerated_samples: Count = 0
    lost_requests: Count = 0
    retractions: Count = 0
    reward_timeouts: Count = 0
    reward_errors: Count = 0
    environment_errors: dict[str, Count] = field(default_factory=dict)
    dropped: dict[str, Count] = field(default_factory=dict)

    def since(self, before: Self) -> Self:
        """What was counted after ``before``."""
        return type(self)(*map(_difference, astuple(self), astuple(before)))


def _difference(now: Any, then: Any) -> Any:
    if not isinstance(now, dict):
        return now - then
    differences = {key: now.get(key, 0) - then.get(key, 0) for key in {**then, **now}}
    return {key: n for key, n in sorted(differences.items()) if n}


@dataclass(frozen=True, slots=True)
class RolloutState:
    """Where the collection of batches stands, apart from its samples."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "allow_inf_nan": False}
    """For ``calls.decode_json``."""
    prompts: MixturePosition
    generation_s: float
    """Seconds since the last batch in which its samples were generated."""
    counted: Totals
    """Since the last batch."""
    sampled_version: Count | None
    """Weights version of the newest samples."""
    fixed_lag: Count | None
    partial_tokens: Count | None
    environment: str
    """The settings of these names, under ``rollout``."""


@dataclass(frozen=True, slots=True)
class _About(RolloutState):
    """The metadata of the file."""

    format: int
    next_group_id: Count
    num_trained: Count
    dropped: dict[str, Count]
    num_earlier: Annotated[int, Field(ge=0, le=1_000_000)]


@dataclass(frozen=True, slots=True)
class SavedRollout:
    """What the collector continues from."""

    about: RolloutState
    buffer: RolloutBuffer

    def check(self, config: RolloutConfig) -> None:
        """Refuse settings under which the samples cannot go on.

        Raises:
            ValueError: A group has another size, a sample is too long, or a mode has changed.
        """
        for name in ("fixed_lag", "partial_tokens", "environment"):
            value = getattr(config, name)
            if (saved := getattr(self.about, name)) != value:
                raise ValueError(
                    f"rollout.{name}: was {saved} when the samples were saved and is {value} now; "
                    "resume with the same value"
                )
        size, max_tokens = config.samples_per_group, config.max_response_tokens
        earlier = (group for batch in self.buffer.earlier for group in batch)
        for group in (*self.buffer, *earlier):
            if len(group.samples) != size:
                raise ValueError(
                    f"rollout.samples_per_group: was {len(group.samples)} when group "
                    f"{group.group_id} was saved and is {size} now; resume with the same value"
                )
        for group in self.buffer:
            num_tokens = max(pending.num_tokens for pending in group.samples)
            if num_tokens > max_tokens:
                raise ValueError(
                    f"rollout.max_response_tokens: must be at least the {num_tokens} tokens of a "
                    f"saved sample, got {max_tokens}; resume with the former value"
                )


class _Row(NamedTuple):
    batch: int
    """Number of the earlier batch that its group was trained in, or ``_WAITING``."""
    group: PendingGroup
    pending: PendingSample


def _of_sample(value_of: Callable[[Sample], Any]) -> Callable[[_Row], Any]:
    return lambda row: value_of(row.pending.sample)


_COLUMNS: dict[str, tuple[Any, Callable[[_Row], Any]]] = {
    "batch": (pa.int32(), lambda row: row.batch),
    "carries": (pa.int32(), lambda row: row.group.carries),
    **{name: (kind, _of_sample(value)) for name, (kind, value) in SAMPLE_COLUMNS.items()},
    "prompt_text": (pa.string(), lambda row: row.pending.prompt.text),
    "answer": (pa.string(), lambda row: row.pending.prompt.answer),
    "has_begun": (pa.bool_(), lambda row: row.pending.has_begun),
    "awaits_answer": (pa.bool_(), lambda row: row.pending.awaits_answer),
    "rests_at": (pa.int32(), lambda row: row.pending.rests_at),
    # JSON; large: a row group may hold more than 2 GB of texts.
    "prompt_row": (pa.large_string(), lambda row: json.dumps(row.pending.prompt.row)),
    "texts": (pa.large_string(), lambda row: json.dumps(row.pending.texts)),
    "extracted": (pa.string(), lambda row: row.pending.extracted),
    "reason": (pa.string(), lambda row: row.pending.reason),
    "state": (pa.large_string(), lambda row: json.dumps(row.pending.state)),
}
_REMEDY = "resume from another checkpoint"
_FILE = RowFile("rollout buffer", _REMEDY, FORMAT, _COLUMNS, _About)


def write_saved(path: Path, saved: SavedRollout) -> None:
    """Write a state that nobody changes meanwhile, and flush it to the disk.

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
    with naming(path), path.open("wb") as stream:
        _FILE.write(stream, _chunks(buffer), about)
        stream.flush()
        os.fsync(stream.fileno())


def read_saved(path: Path) -> SavedRollout:
    """Read what ``write_saved`` wrote.

    Raises:
        DumpError: It is damaged, or of another format.
    """
    about, rows = _FILE.read(path, str(path))
    earlier: list[list[PendingGroup]] = [[] for _ in range(about.num_earlier)]
    buffer = RolloutBuffer(len(earlier))
    buffer.next_group_id, buffer.num_trained = about.next_group_id, about.num_trained
    buffer.dropped = Counter(about.dropped)
    for (batch, group_id), members in groupby(rows, lambda row: (row["batch"], row["group_id"])):
        group = _group(group_id, list(members), str(path))
        if batch == _WAITING:
            buffer.groups[group_id] = group
        elif 0 <= batch < len(earlier):
            earlier[batch].append(group)
        else:
            raise DumpError(
                f"{path}: group {group_id}: batch must be below num_earlier, {len(earlier)}, got "
                f"{batch}; {_REMEDY}"
            )
    buffer.earlier.extend(map(tuple, earlier))
    if buffer.next_group_id != buffer.num_accounted:
        raise DumpError(
            f"{path}: next_group_id must be {buffer.num_accounted}, the number of groups that are "
            f"trained, dropped or waiting, got {buffer.next_group_id}; {_REMEDY}"
        )
    return SavedRollout(about, buffer)


def _chunks(buffer: RolloutBuffer) -> Iterator[list[_Row]]:
    """The rows of the groups of earlier batches, then of those in the buffer."""
    rows: list[_Row] = []
    num_tokens = 0
    groups = [(number, group) for number, batch in enumerate(buffer.earlier) for group in batch]
    for number, group in (*groups, *((_WAITING, group) for group in buffer)):
        for pending in group.samples:
            pending.settle()
            rows.append(_Row(number, group, pending))
            num_tokens += pending.num_tokens
            if num_tokens >= _CHUNK_TOKENS:
                yield rows
                rows, num_tokens = [], 0
    if rows:
        yield rows


def _group(group_id: int, rows: list[dict[str, Any]], name: str) -> PendingGroup:
    first = rows[0]
    prompt = Prompt(
        first["prompt_id"],
        tuple(first["prompt_token_ids"].tolist()),
        first["answer"],
        first["prompt_text"],
        first["source"],
        _read_json(first, "prompt_row", dict[str, Any], name),
    )
    tokens, samples = prompt.tokens(), []
    for row in rows:
        sample = sample_of(row, tokens, name)
        # Copied: views would keep the columns of the whole row group.
        sample.response_token_ids = sample.response_token_ids.copy()
        sample.behaviour_logprobs = sample.behaviour_logprobs.copy()
        pending = PendingSample(sample, prompt, state=_read_json(row, "state", Any, name))
        pending.has_begun, pending.awaits_answer = row["has_begun"], row["awaits_answer"]
        pending.rests_at = row["rests_at"]
        pending.texts = _read_json(row, "texts", tuple[str, ...] | None, name)
        pending.extracted, pending.reason = row["extracted"], row["reason"]
        samples.append(pending)
    return PendingGroup(group_id, samples, first["carries"])


def _read_json(row: dict[str, Any], column: str, kind: Any, name: str) -> Any:
    try:
        return decode(kind, parse_json(row[column]))
    except ValueError as error:
        raise DumpError(
            f"{name}: sample {row['index']} of group {row['group_id']}: {column}: {error}; "
            f"{_REMEDY}"
        ) from error
