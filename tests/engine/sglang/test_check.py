"""Which servers are refused before anything is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bapo_megatron.config.load import ConfigError, load_config
from bapo_megatron.engine.sglang.kind import Kind as SglangKind


@pytest.fixture
def check(tmp_path, monkeypatch):
    """Checks a configuration with overrides, whose model has 6 heads."""
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps({"num_attention_heads": 6}))
    Path("model/model.safetensors").touch()
    Path("model/tokenizer_config.json").touch()
    for name, text in (("half", "http://a:1\nhttp://a"), ("empty", "\n"), ("bare", "a:1\n")):
        Path(name).write_text(text)
    Path("run.yaml").write_text("{name: x, run_dir: runs/x, model: {path: model}}")

    def run(*overrides: str, is_here: bool = True) -> None:
        SglangKind().check(load_config(Path("run.yaml"), overrides), is_here=is_here)

    return run


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["rollout.server.tensor=4"],
            "rollout.server.tensor: must divide the model's 6 attention heads, got 4; choose a "
            "divisor",
        ),
        (
            ["rollout.servers=[localhost:30000]"],
            "rollout.servers: must be addresses like http://host:port, got 'localhost:30000'; "
            "did you mean 'http://localhost:30000'?",
        ),
        (
            ["rollout.servers=[http://a:1, http://a:1]"],
            "rollout.servers: must differ, got 'http://a:1' 2 times; keep or rename one",
        ),
        (
            ["rollout.servers=[http://a:1, http://a:2]", "rollout.min_servers=3"],
            "rollout.min_servers: must be at most the 2 servers of the run, got 3; lower it, or "
            "add servers",
        ),
        (
            ["rollout.servers_file=none"],
            "rollout.servers_file: 'none' must hold an address on each line, got "
            "No such file or directory; correct it",
        ),
        (
            ["rollout.servers_file=half"],
            "rollout.servers_file: 'half' must hold an address on each line, and end with a "
            "newline, got 'http://a:1\\nhttp://a' at its end; it may be cut off",
        ),
        (
            ["rollout.servers_file=empty"],
            "rollout.servers_file: 'empty' must hold an address on each line, got none; correct it",
        ),
        (
            ["rollout.servers_file=bare"],
            "rollout.servers_file: must be addresses like http://host:port, got 'a:1'; did you "
            "mean 'http://a:1'?",
        ),
        *(
            (
                [f"rollout.servers=['{given}']"],
                f"rollout.servers: must be addresses like http://host:port, got '{given}'; "
                "correct it",
            )
            for given in (
                "http://a b",
                "http://a:0",
                "http://a:99999",
                "http://a:1/?b=c",
                "http://:1",
            )
        ),
        (
            ["rollout.servers=[http://user:password@a:1]"],
            "rollout.servers: must hold no user or password, got an address with '@': it would be "
            "in config.yaml and in logs; set BAPO_MEGATRON_API_KEY instead (docs/launch.md)",
        ),
        *(
            (
                [f"rollout.server.extra_args=[{given}]"],
                f"rollout.server.extra_args: must hold no secret, got {name}: it would be in "
                "config.yaml and in logs; leave it out: the trainer's own servers have one, and "
                f"serve takes {variable} (docs/launch.md)",
            )
            for given, name, variable in (
                ("--api-key, s3cret", "--api-key", "BAPO_MEGATRON_API_KEY"),
                ("--admin-api-key=s3cret", "--admin-api-key", "BAPO_MEGATRON_ADMIN_API_KEY"),
            )
        ),
        (
            ["rollout.health.stuck_timeout_s=300"],
            "rollout.health.patience_s: must be above rollout.health.stuck_timeout_s + "
            "rollout.server.start_timeout_s = 900, in which a stuck server is noticed and started "
            "again, got 900; raise it, or lower one of them",
        ),
    ],
)
def test_servers_that_cannot_be_used_are_refused(check, overrides, message):
    with pytest.raises(ConfigError) as caught:
        check(*overrides)
    assert str(caught.value).replace(f"{Path.cwd()}/", "") == message


def test_servers_of_others_need_not_fit_this_machine(check):
    check("rollout.servers=[http://a:1, http://a:2]", "rollout.server.tensor=4")
    check("rollout.servers=[http://a:1]", "rollout.health.patience_s=1")  # nor its start


@pytest.mark.parametrize(
    ("num_gpus", "overrides", "message"),
    [
        (
            8,
            ["rollout.server.count=5", "rollout.server.tensor=2"],
            "rollout.server.count: first_gpu + count × tensor must be at most this machine's 8 "
            "visible GPUs, got 0 + 5 × 2; lower one of them",
        ),
        (
            8,
            ["rollout.server.count=4", "rollout.server.first_gpu=5"],
            "rollout.server.count: first_gpu + count × tensor must be at most this machine's 8 "
            "visible GPUs, got 5 + 4 × 1; lower one of them",
        ),
        (
            0,
            ["rollout.server.count=3", "rollout.server.port=65534"],
            "rollout.server.port: the last of rollout.server.count = 3 servers must have at most "
            "65535, got 65534 for the first; lower it",
        ),
        (
            0,
            ["rollout.colocated=true"],
            "rollout.colocated: needs servers on the trainer's GPUs, whose memory they release, "
            "got 0 visible GPUs; set rollout.colocated=false",
        ),
        (
            8,
            ["rollout.colocated=true", "rollout.server.first_gpu=4"],
            "rollout.server.first_gpu: must be 0 with rollout.colocated, whose servers are on the "
            "trainer's GPUs, got 4; leave it out",
        ),
        (
            1,
            ["rollout.colocated=true", "rollout.weight_sync.method=broadcast"],
            "rollout.weight_sync.method: must be tensor or disk with rollout.colocated, got "
            "broadcast by auto: NCCL has no groups with two processes on one GPU; set "
            "rollout.weight_sync.method=tensor",
        ),
    ],
)
def test_servers_that_this_machine_cannot_run_are_refused(
    check, monkeypatch, num_gpus, overrides, message
):
    monkeypatch.setattr("bapo_megatron.engine.sglang.kind.count_gpus", lambda: num_gpus)
    with pytest.raises(ConfigError) as caught:
        check(*overrides)
    assert str(caught.value).replace(f"{Path.cwd()}/", "") == message


def test_servers_that_fit_this_machine_pass(check, monkeypatch):
    monkeypatch.setattr("bapo_megatron.engine.sglang.kind.count_gpus", lambda: 8)
    check("rollout.server.count=4", "rollout.server.tensor=2", "rollout.server.port=65532")
    check("rollout.colocated=true", "rollout.weight_sync.method=tensor")
    broadcast = ["rollout.weight_sync.method=broadcast", "rollout.weight_sync.backend=gloo"]
    check("rollout.colocated=true", *broadcast)
    # Others' servers are on other machines.
    check("rollout.servers=[http://a:1]", "rollout.server.count=9")
    monkeypatch.setattr("bapo_megatron.engine.sglang.kind.count_gpus", lambda: 0)
    check("rollout.server.count=4")  # SGLang's CPU engine


@pytest.mark.parametrize("num_gpus", [0, 1])
def test_servers_of_another_machine_need_no_gpu_of_this_one(check, monkeypatch, num_gpus):
    monkeypatch.setattr("bapo_megatron.engine.sglang.kind.count_gpus", lambda: num_gpus)
    colocated = ["rollout.colocated=true", "rollout.weight_sync.method=tensor"]
    check("rollout.server.count=8", *colocated, is_here=False)
    with pytest.raises(ConfigError, match=r"^rollout.server.first_gpu: must be 0"):
        check("rollout.server.first_gpu=1", *colocated, is_here=False)
