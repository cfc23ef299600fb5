"""Runs that are asked to stop: what becomes of the signal, of the run, and of its resumption."""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from bapo_megatron.config.schema import TrainConfig
from bapo_megatron.trainer import stopping as stopping_module
from bapo_megatron.trainer.stopping import Stopping
from tests.distributed_launch import run_ranks
from tests.launch import run
from tests.trainer import stub_runs

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import FrameType

    from tests.trainer.stub_runs import Outcome

BY_OTHER = "StoppedError: stopped by a signal to another rank"


@pytest.fixture(scope="module")
def stopped(
    random_model: Path, mixed_dumps: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Outcome]]:
    root = tmp_path_factory.mktemp("stopped")
    return run_ranks(stub_runs.stopped_runs, 2, random_model, mixed_dumps, root)


@pytest.mark.distributed
def test_a_signal_to_one_rank_stops_all_of_them_at_whatever_moment_it_comes(
    stopped: list[dict[str, Outcome]],
) -> None:
    first, second = (
        {name: rank[name].error for name in rank if name != "disk full"} for rank in stopped
    )
    assert first == {
        "start": "StoppedError: stopped by SIGUSR1",
        "rollout": BY_OTHER,
        "save": "StoppedError: stopped by SIGTERM",
        "updates": BY_OTHER,
        "evaluation": BY_OTHER,
        "rest": "",
    }
    assert second["start"] == "StoppedError: another rank: stopped by SIGUSR1"
    assert ["stopped by" in error for error in second.values()] == [*[True] * 5, False]


@pytest.mark.distributed
def test_a_stop_saves_what_there_is_and_marks_what_can_go_on(
    stopped: list[dict[str, Outcome]],
) -> None:
    found = {
        name: (outcome.checkpoint, outcome.saved_state.get("num_samples"), outcome.is_marked)
        for name, outcome in stopped[0].items()
    }
    assert found == {
        "disk full": ("", None, False),
        "start": ("", None, False),
        "rollout": ("step_0", 100, True),  # samples of a batch that was not complete
        "save": ("step_1", 200, True),
        "updates": ("step_2", 300, True),
        "evaluation": ("step_3", 400, True),
        "rest": ("step_3", 400, False),
    }
    assert [row["step"] for row in stopped[0]["rest"].rows] == [1, 2, 3]


@pytest.mark.distributed
def test_an_evaluation_that_was_interrupted_is_continued_before_anything_else(
    stopped: list[dict[str, Outcome]],
) -> None:
    assert [row["step"] for row in stopped[0]["evaluation"].rows] == [1, 2]
    asked = [call for call in stopped[0]["rest"].calls if call.startswith(("evaluate", "collect"))]
    assert asked == ["evaluate 3 again"]
    last = stopped[0]["rest"].rows[-1]
    assert last["eval/sums/avg_at_k"] == 0.375
    assert last["train/updates"] == 2.0


@pytest.mark.distributed
def test_a_stop_that_cannot_save_is_a_failure(stopped: list[dict[str, Outcome]]) -> None:
    for rank in stopped:
        assert rank["disk full"].error.startswith("OSError: ")
        assert "cannot write" in rank["disk full"].error


