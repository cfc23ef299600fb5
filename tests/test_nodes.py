"""The scripts in examples/ on several machines: trainers on two, servers on a third one."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from bapo_megatron.telemetry.sinks import read_metrics
from tests.engine.helpers import ask, descendants
from tests.launch import REPOSITORY, Launched, free_port, run
from tests.nodes import INTERFACE, Node, make_nodes
from tests.reward.own_functions import EVEN_LENGTH
from tests.test_examples import EXAMPLES, KEY, environment
from tests.test_examples import run as run_script
from tests.trainer.dumps import make_random_model, replay_settings

pytestmark = [pytest.mark.distributed, pytest.mark.sglang, pytest.mark.exhaustive]

KEYS = {KEY: "admin-secret" * 2, "BAPO_MEGATRON_API_KEY": "user-secret" * 2}


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[Node]]:
    """Three machines."""
    with make_nodes(3) as machines:
        yield machines


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One step with two updates of a random model."""
    folder = tmp_path_factory.mktemp("nodes")
    questions = folder / "questions.jsonl"
    prompts = [{"prompt": f"{a}+{b}=?", "answer": str(a + b)} for a in range(3) for b in range(3)]
    questions.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    settings = replay_settings(make_random_model(folder / "model"), folder, folder / "run")
    settings |= {
        "replay": None,
        "data": {"train": {"path": str(questions)}, "max_prompt_tokens": 32},
        "rollout": {"groups_per_step": 4, "samples_per_group": 2, "max_response_tokens": 16},
        "eval": {"sets": [{"path": str(questions)}], "max_prompts": 4, "max_response_tokens": 16},
        "reward": {"workers": 1, "functions": [EVEN_LENGTH]},
    }
    settings["train"]["steps"] = 1
    settings["algorithm"]["entropy_coefficient"] = 0.001  # a random model is never right
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    return folder / "config.yaml"


@pytest.fixture(scope="module")
def server(
    config: Path, nodes: list[Node], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """Address of a real server that rollout_servers.sh is starting on the last machine."""
    folder, port, node = tmp_path_factory.mktemp("servers"), free_port(), nodes[-1]
    log_path = folder / "server.log"
    with ExitStack() as stack:
        log = stack.enter_context(log_path.open("w"))
        process = subprocess.Popen(
            [
                *node.prefix,
                str(EXAMPLES / "rollout_servers.sh"),
                str(config),
                f"run_dir={folder / 'servers'}",
                f"rollout.server.port={port}",
                "rollout.server.mem_fraction=0.3",
                "rollout.server.max_total_tokens=8192",
            ],
            env=environment(HOST=node.address, **KEYS),
            cwd=REPOSITORY,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield f"http://{node.address}:{port}"
            assert process.poll() is None, log_path.read_text()
            running = [child.cmdline() for child in descendants(process.pid)]
            assert len(running) >= 3
            assert "secret" not in str(running)
            process.terminate()
            process.wait(timeout=60)
            assert not descendants(mentioning=f"--port={port}")
            (sglang_log,) = (folder / "servers" / "logs").iterdir()
            for written in (log_path, sglang_log):
                assert "secret" not in written.read_text()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def program_of(script: str, *arguments: str, **variables: str) -> list[str]:
    """What a script runs, from the module on."""
    status, (line,) = run_script(script, *arguments, env=environment(PYTHON="echo", **variables))
    words = line.split()
    assert (status, words[0]) == (0, "-m")
    return words[1:]


def test_trainers_on_two_machines_use_servers_on_a_third_one(
    config: Path, nodes: list[Node], server: str, tmp_path: Path, started: list[Launched]
) -> None:
    first, second, _ = nodes
    keys = {**KEYS, "GLOO_SOCKET_IFNAME": INTERFACE}
    for rank, node in (("1", second), ("0", first)):
        program = program_of(
            "multi_node.sh",
            str(config),
            f"run_dir={tmp_path / 'run'}",
            "parallel.tensor=2",  # so that neither machine can do without the other
            f"rollout.servers=[{server}]",
            f"rollout.weight_sync.master_address={first.address}",
            "eval.sets=[]",
            NNODES="2",
            NODE_RANK=rank,
            MASTER_ADDR=first.address,
            NPROC="1",
        )
        started.append(Launched(program=program, environment=keys, node=node.name))
    outputs = [trainer.communicate() for trainer in started]
    assert [trainer.poll() for trainer in started] == [0, 0], outputs
    assert "1/1" in outputs[1][0]  # the machine with NODE_RANK=0 reports
    (row,) = (row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if row["step"] == 1)
    assert row["rollout/generated_tokens"] > 0
    assert row["mismatch/logprob_abs_max"] < 1e-4  # trainers and server hold the same weights
    assert (tmp_path / "run" / "hf" / "model.safetensors").is_file()


def test_an_evaluation_uses_servers_on_another_machine(
    config: Path, server: str, tmp_path: Path
) -> None:
    settings = yaml.safe_load(config.read_text())
    servers = f"rollout.servers=[{server}]"
    model, run_dir = settings["model"]["path"], str(tmp_path / "eval")
    program = program_of("evaluate.sh", str(config), model, run_dir, servers)
    assert program[0] == "bapo_megatron"
    evaluation = run(program[1:], environment=KEYS)
    assert evaluation.returncode == 0, evaluation.stderr
    (result,) = json.loads((tmp_path / "eval" / "eval.json").read_text())
    assert (result["name"], result["num_prompts"]) == ("questions", 4)
    assert ask(f"{server}/abort_request", b'{"rid": "x"}')[0] in (401, 403)
