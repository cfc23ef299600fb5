"""``config``: the keys of every run, and one run resolved and checked."""

from pathlib import Path

import pytest
import typer
import yaml
from rich.console import Console

from bapo_megatron import cli
from bapo_megatron.commands import config as config_command
from bapo_megatron.config.describe import describe_keys
from bapo_megatron.config.load import ConfigError
from tests.config.files import write_runnable


@pytest.fixture
def config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A run that passes all checks."""
    monkeypatch.chdir(tmp_path)
    return str(write_runnable())


def run(*arguments: str) -> None:
    cli.app(["config", *arguments], standalone_mode=False)


def test_without_a_terminal_each_key_is_a_line_with_tabs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(describe_keys())
    assert lines[0] == "name\ttext\trequired\tName of the run."
    assert {line.count("\t") for line in lines} == {3}
    run("--key", "parallel.p")
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("parallel.pipeline\tinteger ≥ 1\t1\t")
    with pytest.raises(typer.BadParameter, match=r"no key contains 'paralel'"):
        run("--key", "paralel")


def test_a_terminal_gets_a_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        config_command,
        "Console",
        lambda: Console(force_terminal=True, color_system=None, width=60),
    )
    run("--key", "parallel.virtual_pipeline")

    lines = capsys.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in line.strip("┃│").split(line[0])] for line in lines[1:-1]]
    assert cells[0] == ["key", "type", "default", "meaning"]
    assert "".join(row[0] for row in cells[2:]) == "parallel.virtual_pipeline"  # folded, not cut
    assert max(map(len, lines)) <= 60


def test_a_configuration_is_printed_and_checked(
    config_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run(config_file, "parallel.tensor=2")  # whose number of ranks is not known

    assert yaml.safe_load(capsys.readouterr().out)["train"]["steps"] == 100
    with pytest.raises(typer.BadParameter, match="leave out CONFIG"):
        run(config_file, "--key", "train")


@pytest.mark.parametrize(
    ("override", "place"),
    [
        ("data.train.path=no.jsonl", r"data\.train\.path: "),
        ("rollout.servers=[a:1]", r"rollout\.servers: "),
        ("algorithm.objective=no_module:f", "no_module"),
    ],
)
def test_what_train_would_refuse_is_named_after_the_resolved_configuration(
    config_file: str, capsys: pytest.CaptureFixture[str], override: str, place: str
) -> None:
    with pytest.raises(ValueError, match=place):
        run(config_file, override)
    assert yaml.safe_load(capsys.readouterr().out)["name"] == "x"


def test_a_number_of_ranks_is_checked_where_it_is_known(
    config_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match=r"parallel: tensor .* must divide the number"):
        run(config_file, "parallel.tensor=2")
