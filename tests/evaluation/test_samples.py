"""The samples file: resumed, repaired, locked, and refused where it holds something else."""

import asyncio
import errno
import fcntl
import json
import os
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.evaluation import samples as samples_module
from bapo_megatron.evaluation.samples import (
    EvalSample,
    ResultsError,
    SampleJournal,
    iterate_samples,
    read_samples,
)
from tests.evaluation.results import sample
from tests.policy.checkpoint_damages import limited

SETTINGS: dict[str, Any] = {
    "weights": "m (0123)",
    "temperature": 0.6,
    "num_prompts": 2,
    "samples_per_prompt": 2,
}
ALL = [sample(prompt_id, index) for prompt_id in ("a:0", "a:1") for index in range(2)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "eval" / "sums.jsonl"


def parse_samples(path: Path) -> list[EvalSample]:
    return list(iterate_samples(path))


def write(path: Path, *content: EvalSample, resume: bool = False, **settings: Any) -> set:
    """Append to a journal; returns the keys that were there before."""

    async def append() -> set:
        journal = await SampleJournal.open(path, SETTINGS | settings, resume=resume)
        before = set(journal.samples)
        for entry in content:
            journal.append(entry)
        journal.sync()
        journal.close()
        return before

    return asyncio.run(append())


def test_a_journal_continues_with_what_it_has_or_begins(path: Path) -> None:
    assert write(path, *ALL[:3], resume=True) == set()
    assert write(path, ALL[3], resume=True) == {s.key for s in ALL[:3]}
    assert read_samples(path) == [ALL[:2], ALL[2:]]
    write(path, ALL[0], temperature=1.0)
    assert parse_samples(path) == ALL[:1]
    assert json.loads(path.with_name("sums.settings.json").read_text())["temperature"] == 1.0


@pytest.mark.parametrize("cut", [1, 30, 200])
def test_a_torn_last_line_is_removed_and_its_sample_made_again(
    path: Path, cut: int, caplog: pytest.LogCaptureFixture
) -> None:
    write(path, *ALL)
    os.truncate(path, path.stat().st_size - cut)
    with pytest.raises(ResultsError, match=r"sums.jsonl:4: the last line is torn"):
        parse_samples(path)
    assert write(path, ALL[3], resume=True) == {s.key for s in ALL[:3]}
    assert parse_samples(path) == ALL
    assert "its last line was torn" in caplog.text
    os.truncate(path, 150)
    assert write(path, resume=True) == set()
    assert path.read_bytes() == b""


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 1.0}, "made with temperature 0.6, now it would be 1.0"),
        ({"weights": "m (4567)"}, r'made with weights "m \(0123\)", now it would be "m \(4567\)"'),
        ({"top_k": 20}, "made with top_k null, now it would be 20"),
    ],
)
def test_samples_of_other_settings_are_not_continued(
    path: Path, settings: dict[str, Any], message: str
) -> None:
    write(path, *ALL)
    before = path.read_bytes()
    with pytest.raises(ResultsError, match=message):
        write(path, resume=True, **settings)
    assert path.read_bytes() == before


@pytest.mark.parametrize(("content", "problem"), [("{", "damaged"), (None, "is missing")])
def test_samples_whose_settings_are_lost_are_not_continued(
    path: Path, content: str | None, problem: str
) -> None:
    write(path, *ALL)
    settings = path.with_name("sums.settings.json")
    settings.unlink() if content is None else settings.write_text(content)
    with pytest.raises(ResultsError, match=rf"sums.settings.json: {problem}"):
        write(path, resume=True)


def test_two_processes_do_not_write_one_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def hand_over() -> int:
        first = await SampleJournal.open(path, SETTINGS, resume=False)
        first.append(ALL[0])
        monkeypatch.setattr(samples_module, "_LOCK_PATIENCE_S", 0.3)
        with pytest.raises(ResultsError, match="another process is writing it"):
            await SampleJournal.open(path, SETTINGS, resume=False)
        monkeypatch.undo()
        second = asyncio.create_task(SampleJournal.open(path, SETTINGS, resume=True))
        await asyncio.sleep(0.1)
        first.append(ALL[1])
        first.close()
        return len((await second).samples)

    assert asyncio.run(hand_over()) == 2


