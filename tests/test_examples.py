"""The scripts in examples/: clean shell, the commands that they run, and runs of them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import yaml

from tests.launch import REPOSITORY
from tests.trainer.dumps import make_random_model, replay_settings, write_dumps

EXAMPLES = REPOSITORY / "examples"
SCRIPTS = sorted([*EXAMPLES.glob("*.sh"), *EXAMPLES.glob("*.sbatch")])
KEY = "BAPO_MEGATRON_ADMIN_API_KEY"
READ = (
    *("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "NPROC", "CUDA_DEVICE_MAX_CONNECTIONS"),
    *("HOST", "SERVERS", "TENSOR", KEY, "BAPO_MEGATRON_API_KEY"),
)


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """A folder of stand-ins that comes first in PATH."""
    folder = tmp_path / "commands"
    folder.mkdir()
    return folder


def stand_in(folder: Path, name: str, script: str) -> Path:
    path = folder / name
    path.write_text(f"#!/usr/bin/env bash\n{script}\n")
    path.chmod(0o755)
    return path


def environment(commands: Path | None = None, **variables: str) -> dict[str, str]:
    """This process's environment without what the scripts read."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in READ and not name.startswith("SLURM")
    }
    path = f"{commands}:{os.environ['PATH']}" if commands else os.environ["PATH"]
    return {
        **inherited,
        "PATH": path,
        "PYTHON": sys.executable,
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "NO_COLOR": "1",
        **variables,
    }


def start(script: str, *arguments: str, env: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(EXAMPLES / script), *arguments],
        cwd=REPOSITORY,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], timeout_s: float = 240) -> str:
    """Output of a script that ends by itself."""
    try:
        return process.communicate(timeout=timeout_s)[0]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def run(script: str, *arguments: str, env: dict[str, str]) -> tuple[int, list[str]]:
    """Exit status and lines of output."""
    process = start(script, *arguments, env=env)
    output = finish(process)
    return process.returncode, output.splitlines()


@pytest.fixture(scope="module")
def replay_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of training from dumps."""
    folder = tmp_path_factory.mktemp("replay")
    model = make_random_model(folder / "model")
    dumps = write_dumps(folder / "dumps", model, steps=2)
    settings = replay_settings(model, dumps, folder / "run")
    settings["train"]["steps"] = 2
    (folder / "replay.yaml").write_text(yaml.safe_dump(settings))
    return folder / "replay.yaml"


def test_shell_scripts_are_clean() -> None:
    scripts = [*SCRIPTS, REPOSITORY / "requirements" / "install.sh"]
    shellcheck = Path(sys.executable).parent / "shellcheck"
    result = subprocess.run([shellcheck, *scripts], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_short_strict_and_says_how_to_use_it(script: Path) -> None:
    text = script.read_text()
    assert text.startswith("#!/usr/bin/env bash\n# ")
    assert "\n# usage: " in text or "usage: examples/" in text.splitlines()[2]
    assert "\nset -euo pipefail\n" in text
    assert os.access(script, os.X_OK)
    assert len(text.splitlines()) <= 50


@pytest.mark.parametrize(
    "script",
    [
        "demo.sh",
        "single_node.sh",
        "multi_node.sh",
        "rollout_servers.sh",
        "evaluate.sh",
        "slurm.sbatch",
    ],
)
def test_without_arguments_a_script_says_what_it_needs(script: str, commands: Path) -> None:
    never = stand_in(commands, "python", "echo started")
    status, lines = run(script, env=environment(PYTHON=str(never)))
    assert status != 0
    assert len(lines) == 1
    assert "usage" in lines[0]


def test_single_node_runs_torchrun_on_every_gpu_with_megatron_s_settings(commands: Path) -> None:
    python = stand_in(commands, "python", 'echo "$CUDA_DEVICE_MAX_CONNECTIONS: $*"')
    status, lines = run("single_node.sh", "a.yaml", "x=[1, 2]", env=environment(PYTHON=str(python)))
    assert (status, lines) == (
        0,
        [
            "1: -m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node gpu "
            "-m bapo_megatron train a.yaml x=[1, 2]"
        ],
    )


def test_in_a_slurm_step_the_task_s_number_is_the_node_s_rank(commands: Path) -> None:
    python = stand_in(commands, "python", 'echo "$@"')
    env = environment(PYTHON=str(python), NNODES="4", MASTER_ADDR="node7", SLURM_PROCID="3")
    status, lines = run("multi_node.sh", "a.yaml", env=env)
    assert (status, lines) == (
        0,
        [
            "-m torch.distributed.run --nnodes 4 --node-rank 3 --nproc-per-node gpu "
            "--master-addr node7 --master-port 29500 -m bapo_megatron train a.yaml"
        ],
    )


def demo(root: Path, commands: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The demo of a copy of examples/, with a stand-in for Python."""
    (root / "examples").mkdir()
    shutil.copy(EXAMPLES / "demo.sh", root / "examples")
    shown = '[[ $* != *" train "* ]] || echo -n "CUDA_VISIBLE_DEVICES=<$CUDA_VISIBLE_DEVICES> "\n'
    python = stand_in(commands, "python", shown + 'echo "$@"')
    command = [root / "examples" / "demo.sh", python, "0", *arguments]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "0,1"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env)


