"""The scripts in examples/: clean shell, the commands that they run, and runs of them."""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.launch import REPOSITORY

EXAMPLES = REPOSITORY / "examples"
SCRIPTS = sorted([*EXAMPLES.rglob("*.sh"), *EXAMPLES.glob("*.sbatch")])
KEY = "BAPO_MEGATRON_ADMIN_API_KEY"
READ = (
    *("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "NPROC", "CUDA_DEVICE_MAX_CONNECTIONS"),
    *("HOST", "PYTHON", "APPTAINER_IMAGE", KEY, "BAPO_MEGATRON_API_KEY"),
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


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_short_strict_and_says_how_to_use_it(script: Path) -> None:
    text = script.read_text()
    assert text.startswith("#!/usr/bin/env bash\n# ")
    assert "\n# usage: " in text or "usage: examples/" in text.splitlines()[2]
    assert "\nset -euo pipefail\n" in text
    assert os.access(script, os.X_OK)
    assert len(text.splitlines()) <= 60


@pytest.mark.parametrize("script", [script.name for script in SCRIPTS if script.parent == EXAMPLES])
def test_without_arguments_a_script_says_what_it_needs(script: str, commands: Path) -> None:
    never = stand_in(commands, "python", "echo started")
    status, lines = run(script, env=environment(PYTHON=str(never)))
    assert status != 0
    assert len(lines) == 1
    assert "usage" in lines[0]


TORCHRUN = "1 -m bapo_megatron.torchrun"
TWO_NODES = {"NNODES": "2", "MASTER_ADDR": "node0"}
ON_TWO_NODES = "--nproc-per-node gpu --master-addr node0 --master-port 29500 -m bapo_megatron"
SERVE = " -m bapo_megatron serve a.yaml rollout.server.host={} x=[1, 2]"


@pytest.mark.parametrize(
    ("script", "variables", "command"),
    [
        (
            "single_node.sh",
            {},
            f"{TORCHRUN} --nproc-per-node gpu -m bapo_megatron train a.yaml x=[1, 2] --resume",
        ),
        (
            "multi_node.sh",
            {**TWO_NODES, "NODE_RANK": "1", "PREFLIGHT": "1"},
            f"{TORCHRUN} --nnodes 2 --node-rank 1 {ON_TWO_NODES} doctor --cluster a.yaml x=[1, 2]",
        ),
        (
            "multi_node.sh",
            {**TWO_NODES, "SLURM_PROCID": "3"},
            f"{TORCHRUN} --nnodes 2 --node-rank 3 {ON_TWO_NODES} train a.yaml x=[1, 2] --resume",
        ),
        ("rollout_servers.sh", {"HOST": "10.0.0.7"}, SERVE.format("10.0.0.7")),
        ("rollout_servers.sh", {"SLURMD_NODENAME": "node3"}, SERVE.format("node3")),
        ("rollout_servers.sh", {}, SERVE.format("127.0.0.1")),
        (
            "evaluate.sh run.yaml runs/1/hf",
            {},
            " -m bapo_megatron eval run.yaml model.path=runs/1/hf run_dir=a.yaml x=[1, 2]",
        ),
    ],
)
def test_a_script_becomes_the_command_that_it_is_for(
    commands: Path, script: str, variables: dict[str, str], command: str
) -> None:
    python = stand_in(commands, "python", 'echo "$$ $CUDA_DEVICE_MAX_CONNECTIONS $*"')
    env = environment(PYTHON=str(python), **variables)
    process = start(*script.split(), "a.yaml", "x=[1, 2]", env=env)
    # In the same process, so that signals of Slurm reach it.
    assert finish(process) == f"{process.pid} {command}\n"
    assert process.returncode == 0


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
    train, report, summary = result.stdout.splitlines()[1:]
    assert train.startswith("CUDA_VISIBLE_DEVICES=<> ")  # two ranks and a server share no GPU
    assert train.endswith("optimizer.lr=0 run_dir=runs/other")
    assert report == "-m bapo_megatron report runs/other examples/demo_grpo"
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


def of_session(session: int) -> list[list[str]]:
    """Command lines of the processes that a script started and that still run."""
    command_lines = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                command_lines.append(process.cmdline())
    return command_lines


def slurm_environment(
    commands: Path,
    tmp_path: Path,
    *,
    servers: str,
    trainer: str,
    check: str = "",
    preflight: str = "true",
) -> dict[str, str]:
    """A heterogeneous job of two trainer nodes and two rollout nodes, with stand-ins for Slurm.

    What is called is in ``tmp_path/calls``, what the trainer should write in ``tmp_path/run``.
    """
    calls = tmp_path / "calls"
    (tmp_path / "run").mkdir()
    stand_in(
        commands,
        "scontrol",
        f'case "$1" in show) tr , "\\n" <<<"$3" ;; *) echo "scontrol $*" >> {calls} ;; esac',
    )
    stand_in(
        commands,
        "srun",
        f'echo "srun $* | $NNODES $MASTER_ADDR ${{#{KEY}}}" >> {calls}\n'
        f'case "$1" in --het-group=1) {servers} ;; --het-group=0) {trainer} ;; '
        f"*) {preflight} ;; esac",
    )
    stand_in(commands, "sleep", 'exec /bin/sleep "$(($1 > 100 ? $1 : 0)).1"')
    resolved = f"run_dir: {tmp_path}/run\\nrollout:\\n  server:\\n    count: 2\\n"
    python = stand_in(
        commands,
        "python",
        f'case "$3" in config) {check} echo "$WORLD_SIZE: $*" >> {calls}; printf "{resolved}" ;;\n'
        f'*) exec {sys.executable} "$@" ;; esac',
    )
    return environment(
        commands,
        PYTHON=str(python),
        SLURM_JOB_ID="77",
        SLURM_JOB_END_TIME="4000000000",
        SLURM_GPUS_ON_NODE="8",
        SLURM_JOB_NODELIST_HET_GROUP_0="train1,train2",
        SLURM_JOB_NODELIST_HET_GROUP_1="sample1,sample2",
    )


def test_the_slurm_job_starts_servers_and_trainer_and_ends_with_the_trainer(
    commands: Path, tmp_path: Path
) -> None:
    count = f"$(grep -c nodelist=sample2 {tmp_path}/calls)"
    env = slurm_environment(  # servers that end again and again, as those of a failed node
        commands, tmp_path, servers="exit 7", trainer=f"until (({count} > 2)); do sleep 0; done"
    )
    process = start("slurm.sbatch", "configs/a.yaml", "train.steps=3", env=env)
    finish(process, timeout_s=120)
    assert process.returncode == 0
    flags = "--cpu-bind=none --kill-on-bad-exit=1"
    servers = (
        "srun --het-group=1 --nodes=1 --ntasks=1 --nodelist={} --cpu-bind=none {} | 2 train1 32"
    )
    command = "examples/rollout_servers.sh configs/a.yaml train.steps=3 rollout.server.port=30000"
    assert sorted(set((tmp_path / "calls").read_text().splitlines())) == [
        "16: -m bapo_megatron config configs/a.yaml train.steps=3",
        f"srun --het-group=0 {flags} examples/multi_node.sh configs/a.yaml train.steps=3 "
        "rollout.servers=[http://sample1:30000,http://sample1:30001,http://sample2:30000,"
        "http://sample2:30001] | 2 train1 32",
        f"srun --het-group=0,1 {flags} examples/multi_node.sh configs/a.yaml train.steps=3 "
        "| 4 train1 32",
        servers.format("sample1", command),
        servers.format("sample2", command),
    ]
    assert not of_session(process.pid)


UNFIT = 'echo "start a multiple of $((WORLD_SIZE * 4)) ranks" >&2; exit 2;'


@pytest.mark.parametrize(
    ("parts", "variables", "status", "said", "called"),
    [
        ({"check": UNFIT}, {}, 2, "start a multiple of 64 ranks", []),
        ({"preflight": "exit 3"}, {}, 3, "", ["-m", "--het-group=0,1"]),
        ({}, {"SLURM_JOB_ACCOUNT": "ACCOUNT"}, 2, "replace ACCOUNT and PARTITION", []),
        ({}, {"SLURM_JOB_PARTITION": "PARTITION"}, 2, "replace ACCOUNT and PARTITION", []),
    ],
    ids=["configuration", "node", "account", "partition"],
)
def test_the_slurm_job_ends_where_something_is_not_in_order(
    commands: Path,
    tmp_path: Path,
    parts: dict[str, str],
    variables: dict[str, str],
    status: int,
    said: str,
    called: list[str],
) -> None:
    env = slurm_environment(commands, tmp_path, servers="", trainer="", **parts) | variables
    (tmp_path / "calls").touch()
    ended, lines = run("slurm.sbatch", "configs/a.yaml", env=env)
    assert (ended, len(lines)) == (status, len(said) > 0)
    assert said in "".join(lines)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [call.split()[1] for call in calls] == called


@pytest.mark.parametrize(
    ("number", "is_saved", "status", "requeued"),
    [
        pytest.param(signal.SIGUSR1, True, 0, ["scontrol requeue 77"], id="before the limit"),
        pytest.param(signal.SIGUSR1, False, 1, [], id="the save failed"),
        pytest.param(signal.SIGTERM, True, 1, [], id="scancel"),
    ],
)
def test_the_slurm_job_is_queued_again_when_the_run_was_saved(
    commands: Path,
    tmp_path: Path,
    number: signal.Signals,
    is_saved: bool,
    status: int,
    requeued: list[str],
) -> None:
    save = f"touch {tmp_path}/run/stopped; " * is_saved
    wait = f"touch {tmp_path}/ready; while :; do sleep 0; done"
    env = slurm_environment(
        commands,
        tmp_path,
        servers="exec sleep 300",
        trainer=f"trap '{save}exit 1' TERM; {wait}",
    )
    (tmp_path / "run" / "stopped").touch()  # an earlier try was saved
    process = start("slurm.sbatch", "configs/a.yaml", env=env)
    while not (tmp_path / "ready").exists():
        time.sleep(0.01)
    process.send_signal(number)
    finish(process, timeout_s=120)
    assert process.returncode == status
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [call for call in calls if call.startswith("scontrol")] == requeued
    assert not of_session(process.pid)
