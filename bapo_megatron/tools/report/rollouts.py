"""A run's rollouts for reading: one step's dump, and a sample that is small enough for a page.

The sample takes steps evenly over the run, and in each of them whole groups, evenly over the order
of their mean rewards, so that bad, mixed and solved ones are all there.

Shape legend: P = groups, G = responses per group, R = tokens of a response, Q = those of them that
the policy sampled, T = tokens of an update.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import ValidationError

from bapo_megatron.config.rollout import StalenessConfig
from bapo_megatron.config.schema import ADVANTAGES, OBJECTIVES
from bapo_megatron.config.settings import masked_reasons
from bapo_megatron.data.columns import DumpError
from bapo_megatron.data.dump import read_batch, texts_by_sample
from bapo_megatron.data.staleness import response_age, token_versions, trainable_mask
from bapo_megatron.data.token_columns import (
    COLUMNS,
    REFERENCE,
    TEACHER,
    TokenColumn,
    concatenated,
    present,
)
from bapo_megatron.data.token_dump import read_token_dump, token_dump_paths
from bapo_megatron.runtime.files import read_regular
from bapo_megatron.tools.report.figures import rounded
from bapo_megatron.tools.report.runs import RunRecord
from bapo_megatron.types import FinishReason, Group, RolloutBatch, Sample, SampleText

Key = tuple[int, int]
"""Group and index."""
Order = Literal["reward", "length", "age", "advantage"]

MAX_STEPS = 16
_MAX_GROUPS = 8
"""Groups of a step."""
_TOKEN_BYTES = 24
"""A token as JSON without columns, at most: its piece, log-prob and ratio."""
_COLUMN_BYTES = 10
"""A token's value in a column as JSON, at most."""
_COMPARED = (TEACHER, REFERENCE)
"""Columns to compare with log π_rollout by colour: the first of these that a run has."""
_SAMPLE_BYTES = 500
"""What a response needs beside its tokens, about."""
_MIN_BYTES = 4000
"""Room for a response even where nothing is left."""
_TRAINED, _MASKED, _WRITTEN, _NO_GRADIENT = range(4)
_MAX_PENDING = 4
"""Tokens of one character at most: it has up to four bytes in UTF-8."""
_INCOMPLETE = "\ufffd"


@dataclass(frozen=True, slots=True)
class DumpedStep:
    """A batch with its texts and advantages."""

    batch: RolloutBatch
    texts: Mapping[Key, SampleText]
    """Empty where the dump has none beside it."""
    estimator: str
    """What computed the advantages; empty where they are not known."""
    _advantages: Mapping[Key, float]
    _staleness: StalenessConfig
    _masked: frozenset[FinishReason]
    _trains_zero_advantage: bool
    """Whether A = 0 may give a token a gradient."""

    def text(self, sample: Sample) -> SampleText | None:
        """Return the texts of a sample; None if none were kept."""
        return self.texts.get(_key(sample))

    def advantage(self, sample: Sample) -> float | None:
        """Return A of all its tokens; None where no estimator is known, or A is not finite."""
        return self._advantages.get(_key(sample))

    def age(self, sample: Sample) -> int:
        """Count the updates from the weights of its oldest token to those of the batch."""
        return int(response_age(sample.episode_versions, self.batch.version, "oldest"))

    def trains(self, sample: Sample) -> np.ndarray:
        """Return which of its tokens the loss counts, [Q] bool over all sequences: m = 1."""
        if sample.finish_reason in self._masked:
            return np.zeros(sample.episode_sampled, dtype=bool)
        return trainable_mask(sample.episode_versions, self.batch.version, self._staleness)

    def has_gradient(self, sample: Sample) -> bool:
        """Whether its trained tokens can have a gradient: not where A = 0, as far as is known."""
        return self._trains_zero_advantage or self.advantage(sample) != 0


