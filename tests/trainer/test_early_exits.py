"""Code of a user that ends a rank: never exit status 0, always one line with the place."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from tests.launch import REPOSITORY, run, torchrun

pytestmark = pytest.mark.distributed
EXITING = "tests.trainer.exiting"
WAY_ON = "the same command with --resume continues from {}/run/checkpoints/step_1"


def arguments(config: Path, run_dir: Path, setting: str) -> list[str]:
    return ["train", str(config), f"run_dir={run_dir}", "checkpoint.every_steps=1", setting]


@pytest.mark.parametrize("ranks", [1, 2])
def test_sys_exit_in_a_rank_is_an_error_with_its_line(
    ranks: int, replay_config: Path, tmp_path: Path
) -> None:
    setting = f"algorithm.advantage={EXITING}:exits"
    result = run(arguments(replay_config, tmp_path / "run", setting), ranks=ranks)
    assert result.returncode == 1
    assert re.search(
        rf"^bapo-megatron: algorithm\.advantage: '{EXITING}:exits' raised SystemExit: 0 "
        r"\(/.*/exiting\.py:\d+\); correct it$",
        result.stderr,
        re.MULTILINE,
    )
    assert "Traceback" not in result.stderr


def test_os_exit_in_a_rank_is_an_error_with_its_line(replay_config: Path, tmp_path: Path) -> None:
    setting = f"algorithm.advantage={EXITING}:exits_at_once"
    result = torchrun(arguments(replay_config, tmp_path / "run", setting), ranks=2)
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    way_on = re.escape(WAY_ON.format(tmp_path))
    assert re.fullmatch(
        r"bapo-megatron: (rank 1: )?os\._exit\(0\) at /.*/exiting\.py:\d+ ended this process "
        rf"before it was done; raise an error there instead; {way_on}",
        last,
    )


@pytest.mark.parametrize("ranks", ["01", "1"])
def test_an_end_in_c_is_no_success_and_names_the_rank(
    ranks: str, replay_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXITING_RANKS", ranks)
    setting = f"algorithm.advantage={EXITING}:exits_in_c"
    result = torchrun(arguments(replay_config, tmp_path / "run", setting), ranks=2)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == (
        f"bapo-megatron: rank {ranks[0]} ended with exit status 0 before it was done: user or "
        f"library code calls exit in C, or exec; remove that call; {WAY_ON.format(tmp_path)}"
    )


@pytest.mark.parametrize(
    ("name", "line"),
    [
        (
            "exits_at_import",
            r"algorithm\.objective: 'tests\.reward\.exits_at_import:loss': cannot import "
            r"tests\.reward\.exits_at_import: SystemExit: 0 \(/.*/exits_at_import\.py:5\); .*",
        ),
        (
            "ends_at_import",
            r"os\._exit\(0\) at /.*/ends_at_import\.py:5 ended this process before it was done; "
            "raise an error there instead",
        ),
    ],
)
def test_an_import_that_exits_is_an_error_with_its_line(
    name: str, line: str, replay_config: Path, tmp_path: Path
) -> None:
    setting = f"algorithm.objective=tests.reward.{name}:loss"
    result = run(arguments(replay_config, tmp_path / "run", setting))
    assert result.returncode == 1
    assert re.fullmatch(rf"bapo-megatron: {line}\n", result.stderr)
    assert not (tmp_path / "run").exists()


def test_code_that_changes_the_working_directory_moves_no_file(replay_config: Path) -> None:
    relative = Path("build") / f"moves-no-file-{os.getpid()}"
    run_dir = REPOSITORY / relative
    try:
        setting = f"algorithm.advantage={EXITING}:changes_directory"
        result = run(arguments(replay_config, relative, setting))
        assert result.returncode == 0, result.stderr
        assert (run_dir / "summary.json").is_file()
        assert (run_dir / "checkpoints" / "step_5").is_dir()
        assert not (Path("/") / relative).exists()
    finally:
        shutil.rmtree(run_dir, ignore_errors=True)
