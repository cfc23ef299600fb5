"""The scripts in examples/: clean shell, the commands that they run, and runs of them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import psutil
import pytest
import yaml

from bapo_megatron.telemetry.sinks import read_metrics
from tests.engine.helpers import descendants
from tests.launch import REPOSITORY, free_port
from tests.trainer.dumps import make_random_model, replay_settings, write_dumps

if TYPE_CHECKING:
    from collections.abc import Iterator

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
    python = stand_in(commands, "python", 'echo "$@"')
    command = [root / "examples" / "demo.sh", python, "0", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


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


@pytest.mark.distributed
def test_two_nodes_train_together(replay_config: Path, tmp_path: Path) -> None:
    port = str(free_port())
    nodes = [
        start(
            "multi_node.sh",
            str(replay_config),
            f"run_dir={tmp_path / 'run'}",
            "parallel.tensor=2",  # so that neither node can do without the other
            env=environment(
                NNODES="2", NODE_RANK=rank, MASTER_ADDR="127.0.0.1", MASTER_PORT=port, NPROC="1"
            ),
        )
        for rank in ("1", "0")
    ]
    outputs = [finish(node) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 2
    assert (tmp_path / "run" / "hf" / "model.safetensors").is_file()
    assert "2/2" in outputs[1]  # the node with NODE_RANK=0 reports


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


@pytest.fixture
def server(replay_config: Path, tmp_path: Path) -> Iterator[str]:
    """Address of a real server that rollout_servers.sh is starting."""
    port, log_path = free_port(), tmp_path / "server.log"
    with ExitStack() as stack:
        log = stack.enter_context(log_path.open("w"))
        process = subprocess.Popen(
            [
                str(EXAMPLES / "rollout_servers.sh"),
                str(replay_config),
                f"run_dir={tmp_path / 'servers'}",
                f"rollout.server.port={port}",
                "rollout.server.mem_fraction=0.3",
                "rollout.server.max_total_tokens=8192",
            ],
            env=environment(**{KEY: "admin-secret"}),
            cwd=REPOSITORY,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        address = f"http://127.0.0.1:{port}"
        try:
            yield address
            assert process.poll() is None, log_path.read_text()
            running = [child.cmdline() for child in descendants(process.pid)]
            assert len(running) >= 3
            assert "admin-secret" not in str(running)
            process.terminate()
            process.wait(timeout=60)
            assert not descendants(mentioning=f"--port={port}")
            for written in (log_path, tmp_path / "servers" / "logs" / "sglang.log"):
                assert "admin-secret" not in written.read_text()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.sglang
def test_a_trainer_waits_for_servers_elsewhere_and_an_evaluation_uses_them_too(
    server: str, replay_config: Path, tmp_path: Path
) -> None:
    prompts = [{"prompt": f"{a}+{b}=?", "answer": str(a + b)} for a in range(3) for b in range(3)]
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    overrides = [
        f"rollout.servers=[{server}]",
        "replay.dumps=null",
        f"data.train.path={questions}",
        "data.max_prompt_tokens=32",
        "rollout.groups_per_step=4",  # two updates
        "rollout.samples_per_group=2",
        "rollout.max_response_tokens=16",
        f"eval.sets=[{{path: {questions}}}]",
        "eval.max_prompts=4",
        "eval.max_response_tokens=16",
        "train.steps=1",
        "reward.workers=1",
        "algorithm.entropy_coefficient=0.001",  # a random model is never right: no other signal
    ]
    env = environment(NPROC="1", **{KEY: "admin-secret"})
    run_dir = tmp_path / "run"
    status, lines = run(
        "single_node.sh", str(replay_config), f"run_dir={run_dir}", *overrides, env=env
    )
    assert status == 0, lines
    (row,) = (row for row in read_metrics(run_dir / "metrics.jsonl") if row["step"] == 1)
    assert row["rollout/generated_tokens"] > 0
    assert row["mismatch/logprob_abs_max"] < 1e-4  # trainer and server hold the same weights
    refused = httpx.post(f"{server}/abort_request", json={"rid": "x"}, trust_env=False)
    assert refused.status_code in (401, 403)

    status, lines = run(
        "evaluate.sh",
        str(replay_config),
        str(run_dir / "hf"),
        str(tmp_path / "eval"),
        *overrides,
        env=env,
    )
    assert status == 0, lines
    (result,) = json.loads((tmp_path / "eval" / "eval.json").read_text())
    assert (result["name"], result["num_prompts"]) == ("questions", 4)
