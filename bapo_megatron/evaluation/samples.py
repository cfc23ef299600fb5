"""The samples of an evaluation: its sets, the settings that decide them, and their files.

    <run_dir>/eval/<set>.jsonl             of the ``eval`` command
    <run_dir>/eval/step_000020_<set>.jsonl of an evaluation inside training; ``start_<set>``: before
    ….settings.json                        beside each: how its samples were made

Each sample is one line, written as it finishes. ``SampleJournal`` appends and resumes,
``read_samples`` reads a complete file. A kill can only tear the last line, which ``SampleJournal``
removes: that sample is repeated. Only an evaluation with the same settings may add samples.
"""

import asyncio
import hashlib
import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from io import FileIO
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, StrictBool, StrictInt

from bapo_megatron.config.evaluation import MAX_SAMPLES, EvalSamplingConfig, eval_reward
from bapo_megatron.config.reward import RewardConfig
from bapo_megatron.config.schema import RunConfig
from bapo_megatron.config.section import MAX_INTEGER
from bapo_megatron.data.chat import ChatRenderer
from bapo_megatron.data.prompts import load_eval_sets, log_warnings
from bapo_megatron.runtime.calls import decode, decode_json, shown_value
from bapo_megatron.runtime.files import (
    atomic_write_text,
    lock,
    naming,
    open_regular,
    parse_json,
    read_lines,
    read_regular,
    spread_pieces,
)
from bapo_megatron.types import FinishReason, Prompt

_LOG = logging.getLogger(__name__)
_LOCK_PATIENCE_S = 15.0
"""An orphaned collector ends within a few seconds."""
_LOCK_POLL_S = 0.2

MAX_NUMBER = 1e15
"""Limit of rewards and times in samples and results: sums of them stay finite."""

_NUM_CHUNKS = 64
_CHUNK_BYTES = 1 << 14

_Count = Annotated[int, Field(strict=True, ge=0, le=MAX_INTEGER)]
_Number = Annotated[float, Field(strict=True, ge=-MAX_NUMBER, le=MAX_NUMBER)]
_Seconds = Annotated[float, Field(strict=True, ge=0, le=MAX_NUMBER)]


@dataclass(frozen=True)
class _Settings:
    """What readers of settings rely on; the rest is only compared."""

    num_prompts: Annotated[int, Field(ge=1)]
    samples_per_prompt: Annotated[int, Field(ge=1, le=MAX_SAMPLES)]
    name: str = ""
    seed: Annotated[int, Field(ge=0, le=MAX_INTEGER)] = 0
    reward: dict[str, Any] = field(default_factory=dict)


class ResultsError(ValueError):
    """Results that cannot be used; one line with file, reason and remedy."""


@dataclass(frozen=True, slots=True)
class EvalSet:
    """A named list of prompts, and how they are sampled."""

    name: str
    prompts: tuple[Prompt, ...]
    sampling: EvalSamplingConfig


def load_sets(
    config: RunConfig, renderer: ChatRenderer, *, warns: bool = True
) -> tuple[EvalSet, ...]:
    """Read every set of ``eval.sets``; ``warns``: log the warnings about them.

    Raises:
        DataError: A row cannot be used, or a prompt is too long.
        OSError: A file cannot be read.
    """
    sets = []
    loaded_sets = load_eval_sets(config, renderer)
    for dataset, prompt_set in zip(config.eval.sets, loaded_sets, strict=True):
        sampling = config.eval.sampling_of(dataset)
        if warns:
            log_warnings([prompt_set])
        sets.append(EvalSet(dataset.label, prompt_set.prompts[: sampling.max_prompts], sampling))
    return tuple(sets)


