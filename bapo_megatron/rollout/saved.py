"""The file of unfinished samples in a checkpoint: a row per sample, bit for bit.

Its columns are those of a rollout dump and what only the collector knows about a sample. Data
position and counters are in its metadata.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from bapo_megatron.config.rollout import RolloutConfig
from bapo_megatron.data.columns import RowFile
from bapo_megatron.data.dump import SAMPLE_COLUMNS, sample_of
from bapo_megatron.rollout.buffer import PendingGroup, PendingSample, RolloutBuffer
from bapo_megatron.types import Prompt, Sample

FORMAT = 7
"""Earlier formats were JSON, part of the checkpoint's state.json."""
_CHUNK_TOKENS = 4_000_000
"""Response tokens of a row group: what is held twice while a file is written or read."""
_WAITING = -1


@dataclass(frozen=True, slots=True)
class SavedRollout:
    """What the collector continues from."""

    about: dict[str, Any]
    """Data position and counters, JSON values."""
    buffer: RolloutBuffer

    def check(self, config: RolloutConfig) -> None:
        """Refuse settings under which the samples cannot go on.

        Raises:
            ValueError: A group has another size, a sample is too long, or a mode has changed.
        """
        for name in ("fixed_lag", "partial_tokens", "environment"):
            value = getattr(config, name)
            if self.about[name] != value:
                raise ValueError(
                    f"rollout.{name}: was {self.about[name]} when the samples were saved and is "
                    f"{value} now; resume with the same value"
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
    "state": (pa.large_string(), lambda row: json.dumps(row.pending.state)),
}
_FILE = RowFile("rollout buffer", "resume from another checkpoint", FORMAT, _COLUMNS)


def write_saved(path: Path, saved: SavedRollout) -> None:
    """Write a state that nobody changes meanwhile, and flush it to the disk.

    Raises:
        OSError: The file cannot be written.
    """
    buffer = saved.buffer
    about = {
        **saved.about,
        "next_group_id": buffer.next_group_id,
        "num_trained": buffer.num_trained,
        "dropped": dict(buffer.dropped),
        "num_earlier": len(buffer.earlier),
    }
    with path.open("wb") as stream:
        _FILE.write(stream, _chunks(buffer), about)
        stream.flush()
        os.fsync(stream.fileno())


def read_saved(path: Path) -> SavedRollout:
    """Read what ``write_saved`` wrote.

    Raises:
        DumpError: It is damaged, or of another format.
    """
    about, rows = _FILE.read(path, str(path))
    earlier: list[list[PendingGroup]] = [[] for _ in range(about.pop("num_earlier"))]
    buffer = RolloutBuffer(len(earlier))
    buffer.next_group_id = about.pop("next_group_id")
    buffer.num_trained = about.pop("num_trained")
    buffer.dropped = Counter(about.pop("dropped"))
    for (batch, group_id), members in groupby(rows, lambda row: (row["batch"], row["group_id"])):
        group = _group(group_id, list(members), str(path))
        if batch == _WAITING:
            buffer.groups[group_id] = group
        else:
            earlier[batch].append(group)
    buffer.earlier.extend(map(tuple, earlier))
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
        json.loads(first["prompt_row"]),
    )
    tokens, samples = prompt.tokens(), []
    for row in rows:
        sample = sample_of(row, tokens, name)
        # Copied: views would keep the columns of the whole row group.
        sample.response_token_ids = sample.response_token_ids.copy()
        sample.behaviour_logprobs = sample.behaviour_logprobs.copy()
        pending = PendingSample(sample, prompt, state=json.loads(row["state"]))
        pending.has_begun, pending.awaits_answer = row["has_begun"], row["awaits_answer"]
        pending.rests_at = row["rests_at"]
        texts = json.loads(row["texts"])
        pending.texts = None if texts is None else tuple(texts)
        samples.append(pending)
    return PendingGroup(group_id, samples, first["carries"])
