"""The commands that need neither a server nor Megatron."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import bapo_megatron
from bapo_megatron import cli
from bapo_megatron.commands import train
from tests.launch import REPOSITORY, run, torchrun
from tests.trainer.dumps import make_random_model

COMMAND = [sys.executable, "-m", "bapo_megatron"]


def _write_tokens(path: Path, ratios: list[float], advantages: list[float]) -> Path:
    np.savez(
        path,
        logprob=np.log(np.array(ratios, np.float32)),
        behaviour_logprob=np.zeros(3, np.float32),
        advantage=np.array(advantages, np.float32),
    )
    return path


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    """Wrong tokens outweigh right ones until the upper bound lets the ratio of 2 count."""
    return _write_tokens(tmp_path / "tokens.npz", [2.0, 1.0, 1.0], [1.0, -1.0, -1.2])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "shown"), [("SIGINT", "bapo-megatron: interrupted\n"), ("SIGTERM", "")]
)
def test_an_error_in_place_of_a_signals_exception_is_an_interrupt(number: str, shown: str) -> None:
    # As torch.asarray does: "could not determine the shape of object type UntypedStorage".
    code = f"""
import signal
from bapo_megatron import cli
def app(**options):
    try: signal.raise_signal(signal.{number})
    except BaseException: raise TypeError("another") from None
cli.app = app
cli.main()
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=REPOSITORY
    )
    assert (result.returncode, result.stderr) == (128 + getattr(signal, number), shown)


@pytest.mark.slow
def test_bounds_prints_the_decision_as_json(tokens: Path) -> None:
    result = run(["bounds", str(tokens), "--preset", "paper", "--json"])
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    # P = min(2, c), N = 2.2: P / (P + N) >= 0.4 needs c >= 1.4667, so 1.5 on the grid.
    assert report["clip_high"] == pytest.approx(1.5)
    assert report["clip_low"] == pytest.approx(0.6)
    assert report["exit"] == "met"
    assert report["positive_share_start"] == pytest.approx(1.2 / 3.4, abs=1e-6)
    assert report["positive_share"] == pytest.approx(1.5 / 3.7, abs=1e-6)


@pytest.mark.slow
def test_bounds_prints_a_table_for_people(tokens: Path) -> None:
    result = run(["bounds", str(tokens), "--contribution", "gradient"])
    assert result.returncode == 0, result.stderr
    # Counting only unclipped tokens, the ratio of 2 counts from the bound 2.05 on.
    assert "met: c_low 0.6, c_high 2.05" in result.stdout
    assert "→" in result.stdout


@pytest.mark.slow
def test_bounds_uses_the_dual_clip_of_the_recipe(tmp_path: Path) -> None:
    path = _write_tokens(tmp_path / "tokens.npz", [1.0, 4.0, 1.0], [1.0, -1.0, -0.25])
    result = run(
        ["bounds", str(path), "--preset", "recipe", "--contribution", "gradient", "--json"]
    )
    assert result.returncode == 0, result.stderr
    # The ratio of 4 is above the dual clip of 3: P = 1, N = 0.25. With it the share were 1 / 5.25.
    assert json.loads(result.stdout)["positive_share_start"] == pytest.approx(0.8)


