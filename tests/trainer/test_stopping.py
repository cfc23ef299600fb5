"""Runs that are asked to stop: what becomes of the signal, of the run, and of its resumption."""

import ctypes
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType, SimpleNamespace

import pytest

from bapo_megatron.config.schema import TrainConfig
from bapo_megatron.trainer import stopping as stopping_module
from bapo_megatron.trainer.stopping import Stopping
from tests.distributed_launch import run_ranks
from tests.trainer import stub_runs
from tests.trainer.stub_runs import Outcome

BY_OTHER = "StoppedError: stopped by a signal to another rank"


@pytest.fixture(scope="module")
def stopped(
    random_model: Path, mixed_dumps: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Outcome]]:
    root = tmp_path_factory.mktemp("stopped")
    return run_ranks(stub_runs.stopped_runs, 2, random_model, mixed_dumps, root)


@pytest.mark.distributed
@pytest.mark.exhaustive
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
    states = {
        name: (outcome.checkpoint, outcome.saved_state.get("num_samples"), outcome.is_marked)
        for name, outcome in stopped[0].items()
    }
    assert states == {
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
def stopping() -> Iterator[Stopping]:
    """Whose handlers do not outlive the test."""
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
    assert "press Ctrl-C again after 5 s" in capfd.readouterr().err


def test_ctrl_c_is_why_a_run_ends_unless_its_time_was_over_before(stopping: Stopping) -> None:
    due = Stopping(TrainConfig(stop_after=0.0001))
    due.listen(keeps_time=True)
    time.sleep(0.001)
    assert due.error() is not None
    stopping.agree(lambda _: True)  # it has reached another rank first
    for stops, reason in ((due, "train.stop_after"), (stopping, "SIGINT")):
        stops.listen_to_interrupts()
        signal.raise_signal(signal.SIGINT)
        assert str(stops.error()) == f"stopped by {reason}"
        assert stops.is_interrupted == (reason == "SIGINT")


def test_a_run_stops_before_the_end_of_its_slurm_job(
    stopping: Stopping, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(time.time() + 61))
    stopping.listen(keeps_time=True)
    assert stopping.error() is None
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1000000000")
    stopping.listen(keeps_time=True)
    assert str(stopping.error()).startswith("stopped by train.stop_lead_s = 60: ")
    assert " 2001-09-" in str(stopping.error())
    monkeypatch.setenv("SLURM_JOB_END_TIME", "tomorrow")
    with pytest.raises(ValueError, match=r"SLURM_JOB_END_TIME: .*tomorrow"):
        stopping.listen(keeps_time=True)


def test_a_run_stops_after_the_time_that_it_was_given_by_a_clock_that_nobody_sets(
    stopping: Stopping, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now_s=50.0, wall_s=1e9)
    fake = SimpleNamespace(monotonic=lambda: clock.now_s, time=lambda: clock.wall_s)
    monkeypatch.setattr(stopping_module, "time", fake)
    limited = Stopping(TrainConfig(stop_after=60))
    limited.listen(keeps_time=False)
    clock.now_s += 61
    assert limited.error() is None
    limited.listen(keeps_time=True)
    clock.wall_s += 86400
    clock.now_s += 59
    assert limited.error() is None
    clock.wall_s -= 2 * 86400
    clock.now_s += 1
    assert str(limited.error()) == "stopped by train.stop_after"
    assert stopping.error() is None


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


def test_handlers_of_a_users_code_are_replaced_again(stopping: Stopping) -> None:
    stopping.listen(keeps_time=True)
    signal.signal(signal.SIGTERM, _of_user)
    assert stopping.agree(lambda flag: flag) is None
    # Of this one Python knows nothing.
    ctypes.CDLL(None).signal(signal.SIGTERM, ctypes.c_void_p(signal.SIG_IGN))
    signal.raise_signal(signal.SIGTERM)
    assert stopping.agree(lambda flag: flag) is None
    signal.raise_signal(signal.SIGTERM)
    assert str(stopping.agree(lambda flag: flag)) == "stopped by SIGTERM"


def test_handlers_are_left_alone_by_a_thread_which_may_not_set_them(stopping: Stopping) -> None:
    stopping.listen(keeps_time=False)
    signal.signal(signal.SIGTERM, _of_user)
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(stopping.agree, lambda flag: flag).result() is None


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("45", 45.0), ('"90s"', 90.0), ('"1.5m"', 90.0), ('"23h"', 82800.0), ('"2d"', 172800.0)],
)
def test_a_duration_may_have_a_unit(text: str, seconds: float) -> None:
    config = TrainConfig.model_validate_json(f'{{"stop_after": {text}}}', strict=True)
    assert config.stop_after == seconds
