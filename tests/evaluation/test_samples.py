"""The samples file: resumed, repaired, locked, and refused where it holds something else."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import json
import os
import resource
import signal
from typing import TYPE_CHECKING, Any

import pytest

from bapo_megatron.evaluation import samples as samples_module
from bapo_megatron.evaluation.samples import (
    EvalSample,
    SampleJournal,
    iterate_samples,
    read_samples,
)
from bapo_megatron.evaluation.settings import ResultsError
from tests.evaluation.results import sample

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextlib.contextmanager
def signal_ignored(number: signal.Signals) -> Iterator[None]:
    before = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(number, before)


def parse_samples(path: Path, **options: bool) -> list[EvalSample]:
    return list(iterate_samples(path, **options))


SETTINGS: dict[str, Any] = {
    "weights": "m (0123)",
    "temperature": 0.6,
    "num_prompts": 2,
    "samples_per_prompt": 2,
}
ALL = [sample(prompt_id, index) for prompt_id in ("a:0", "a:1") for index in range(2)]


async def write(path: Path, *content: EvalSample, resume: bool = False, **settings: Any) -> set:
    """Append to a journal; returns the keys that were there before."""
    journal = await SampleJournal.open(path, SETTINGS | settings, resume=resume)
    found = set(journal.samples)
    for entry in content:
        await journal.append(entry)
    journal.sync()
    journal.close()
    return found


def test_a_journal_goes_on_with_what_it_has(tmp_path: Path) -> None:
    path = tmp_path / "eval" / "sums.jsonl"
    assert asyncio.run(write(path, *ALL[:3])) == set()
    assert asyncio.run(write(path, ALL[3], resume=True)) == {s.key for s in ALL[:3]}
    assert read_samples(path) == [ALL[:2], ALL[2:]]


def test_resuming_what_was_never_begun_begins(tmp_path: Path) -> None:
    path = tmp_path / "sums.jsonl"
    assert asyncio.run(write(path, *ALL, resume=True)) == set()
    assert len(parse_samples(path)) == 4


def test_beginning_anew_empties_the_file_and_takes_new_settings(tmp_path: Path) -> None:
    path = tmp_path / "sums.jsonl"
    asyncio.run(write(path, *ALL))
    asyncio.run(write(path, ALL[0], temperature=1.0))
    assert parse_samples(path) == ALL[:1]
    assert json.loads((tmp_path / "sums.settings.json").read_text())["temperature"] == 1.0


@pytest.mark.parametrize("cut", [1, 30, 200])
def test_a_torn_last_line_is_removed_and_its_sample_made_again(
    tmp_path: Path, cut: int, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "sums.jsonl"
    asyncio.run(write(path, *ALL))
    os.truncate(path, path.stat().st_size - cut)
    with pytest.raises(ResultsError, match=r"sums.jsonl:4: the last line is torn; finish"):
        parse_samples(path)
    assert parse_samples(path, allow_torn=True) == ALL[:3]
    assert asyncio.run(write(path, ALL[3], resume=True)) == {s.key for s in ALL[:3]}
    assert parse_samples(path) == ALL
    assert "its last line was torn" in caplog.text


def test_a_file_that_is_one_torn_line_is_begun_again(tmp_path: Path) -> None:
    path = tmp_path / "sums.jsonl"
    asyncio.run(write(path, sample(response="x" * 200_000)))
    os.truncate(path, 150_000)
    assert asyncio.run(write(path, resume=True)) == set()
    assert path.read_bytes() == b""


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 1.0}, "made with temperature 0.6, now it would be temperature 1.0"),
        ({"weights": "m (4567)"}, r"made with model m \(0123\), now it would be model m \(4567\)"),
        ({"top_k": 20}, "made with top_k null, now it would be top_k 20"),
    ],
)
def test_samples_of_other_settings_are_not_continued(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    path = tmp_path / "sums.jsonl"
    asyncio.run(write(path, *ALL))
    before = path.read_bytes()
    with pytest.raises(ResultsError, match=f"{message}; resume with the same, or change run_dir"):
        asyncio.run(write(path, resume=True, **settings))
    assert path.read_bytes() == before


def test_samples_whose_settings_are_lost_are_not_continued(tmp_path: Path) -> None:
    path = tmp_path / "sums.jsonl"
    asyncio.run(write(path, *ALL))
    (tmp_path / "sums.settings.json").write_text("{")
    with pytest.raises(ResultsError, match=r"sums.settings.json: damaged"):
        asyncio.run(write(path, resume=True))
    (tmp_path / "sums.settings.json").unlink()
    with pytest.raises(ResultsError, match=r"sums.settings.json: is missing"):
        asyncio.run(write(path, resume=True))


def test_two_processes_do_not_write_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples_module, "_LOCK_PATIENCE_S", 0.3)

    async def write_twice() -> None:
        journal = await SampleJournal.open(tmp_path / "a.jsonl", SETTINGS, resume=False)
        await journal.append(ALL[0])
        with pytest.raises(ResultsError, match="another process is writing it"):
            await SampleJournal.open(tmp_path / "a.jsonl", SETTINGS, resume=False)
        journal.close()

    asyncio.run(write_twice())
    assert parse_samples(tmp_path / "a.jsonl") == ALL[:1]


def test_a_line_that_a_full_disk_cuts_is_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"

    async def fill() -> None:
        journal = await SampleJournal.open(path, SETTINGS, resume=False)
        await journal.append(ALL[0])
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        try:
            with signal_ignored(signal.SIGXFSZ):
                resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 100, before[1]))
                with pytest.raises(OSError, match="File too large"):
                    await journal.append(ALL[1])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        await journal.append(ALL[2])
        journal.close()

    asyncio.run(fill())
    assert parse_samples(path) == [ALL[0], ALL[2]]


def test_a_file_system_without_locks_is_the_run_directorys_to_warn_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    asyncio.run(write(tmp_path / "a.jsonl", ALL[0]))
    assert parse_samples(tmp_path / "a.jsonl") == ALL[:1]
    assert caplog.text == ""


def test_a_journal_waits_for_one_that_is_about_to_end(tmp_path: Path) -> None:
    async def hand_over() -> int:
        first = await SampleJournal.open(tmp_path / "a.jsonl", SETTINGS, resume=False)
        second = asyncio.create_task(
            SampleJournal.open(tmp_path / "a.jsonl", SETTINGS, resume=True)
        )
        await asyncio.sleep(0.1)
        await first.append(ALL[0])
        first.close()
        return len((await second).samples)

    assert asyncio.run(hand_over()) == 1


def test_any_text_comes_back_as_it_was(tmp_path: Path) -> None:
    texts = ["a\nb\u2028c\r\x00", "½ 数 🙂", "\ud800 half a pair", '"\\']
    path = tmp_path / "sums.jsonl"
    content = [sample(index=i, response=t, row={"x": [1, t]}) for i, t in enumerate(texts)]
    asyncio.run(write(path, *content))
    assert parse_samples(path) == content


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("no json", "sums.jsonl:2: not valid JSON"),
        pytest.param("[" * 100_000, "sums.jsonl:2: not valid JSON", id="nested"),
        ("[]", r"sums.jsonl:2: must be an object, got \[\]; remove the line, or give a file that"),
        ("{}", "sums.jsonl:2: 'prompt_id' is missing; remove the line"),
        (None, "sums.jsonl:2: sample 0 of a:0 occurs twice; remove one of the lines"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, line: str | None, message: str) -> None:
    path = tmp_path / "sums.jsonl"
    good = ALL[0].to_line()
    path.write_bytes(good + (good if line is None else line.encode() + b"\n"))
    with pytest.raises(ResultsError, match=message):
        parse_samples(path)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("index", -1, "'index' must be greater than or equal to 0, got -1"),
        ("index", True, "'index' must be an integer, got true"),
        ("reward", float("nan"), "'reward' must be .*, got NaN"),
        ("reward", True, "'reward' must be a number, got true"),
        ("num_tokens", -1, "'num_tokens' must be greater than or equal to 0, got -1"),
        ("components", {"math": None}, "'components.math' must be a number, got null"),
        ("prompt", None, "'prompt' must be a string, got null"),
        ("row", None, "'row' must be a dictionary, got null"),
        ("elapsed_s", float("inf"), "'elapsed_s' must be .*, got Infinity"),
    ],
)
def test_a_value_that_no_evaluation_writes_is_named(
    tmp_path: Path, name: str, value: object, message: str
) -> None:
    path = tmp_path / "sums.jsonl"
    line = {**json.loads(ALL[0].to_line()), name: value}
    path.write_text(json.dumps(line) + "\n")
    with pytest.raises(ResultsError, match=rf"^\S+:1: {message}; remove the line, or "):
        parse_samples(path)


def test_an_incomplete_file_is_refused_with_the_number_of_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "sums.jsonl"
    asyncio.run(write(path, ALL[0], ALL[1], ALL[3]))
    with pytest.raises(ResultsError, match=r"1 of 4 samples are missing; finish the evaluation"):
        read_samples(path)
    (tmp_path / "sums.settings.json").write_text('{"num_prompts": 2}')
    with pytest.raises(ResultsError, match=r"damaged \('samples_per_prompt' is missing\); put it"):
        read_samples(path)
    (tmp_path / "sums.settings.json").unlink()  # then only the lines can tell
    with pytest.raises(ResultsError, match=r"1 of 4 samples are missing"):
        read_samples(path)
    path.write_bytes(b"")
    with pytest.raises(ResultsError, match="holds no sample"):
        read_samples(path)