ORDERS: dict[Order, Callable[[DumpedStep, Sample], float]] = {
    "reward": lambda step, sample: sample.reward,
    "length": lambda step, sample: sample.episode_tokens,
    "age": lambda step, sample: step.age(sample),
    "advantage": lambda step, sample: step.advantage(sample) or 0.0,
}
"""Sort keys of samples."""


def dump_files(run_dir: Path) -> dict[int, Path]:
    """Return the dumps of a run by step, ascending; ``rollout.keep_dumps`` removes early ones."""
    files = {}
    for path in (run_dir / "rollouts").glob("step_*.parquet"):
        if match := re.fullmatch(r"step_(\d+)\.parquet", path.name):
            files[int(match[1])] = path
    return dict(sorted(files.items()))


def read_step(path: Path, settings: Mapping[str, Any]) -> DumpedStep:
    """Read a dump, and compute its advantages from its rewards by the code that trains.

    ``settings`` is the run's config.yaml by dotted key, empty if unknown. A user's estimator is not
    called; the advantages are then not known.

    Raises:
        DumpError: A file is damaged, or of another version's format.
        ValueError: The settings are another version's.
        OSError: A file cannot be read.
    """
    batch = read_batch(path)
    start = "rollout.staleness."
    limits = {
        key.removeprefix(start): value for key, value in settings.items() if key.startswith(start)
    }
    try:
        staleness = StalenessConfig(**limits)
    except ValidationError as error:
        raise ValueError(
            f"{path.parent.parent / 'config.yaml'}: rollout.staleness is not of this version; read "
            "the run with the version that wrote it"
        ) from error
    kind = settings.get("algorithm.advantage")
    shift = settings.get("algorithm.baseline_shift", 0.0)
    # Settings of a file that this version cannot use may be anything.
    is_known = type(shift) in (int, float) and abs(shift) < 1e9
    is_known &= kind in ADVANTAGES and len(batch.groups[0].samples) > 1
    return DumpedStep(
        batch=batch,
        texts=texts_by_sample(path) or {},
        estimator=str(kind) if is_known else "",
        _advantages=_advantages(batch, str(kind), float(shift)) if is_known else {},
        _staleness=staleness,
        _masked=masked_reasons(settings),
        # These terms give A = 0 a loss, and so may an objective of the user's.
        _trains_zero_advantage=any(
            settings.get(f"algorithm.{name}coefficient", 0) != 0
            for name in ("entropy_", "kl.", "distillation.")
        )
        or settings.get("algorithm.objective", "bapo") not in OBJECTIVES,
    )


def _advantages(batch: RolloutBatch, kind: str, shift: float) -> dict[Key, float]:
    from bapo_megatron.algorithm.advantage import Advantages  # torch takes seconds

    values_PG = Advantages(kind, shift).compute(batch.groups).tolist()
    return {
        _key(sample): value
        for group, values_G in zip(batch.groups, values_PG, strict=True)
        for sample, value in zip(group.samples, values_G, strict=True)
        if math.isfinite(value)
    }


def _key(sample: Sample) -> Key:
    return sample.group_id, sample.index


def read_ratios(run_dir: Path, step: int) -> dict[Key, np.ndarray]:
    """Return π/μ [Q] by response, of the first pass over a batch; empty without token dumps.

    Raises:
        DumpError: A file is damaged, no token dump, or of another version's format.
    """
    ratios: dict[Key, np.ndarray] = {}
    for path in token_dump_paths(run_dir, step):
        columns = read_token_dump(path)
        ratio_T = np.exp(columns["logprob"].astype(np.float64) - columns["behaviour_logprob"])
        keys_T = np.stack([columns["group_id"], columns["index"]], axis=1)
        starts = np.flatnonzero((np.diff(keys_T, axis=0) != 0).any(axis=1)) + 1
        parts = zip(np.split(keys_T, starts), np.split(ratio_T, starts), strict=True)
        for key_Q, ratio_Q in parts if len(ratio_T) else ():
            # The first pass comes first.
            ratios.setdefault((int(key_Q[0, 0]), int(key_Q[0, 1])), ratio_Q)
    return ratios