@pytest.fixture
def stopping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stopping]:
    """A run of a Slurm job, which ``squeue``, a stand-in, knows to end in 2001."""
    squeue = tmp_path / "squeue"
    squeue.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/asked\necho 2001-09-09T01:46:40\n')
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    handlers = {number: signal.getsignal(number) for number in numbers}
    yield Stopping(TrainConfig(stop_lead_s=60))
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_signals_within_five_seconds_count_once_and_a_later_one_ends_the_process(
    stopping: Stopping, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter((99.0, 100.0, 104.9, 105.1))
    fake = SimpleNamespace(monotonic=lambda: next(clock), time=time.time)
    monkeypatch.setattr(stopping_module, "time", fake)
    monkeypatch.delenv("SLURM_JOB_ID")
    stopping.listen(keeps_time=True)
    assert stopping.error() is None
    signal.raise_signal(signal.SIGUSR1)
    signal.raise_signal(signal.SIGTERM)
    assert str(stopping.error()) == "stopped by SIGUSR1"
    with pytest.raises(SystemExit) as ended:
        signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == 143


def test_ctrl_c_ends_the_process_before_the_first_step_and_later_asks_the_run_to_stop(
    stopping: Stopping, capfd: pytest.CaptureFixture[str]
) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    stopping.listen(keeps_time=True)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert stopping.error() is None
    stopping.listen_to_interrupts()
    signal.raise_signal(signal.SIGINT)
    assert str(stopping.error()) == "stopped by SIGINT"
    assert stopping.is_interrupted
    said = capfd.readouterr().err
    assert said.startswith("\ninterrupted: the run is saved and ends; Ctrl-C after 5 seconds")


def test_ctrl_c_is_why_a_run_ends_unless_its_time_was_over_before(stopping: Stopping) -> None:
    due = Stopping(TrainConfig(stop_after=0.0001))
    due.listen(keeps_time=True)
    time.sleep(0.001)
    assert due.error() is not None
    due.listen_to_interrupts()
    signal.raise_signal(signal.SIGINT)
    assert (str(due.error()), due.is_interrupted) == ("stopped by train.stop_after", False)
    stopping.listen_to_interrupts()
    stopping.agree(lambda _: True)  # it has reached another rank first
    signal.raise_signal(signal.SIGINT)
    assert (str(stopping.error()), stopping.is_interrupted) == ("stopped by SIGINT", True)


@pytest.fixture
def _utc() -> Iterator[None]:
    """Slurm and the message say local times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("_utc")
@pytest.mark.parametrize("knows_end", [True, False])
def test_a_run_stops_before_the_end_of_its_slurm_job(
    stopping: Stopping, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, knows_end: bool
) -> None:
    if knows_end:
        monkeypatch.setenv("SLURM_JOB_END_TIME", "1000000000")
    stopping.listen(keeps_time=True)
    while (error := stopping.error()) is None:
        time.sleep(0.01)
    assert str(error) == (
        "stopped by train.stop_lead_s = 60: the Slurm job ends at 2001-09-09 01:46:40"
    )
    if not knows_end:
        assert (tmp_path / "asked").read_text() == "-h -j 77 -o %e\n"


def test_a_run_stops_after_the_time_that_it_was_given(
    stopping: Stopping, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID")
    limited = Stopping(TrainConfig(stop_after=0.01))
    limited.listen(keeps_time=False)
    assert limited.error() is None
    limited.listen(keeps_time=True)
    time.sleep(0.02)
    assert str(limited.error()) == "stopped by train.stop_after"
    assert stopping.error() is None


@pytest.mark.usefixtures("stopping")
def test_a_clock_that_is_set_ends_no_run_before_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    clock = SimpleNamespace(now_s=50.0, wall_s=1e9)
    fake = SimpleNamespace(monotonic=lambda: clock.now_s, time=lambda: clock.wall_s)
    monkeypatch.setattr(stopping_module, "time", fake)
    limited = Stopping(TrainConfig(stop_after=60))
    limited.listen(keeps_time=True)
    clock.wall_s += 86400
    clock.now_s += 59
    assert limited.error() is None
    clock.wall_s -= 2 * 86400
    clock.now_s += 1
    assert str(limited.error()) == "stopped by train.stop_after"


def test_a_rank_other_than_the_first_dies_of_a_signal_until_it_has_joined_and_then_notes_it(
    stopping: Stopping, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    stopping.listen(keeps_time=False)
    assert [signal.getsignal(number) for number in numbers] == [signal.SIG_DFL] * 3
    with stopping.joining():
        assert [signal.getsignal(number) for number in numbers] == [signal.SIG_DFL] * 3
    signal.raise_signal(signal.SIGTERM)
    assert str(stopping.error()) == "stopped by SIGTERM"
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_the_first_rank_notes_a_signal_but_joins_no_others_after_it(
    stopping: Stopping, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID")
    stopping.listen(keeps_time=True)
    with stopping.joining():  # a single rank waits for nobody
        signal.raise_signal(signal.SIGTERM)
    assert str(stopping.error()) == "stopped by SIGTERM"
    monkeypatch.setenv("WORLD_SIZE", "2")
    message = "^stopped by SIGTERM before rendezvous; nothing to save, start the run again$"
    with pytest.raises(ValueError, match=message), stopping.joining():
        pass


def _of_user(number: int, frame: FrameType | None) -> None:
    raise AssertionError("not the run's handler")


def test_a_handler_of_a_users_code_is_named_once_and_the_run_is_stopped_by_the_signal_again(
    stopping: Stopping, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.delenv("SLURM_JOB_ID")
    stopping.listen(keeps_time=True)
    stopping.listen_to_interrupts()
    stopping.agree(lambda flag: flag)
    assert capsys.readouterr().err == ""
    line = _of_user.__code__.co_firstlineno
    for said in (
        f"rank 3: tests.trainer.test_stopping._of_user ({__file__}:{line}) had replaced the "
        "handler of SIGTERM; restored, because the signal stops the run\n",
        "",
    ):
        signal.signal(signal.SIGTERM, _of_user)
        assert stopping.agree(lambda flag: flag) is None
        assert capsys.readouterr().err == said
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, functools.partial(_of_user))
    stopping.agree(lambda flag: flag)
    assert [line.split(";")[0] for line in capsys.readouterr().err.splitlines()] == [
        "rank 3: functools.partial had replaced the handler of SIGUSR1",
        "rank 3: SIG_IGN had replaced the handler of SIGINT",
    ]
    signal.raise_signal(signal.SIGTERM)
    assert str(stopping.agree(lambda flag: flag)) == "stopped by SIGTERM"


def test_a_handler_that_c_code_installs_is_replaced_without_a_word(
    stopping: Stopping, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID")
    stopping.listen(keeps_time=True)
    ctypes.CDLL(None).signal(signal.SIGTERM, ctypes.c_void_p(signal.SIG_IGN))
    signal.raise_signal(signal.SIGTERM)
    assert stopping.agree(lambda flag: flag) is None
    signal.raise_signal(signal.SIGTERM)
    assert str(stopping.agree(lambda flag: flag)) == "stopped by SIGTERM"
    assert capsys.readouterr().err == ""


def test_a_handler_that_python_does_not_know_is_described_in_words(
    stopping: Stopping, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID")
    stopping.listen(keeps_time=True)
    monkeypatch.setattr(signal, "getsignal", lambda _: None)
    stopping.agree(lambda flag: flag)
    assert capsys.readouterr().err == (
        "rank 0: a handler that was installed from C had replaced the handler of SIGTERM; "
        "restored, because the signal stops the run\n"
    )


def test_handlers_are_left_alone_by_a_thread_which_may_not_set_them(stopping: Stopping) -> None:
    stopping.listen(keeps_time=False)
    signal.signal(signal.SIGTERM, _of_user)
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(stopping.agree, lambda flag: flag).result() is None


@pytest.mark.parametrize(
    ("given", "seconds"),
    [("45", 45.0), ('"90s"', 90.0), ('"1.5m"', 90.0), ('"23h"', 82800.0), ('"2d"', 172800.0)],
)
def test_a_duration_may_have_a_unit(given: str, seconds: float) -> None:
    config = TrainConfig.model_validate_json(f'{{"stop_after": {given}}}', strict=True)
    assert config.stop_after == seconds


def test_a_deadline_in_the_past_is_one_line_and_loses_nothing(
    replay_config: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    result = run(
        ["train", str(replay_config), f"run_dir={run_dir}", "--resume"],
        environment={"SLURM_JOB_ID": "77", "SLURM_JOB_END_TIME": "1000000000"},
    )
    assert result.returncode == 0
    (line,) = (line for line in result.stderr.splitlines() if "stop" in line)
    assert line == result.stderr.splitlines()[-1]
    assert line.startswith("stopped by train.stop_lead_s = 900: the Slurm job ends at 2001-09-")
    assert line.endswith("; no checkpoint yet: the same command with --resume starts at step 1")
    assert not (run_dir / "checkpoints").exists()
