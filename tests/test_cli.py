"""The command line: what it imports, how it ends, and what it says of errors."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import bapo_megatron
from bapo_megatron import cli
from bapo_megatron.commands import options
from tests import preloaded
from tests.config.shipped import MODELS
from tests.distributed_launch import run_ranks
from tests.launch import REPOSITORY, run

COMMAND = [sys.executable, "-m", "bapo_megatron"]


def python(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.slow
def test_a_signal_ends_a_command_once_whatever_error_comes_of_it() -> None:
    # As torch.asarray does: "could not determine the shape of object type UntypedStorage".
    result = python("""
import os, signal
from bapo_megatron import cli

def app(**options):
    try:
        signal.raise_signal(first)
    except BaseException:
        if is_replaced:
            raise TypeError("another") from None
        raise
    finally:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        print("cleaned up")

cli.app = app
for is_replaced in (False, True):
    for first in (signal.SIGINT, signal.SIGTERM):
        if os.fork() == 0:
            cli.main()
        print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
""")
    assert result.stdout == 2 * "cleaned up\n130\ncleaned up\n143\n"
    assert result.stderr == 2 * "bapo-megatron: interrupted\n"
    assert result.returncode == 0


def test_the_script_finds_modules_of_the_current_directory_and_of_home(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "bapo-megatron"  # as pip writes it
    script.write_text(
        "import sys\nfrom bapo_megatron import cli\n"
        "from bapo_megatron.runtime.names import load_named\n"
        "try:\n    cli.main()\nexcept SystemExit:\n"
        "    print(load_named('my_losses:loss')(), *sys.argv[1:])\n"
    )
    (tmp_path / "my_losses.py").write_text("def loss(): return 7\n")
    (tmp_path / "~").mkdir()
    environment = {**os.environ, "HOME": "/home/me", "PYTHONPATH": str(REPOSITORY)}
    result = subprocess.run(
        [sys.executable, script, "--version", "--out=~/a", "~", "a~", "run_dir=~/b"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.splitlines()[-1] == "7 --version --out=/home/me/a /home/me a~ run_dir=~/b"


def test_version_and_help_name_the_package_and_its_commands() -> None:
    assert run(["--version"]).stdout == f"bapo-megatron {bapo_megatron.__version__}\n"
    listed = run(["--help"], environment={"COLUMNS": "200"}).stdout
    for name, line in cli.COMMANDS.items():
        assert f"{name} " in listed
        assert line in listed


@pytest.mark.parametrize("command", ["--help", "config"])
def test_what_takes_half_a_second_imports_no_slow_library(command: str, tmp_path: Path) -> None:
    arguments = command.split()
    if command == "config":
        shutil.copy(MODELS / "qwen3-0.6b.json", tmp_path / "config.json")
        for name in ("model.safetensors", "tokenizer_config.json"):
            (tmp_path / name).touch()
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
    result = python(program, *arguments)
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("[]\n")


def test_what_generates_is_started_before_torch_is_imported() -> None:
    result = python("""
import sys
from bapo_megatron.trainer.opening import open_run
print("torch" in sys.modules)
""")
    assert result.stdout == "False\n", result.stderr


@pytest.mark.distributed
def test_imports_of_a_training_without_a_gpu_load_no_compiler() -> None:
    assert run_ranks(preloaded.compiler_of_imports, 1) == [set()]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["bounds", "/no/such.parquet"], "/no/such.parquet: no such file"),
        (["bounds", "x.parquet", "--preset", "papper"], "preset"),
        (["train"], "Missing argument 'CONFIG'"),
        (["trian"], "No such command 'trian'. Did you mean 'train'?"),
        (["grade", "\x1b]0;x\x07"], "␛]0;x␇: no such file"),
    ],
)
def test_wrong_usage_is_one_line_and_a_status(arguments: list[str], expected: str) -> None:
    result = run(arguments)
    assert result.returncode != 0
    (line,) = result.stderr.splitlines()
    assert line.startswith("bapo-megatron: ")
    assert expected in line


def test_torchrun_is_told_an_error_whose_control_characters_are_seen(tmp_path: Path) -> None:
    file = tmp_path / "error.json"  # whose message torchrun prints
    result = run(["train", "no\x1b[2J.yaml"], environment={"TORCHELASTIC_ERROR_FILE": str(file)})
    assert result.stderr == "bapo-megatron: no␛[2J.yaml: no such file; check the path\n"
    message = json.loads(file.read_text())["message"]["message"]
    assert message == "no␛[2J.yaml: no such file; check the path"


def test_resume_is_an_option_of_train(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[list[str]] = []

    def load_config(config: Path, overrides: list[str]) -> Any:
        loaded.append(overrides)
        raise ValueError("seen")

    monkeypatch.setattr(options, "load_config", load_config)
    for arguments in (["seed=1", "--resume"], ["--resume"], ["seed=1"]):
        with pytest.raises(ValueError, match="seen"):
            cli.app(["train", "run.yaml", *arguments], standalone_mode=False)
    assert loaded == [["seed=1", "resume=true"], ["resume=true"], ["seed=1"]]


@pytest.mark.parametrize(
    ("redirected", "place"),
    [("config >/dev/full", "no space left on device"), ("--help >&-", "closed")],
)
def test_standard_output_that_cannot_be_written_is_named(redirected: str, place: str) -> None:
    result = subprocess.run(
        ["sh", "-c", f'"$@" {redirected}', "sh", *COMMAND],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"bapo-megatron: standard output: {place}; ")


@pytest.mark.parametrize("arguments", [["--help"], ["config"]])
def test_a_command_ends_silently_once_nobody_reads_its_output(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    result = subprocess.run(
        [*COMMAND, *arguments], stdout=writer, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writer)
    assert (result.returncode, result.stderr) == (141, "")
