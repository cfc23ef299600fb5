"""The scripts in examples/: clean shell, the commands that they run, and runs of them."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import yaml

from bapo_megatron.telemetry.sinks import read_metrics
from tests import launch
from tests.launch import REPOSITORY, free_port
from tests.trainer.dumps import make_random_model, replay_settings, write_dumps

EXAMPLES = REPOSITORY / "examples"
SCRIPTS = sorted([*EXAMPLES.rglob("*.sh"), *EXAMPLES.glob("*.sbatch")])
KEY = "BAPO_MEGATRON_ADMIN_API_KEY"
READ = (
    *("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "NPROC", "CUDA_DEVICE_MAX_CONNECTIONS"),
    *("HOST", "PYTHON", KEY, "BAPO_MEGATRON_API_KEY"),
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
    assert len(text.splitlines()) <= 60


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
            "1: -m bapo_megatron.torchrun --nproc-per-node gpu "
            "-m bapo_megatron train a.yaml x=[1, 2] --resume"
        ],
    )


def test_multi_node_checks_the_machines_instead_of_training(commands: Path) -> None:
    python = stand_in(commands, "python", 'echo "${@:13}"')
    place = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "node0", "PREFLIGHT": "1"}
    env = environment(PYTHON=str(python), **place)
    status, lines = run("multi_node.sh", "a.yaml", "x=1", env=env)
    assert (status, lines) == (0, ["-m bapo_megatron doctor --cluster a.yaml x=1"])


def test_in_a_slurm_step_the_task_s_number_is_the_node_s_rank(commands: Path) -> None:
    python = stand_in(commands, "python", 'echo "$@"')
    env = environment(PYTHON=str(python), NNODES="4", MASTER_ADDR="node7", SLURM_PROCID="3")
    status, lines = run("multi_node.sh", "a.yaml", env=env)
    assert (status, lines) == (
        0,
        [
            "-m bapo_megatron.torchrun --nnodes 4 --node-rank 3 --nproc-per-node gpu "
            "--master-addr node7 --master-port 29500 -m bapo_megatron train a.yaml --resume"
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
    assert (
        plot == "-m bapo_megatron plot runs/other examples/demo_grpo --out runs/other/dynamics.png"
    )
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


def test_the_slurm_job_ends_where_the_configuration_does_not_fit_its_nodes(
    commands: Path, tmp_path: Path
) -> None:
    check = 'echo "start a multiple of $((WORLD_SIZE * 4)) ranks" >&2; exit 2;'
    env = slurm_environment(commands, tmp_path, servers="", trainer="", check=check)
    status, lines = run("slurm.sbatch", "configs/a.yaml", env=env)
    assert (status, lines) == (2, ["start a multiple of 64 ranks"])
    assert not (tmp_path / "calls").exists()


def test_the_slurm_job_ends_where_a_node_is_not_in_order(commands: Path, tmp_path: Path) -> None:
    env = slurm_environment(commands, tmp_path, servers="", trainer="", preflight="exit 3")
    assert run("slurm.sbatch", "configs/a.yaml", env=env)[0] == 3
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [call.split()[1] for call in calls] == ["-m", "--het-group=0,1"]


@pytest.mark.parametrize(
    ("name", "placeholder"),
    [("SLURM_JOB_ACCOUNT", "ACCOUNT"), ("SLURM_JOB_PARTITION", "PARTITION")],
)
def test_the_slurm_job_ends_where_a_placeholder_was_left(
    commands: Path, tmp_path: Path, name: str, placeholder: str
) -> None:
    env = slurm_environment(commands, tmp_path, servers="", trainer="") | {name: placeholder}
    status, (line,) = run("slurm.sbatch", "configs/a.yaml", env=env)
    assert status == 2
    assert line.endswith("slurm.sbatch: replace ACCOUNT and PARTITION by your site's")


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


@pytest.mark.distributed
@pytest.mark.exhaustive
def test_a_stop_goes_from_the_slurm_job_to_every_rank_and_the_job_can_go_on(
    commands: Path, tmp_path: Path
) -> None:
    model = make_random_model(tmp_path / "model")
    dumps = write_dumps(tmp_path / "dumps", model, steps=6, groups=2, samples_per_group=2)
    settings = replay_settings(model, dumps, tmp_path / "run")
    settings["train"]["steps"] = 6
    (tmp_path / "replay.yaml").write_text(yaml.safe_dump(settings))
    arguments = [str(tmp_path / "replay.yaml"), "checkpoint.every_steps=9"]
    # As srun: its first argument that is no option begins the command.
    env = slurm_environment(
        commands, tmp_path, servers="exec sleep 300", trainer='SLURM_PROCID=0 exec "${@:4}"'
    )
    env |= {"NPROC": "2", "SLURM_JOB_NODELIST_HET_GROUP_0": "127.0.0.1"}
    env["MASTER_PORT"] = str(free_port())
    slowly = "algorithm.advantage=tests.trainer.stub_runs:slow_advantage"
    process = start("slurm.sbatch", *arguments, slowly, env=env)
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text()):
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    started = psutil.Process(process.pid).children(recursive=True)
    ranks = [child for child in started if child.cmdline()[1:3] == ["-u", "-m"]]
    assert len(ranks) == 2
    process.send_signal(signal.SIGUSR1)
    for rank in ranks:  # from Slurm, which may signal all processes of a step
        rank.send_signal(signal.SIGTERM)
    output = finish(process)
    assert process.returncode == 0, output
    assert (tmp_path / "calls").read_text().splitlines()[-1] == "scontrol requeue 77"
    way_on = (
        r"the same command with --resume .*/step_\d, of which bapo-megatron convert makes a model"
    )
    line = re.search(rf"^stopped by \w+; {way_on}$", output, re.M)
    assert line is not None, output
    assert psutil.wait_procs(started, timeout=60)[1] == []
    rest = launch.run(["train", *arguments, "--resume"], ranks=2)
    assert rest.returncode == 0, rest.stderr
    assert [row["step"] for row in read_metrics(metrics)] == [1, 2, 3, 4, 5, 6]
    assert not (tmp_path / "run" / "stopped").exists()
