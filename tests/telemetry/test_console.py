"""What people are told: on the terminal, without one, and in the file that keeps it."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.table import Table

from bapo_megatron.config.schema import LogConfig
from bapo_megatron.errors import RolloutError, StoppedError
from bapo_megatron.telemetry.console import ProgressLine, console_kept_in, say, show
from bapo_megatron.telemetry.sinks import MetricsSinks
from bapo_megatron.types import StepMetrics

PROGRAM = """
import logging, sys
from pathlib import Path
from bapo_megatron.telemetry.console import console_kept_in, say
with console_kept_in(Path(sys.argv[1])):
    logging.getLogger("bapo_megatron.rollout.client").warning("a server is taken out")
    logging.getLogger("bapo_megatron.rollout.client").info("nobody reads this")
    logging.getLogger("talkative").setLevel(logging.DEBUG)
    logging.getLogger("talkative").info("nor this")
    say("resumed [1/2]")
logging.getLogger("bapo_megatron.rollout.client").warning("after it")
"""


def test_the_file_has_lines_tables_and_the_last_error_of_every_start(tmp_path, capsys) -> None:
    path = tmp_path / "console.log"
    table = Table("what", "value", title="runs/[x]")
    table.add_row("time: export", "[bold]1.2 s[/bold]")

    def tell() -> None:
        show("step  reward", style="bold")
        say("resumed [1/2]")
        show(table)
        raise StoppedError("stopped by SIGTERM")

    with pytest.raises(StoppedError), console_kept_in(path):
        tell()
    with pytest.raises(RolloutError), console_kept_in(path):
        raise RolloutError("no server left;\ncontinue with resume=true")
    with pytest.raises(SystemExit), console_kept_in(path):
        sys.exit(128 + signal.SIGTERM)
    say("outside of the block")

    text = path.read_text()
    assert "\x1b" not in text
    assert "[bold]" not in text
    lines = [line[24:] for line in text.splitlines() if line.startswith("20")]
    assert lines == [
        "step  reward",
        "resumed [1/2]",
        "",
        "stopped by SIGTERM",
        "no server left; continue with resume=true",
        "SIGTERM",
    ]
    assert "│ time: export │ 1.2 s │" in text
    assert "RolloutError: no server left;" in text.splitlines()[-3]
    assert text.count("Traceback") == 1
    assert "time: export" in capsys.readouterr().out


def test_control_characters_of_data_are_seen_and_not_obeyed(tmp_path, capsys) -> None:
    table = Table("a\x1b]0;title\x07", title="set \x1b[2J")
    table.add_row("\x9b31m")
    with console_kept_in(tmp_path / "console.log"):
        say("said \x1b[31m")
        show("shown \x1b[31m")
        show(table)

    printed = capsys.readouterr()
    kept = (tmp_path / "console.log").read_text()
    for text in (printed.out, printed.err, kept):
        assert not {"\x1b", "\x9b", "\x07"} & set(text)
    assert "said ␛[31m" in printed.err
    assert "shown ␛[31m" in printed.out
    assert "␛]0;title" in printed.out
    assert "set ␛[2J" in kept


def test_warnings_are_in_the_file_and_once_on_standard_error(tmp_path) -> None:
    path = tmp_path / "console.log"
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(path)], capture_output=True, text=True, check=True
    )
    assert found.stderr == "a server is taken out\nresumed [1/2]\nafter it\n"
    kept = [line[24:] for line in path.read_text().splitlines()]
    assert kept == ["a server is taken out", "resumed [1/2]"]


def test_logging_is_afterwards_as_it_was_before(tmp_path) -> None:
    before = list(logging.getLogger().handlers)
    with console_kept_in(tmp_path / "console.log"):
        assert len(logging.getLogger().handlers) == len(before) + 1
    assert logging.getLogger().handlers == before


def test_without_a_terminal_progress_does_not_stand_between_the_rows(
    tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr("bapo_megatron.telemetry.console._PLAIN_INTERVAL_S", 0.0)
    sinks = MetricsSinks(tmp_path, "run", LogConfig(tensorboard=False), first_step=0, total_steps=2)
    with ProgressLine() as progress:
        progress.update("server 0: loading")
        progress.move_to(tmp_path / "progress")
        for step in (1, 2):
            progress.update(f"rollout {step}: 3/4 groups")
            sinks.write(StepMetrics(step, {"reward/mean": 0.5}))
    sinks.close()
    output = capsys.readouterr()
    assert output.err == "server 0: loading\n"
    assert [line.split()[0] for line in output.out.splitlines()] == ["step", "1/2", "2/2"]
    assert (tmp_path / "progress").read_text() == "rollout 2: 3/4 groups\n"


def test_progress_that_cannot_be_written_ends_no_run(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("bapo_megatron.telemetry.console._PLAIN_INTERVAL_S", 0.0)
    progress = ProgressLine()
    progress.move_to(Path("/dev/full"))
    progress.update("rollout 1: 3/4 groups")


def test_a_row_shows_all_clipped_tokens_and_no_time_of_evaluations(tmp_path, capsys) -> None:
    sinks = MetricsSinks(tmp_path, "run", LogConfig(tensorboard=False), first_step=0, total_steps=2)
    clipped = {"clip/fraction_high": 0.125, "clip/fraction_low": 0.25, "clip/fraction_dual": 0.0}
    seconds = {"time/rollout_s": 1.5, "time/training_s": 2.0, "time/evaluation_s": 60.0}
    sinks.write(StepMetrics(1, clipped | seconds))
    sinks.write(StepMetrics(2, {"time/evaluation_s": 60.0, "time/training_s": 0.04}))
    sinks.close()
    names, first, second = (line.split() for line in capsys.readouterr().out.splitlines())
    assert first[names.index("clipped")] == "0.375"
    assert first[-2:] == ["3.50", "s"]
    assert second[names.index("clipped")] == "-"
    assert second[-2:] == ["0.04", "s"]