def settings_of(eval_set: EvalSet, config: RunConfig, weights: str) -> dict[str, Any]:
    """Return everything that decides the samples of a set and their scores, as JSON values.

    ``weights`` names the weights, such as by the ``fingerprint`` of their files.
    """
    rollout = config.rollout
    return {
        "name": eval_set.name,
        "weights": weights,
        "prompts": prompts_digest(eval_set.prompts),
        "num_prompts": len(eval_set.prompts),
        **eval_set.sampling.model_dump(mode="json", exclude={"max_prompts"}),
        "reward": comparable_reward(eval_reward(config.reward, config.eval)),
        "seed": config.seed,
        "environment": rollout.environment_name,
        "max_turns": rollout.episodes.max_turns if rollout.has_environment else None,
    }


def comparable_reward(reward: RewardConfig) -> dict[str, Any]:
    """Return the reward section, as JSON values, without what changes no score of an evaluation."""
    left_out = dict.fromkeys(("workers", "truncated", "overlong", "format", "repetition"), True)
    return reward.model_dump(mode="json", exclude={**left_out, "functions": {"__all__": {"http"}}})


def prompts_digest(prompts: Sequence[Prompt]) -> str:
    """Hash ids, tokens, answers and rows: the data, the chat template and the tokenizer."""
    digest = hashlib.sha256()
    for prompt in prompts:
        entry: list[Any] = [prompt.prompt_id, list(prompt.token_ids), prompt.answer]
        if prompt.row:  # reward functions may read tests or a budget of tokens there
            entry.append(prompt.row)
        digest.update(json.dumps(entry, sort_keys=True).encode() + b"\n")
    return digest.hexdigest()[:16]


def fingerprint(model_dir: Path, config_name: str = "config.json") -> str:
    """Hash a model, or an adapter, so that others differ, in milliseconds for any size.

    The hash covers its configuration and, of each weight file, its name, its size and 64 evenly
    spread pieces of 16 KiB. Training changes nearly every number, so two steps of a run differ.

    Raises:
        OSError: A file cannot be read.
    """
    digest = hashlib.sha256((model_dir / config_name).read_bytes())
    for path in sorted(model_dir.glob("*.safetensors")):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        for piece in spread_pieces(path, _NUM_CHUNKS, _CHUNK_BYTES):
            digest.update(piece)
    return digest.hexdigest()[:16]


def settings_path(path: Path) -> Path:
    """Return where the settings of a samples file are."""
    return path.with_suffix(".settings.json")


def write_settings(path: Path, settings: Mapping[str, Any]) -> None:
    """Write the settings of a samples file beside it; OSError where that fails."""
    atomic_write_text(settings_path(path), json.dumps(settings, indent=2) + "\n")


def read_settings(path: Path) -> dict[str, Any]:
    """Read a settings file; ResultsError where it is missing or damaged."""
    remedy = "put it back, or change run_dir"
    try:
        content = read_regular(path)
        decode_json(_Settings, content)
        settings: dict[str, Any] = parse_json(content)
    except FileNotFoundError as error:
        raise ResultsError(
            f"{path}: is missing, so the settings of the samples beside it are unknown; {remedy}"
        ) from error
    except ValueError as error:
        raise ResultsError(f"{path}: damaged ({error}); {remedy}") from error
    return settings


def settings_beside(path: Path) -> dict[str, Any]:
    """Return the settings beside a samples file; empty if there are none."""
    return read_settings(settings_path(path)) if os.path.lexists(settings_path(path)) else {}