@pytest.mark.parametrize(("first", "status"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_second_signal_does_not_interrupt_the_cleanup(first: str, status: int) -> None:
    program = f"""
import signal
from bapo_megatron import cli

def app(**options):
    try:
        signal.raise_signal(signal.{first})
    finally:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        print("cleaned up")

cli.app = app
cli.main()
"""
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == status
    assert result.stdout == "cleaned up\n"
    assert "Traceback" not in result.stderr


def test_version_and_help_name_the_package_and_its_commands() -> None:
    assert run(["--version"]).stdout == f"bapo-megatron {bapo_megatron.__version__}\n"
    listed = run(["--help"], environment={"COLUMNS": "200"}).stdout
    for name, line in cli.COMMANDS.items():
        assert f"{name} " in listed
        assert line in listed


@pytest.mark.parametrize("command", ["--help", "config", "make-tiny --help"])
def test_what_takes_half_a_second_imports_no_slow_library(command: str, tmp_path: Path) -> None:
    arguments = command.split()
    if command == "config":
        make_random_model(tmp_path)
        prompts = tmp_path / "train.jsonl"
        prompts.write_text('{"prompt": "1+1=?", "answer": "2"}\n')
        files = [f"model.path={tmp_path}", f"data.train.path={prompts}", "eval.sets=[]"]
        arguments += ["configs/demo.yaml", *files]
    program = """
import sys
from bapo_megatron import cli
try:
    cli.main()
finally:
    print(sorted({"numpy", "torch", "transformers"} & set(sys.modules)))
"""
    result = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("[]\n")


def test_what_generates_is_started_before_torch_is_imported() -> None:
    program = """
import sys
from bapo_megatron.trainer.opening import open_run
print("torch" in sys.modules)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stdout == "False\n", result.stderr


@pytest.mark.distributed
def test_torchrun_s_report_ends_with_the_error_of_a_rank() -> None:
    result = torchrun(["train", "no.yaml"], ranks=2)
    assert result.returncode != 0
    report = result.stderr.rpartition("Root Cause")[2]
    assert "traceback : no.yaml: no such file; check the path\n" in report


def test_a_misspelt_command_is_told_the_nearest() -> None:
    assert (
        run(["trian"]).stderr == "bapo-megatron: No such command 'trian'. Did you mean 'train'?\n"
    )


def test_control_characters_in_an_error_are_seen_not_obeyed(tmp_path: Path) -> None:
    file = tmp_path / "error.json"  # whose message torchrun prints
    result = run(["train", "no\x1b[2J.yaml"], environment={"TORCHELASTIC_ERROR_FILE": str(file)})
    assert result.stderr == "bapo-megatron: no␛[2J.yaml: no such file; check the path\n"
    told = json.loads(file.read_text())["message"]["message"]
    assert told == "no␛[2J.yaml: no such file; check the path"


def test_resume_is_an_option_of_train(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[list[str]] = []

    def load(config: Path, overrides: list[str]) -> None:
        given.append(overrides)
        raise ValueError("seen")

    monkeypatch.setattr(train, "load", load)
    for arguments in (["seed=1", "--resume"], ["--resume"], ["seed=1"]):
        with pytest.raises(ValueError, match="seen"):
            cli.app(["train", "run.yaml", *arguments], standalone_mode=False)
    assert given == [["seed=1", "resume=true"], ["resume=true"], ["seed=1"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["bounds", "/no/such.npz"], "/no/such.npz"),
        (["bounds", "FILE", "--preset", "papper"], "preset"),
        (["train"], "CONFIG"),
        (["tarin"], "tarin"),
    ],
)
def test_wrong_usage_is_one_line_and_a_status(
    tokens: Path, arguments: list[str], expected: str
) -> None:
    result = run([str(tokens) if a == "FILE" else a for a in arguments])
    assert result.returncode != 0
    assert expected in result.stderr
    assert result.stderr.startswith("bapo-megatron: ")
    assert "Traceback" not in result.stderr


def test_keys_and_their_meaning_can_be_searched_in_a_pipe() -> None:
    result = run(["config"])
    assert result.returncode == 0, result.stderr
    (line,) = [line for line in result.stdout.splitlines() if "virtual_pipeline" in line]
    assert "Chunks of layers of each stage (interleaved schedule)" in line


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["base.yaml", "demo.yaml", "gsm8k-tiny.yaml", "eval-aime.yaml", "eval-aime-tiny.yaml"]
)
def test_every_shipped_configuration_resolves_and_is_checked(name: str) -> None:
    overrides = ["name=x", "run_dir=x"] if name == "base.yaml" else []
    result = run(["config", f"configs/{name}", *overrides, "model.path=no/model"])
    assert "preset: paper" in result.stdout
    assert result.returncode == 2
    assert result.stderr.startswith("bapo-megatron: model.path: no such directory '/")
    preset = "algorithm.bapo.preset=recipe"
    recipe = run(["config", f"configs/{name}", *overrides, "model.path=no/model", preset])
    assert "behaviour: recomputed" in recipe.stdout
    assert "dual_clip: 3.0" in recipe.stdout


def test_a_working_directory_that_is_gone_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.setattr("sys.argv", ["bapo-megatron", "plot", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    assert capsys.readouterr().err == (
        "bapo-megatron: the current working directory has been deleted; change to another one\n"
    )


def test_standard_output_that_cannot_be_written_is_named() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*COMMAND, "--version"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (
        1,
        "bapo-megatron: standard output: no space left on device; free space, or choose another "
        "file system\n",
    )


@pytest.mark.parametrize("arguments", [["--help"], ["config"]])
def test_a_command_ends_silently_once_nobody_reads_its_output(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [*COMMAND, *arguments], stdout=writer, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_closed_standard_output_is_an_error() -> None:
    done = subprocess.run(
        ["sh", "-c", '"$@" >&-', "sh", *COMMAND, "config"],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == (
        "bapo-megatron: standard output: closed; redirect it to a file, or to /dev/null\n"
    )


def test_control_characters_of_an_error_are_seen_and_not_obeyed() -> None:
    said = run(["grade", "\x1b]0;x\x07"]).stderr
    assert said.startswith("bapo-megatron: ␛]0;x␇: cannot be read (No such file or directory)")