class Pieces:
    """Token ids as numbers of (id, text) pairs, which the page holds once per run."""

    def __init__(self, tokenizer: Any) -> None:
        """Take a ``tokenizers.Tokenizer``, or None: then texts are token ids."""
        self._tokenizer = tokenizer
        self.has_texts = tokenizer is not None
        self._numbers: dict[tuple[int, str], int] = {}
        self._texts: dict[tuple[int, ...], str] = {}
        self.num_bytes = 0
        """Size of the table as JSON, about."""

    @property
    def table(self) -> list[tuple[int, str]]:
        """The pairs, by number."""
        return list(self._numbers)

    def encode(self, token_ids: np.ndarray) -> list[int]:
        """Return the number of every token's pair.

        A character that several tokens share is the text of the last of them; the others are empty.
        """
        numbers: list[int] = []
        pending: list[int] = []
        num_left = len(token_ids)
        for token in token_ids.tolist():
            pending.append(token)
            num_left -= 1
            text = self._text(tuple(pending))
            if text.endswith(_INCOMPLETE) and len(pending) < _MAX_PENDING and num_left:
                continue
            numbers += [self._number(part, "") for part in pending[:-1]]
            numbers.append(self._number(token, text))
            pending = []
        return numbers

    def _text(self, ids: tuple[int, ...]) -> str:
        if self._tokenizer is None:
            return f" {ids[-1]}"
        if ids not in self._texts:
            self._texts[ids] = str(self._tokenizer.decode(list(ids), skip_special_tokens=False))
        return self._texts[ids]

    def _number(self, token: int, text: str) -> int:
        if (token, text) not in self._numbers:
            self._numbers[token, text] = len(self._numbers)
            self.num_bytes += len(json.dumps([token, text])) + 1
        return self._numbers[token, text]


def find_tokenizer(run: RunRecord, directory: Path | None = None) -> Any:
    """Load the tokenizer in ``directory``; by default that of the run's export or ``model.path``.

    Returns a ``tokenizers.Tokenizer``; None if no directory is given and the run has none.

    Raises:
        ValueError: The directory has no readable tokenizer.json.
    """
    from tokenizers import Tokenizer

    own = [run.path / "hf", Path(str(run.settings.get("model.path", "")))]
    for folder in own if directory is None else [directory]:
        file = folder / "tokenizer.json"
        if directory is None and not file.is_file():
            continue
        try:
            return Tokenizer.from_buffer(read_regular(file))
        except OSError:
            raise
        except Exception as error:
            raise ValueError(
                f"{file}: not a readable tokenizer ({error}); give --tokenizer a Hugging Face "
                "model directory"
            ) from error
    return None


def sample_rollouts(run: RunRecord, tokenizer: Any, max_bytes: float) -> dict[str, Any]:
    """Return rollouts of a run as the page reads them, of about ``max_bytes`` as JSON.

    ``groups`` holds what the samples of a group share, ``samples`` names theirs by number, and
    ``pieces`` are the pairs (token id, text) that the tokens name by number. Errors are those of
    ``read_step`` and ``read_ratios``.
    """
    paths = dump_files(run.path)
    steps = list(paths)
    chosen_steps = [steps[index] for index in spread(len(steps), MAX_STEPS)]
    pieces = Pieces(tokenizer)
    groups: list[dict[str, Any]] = []
    samples: list[dict[str, Any]] = []
    num_bytes, num_read, num_stored = 0.0, 0, 0
    for number, step in enumerate(chosen_steps):
        try:
            dumped = read_step(paths[step], run.settings)
        except FileNotFoundError:
            continue  # removed by the run meanwhile (rollout.keep_dumps)
        ratios = read_ratios(run.path, step)
        num_read += 1
        num_stored += len(dumped.batch.samples)
        room = (max_bytes - num_bytes - pieces.num_bytes) / (len(chosen_steps) - number)
        for group, members in _chosen_samples(dumped.batch, room):
            groups.append(_group_entry(dumped, group))
            limit = max(_MIN_BYTES, room / 2 if len(members) > 1 else room)
            for sample in members:
                entry = _sample_entry(dumped, ratios, sample, pieces, limit)
                samples.append({"group": len(groups) - 1, **entry})
                num_bytes += len(json.dumps(samples[-1]))
    names = {name for sample in samples for name in sample["columns"]}
    compared = next((name for name in _COMPARED if name in names), None)
    num_ratios = sum(sample["ratios"] is not None for sample in samples)
    return {
        "run": run.name,
        "groups": groups,
        "samples": samples,
        "columns": {
            column.name: column.label for column in COLUMNS.values() if column.name in names
        },
        "compared": compared and [compared, compared.removesuffix("_logprob")],
        "pieces": pieces.table,
        "has_texts": pieces.has_texts,
        "note": _note(steps, num_read, num_stored, samples),
        "ratios": f"{num_ratios:,} of {len(samples):,} responses have ratios (train.dump_tokens).",
    }


