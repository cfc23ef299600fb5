"""Rollout dumps: one training batch as one parquet file, a row per sequence of a sample.

The file is the input of ``replay`` and, byte for byte, what every rank gets: it is encoded once,
by the collector. It holds everything that training needs, bit for bit, and no text; what belongs
to the batch as a whole (step, version, statistics) is JSON in the file's key-value metadata. Texts
for people are in a file of the same name in ``texts/`` beside it, joined by group_id and index.

Shape legend: P = prompt tokens, R = tokens of one response, Q = those of them that the policy
sampled, K = its version spans, W = spans that an environment wrote.
"""

import io
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
from pydantic import Field

from bapo_megatron.data import token_columns
from bapo_megatron.data.columns import DumpError, RowFile
from bapo_megatron.data.staleness import num_spanned
from bapo_megatron.runtime.calls import decode_json
from bapo_megatron.runtime.files import atomic_write_bytes, open_regular
from bapo_megatron.types import (
    EncodedBatch,
    FinishReason,
    Group,
    PromptTokens,
    RolloutBatch,
    RolloutStats,
    Sample,
    SampleText,
    VersionSpan,
    WrittenSpan,
)

FORMAT = 4
_TEXTS_FORMAT = 5
_REMEDY = "write the dump again"
_MAX_INT32 = 2**31 - 1

SAMPLE_COLUMNS: dict[str, tuple[Any, Callable[[Sample], Any]]] = {
    "group_id": (pa.int64(), lambda sample: sample.group_id),
    "index": (pa.int64(), lambda sample: sample.index),
    "prompt_id": (pa.string(), lambda sample: sample.prompt.prompt_id),
    "source": (pa.string(), lambda sample: sample.prompt.source),
    "finish_reason": (pa.string(), lambda sample: sample.finish_reason.value),
    "reward": (pa.float64(), lambda sample: sample.reward),
    "reward_components": (pa.string(), lambda sample: json.dumps(sample.reward_components)),
    "answer_found": (pa.bool_(), lambda sample: sample.answer_found),
    "prompt_token_ids": (pa.list_(pa.int32()), lambda sample: sample.prompt.token_ids),
    "response_token_ids": (pa.list_(pa.int32()), lambda sample: sample.response_token_ids),
    "behaviour_logprobs": (pa.list_(pa.float32()), lambda sample: sample.behaviour_logprobs),
    "versions": (pa.list_(pa.int32()), lambda sample: [v for v, _ in sample.versions]),
    "version_tokens": (pa.list_(pa.int32()), lambda sample: [n for _, n in sample.versions]),
    "written_starts": (pa.list_(pa.int32()), lambda sample: [start for start, _ in sample.written]),
    "written_tokens": (pa.list_(pa.int32()), lambda sample: [n for _, n in sample.written]),
}
"""One value per sequence, or a list: [P], [R], [Q], [K], [K], [W], [W]."""
NUMBER, CALL_REWARDS = "sequence", "call_rewards"
OPTIONAL_COLUMNS: dict[str, tuple[Any, Callable[[Sample], Any]]] = {
    NUMBER: (pa.int32(), lambda sample: sample.number),
    CALL_REWARDS: (pa.list_(pa.float64()), lambda sample: sample.call_rewards),
    **token_columns.row_columns(),
}
"""``NUMBER`` is absent where every sample has one sequence, after the prompt of its group, and
``CALL_REWARDS`` [turns] where agents gave none."""


@dataclass(frozen=True, slots=True)
class _About:
    """The metadata of a batch."""

    format: int
    step: Annotated[int, Field(ge=1, le=_MAX_INT32)]
    version: Annotated[int, Field(ge=0, le=_MAX_INT32)]
    stats: RolloutStats = field(default_factory=RolloutStats)


