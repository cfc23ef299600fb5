"""A second start in the directory of a live run: it says who works there, and touches nothing."""

import re
import subprocess
import urllib.request
from pathlib import Path

import pytest

from tests.launch import free_port, run, start
from tests.trainer.chaos import steps, wait_for
from tests.trainer.dumps import MANY_STEPS


@pytest.mark.distributed
@pytest.mark.exhaustive
def test_a_second_start_names_the_first_and_after_a_kill_the_run_goes_on(
    replay_config: Path, many_dumps: Path, tmp_path: Path, started: list[subprocess.Popen[str]]
) -> None:
    run_dir, link, noted = tmp_path / "run", tmp_path / "link", tmp_path / "noted"
    link.symlink_to("run")
    settings = {
        "replay": many_dumps,
        "train.steps": MANY_STEPS,
        "algorithm.advantage": "tests.trainer.stub_runs:slow_advantage",
        "log.prometheus_port": (port := free_port()),  # which must not be what is named
    }
    overrides = [f"{name}={value}" for name, value in settings.items()]
    train = ["train", str(replay_config), *overrides]
    first = start([*train, f"run_dir={run_dir}"])
    started.append(first)
    wait_for(first, lambda: len(steps(run_dir)) >= 1, "a step")
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as page:
        assert b"\nbapo_policy_entropy " in page.read()
    before = {name: (run_dir / name).read_bytes() for name in ("config.yaml", ".lock")}
    data = tmp_path / "sums.jsonl"
    data.write_text('{"prompt": "1+1=?", "answer": "2"}\n')
    sampling = [
        f"run_dir={run_dir}",
        "replay.dumps=null",
        "rollout.servers=[http://127.0.0.1:1]",
        "rollout.max_response_tokens=64",
        "eval.max_response_tokens=64",
    ]
    for arguments in (
        [*train, f"run_dir={link}", "--resume", "seed=7"],
        ["eval", str(replay_config), *sampling, f"eval.sets=[{{path: {data}}}]"],
        ["generate", str(replay_config), *sampling, f"data.train.path={data}"],
    ):
        second = run(arguments, environment={"BAPO_MEGATRON_RUN_DIR_FILE": str(noted)})
        assert second.returncode == 1
        assert re.fullmatch(
            rf"bapo-megatron: {tmp_path}/(run|link): in use by train, process {first.pid} on \S+ "
            r"since \S+ \S+ \S+; wait until it ends, or choose another run_dir",
            second.stderr.splitlines()[-1],
        )
    assert {name: (run_dir / name).read_bytes() for name in before} == before
    assert "in use" not in (run_dir / "console.log").read_text()
    assert not noted.exists()
    num_steps = len(steps(run_dir))
    wait_for(first, lambda: len(steps(run_dir)) > num_steps, "a step after that")
    first.kill()
    result = run(
        [*train, f"run_dir={link}", "--resume"],
        environment={"SLURM_JOB_ID": "77", "SLURM_JOB_END_TIME": "1000000000"},
    )
    assert result.returncode == 0, result.stderr
    (line,) = (line for line in result.stderr.splitlines() if "stop" in line)
    assert line == result.stderr.splitlines()[-1]
    assert line.startswith("stopped by train.stop_lead_s = 900: the Slurm job ends at 2001-09-")