def check_same(path: Path, settings: Mapping[str, Any]) -> None:
    """Refuse to continue the samples file ``path`` with other settings.

    Raises:
        ResultsError: A setting differs, or those of the file are missing.
    """
    saved = read_settings(settings_path(path))
    for name, value in settings.items():
        if saved.get(name) != value:
            raise ResultsError(
                f"{path}: its samples were made with {name} {json.dumps(saved.get(name))}, now it "
                f"would be {json.dumps(value)}; resume with the same, or change run_dir"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSample:
    """One graded response; the keys of a line. Those with a default may be missing."""

    prompt_id: str
    index: Annotated[int, Field(strict=True, ge=0, lt=MAX_SAMPLES)]
    """0 … n − 1 among the samples of the prompt."""
    prompt: str = ""
    """The rendered prompt as text."""
    answer: str
    """The reference answer."""
    response: str
    """The response as text, without special tokens; of several turns the policy's last one."""
    turns: tuple[str, ...] = ()
    """Texts of policy and environment, if there are several turns; ends with ``response``."""
    state: Any = None
    """The environment's final state."""
    extracted: str = ""
    """The answer as it stands in the response; empty where none was found."""
    reward: _Number
    """Weighted sum of the reward functions, without shaping."""
    components: Mapping[str, _Number] = field(default_factory=dict)
    """What each reward function gave, without its weight."""
    reason: str = ""
    """Why it is right or wrong, as the first reward function says (docs/rewards.md)."""
    answer_found: StrictBool
    timed_out: StrictBool = False
    """Grading was ended by its limit of time or memory."""
    failed: StrictBool = False
    """A reward function failed, and ``reward.on_error: zero`` made it 0."""
    metrics: Mapping[str, _Number] = field(default_factory=dict)
    """Further numbers of the reward functions: ``<function>/<name>``."""
    num_tokens: _Count
    """Tokens that the policy sampled."""
    num_environment_tokens: _Count = 0
    finish_reason: FinishReason
    version: StrictInt = 0
    """Newest weights version that sampled a token of it."""
    elapsed_s: _Seconds = 0.0
    """When it was finished: wall time of the evaluation, earlier tries included."""
    source: str = ""
    """Name of the data set."""
    row: Mapping[str, Any] = field(default_factory=dict)
    """The other columns of its row."""

    @property
    def key(self) -> tuple[str, int]:
        """What identifies it within its file."""
        return self.prompt_id, self.index

    def to_line(self) -> bytes:
        """Encode it as one line of JSON, with its end."""
        # Half a surrogate pair, from an escape in a data file, becomes that escape again.
        text = json.dumps(asdict(self), ensure_ascii=False)
        return text.encode(errors="backslashreplace") + b"\n"


class SampleJournal:
    """The file of one set while it is sampled; it has no other writer."""

    def __init__(self, path: Path, file: FileIO, samples: Iterable[EvalSample]) -> None:
        """Continue an open file; see ``open``."""
        self.path = path
        self.samples = {sample.key: sample for sample in samples}
        """Samples in the file by key, earlier tries' too; without their texts, which are large."""
        self._file = file

    @classmethod
    async def open(cls, path: Path, settings: Mapping[str, Any], *, resume: bool) -> Self:
        """Begin a file, or continue it.

        Args:
            path: The jsonl file; missing directories are made.
            settings: How the samples are made, as JSON values.
            resume: Keep what is in the file, if there is one; else it begins empty.

        Raises:
            ResultsError: It has other settings, is damaged, or is in use by another process.
            OSError: It cannot be written.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab", buffering=0)
        try:
            await _lock(path, file)
            samples: Iterable[EvalSample] = ()
            if resume and path.stat().st_size:
                check_same(path, settings)
                content = path.read_bytes()
                end = content.rfind(b"\n") + 1
                if end < len(content):
                    _LOG.warning("%s: its last line was torn; repeating that sample", path)
                    file.truncate(end)
                samples = map(_without_texts, iterate_samples(path))
            else:
                file.truncate(0)
                write_settings(path, settings)
            return cls(path, file, samples)
        except BaseException:
            file.close()
            raise

    @property
    def elapsed_s(self) -> float:
        """Wall time of the evaluation until its newest sample."""
        return max((sample.elapsed_s for sample in self.samples.values()), default=0.0)

    def append(self, sample: EvalSample) -> None:
        """Add a sample: other processes see it at once.

        Raises:
            OSError: It cannot be written.
        """
        assert sample.key not in self.samples, f"{sample.key} was sampled twice"
        line, end = sample.to_line(), os.fstat(self._file.fileno()).st_size
        try:
            with naming(self.path):
                while line:
                    line = line[self._file.write(line) :]
        except OSError:
            self._file.truncate(end)  # what follows a part of a line could not be read
            raise
        self.samples[sample.key] = _without_texts(sample)

    def sync(self) -> None:
        """Flush everything to the disk; raises OSError where it cannot be written."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file, so that others may lock it."""
        self._file.close()


async def _lock(path: Path, file: FileIO) -> None:
    """Wait until the collector of a command that was killed has ended.

    The run directory's lock went with that command. A sample that its collector appends after this
    one has read or emptied the file would be there twice, or be one of other weights.
    """
    try:
        async with asyncio.timeout(_LOCK_PATIENCE_S):
            while True:
                with suppress(BlockingIOError):
                    lock(file)  # where there are no locks, ``run_dir_locked`` has said so
                    return
                await asyncio.sleep(_LOCK_POLL_S)
    except TimeoutError as error:
        raise ResultsError(
            f"{path}: another process is writing it; wait until it ends, or change run_dir"
        ) from error


def _without_texts(sample: EvalSample) -> EvalSample:
    return replace(sample, prompt="", response="", turns=(), state=None, row={})


def read_samples(path: Path) -> list[list[EvalSample]]:
    """Read a complete file.

    Returns:
        For each prompt, in the order of their first lines, its samples by index.

    Raises:
        ResultsError: It holds no sample, or one is missing.
        OSError: The file cannot be read.
    """
    by_prompt: dict[str, list[EvalSample]] = {}
    for sample in iterate_samples(path):
        by_prompt.setdefault(sample.prompt_id, []).append(sample)
    if not by_prompt:
        raise ResultsError(f"{path}: holds no sample; give a file that an evaluation wrote")
    settings = settings_beside(path)
    last = max(sample.index for group in by_prompt.values() for sample in group)
    num_prompts = settings.get("num_prompts", len(by_prompt))
    num_each = settings.get("samples_per_prompt", last + 1)
    if last >= num_each or len(by_prompt) > num_prompts:
        raise ResultsError(
            f"{path}: has more samples than num_prompts = {num_prompts} and samples_per_prompt = "
            f"{num_each} in {settings_path(path).name}; give the settings of these samples"
        )
    num_missing = num_prompts * num_each - sum(map(len, by_prompt.values()))
    if num_missing:
        raise ResultsError(
            f"{path}: {num_missing} of {num_prompts * num_each} samples are missing; finish the "
            "evaluation with eval --resume"
        )
    return [sorted(group, key=lambda sample: sample.index) for group in by_prompt.values()]


def iterate_samples(path: Path) -> Iterator[EvalSample]:
    """Read the lines of a samples file in order.

    Raises:
        ResultsError: A line is torn or not a sample, a sample occurs twice, or two samples of a
            prompt have different answers.
        OSError: The file cannot be read.
    """
    seen: set[tuple[str, int]] = set()
    answers: dict[str, str] = {}
    with open_regular(path) as stream:
        for number, line in enumerate(read_lines(stream, path), start=1):
            place = f"{path}:{number}"
            if not line.endswith(b"\n"):
                raise ResultsError(
                    f"{place}: the last line is torn; finish the evaluation with eval --resume"
                )
            try:
                sample = decode(EvalSample, parse_json(line))
            except ValueError as error:
                raise ResultsError(f"{place}: {error}; remove the line") from error
            answer = answers.setdefault(sample.prompt_id, sample.answer)
            if sample.key in seen or sample.answer != answer:
                raise ResultsError(
                    f"{place}: sample {sample.index} of {sample.prompt_id} occurs twice, or its "
                    f"'answer' is no longer {shown_value(answer)}; give the samples of one "
                    "evaluation"
                )
            seen.add(sample.key)
            yield sample
