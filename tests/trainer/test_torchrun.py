"""Two ranks under torchrun: one clear line for an error, and no process after any end."""

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from tests.launch import Launched
from tests.trainer.chaos import steps, wait_for
from tests.trainer.dumps import MANY_STEPS

pytestmark = pytest.mark.distributed


NO_CHECKPOINT = "no checkpoint yet: the same command with --resume starts at step 1"


def _own_lines(stderr: str, rank: int) -> list[str]:
    """The lines of the command line's own errors of a rank."""
    prefix = rf"\[rank {rank}\] " if rank else ""
    return re.findall(rf"^{prefix}bapo-megatron: (.*)$", stderr, re.MULTILINE)


def _assert_no_rank_shows_a_traceback(stderr: str) -> None:
    """torchrun shows one of its own, which never comes through our files."""
    assert not re.search(r'bapo_megatron/\w+\.py", line \d+', stderr)


def _exchange(dump: Path) -> None:
    shutil.copy(dump.with_name("step_000002.parquet"), dump)


def _cut_short(dump: Path) -> None:
    dump.write_bytes(dump.read_bytes()[:-20])


@pytest.mark.parametrize(
    ("damage", "problem"),
    [(_exchange, "holds step 2, not 3"), (_cut_short, "not a readable parquet file")],
)
def test_a_dump_that_cannot_be_used_is_named_when_the_steps_before_are_saved(
    replay_config: Path,
    mixed_dumps: Path,
    tmp_path: Path,
    damage: Callable[[Path], None],
    problem: str,
) -> None:
    dumps = tmp_path / "dumps"
    shutil.copytree(mixed_dumps, dumps)
    damage(dumps / "step_000003.parquet")
    run_dir = tmp_path / "run"
    process = Launched(["train", str(replay_config), f"run_dir={run_dir}", f"replay={dumps}"])
    _, stderr = process.communicate()
    assert process.poll() == 1
    _assert_no_rank_shows_a_traceback(stderr)
    line, last = _own_lines(stderr, 0)  # the launcher's is below torchrun's report
    assert f"step_000003.parquet: {problem}" in line
    assert last.startswith(line)
    checkpoint = f"{run_dir}/checkpoints/step_2"
    assert last.endswith(
        f"--resume continues from {checkpoint}, of which bapo-megatron convert makes a model"
    )
    assert stderr.splitlines()[-1] == f"bapo-megatron: {last}"
    # torchrun may end rank 1 before it has said anything.
    assert _own_lines(stderr, 1) in ([], [line])


def test_what_rank_0_alone_refuses_ends_all_ranks_at_once(
    replay_config: Path, tmp_path: Path, started: list[Launched]
) -> None:
    # torchrun kills half a minute later what does not end.
    environment = {"PET_SHUTDOWN_TIMEOUT": "240"}
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    arguments = ["train", str(replay_config), f"run_dir={tmp_path}"]
    process = Launched(arguments, environment=environment)
    started.append(process)
    _, stderr = process.communicate(timeout=180)
    assert process.poll() == 1
    assert "already holds a run" in stderr.splitlines()[-1]
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_rank_0_waits_for_another_rank_ends_everything_and_leaves_nothing(
    number: signal.Signals,
    replay_config: Path,
    tmp_path: Path,
    started: list[Launched],
) -> None:
    run_dir, scratch, data = tmp_path / "run", tmp_path / "scratch", tmp_path / "train.jsonl"
    scratch.mkdir()
    data.write_text('{"prompt": "1+1=?", "answer": "2"}\n')
    settings = {
        "run_dir": run_dir,
        "algorithm.advantage": "tests.trainer.late_import:centred",
        "replay.dumps": "null",
        "rollout.engine": "local",  # with a collector of its own
        "rollout.groups_per_step": 2,
        "rollout.max_response_tokens": 16,
        "data.train.path": data,
        "data.max_prompt_tokens": 64,
    }
    overrides = [f"{name}={value}" for name, value in settings.items()]
    process = Launched(
        ["train", str(replay_config), *overrides],
        environment={"PET_SHUTDOWN_TIMEOUT": "240", "TMPDIR": str(scratch)},
    )
    started.append(process)
    wait_for(process, (run_dir / "config.yaml").exists, "rank 0")
    rank_0 = _rank(process, 0)
    wait_for(process, lambda: not _handles(rank_0, signal.SIGTERM), "rank 0 to join")
    children = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
    _, stderr = process.communicate(timeout=30)
    assert stderr.splitlines()[-1] == f"bapo-megatron: ended by {number.name}; {NO_CHECKPOINT}"
    assert len(children) >= 3
    _, alive = psutil.wait_procs(children, timeout=15)
    assert not alive
    assert not list(scratch.iterdir())


def _rank(process: Launched, rank: int) -> psutil.Process:
    """torchrun starts its ranks in order."""
    ranks = sorted(psutil.Process(process.pid).children(), key=lambda child: child.pid)
    assert len(ranks) == 2
    return ranks[rank]


def _handles(process: psutil.Process, number: signal.Signals) -> bool:
    status = Path(f"/proc/{process.pid}/status").read_text()
    (mask,) = re.findall(r"^SigCgt:\t(\w+)$", status, re.MULTILINE)
    return bool(int(mask, 16) >> (number - 1) & 1)


