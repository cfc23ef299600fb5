"""Code of a user that ends a rank: never exit status 0, always one line with the place."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from tests.launch import REPOSITORY, Launched, run
from tests.trainer.runs import refusal

pytestmark = pytest.mark.distributed
EXITING = "tests.trainer.exiting"


def arguments(config: Path, run_dir: Path, setting: str) -> list[str]:
    return ["train", str(config), f"run_dir={run_dir}", "checkpoint.every_steps=1", setting]


@pytest.mark.parametrize("ranks", [1, 2])
def test_sys_exit_in_a_rank_is_an_error_with_its_line(
    ranks: int, replay_config: Path, tmp_path: Path
) -> None:
    setting = f"algorithm.advantage={EXITING}:exits"
    status, line = refusal(arguments(replay_config, tmp_path / "run", setting), ranks=ranks)
    assert status == 1
    assert re.match(rf"algorithm\.advantage: '{EXITING}:exits' .*SystemExit: 0 .*\.py:\d+\)", line)


def test_an_end_without_python_s_cleanup_is_no_success_and_names_the_line(
    replay_config: Path, tmp_path: Path
) -> None:
    setting = f"algorithm.advantage={EXITING}:exits_at_once"
    process = Launched(arguments(replay_config, tmp_path / "run", setting))
    last = process.communicate()[1].splitlines()[-1]
    assert process.poll() == 1
    assert re.match(r"bapo-megatron: (rank 1: )?os\._exit\(0\) at /.*/exiting\.py:\d+ ", last)
    checkpoint = f"{tmp_path}/run/checkpoints/step_1"
    assert last.endswith(
        f"--resume continues from {checkpoint}, of which bapo-megatron convert makes a model"
    )


def test_code_that_changes_the_working_directory_moves_no_file(replay_config: Path) -> None:
    relative = Path("build") / f"moves-no-file-{os.getpid()}"
    run_dir = REPOSITORY / relative
    try:
        setting = f"algorithm.advantage={EXITING}:changes_directory"
        result = run([*arguments(replay_config, relative, setting), "train.steps=2"])
        assert result.returncode == 0, result.stderr
        assert (run_dir / "summary.json").is_file()
        assert (run_dir / "checkpoints" / "step_2").is_dir()
        assert not (Path("/") / relative).exists()
    finally:
        shutil.rmtree(run_dir, ignore_errors=True)