def test_a_line_that_a_full_disk_cuts_is_taken_back(path: Path) -> None:
    async def fill() -> None:
        journal = await SampleJournal.open(path, SETTINGS, resume=False)
        journal.append(ALL[0])
        with limited(path.stat().st_size + 100), pytest.raises(OSError, match="File too large"):
            journal.append(ALL[1])
        journal.append(ALL[2])
        journal.close()

    asyncio.run(fill())
    assert parse_samples(path) == [ALL[0], ALL[2]]


def test_a_file_system_without_locks_is_the_run_directorys_to_warn_about(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    write(path, ALL[0])
    assert parse_samples(path) == ALL[:1]
    assert caplog.text == ""


def test_any_text_comes_back_as_it_was(path: Path) -> None:
    texts = ["a\nb\u2028c\r\x00", "½ 数 🙂", "\ud800 half a pair", '"\\', "\\ud800"]
    content = [sample(index=i, response=t, row={"x": [1, t]}) for i, t in enumerate(texts)]
    write(path, *content)
    assert parse_samples(path) == content
    assert "½ 数 🙂" in path.read_text()


FIRST = json.loads(ALL[0].to_line())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("no json", "not valid JSON"),
        pytest.param("[" * 100_000, "not valid JSON", id="nested"),
        ("[]", "must be an object"),
        ("{}", "'prompt_id' is missing"),
        (FIRST, "sample 0 of a:0 occurs twice"),
        ({**FIRST, "index": 1, "answer": "9"}, "sample 1 of a:0 .*'answer'"),
        ({**FIRST, "index": -1}, "'index' must"),
        ({**FIRST, "index": True}, "'index' must"),
        ({**FIRST, "index": 10**9}, "'index' must"),
        ({**FIRST, "reward": float("nan")}, "'reward' must"),
        ({**FIRST, "reward": True}, "'reward' must"),
        ({**FIRST, "num_tokens": -1}, "'num_tokens' must"),
        ({**FIRST, "components": {"math": None}}, "'components.math' must"),
        ({**FIRST, "prompt": None}, "'prompt' must"),
        ({**FIRST, "row": None}, "'row' must"),
        ({**FIRST, "elapsed_s": float("inf")}, "'elapsed_s' must"),
    ],
)
def test_a_line_that_no_evaluation_writes_is_named(
    tmp_path: Path, line: str | dict[str, Any], message: str
) -> None:
    path = tmp_path / "sums.jsonl"
    text = line if isinstance(line, str) else json.dumps(line)
    path.write_bytes(ALL[0].to_line() + text.encode() + b"\n")
    with pytest.raises(ResultsError, match=rf"sums\.jsonl:2: {message}"):
        parse_samples(path)


def test_an_incomplete_file_is_refused_with_the_number_of_what_is_missing(path: Path) -> None:
    settings = path.with_name("sums.settings.json")
    write(path, ALL[0], ALL[1], ALL[3])
    with pytest.raises(ResultsError, match=r"1 of 4 samples are missing"):
        read_samples(path)
    settings.write_text('{"num_prompts": 2}')
    with pytest.raises(ResultsError, match=r"damaged \('samples_per_prompt' is missing\)"):
        read_samples(path)
    for num_prompts, num_each in ((1, 2), (2, 1)):
        settings.write_text(f'{{"num_prompts": {num_prompts}, "samples_per_prompt": {num_each}}}')
        with pytest.raises(ResultsError, match=rf"num_prompts = {num_prompts} .* = {num_each} in"):
            read_samples(path)
    settings.unlink()  # then only the lines can tell
    with pytest.raises(ResultsError, match=r"1 of 4 samples are missing"):
        read_samples(path)
    path.write_bytes(b"")
    with pytest.raises(ResultsError, match="holds no sample"):
        read_samples(path)
