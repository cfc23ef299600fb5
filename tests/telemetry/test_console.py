"""What people are told: on the terminal, without one, and in the file that keeps it."""

import io
import logging
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from bapo_megatron.errors import RolloutError, StoppedError
from bapo_megatron.telemetry.console import (
    ProgressLine,
    console_kept_in,
    print_entry,
    print_table,
    say,
    show,
    uncut_console,
)

PROGRAM = """
import logging, sys
from pathlib import Path
from bapo_megatron.telemetry.console import console_kept_in, say
with console_kept_in(Path(sys.argv[1])):
    logging.getLogger("bapo_megatron.rollout.client").warning("a server is lost")
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
    handlers = list(logging.getLogger().handlers)
    with console_kept_in(tmp_path / "console.log"):
        say("said \x1b[31m")
        show("shown \x1b[31m")
        show(table)

    assert logging.getLogger().handlers == handlers
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
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(path)], capture_output=True, text=True, check=True
    )
    assert result.stderr == "a server is lost\nresumed [1/2]\nafter it\n"
    kept = [line[24:] for line in path.read_text().splitlines()]
    assert kept == ["a server is lost", "resumed [1/2]"]


def test_rows_of_tables_are_whole_where_output_is_no_terminal(capsys, monkeypatch) -> None:
    table = Table("key", "meaning")
    table.add_row("a", "word " * 60)
    for columns, num_lines in ((None, 5), ("80", 9)):
        monkeypatch.delenv("COLUMNS", raising=False)
        if columns:
            monkeypatch.setenv("COLUMNS", columns)
        uncut_console().print(table)
        assert len(capsys.readouterr().out.splitlines()) == num_lines


def test_progress_in_a_log_is_one_line_without_markup_and_may_fail(capsys, monkeypatch) -> None:
    monkeypatch.setattr("bapo_megatron.telemetry.console._PLAIN_INTERVAL_S", 0.0)
    progress = ProgressLine()
    for line in ("starting http://[fe80::1]:30000", "grading runs/[/a]/b", "a word " * 30 + "end"):
        progress.update(line)
        assert capsys.readouterr().err == f"{line}\n"
    progress.move_to(Path("/dev/full"))
    progress.update("rollout 1: 3/4 groups")


def test_tables_and_entries_show_texts_as_they_are_and_no_text_ends_its_block() -> None:
    rows, out = [["[red]a|b[/]\x1b", "a\r\nb\n"]], io.StringIO()
    for terminal in (True, False):
        console = Console(file=out, width=60, force_terminal=terminal, color_system=None)
        print_table(console, "of [/x]", ["set", "[n]"], rows, num_left=1)
    # A line of Markdown is a row.
    piped = "| set | [n] |\n| --- | ---: |\n| [red]a\\|b[/]␛ | a b |\n"
    drawn = out.getvalue().removesuffix(piped)
    assert drawn != out.getvalue()
    assert all(text in drawn for text in ("of [/x]", "[n]", "[red]a|b[/]␛"))

    out = io.StringIO()
    parts = [("fact", "x: \x1b"), ("heading", "[/p]\x9b\u202e"), ("prompt", "[a]\n\n```\x1b\n# b")]
    print_entry(Console(file=out, width=8), "group 0 · long title\x1b", parts)
    assert out.getvalue() == (
        "\n### group 0 · long title␛\n- x: ␛\n\n**[/p]��**\n\n    [a]\n\n    ```␛\n    # b\n"
    )