def spread(num_items: int, max_items: int) -> list[int]:
    """Return at most ``max_items`` indices, evenly from the first to the last item."""
    if num_items <= max_items:
        return list(range(num_items))
    if max_items == 1:
        return [num_items // 2]
    return [round(i * (num_items - 1) / (max_items - 1)) for i in range(max_items)]


def _chosen_samples(batch: RolloutBatch, room: float) -> list[tuple[Group, Sequence[Sample]]]:
    """Whole groups if one fits into ``room`` bytes; else as many responses of one as fit."""
    num_tokens = sum(sample.episode_tokens for sample in batch.samples)
    sample_bytes = _SAMPLE_BYTES + _token_bytes(batch.samples) * num_tokens / len(batch.samples)
    size = len(batch.groups[0].samples)
    ordered = sorted(batch.groups, key=lambda group: (_mean_reward(group), group.group_id))
    num_groups = min(_MAX_GROUPS, math.floor(room / (size * sample_bytes)))
    if num_groups >= 1:
        return [(ordered[i], ordered[i].samples) for i in spread(len(ordered), num_groups)]
    group = ordered[len(ordered) // 2]
    by_reward = sorted(group.samples, key=lambda sample: sample.reward)
    indices = spread(size, max(1, math.floor(room / sample_bytes)))
    return [(group, [by_reward[index] for index in indices])]


def _shown_columns(samples: Sequence[Sample]) -> list[TokenColumn]:
    return [column for column in present(samples) if column.label]


def _token_bytes(samples: Sequence[Sample]) -> int:
    return _TOKEN_BYTES + _COLUMN_BYTES * len(_shown_columns(samples))


def _mean_reward(group: Group) -> float:
    return math.fsum(sample.reward for sample in group.samples) / len(group.samples)


def _group_entry(step: DumpedStep, group: Group) -> dict[str, Any]:
    first = group.samples[0]
    text = step.text(first)
    return {
        "step": step.batch.step,
        "id": group.group_id,
        "prompt_id": first.prompt.prompt_id,
        "source": first.prompt.source,
        "prompt": text and text.prompt_text,
        "answer": text and text.answer,
        "mean": rounded(_mean_reward(group)),
        "version": step.batch.version,
    }


def _sample_entry(
    step: DumpedStep,
    ratios: Mapping[Key, np.ndarray],
    sample: Sample,
    pieces: Pieces,
    max_bytes: float,
) -> dict[str, Any]:
    """What the page shows of a response; arrays are [R] or runs of equal values ``[value, n]``."""
    text, sequences = step.text(sample), sample.sequences
    # The sequences of an episode are shown as one response, in order.
    token_ids_R = np.concatenate([s.response_token_ids for s in sequences])
    sampled_R = np.concatenate([s.loss_mask for s in sequences])
    logprob_Q = np.concatenate([s.behaviour_logprobs for s in sequences])
    num_tokens = len(token_ids_R)
    kept_R = _kept(num_tokens, math.floor((max_bytes - _SAMPLE_BYTES) / _token_bytes(sequences)))
    levels_R = np.full(num_tokens, _WRITTEN)
    trained = _TRAINED if step.has_gradient(sample) else _NO_GRADIENT
    levels_R[sampled_R] = np.where(step.trains(sample), trained, _MASKED)
    version_R = np.full(num_tokens, -1)
    version_R[sampled_R] = token_versions(sample.episode_versions)
    ratio_Q = ratios.get(_key(sample))
    if ratio_Q is not None and len(ratio_Q) != len(logprob_Q):
        raise DumpError(
            f"tokens/: {len(ratio_Q)} tokens of sample {sample.index} of group {sample.group_id}, "
            f"whose dump in rollouts/ has {len(logprob_Q)}; remove the token dumps, they are "
            "of another run"
        )
    advantage = step.advantage(sample)
    entry = {
        "index": sample.index,
        "reward": rounded(sample.reward),
        "right": sample.is_right,
        "components": {name: rounded(v) for name, v in sample.reward_components.items()},
        "answered": sample.answer_found,
        "advantage": None if advantage is None else rounded(advantage),
        "exit": sample.finish_reason.value,
        "tokens": num_tokens,
        "age": step.age(sample),
        "extracted": text.extracted if text else None,
        "reason": text.reason if text else "",
        "pieces": pieces.encode(token_ids_R[kept_R]),
        "logprobs": _on_response(logprob_Q, sampled_R, kept_R, 3),
        "ratios": None if ratio_Q is None else _on_response(ratio_Q, sampled_R, kept_R, 4),
        "columns": {
            column.name: values
            for column in _shown_columns(sequences)
            if any(values := _on_response(concatenated(column, sequences), sampled_R, kept_R, 3))
        },
        "versions": _run_lengths(version_R[kept_R].tolist()),
        "levels": _run_lengths(levels_R[kept_R].tolist()),
    }
    if len(sequences) > 1:
        lengths = [len(s.response_token_ids) for s in sequences[:-1]]
        entry["starts"] = list(accumulate(lengths))
    if len(kept_R) < num_tokens:
        entry["cut_at"] = len(kept_R) // 2
    if text and not pieces.has_texts:
        entry["text"] = "\n\n".join(text.turns or (text.response_text,))
    return entry


def _kept(num_tokens: int, max_tokens: int) -> np.ndarray:
    """Positions of a response that are shown: all, or its two ends."""
    if num_tokens <= max_tokens:
        return np.arange(num_tokens)
    head = max(1, max_tokens // 2)
    return np.concatenate([np.arange(head), np.arange(num_tokens - head, num_tokens)])


def _on_response(
    values_Q: np.ndarray, sampled_R: np.ndarray, kept_R: np.ndarray, digits: int
) -> list[float | None]:
    """Values of the kept tokens; None for an environment's tokens, and for non-finite values."""
    value_R = np.full(len(sampled_R), np.nan)
    value_R[sampled_R] = values_Q
    return [
        rounded(value, digits) if math.isfinite(value) else None
        for value in value_R[kept_R].tolist()
    ]


def _run_lengths(values: Iterable[int]) -> list[tuple[int, int]]:
    return [(value, len(list(members))) for value, members in groupby(values)]


def _note(steps: Sequence[int], num_read: int, num_stored: int, samples: Sequence[Any]) -> str:
    if not steps:
        return "This run kept no rollouts (rollout.dump)."
    missing = f" {len(steps):,} of {steps[-1]:,} steps have dumps." * (len(steps) < steps[-1])
    if num_read == len(steps) and len(samples) == num_stored:
        return f"All {num_stored:,} responses of {num_read:,} steps.{missing}"
    num_cut = sum("cut_at" in sample for sample in samples)
    return (
        f"A sample: {len(samples):,} of the {num_stored:,} responses of {num_read:,} steps, evenly "
        f"over the {len(steps):,} dumped ones; of each at most {_MAX_GROUPS} groups, evenly over "
        f"their mean rewards; {num_cut:,} long responses show their two ends only.{missing}"
    )