def test_ctrl_c_before_the_first_checkpoint_saves_the_steps_and_leaves_no_process(
    start_long: Callable[..., Launched], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    process = start_long(run_dir)
    wait_for(process, lambda: len(steps(run_dir)) >= 2, "two steps")
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 2
    process.send_signal(signal.SIGINT)
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not alive
    _, stderr = process.communicate(timeout=30)
    assert process.poll() == 1
    _assert_no_rank_shows_a_traceback(stderr)
    assert stderr.count("Saving and exiting;") == 1
    num_steps = len(steps(run_dir))
    assert num_steps < MANY_STEPS
    assert (run_dir / "saved").read_text() == f"step_{num_steps}\n"
    last = stderr.splitlines()[-1]
    assert last.startswith("bapo-megatron: stopped by SIGINT; ")
    checkpoint = f"{run_dir}/checkpoints/step_{num_steps}"
    assert last.endswith(f" {checkpoint}, of which bapo-megatron convert makes a model")


@pytest.mark.slow
def test_a_second_ctrl_c_ends_a_run_at_once_and_leaves_no_process(
    replay_config: Path, tmp_path: Path, started: list[Launched]
) -> None:
    endless = "algorithm.advantage=tests.trainer.stub_runs:endless_advantage"
    process = Launched(["train", str(replay_config), f"run_dir={tmp_path / 'run'}", endless])
    started.append(process)
    wait_for(process, lambda: "in a step\n" in process.output()[1], "the first step")
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)  # the same one
    time.sleep(5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, alive = psutil.wait_procs(children, timeout=25)
    assert not alive
    _, stderr = process.communicate(timeout=25)
    assert stderr.splitlines()[-1] == f"bapo-megatron: ended by SIGINT; {NO_CHECKPOINT}"


@pytest.mark.parametrize(
    ("number", "why"),
    [(signal.SIGTERM, "stopped by SIGTERM"), (signal.SIGKILL, "rank 1 ended by SIGKILL")],
)
def test_the_last_line_says_why_a_run_ended_and_how_it_goes_on(
    number: signal.Signals,
    why: str,
    start_long: Callable[..., Launched],
    tmp_path: Path,
) -> None:
    run_dir = tmp_path / "run"
    process = start_long(run_dir, "checkpoint.every_steps=1", PET_SHUTDOWN_TIMEOUT="240")
    wait_for(process, lambda: len(steps(run_dir)) >= 2, "two steps")
    if number == signal.SIGTERM:
        for _ in range(4):  # to torchrun, as Slurm does, and others with less patience
            process.send_signal(number)
            time.sleep(0.2)
    else:
        _rank(process, 1).send_signal(number)
    _, stderr = process.communicate(timeout=240)
    assert process.poll() == 1
    way_on = (
        rf"the same command with --resume continues from {run_dir}/checkpoints/step_\d+, "
        "of which bapo-megatron convert makes a model"
    )
    assert re.fullmatch(f"bapo-megatron: {why}; {way_on}", stderr.splitlines()[-1])


def test_what_a_rank_says_counts_before_how_the_others_ended(tmp_path: Path) -> None:
    from bapo_megatron.torchrun import _describe_failure

    killed = _failure(tmp_path, exitcode=-9, ended_s=102)
    lost = _failure(tmp_path, exitcode=1, ended_s=102)
    ended_by_torchrun = _failure(tmp_path, exitcode=-9, ended_s=132)
    terminated = _failure(tmp_path, exitcode=-15, ended_s=102)
    tells_more = _failure(tmp_path, exitcode=1, ended_s=102, said="it died; LOG says why:\n    x")
    said = _failure(tmp_path, exitcode=1, ended_s=101, said="data.jsonl: empty; add rows")
    noted, again = tmp_path / "run_dir", "; start all nodes of the run again"
    for failures, line in (
        ({0: lost, 1: killed}, f"rank 1 ended by SIGKILL{again}"),
        ({0: ended_by_torchrun, 1: lost}, f"rank 1 ended by exit status 1{again}"),
        ({0: terminated, 1: killed}, f"rank 1 ended by SIGKILL{again}"),
        ({0: tells_more, 1: terminated}, "it died; LOG says why"),
        ({0: killed, 1: said}, "rank 1: data.jsonl: empty; add rows"),
    ):
        assert _describe_failure(ChildFailedError("train", failures), noted) == line
    noted.write_text(str(tmp_path))
    line = _describe_failure(ChildFailedError("train", {0: said}), noted)
    assert line == f"data.jsonl: empty; add rows; {NO_CHECKPOINT}"
    explained = _failure(tmp_path, 1, ended_s=101, said="step_2: damaged", has_remedy=True)
    assert _describe_failure(ChildFailedError("train", {0: explained}), noted) == "step_2: damaged"


def _failure(
    scratch: Path, exitcode: int, ended_s: int, said: str = "", *, has_remedy: bool = False
) -> ProcessFailure:
    file = scratch / "error.json"
    if said:
        extra = {"timestamp": "1", "has_remedy": has_remedy}
        file.write_text(json.dumps({"message": {"message": said, "extraInfo": extra}}))
    failure = ProcessFailure(0, 1, exitcode, str(file))
    failure.timestamp = ended_s
    return failure
