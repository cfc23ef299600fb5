"""Sweeps as a user starts them; ``train`` is replaced."""

import errno
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO

import psutil
import pytest

from bapo_megatron import cli
from bapo_megatron.tools.sweep.file import PlannedRun, load_sweep
from bapo_megatron.tools.sweep.run import run_sweep
from tests.launch import Launched
from tests.tools.sweep import program
from tests.tools.sweep.files import write_sweep

Start = Callable[[Path], Launched]
Finish = Callable[..., tuple[int, str, str]]

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _uncut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are as wide as their rows, whatever the terminal."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def start(outcomes: Path, started: list[Launched]) -> Iterator[Start]:
    """Starts sweeps with the stand-in for ``train``; what still runs at the end is killed."""

    def start(file: Path) -> Launched:
        arguments = (program.__name__, str(outcomes), "sweep", str(file))
        started.append(Launched(program=arguments))
        return started[-1]

    yield start
    for process in runs_of(outcomes):
        process.kill()


@pytest.fixture
def finish(
    outcomes: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Finish:
    """Runs sweeps with the stand-in for ``train`` to their end, in this process."""
    monkeypatch.setattr(PlannedRun, "command", program.command_with(str(outcomes)))
    return partial(_finish, capsys)


def _finish(capsys: pytest.CaptureFixture[str], file: Path, *options: str) -> tuple[int, str, str]:
    """Exit status, standard output and standard error."""
    status = 0
    try:
        cli.app(["sweep", str(file), *options], standalone_mode=False)
    except ValueError as error:
        status = cli._report(error)
    return status, *capsys.readouterr()


def runs_of(outcomes: Path) -> list[psutil.Process]:
    """The stand-ins that are there."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if str(outcomes) in (process.info["cmdline"] or [])
        and str(program.FAKE) in process.info["cmdline"]
    ]


def until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s, f"{what}: not within 60 s"
        time.sleep(0.05)


def cells(line: str) -> list[str]:
    """The cells of a table's line."""
    return [cell.strip() for cell in re.split("[│┃]", line)[1:-1]]


def test_variants_are_compared_seed_by_seed(finish: Finish, base: Path, tmp_path: Path) -> None:
    status, out, err = finish(write_sweep(tmp_path, base, seeds=[0, 1, 2]))
    assert status == 0, err
    rows = [cells(line) for line in out.splitlines() if "│" in line]
    # Right of ten: GRPO 2, 3, 4, and BAPO 3, 5, 7, so that differences are 0.1, 0.2, 0.3.
    assert rows[0][:6] == ["sums", "avg@1", "grpo", "3", "30.00%", "5.16% … 54.84%"]
    assert rows[1] == [
        *("sums", "avg@1", "bapo", "3", "50.00%", "0.32% … 99.68%"),
        *("+20.00%", "-4.84% … +44.84%", "0.0742", "0.0742"),
    ]
    assert [row[1] for row in rows] == ["avg@1", "avg@1", "maj@1", "maj@1"]
    assert "Student's t over seeds" in out
    assert max(map(len, out.splitlines())) > 80  # a pipe cuts nothing
    results = json.loads((tmp_path / "sweep" / "sweep.json").read_text())
    runs = [(run["variant"], run["seed"], run["is_finished"]) for run in results["runs"]]
    assert runs[:2] == [("grpo", 0, True), ("bapo", 0, True)]
    bapo = results["scores"][1]
    assert (bapo["variant"], bapo["set_name"], bapo["name"]) == ("bapo", "sums", "avg@1")
    assert bapo["by_seed"] == {"0": 0.3, "1": 0.5, "2": 0.7}
    assert bapo["against_first"]["seeds"] == [0, 1, 2]
    assert bapo["against_first"]["paired"]["p_value"] == pytest.approx(0.0742, abs=1e-4)

    # Nothing is left to do: the same command shows the same.
    status, again, err = finish(tmp_path / "sweep.yaml", "--json")
    assert status == 0
    assert "6 of 6 runs are finished already" in err
    assert json.loads(again) == results


def test_one_seed_has_no_interval_and_one_variant_nothing_to_be_compared_with(
    finish: Finish, base: Path, tmp_path: Path
) -> None:
    bapo = {"bapo": ["algorithm.objective=bapo"]}
    _, out, err = finish(write_sweep(tmp_path, base, variants=bapo, seeds=[2]))
    assert "bapo/seed2: finished" in err
    (row,) = [cells(line) for line in out.splitlines() if "avg@1" in line]
    assert row[2:] == ["bapo", "1", "70.00%", "–"]


def test_a_run_that_fails_stops_no_other_and_is_continued_by_the_same_command(
    finish: Finish, base: Path, tmp_path: Path, outcomes: Path
) -> None:
    (outcomes / "fails").write_text("bapo/seed1\n")
    three = {
        name: [f"algorithm.objective={o}"]
        for name, o in (("grpo", "clip"), ("bapo", "bapo"), ("none", "none"))
    }
    file = write_sweep(tmp_path, base, variants=three, seeds=[0, 1, 2])
    status, out, err = finish(file)
    assert status == 1
    log = tmp_path / "sweep" / "bapo" / "seed1" / "logs" / "sweep.log"
    failed = "bapo/seed1 failed: model.path: 'x' is broken; repair it (exit status 1)"
    assert f"{failed}; log: {log}" in err.splitlines()
    assert err.splitlines()[-1].startswith("bapo-megatron: 1 of 9 runs did not finish; ")
    rows = [cells(line) for line in out.splitlines() if "│" in line]
    # The pairs of seeds 0 and 2 are left; with two p-values, Holm doubles the smaller one.
    assert rows[1][2:5] == ["bapo", "2", "50.00%"]
    assert rows[1][6] == "+20.00%"
    assert rows[1][8:] == ["0.2952", "0.5903"]
    assert rows[2][8:] == ["1.0000", "1.0000"]

    (outcomes / "fails").unlink()
    status, out, err = finish(file)
    assert status == 0, err
    assert "8 of 9 runs are finished already" in err
    steps = (tmp_path / "sweep" / "bapo" / "seed1" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in steps] == [1, 2, 3]


def test_ctrl_c_has_the_runs_save_and_leaves_none_behind(
    start: Start, finish: Finish, base: Path, tmp_path: Path, outcomes: Path
) -> None:
    (outcomes / "waits").write_text("grpo/seed0 bapo/seed0\n")
    file = write_sweep(tmp_path, base)
    sweep = start(file)
    runs = [tmp_path / "sweep" / name / "seed0" for name in ("grpo", "bapo")]
    until(lambda: all((run / "waiting").exists() for run in runs), "two runs wait")
    assert f"bapo-megatron: {tmp_path}/sweep: in use by another sweep" in finish(file)[2]
    sweep.send_signal(signal.SIGINT)
    _, err = sweep.communicate(timeout=120)
    assert sweep.poll() == 130
    assert "saving and ending grpo/seed0, bapo/seed0; " in err
    assert "interrupted; rerun the command" in err
    assert all((run / "saved").exists() for run in runs)
    assert runs_of(outcomes) == []

    (outcomes / "waits").unlink()
    assert finish(file)[0] == 0


@pytest.mark.parametrize("has_locks", [True, False])
def test_what_another_sweep_finishes_before_this_one_has_the_lock_is_not_started_again(
    has_locks: bool,
    base: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sweep = load_sweep(write_sweep(tmp_path, base))

    def lock_on_nfs(file: IO[bytes], _: int) -> None:
        for run in sweep.runs:
            run.run_dir.mkdir(parents=True)
            (run.run_dir / "summary.json").touch()
        if not has_locks:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    monkeypatch.setattr(fcntl, "flock", lock_on_nfs)
    monkeypatch.setattr(subprocess, "Popen", None)
    assert run_sweep(sweep) == {}
    assert ("does not support locks" in capsys.readouterr().err) is not has_locks


def test_a_second_ctrl_c_ends_runs_that_do_not(
    start: Start, base: Path, tmp_path: Path, outcomes: Path
) -> None:
    (outcomes / "waits").write_text("stubborn/seed0\n")
    file = write_sweep(
        tmp_path, base, variants={"stubborn": ["algorithm.objective=clip"]}, seeds=[0]
    )
    sweep = start(file)
    until(lambda: (tmp_path / "sweep/stubborn/seed0/waiting").exists(), "the run waits")
    sweep.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert len(runs_of(outcomes)) == 1
    sweep.send_signal(signal.SIGINT)
    _, err = sweep.communicate(timeout=120)
    assert (sweep.poll(), "ending them at once" in err) == (130, True)
    assert runs_of(outcomes) == []


def test_runs_save_and_end_when_the_sweep_is_killed(
    start: Start, base: Path, tmp_path: Path, outcomes: Path
) -> None:
    (outcomes / "waits").write_text("grpo/seed0\n")
    sweep = start(write_sweep(tmp_path, base, jobs=1))
    run = tmp_path / "sweep" / "grpo" / "seed0"
    until(lambda: (run / "waiting").exists(), "the run waits")
    sweep.send_signal(signal.SIGKILL)
    until(lambda: (run / "saved").exists(), "the run has saved")
    until(lambda: not runs_of(outcomes), "the run has ended")


def test_a_slurm_array_has_a_task_per_run_and_continues_what_was_saved(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "my sweep"
    wide = {"wide": ["parallel.tensor=2"]}
    file = write_sweep(tmp_path, base, variants=wide, jobs=3, dir=str(directory))
    status, out, err = _finish(capsys, file, "--slurm")
    script = directory / "sweep.sbatch"
    assert (status, out) == (0, "")
    assert f"wrote {script} for 2 runs; submit it with: sbatch '{script}'\n" in err
    text = script.read_text()
    assert "#SBATCH --job-name='my sweep' --array=0-1%3 " in text
    assert f" --output='{directory}/slurm-%a.log'\n" in text
    assert "--gpus-per-node=2\n" in text
    shellcheck = Path(sys.executable).parent / "shellcheck"
    checked = subprocess.run([shellcheck, script], capture_output=True, text=True, check=False)
    assert checked.stdout == ""

    # A task, with stand-ins: the first try is asked to stop, the last one finishes.
    tools = tmp_path / "tools"
    tools.mkdir()
    run_dir = load_sweep(file).runs[1].run_dir
    run_dir.mkdir(parents=True)
    for name, body in {
        "scontrol": f'echo "scontrol $*" >> {tmp_path}/calls',
        "python": f'echo "$OMP_NUM_THREADS $*" >> {tmp_path}/calls\n'
        f"touch '{run_dir}/stopped'; exit 1",
    }.items():
        (tools / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tools / name).chmod(0o755)
    script.write_text(text.replace(sys.executable, str(tools / "python")))
    env = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "OMP_NUM_THREADS": "4"}
    task = {"SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_JOB_ID": "77"}
    done = subprocess.run(["bash", script], env=env | task, check=False)
    assert done.returncode == 0
    train, requeue = (tmp_path / "calls").read_text().splitlines()
    assert train.startswith(
        "4 -m bapo_megatron.torchrun --nproc-per-node 2 -m bapo_megatron train "
    )
    assert train.endswith(f'name=my-sweep-wide-seed1 run_dir="{run_dir}" seed=1 --resume')
    assert requeue == "scontrol requeue 77_1"
    # The next try fails at once, beside what the first one left.
    body = (tools / "python").read_text()
    (tools / "python").write_text(body.replace(f"touch '{run_dir}/stopped'; ", ""))
    assert subprocess.run(["bash", script], env=env | task, check=False).returncode == 1
    assert "scontrol" not in (tmp_path / "calls").read_text().partition("requeue")[2]
    (run_dir / "summary.json").touch()
    (tmp_path / "calls").unlink()
    assert subprocess.run(["bash", script], env=env | task, check=False).returncode == 0
    assert not (tmp_path / "calls").exists()
