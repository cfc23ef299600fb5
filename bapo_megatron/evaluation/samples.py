"""Every sample of an evaluation as one line of a jsonl file, written as it finishes.

    <run_dir>/eval/<set>.jsonl             of the ``eval`` command
    <run_dir>/eval/step_000020_<set>.jsonl of an evaluation inside training; ``start_<set>``: before
    ….settings.json                        beside each: what its samples were made with

``SampleJournal`` appends and resumes, ``read_samples`` reads a complete file. A kill can only tear
the last line, which ``SampleJournal`` removes: that sample is made again.
"""

import asyncio
import json
import logging
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from io import FileIO
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, StrictBool, StrictInt

from bapo_megatron.config.evaluation import MAX_SAMPLES
from bapo_megatron.config.section import MAX_INTEGER
from bapo_megatron.evaluation.settings import (
    MAX_NUMBER,
    ResultsError,
    check_same,
    read_settings,
    settings_path,
    write_settings,
)
from bapo_megatron.runtime.calls import decode, shown_value
from bapo_megatron.runtime.files import lock, naming, open_regular, parse_json, read_lines
from bapo_megatron.types import FinishReason

_LOG = logging.getLogger(__name__)
_SYNC_INTERVAL_S = 1.0
_LOCK_PATIENCE_S = 15.0
"""An orphaned collector ends within a few seconds."""
_LOCK_POLL_S = 0.2

_Count = Annotated[int, Field(strict=True, ge=0, le=MAX_INTEGER)]
_Number = Annotated[float, Field(strict=True, ge=-MAX_NUMBER, le=MAX_NUMBER)]
_Seconds = Annotated[float, Field(strict=True, ge=0, le=MAX_NUMBER)]


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
    """The environment's at the end."""
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
        content = asdict(self)
        try:
            return json.dumps(content, ensure_ascii=False).encode() + b"\n"
        except UnicodeEncodeError:  # half a surrogate pair, from an escape in a data file
            return json.dumps(content).encode() + b"\n"


class SampleJournal:
    """The file of one set while it is sampled; nobody else writes it meanwhile."""

    def __init__(self, path: Path, file: FileIO, samples: Iterable[EvalSample]) -> None:
        """Continue an open file; see ``open``."""
        self.path = path
        self.samples = {sample.key: sample for sample in samples}
        """Those in the file, earlier tries' too, by key; without their texts, which are large."""
        self._file = file
        self._synced_s = time.monotonic()

    @classmethod
    async def open(cls, path: Path, settings: Mapping[str, Any], *, resume: bool) -> Self:
        """Begin a file, or continue it.

        Args:
            path: The jsonl file; missing directories are made.
            settings: What the samples are made with, JSON values.
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
                _remove_torn_line(path, file)
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

    async def append(self, sample: EvalSample) -> None:
        """Add a sample: other processes see it at once, the disk has it within about a second.

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
        if time.monotonic() - self._synced_s > _SYNC_INTERVAL_S:
            self._synced_s = math.inf  # one at a time
            try:
                await asyncio.to_thread(self.sync)
            finally:
                self._synced_s = time.monotonic()

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
    deadline_s = time.monotonic() + _LOCK_PATIENCE_S
    while True:
        try:
            lock(file)  # where there are no locks, ``run_dir_locked`` has said so
            return
        except BlockingIOError as error:
            if time.monotonic() > deadline_s:
                raise ResultsError(
                    f"{path}: another process is writing it; wait until it ends, or change run_dir"
                ) from error
            await asyncio.sleep(_LOCK_POLL_S)


def _remove_torn_line(path: Path, file: FileIO) -> None:
    """Cut off what follows the last end of a line."""
    with path.open("rb") as stream, mmap(stream.fileno(), 0, access=ACCESS_READ) as content:
        size, end = len(content), content.rfind(b"\n") + 1
    if end < size:
        _LOG.warning("%s: its last line was torn; that sample is made again", path)
        file.truncate(end)


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
    if os.path.lexists(settings_path(path)):
        settings = read_settings(settings_path(path))
        num_prompts, num_each = settings["num_prompts"], settings["samples_per_prompt"]
    else:
        num_prompts = len(by_prompt)
        num_each = max(sample.index + 1 for group in by_prompt.values() for sample in group)
    for prompt_id, group in by_prompt.items():
        last = max(sample.index for sample in group)
        if last >= num_each:
            raise ResultsError(
                f"{path}: sample {last} of {prompt_id}: 'index' must be below samples_per_prompt = "
                f"{num_each} in {settings_path(path).name}; give the settings of these samples"
            )
    num_missing = num_prompts * num_each - sum(map(len, by_prompt.values()))
    if num_missing < 0:
        raise ResultsError(
            f"{path}: has {len(by_prompt)} prompts, num_prompts in {settings_path(path).name} is "
            f"{num_prompts}; give the settings of these samples"
        )
    if num_missing:
        raise ResultsError(
            f"{path}: {num_missing} of {num_prompts * num_each} samples are missing; finish the "
            "evaluation with eval --resume"
        )
    return [sorted(group, key=lambda sample: sample.index) for group in by_prompt.values()]


def iterate_samples(path: Path, *, allow_torn: bool = False) -> Iterator[EvalSample]:
    """Read the lines of a samples file in order.

    Args:
        path: The file.
        allow_torn: Leave out a last line without an end.

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
                if allow_torn:
                    break
                raise ResultsError(
                    f"{place}: the last line is torn; finish the evaluation with eval --resume"
                )
            sample = _parse(line, place)
            if sample.key in seen:
                raise ResultsError(
                    f"{place}: sample {sample.index} of {sample.prompt_id} occurs twice; "
                    "remove one of the lines"
                )
            seen.add(sample.key)
            answer = answers.setdefault(sample.prompt_id, sample.answer)
            if sample.answer != answer:
                raise ResultsError(
                    f"{place}: 'answer' of {sample.prompt_id} must be "
                    f"{shown_value(answer)} as before, got {shown_value(sample.answer)}; give the "
                    "samples of one evaluation"
                )
            yield sample


def _parse(line: bytes, place: str) -> EvalSample:
    try:
        return decode(EvalSample, parse_json(line))
    except ValueError as error:
        raise ResultsError(
            f"{place}: {error}; remove the line, or give a file that an evaluation wrote"
        ) from error