_DUMP = RowFile("rollout dump", _REMEDY, FORMAT, SAMPLE_COLUMNS, _About, optional=OPTIONAL_COLUMNS)
TEXT_COLUMNS: dict[str, tuple[Any, Callable[[SampleText], Any]]] = {
    "group_id": (pa.int64(), lambda text: text.group_id),
    "index": (pa.int64(), lambda text: text.index),
    "prompt_text": (pa.string(), lambda text: text.prompt_text),
    "answer": (pa.string(), lambda text: text.answer),
    "response_text": (pa.string(), lambda text: text.response_text),
    "turns": (pa.list_(pa.string()), lambda text: text.turns),
    "extracted": (pa.string(), lambda text: text.extracted),
    "reason": (pa.string(), lambda text: text.reason),
}
"""One value per sample."""
_TEXTS = RowFile(
    "texts of a rollout dump", _REMEDY, _TEXTS_FORMAT, TEXT_COLUMNS, key="bapo_megatron.texts"
)


def write_batch(path: Path, batch: RolloutBatch) -> None:
    """Write a batch as a parquet file, complete or not at all; parent directories are created.

    Raises:
        DumpError: The batch breaks a rule that ``decode_batch`` checks.
        OSError: The file cannot be written (disk full, no permission); nothing is left behind.
    """
    atomic_write_bytes(path, encode_batch(batch))


def read_batch(path: Path) -> RolloutBatch:
    """Read and decode a dump; raises what ``read_encoded`` and ``decode_batch`` do."""
    return decode_batch(read_encoded(path))


def read_encoded(path: Path) -> EncodedBatch:
    """Read a dump's bytes without decoding them; raises ``OSError``."""
    with open_regular(path) as file:
        content = bytearray(path.stat().st_size)
        del content[file.readinto(content) :]
    return EncodedBatch(str(path), content)


def encode_batch(batch: RolloutBatch) -> bytes:
    """Encode a batch as the content of a dump.

    Raises:
        DumpError: The batch breaks a rule that ``decode_batch`` checks.
    """
    _check_batch(batch, f"batch of step {batch.step}")
    stream = io.BytesIO()
    about = {"step": batch.step, "version": batch.version, "stats": asdict(batch.stats)}
    sequences = batch.sequences
    _DUMP.write(stream, [sequences], about, optional_names(sequences))
    return stream.getvalue()


def decode_batch(encoded: EncodedBatch, vocab_size: int | None = None) -> RolloutBatch:
    """Read what ``encode_batch`` wrote, for a model with ``vocab_size`` tokens if that is known.

    The arrays of the samples are read-only views of the columns. Log-probs are not required to be
    finite: the trainer reports those with sample and position.

    Raises:
        DumpError: It is damaged, not a dump of this format, or inconsistent.
    """
    about, rows = _DUMP.read(pa.BufferReader(encoded.content), encoded.name)
    batch = RolloutBatch(
        step=about.step,
        version=about.version,
        groups=_groups(rows, encoded.name),
        stats=about.stats,
    )
    _check_batch(batch, encoded.name, vocab_size)
    return batch


def optional_names(sequences: Sequence[Sample]) -> list[str]:
    """Return which of ``OPTIONAL_COLUMNS`` a file with these sequences has."""
    names = [column.name for column in token_columns.present(sequences)]
    names += [CALL_REWARDS] if any(sequence.call_rewards for sequence in sequences) else []
    has_agents = any(sequence.number for sequence in sequences) or any(
        first.group_id == second.group_id
        and first.prompt is not second.prompt
        and not np.array_equal(first.prompt.token_ids, second.prompt.token_ids)
        for first, second in pairwise(sequences)
    )
    return [NUMBER, *names] if has_agents else names


def dump_path(directory: Path, step: int) -> Path:
    """Return where the dump of a step is, in a run's directory of dumps."""
    return directory / f"step_{step:06d}.parquet"


def texts_path(path: Path) -> Path:
    """Return where the texts of a dump are."""
    return path.parent / "texts" / path.name


def write_texts(path: Path, step: int, texts: Sequence[SampleText]) -> None:
    """Write a batch's texts beside its dump ``path``: one per sample, in order."""
    stream = io.BytesIO()
    _TEXTS.write(stream, [texts], {"step": step})
    atomic_write_bytes(texts_path(path), stream.getvalue())