def test_the_demo_replaces_the_run_directory_that_it_is_given_and_no_other(
    commands: Path, tmp_path: Path
) -> None:
    for name in ("demo", "other"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.yaml").touch()
    result = demo(tmp_path, commands, "optimizer.lr=0", "run_dir=runs/other")
    assert (result.returncode, result.stderr) == (0, "")
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["demo"]
    train, plot, summary = result.stdout.splitlines()[1:]
    assert train.startswith("CUDA_VISIBLE_DEVICES=<> ")  # two ranks and a server share no GPU
    assert train.endswith("optimizer.lr=0 run_dir=runs/other")
    assert plot == "-m bapo_megatron plot runs/other"
    assert "runs/other/summary.json" in summary


@pytest.mark.parametrize(
    ("run_dir", "message"),
    [
        ("", "run_dir= names no directory; give one, or leave it out"),
        ("home", "home is not the directory of a run; remove it, or name another run_dir"),
    ],
)
def test_the_demo_deletes_nothing_but_a_run(
    commands: Path, tmp_path: Path, run_dir: str, message: str
) -> None:
    (tmp_path / "home").mkdir()
    result = demo(tmp_path, commands, f"run_dir={run_dir}")
    assert result.returncode != 0
    assert result.stdout == ""
    assert message in result.stderr
    assert (tmp_path / "home").is_dir()


@pytest.mark.parametrize(
    ("variables", "host"),
    [
        ({"HOST": "10.0.0.7"}, "10.0.0.7"),
        ({"SLURMD_NODENAME": "node3"}, "node3"),
        ({}, "127.0.0.1"),
    ],
)
def test_rollout_servers_listen_where_they_are_told(
    commands: Path, variables: dict[str, str], host: str
) -> None:
    python = stand_in(commands, "python", 'echo "$@"')
    env = environment(PYTHON=str(python), **variables)
    status, lines = run("rollout_servers.sh", "a.yaml", "rollout.server.count=8", env=env)
    assert (status, lines) == (
        0,
        [f"-m bapo_megatron serve a.yaml rollout.server.host={host} rollout.server.count=8"],
    )


def of_session(session: int) -> list[list[str]]:
    """Command lines of the processes that a script started and that still run."""
    found = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.cmdline())
    return found


def slurm_environment(
    commands: Path, tmp_path: Path, *, servers: str, trainer: str
) -> dict[str, str]:
    """A heterogeneous job of two trainer nodes and two rollout nodes, with stand-ins for Slurm."""
    stand_in(commands, "scontrol", 'test "$1 $2" = "show hostnames" && printf "%s1\\n%s2\\n" $3 $3')
    stand_in(
        commands,
        "srun",
        f'echo "srun $* | $NNODES $MASTER_ADDR ${{#{KEY}}}" >> {tmp_path}/calls\n'
        f'case "$1" in --het-group=1) {servers} ;; *) {trainer} ;; esac',
    )
    return environment(
        commands, SLURM_JOB_NODELIST_HET_GROUP_0="train", SLURM_JOB_NODELIST_HET_GROUP_1="sample"
    )


def test_the_slurm_job_starts_servers_and_trainer_and_ends_with_the_trainer(
    commands: Path, tmp_path: Path
) -> None:
    env = slurm_environment(commands, tmp_path, servers="exec sleep 300", trainer="sleep 1")
    env |= {"SERVERS": "2", "TENSOR": "4"}
    process = start("slurm.sbatch", "configs/a.yaml", "train.steps=3", env=env)
    finish(process, timeout_s=60)
    assert process.returncode == 0
    flags = "--cpu-bind=none --kill-on-bad-exit=1"
    assert sorted((tmp_path / "calls").read_text().splitlines()) == [
        f"srun --het-group=0 {flags} examples/multi_node.sh configs/a.yaml train.steps=3 "
        "rollout.servers=[http://sample1:30000,http://sample1:30001,http://sample2:30000,"
        "http://sample2:30001] | 2 train1 32",
        f"srun --het-group=1 {flags} examples/rollout_servers.sh configs/a.yaml train.steps=3 "
        "rollout.server.count=2 rollout.server.tensor=4 rollout.server.port=30000 | 2 train1 32",
    ]
    assert not of_session(process.pid)


def test_the_slurm_job_ends_when_its_servers_do(commands: Path, tmp_path: Path) -> None:
    env = slurm_environment(commands, tmp_path, servers="exit 7", trainer="exec sleep 300")
    process = start("slurm.sbatch", "configs/a.yaml", env=env)
    finish(process, timeout_s=60)
    assert process.returncode == 7
    assert not of_session(process.pid)