def texts_by_sample(path: Path) -> dict[tuple[int, int], SampleText] | None:
    """Read the texts beside a dump, by group and index; None where there are none.

    Raises:
        DumpError: The file is damaged, or of another kind.
        OSError: They cannot be read.
    """
    try:
        encoded = read_encoded(texts_path(path))
    except FileNotFoundError:
        return None
    _, rows = _TEXTS.read(pa.BufferReader(encoded.content), encoded.name)
    texts = (SampleText(**{**row, "turns": tuple(row["turns"])}) for row in rows)
    return {(text.group_id, text.index): text for text in texts}


def _groups(all_rows: Iterable[dict[str, Any]], name: str) -> tuple[Group, ...]:
    """Groups of the consecutive rows with one ``group_id``, whose samples share one prompt."""
    groups = []
    for group_id, members in groupby(all_rows, key=lambda row: row["group_id"]):
        rows = list(members)
        first = rows[0]
        # Copied: a view would keep the whole column, which repeats the prompt in every row.
        prompt = PromptTokens(first["prompt_id"], first["prompt_token_ids"].copy(), first["source"])
        prompt_bytes = prompt.token_ids.tobytes()
        samples: list[Sample] = []
        for row in rows:
            is_same = NUMBER in row or row["prompt_token_ids"].tobytes() == prompt_bytes
            if row["prompt_id"] != prompt.prompt_id or not is_same:
                raise DumpError(
                    f"{name}: sample {row['index']} of group {group_id}: prompt_id and "
                    f"prompt_token_ids must be those of the group's first sample; {_REMEDY}"
                )
            sequence = sample_of(row, prompt, name)
            if sequence.number and samples:
                samples[-1].branches += (sequence,)
            else:
                samples.append(sequence)
        groups.append(Group(group_id, tuple(samples)))
    return tuple(groups)


def sample_of(row: dict[str, Any], prompt: PromptTokens, name: str) -> Sample:
    """Return the sequence of a row of ``SAMPLE_COLUMNS``, with views of the row's arrays.

    ``prompt`` is that of its group; an agent's sequence may have one of its own.

    Raises:
        DumpError: The row has a value that no run writes; ``name`` is the file's.
    """
    place = f"{name}: sample {row['index']} of group {row['group_id']}"
    try:
        column = "finish_reason"
        finish_reason = FinishReason(row[column])
        column = "reward_components"
        reward_components = decode_json(dict[str, float], row[column].encode())
        column = "version_tokens"
        versions = tuple(VersionSpan(*span) for span in _pairs(row["versions"], row[column]))
        column = "written_tokens"
        written = tuple(WrittenSpan(*span) for span in _pairs(row["written_starts"], row[column]))
        column = "token columns"
        columns = token_columns.read_columns(row, len(row["behaviour_logprobs"]))
    except ValueError as error:
        raise DumpError(f"{place}: {column}: {error}; {_REMEDY}") from error
    if not np.array_equal(row["prompt_token_ids"], prompt.token_ids):  # an agent wrote its own
        prompt = replace(prompt, token_ids=row["prompt_token_ids"].copy())
    return Sample(
        group_id=row["group_id"],
        index=row["index"],
        prompt=prompt,
        response_token_ids=row["response_token_ids"],
        behaviour_logprobs=row["behaviour_logprobs"],
        versions=versions,
        written=written,
        finish_reason=finish_reason,
        reward=row["reward"],
        reward_components=reward_components,
        answer_found=row["answer_found"],
        columns=columns,
        call_rewards=tuple(map(float, row.get(CALL_REWARDS, ()))),
        number=row.get(NUMBER, 0),
    )


def _pairs(firsts: np.ndarray, seconds: np.ndarray) -> Iterator[tuple[int, int]]:
    if len(firsts) != len(seconds):
        raise ValueError(f"must have {len(firsts)} entries, got {len(seconds)}")
    return zip(firsts.tolist(), seconds.tolist(), strict=True)


def _check_batch(batch: RolloutBatch, name: str, vocab_size: int | None = None) -> None:
    if not batch.groups:
        raise DumpError(f"{name}: the batch has no samples; collect at least one group")
    group_size = len(batch.groups[0].samples)
    limit = _MAX_INT32 if vocab_size is None else vocab_size - 1
    if len({group.group_id for group in batch.groups}) != len(batch.groups):
        raise DumpError(f"{name}: a group_id occurs twice; its rows must stand together")
    for group in batch.groups:
        indices = [sample.index for sample in group.samples]
        if indices != list(range(group_size)):
            raise DumpError(
                f"{name}: group {group.group_id} holds samples {indices}, expected 0 to "
                f"{group_size - 1} as in the first group; {_REMEDY}"
            )
        for sample in group.samples:
            check_sequences(sample, name)
            for sequence in sample.sequences:
                problem = (
                    _problem_of_parts(sequence)
                    or _problem_of_values(sequence, batch.version)
                    or _problem_of_tokens("response_token_ids", sequence.response_token_ids, limit)
                    or _problem_of_tokens("prompt_token_ids", sequence.prompt.token_ids, limit)
                )
                if problem:
                    raise DumpError(f"{name}: {sequence.place}: {problem}; {_REMEDY}")


def check_sequences(sample: Sample, name: str) -> None:
    """Raise a ``DumpError`` unless the sequences of a sample belong together.

    They are numbered from 0, are of one index and prompt_id, and only the first has a reward.
    """
    for number, sequence in enumerate(sample.sequences):
        place = sequence.group_id, sequence.index, sequence.prompt.prompt_id
        if place != (sample.group_id, sample.index, sample.prompt.prompt_id):
            problem = (
                "a further sequence must stand with those of its sample, and have its prompt_id"
            )
        elif sequence.number != number:
            problem = f"its sequences must be numbered from 0, got {sequence.number} for {number}"
        elif number and (sequence.reward or sequence.reward_components or sequence.branches):
            problem = "a further sequence has no reward and no branches of its own"
        else:
            continue
        raise DumpError(f"{name}: {sequence.place}: {problem}; {_REMEDY}")


def _problem_of_parts(sample: Sample) -> str:
    """Describe which parts of a sample contradict each other; empty if none do."""
    end = 0
    for start, num_tokens in sample.written:
        if start <= end or num_tokens < 1:
            return (
                "tokens of the environment must be between turns of the policy, got "
                f"{num_tokens} tokens from {start}"
            )
        end = start + num_tokens
    if sample.written and end >= len(sample.response_token_ids):
        return (
            f"must end with a turn of the policy, got {len(sample.response_token_ids)} tokens of "
            f"which the environment wrote those up to {end}"
        )
    lengths = sample.num_sampled, len(sample.behaviour_logprobs), num_spanned(sample.versions)
    if len(set(lengths)) != 1:
        return (
            f"{lengths[0]} sampled tokens, {lengths[1]} behaviour log-probs and {lengths[2]} "
            "tokens with a version must be equally many"
        )
    if len(sample.call_rewards) not in (0, sample.num_turns):
        return f"{len(sample.call_rewards)} {CALL_REWARDS} for {sample.num_turns} turns"
    if any(span.num_tokens < 1 for span in sample.versions):
        return "a weights version without tokens"
    return "" if len(sample.prompt.token_ids) else "the prompt has no tokens"


def _problem_of_values(sample: Sample, version: int) -> str:
    """Describe a version or reward that no run writes; empty if there is none."""
    versions = [-1, *(span.version for span in sample.versions), version]
    if versions != sorted(versions) or -1 in versions[1:]:
        return (
            f"versions must ascend from 0 to at most {version}, that of the batch, got "
            f"{versions[1:-1]}"
        )
    rewards = {"reward": sample.reward, **sample.reward_components}
    rewards |= {f"{CALL_REWARDS}[{n}]": reward for n, reward in enumerate(sample.call_rewards)}
    for name, reward in rewards.items():
        if not math.isfinite(reward):
            column = f"reward_components.{name}" if name in sample.reward_components else name
            return f"{column} must be finite, got {reward}"
    return ""


def _problem_of_tokens(column: str, ids: np.ndarray, limit: int) -> str:
    """Describe a token that no run writes; empty if there is none."""
    if not len(ids) or 0 <= ids.min() <= ids.max() <= limit:
        return ""
    position = int(np.flatnonzero((ids < 0) | (ids > limit))[0])
    return (
        f"{column}[{position}] must be a token of the model, from 0 to {limit}, got {ids[position]}"
    )
