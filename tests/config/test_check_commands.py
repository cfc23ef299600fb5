"""Rules of servers, and of commands other than ``train``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bapo_megatron.config.check import check_eval_config, check_generate_config
from bapo_megatron.config.load import ConfigError, load_config


@pytest.mark.usefixtures("check")
def test_an_evaluation_needs_sets_but_nothing_of_training():
    no_training = [
        "data.train=null",
        "algorithm.updates_per_batch=5",
        "rollout.max_response_tokens=9999",
    ]

    check_eval_config(load_config(Path("run.yaml"), no_training))
    for overrides, message in (
        (["eval.sets=[]"], "eval.sets: needs at least one set, got none"),
        (["eval.max_response_tokens=501"], "eval.max_response_tokens: must leave room"),
        (["rollout.servers=[a:1]"], "rollout.servers: must be addresses like http://host:port"),
        (["eval.sets=[{path: no.jsonl}]"], "eval.sets[0].path: no such file 'no.jsonl'"),
    ):
        with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
            check_eval_config(load_config(Path("run.yaml"), overrides))


@pytest.mark.parametrize(
    ("num_gpus", "overrides", "message"),
    [
        (
            8,
            ["rollout.server.count=5", "rollout.server.tensor=2"],
            "rollout.server.count: count × tensor must be at most this machine's 8 visible GPUs, "
            "got 5 × 2; lower one of them",
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
            "rollout.colocated: needs a GPU, whose memory servers can release, got none; set "
            "rollout.colocated=false",
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
    monkeypatch.setattr("torch.cuda.device_count", lambda: num_gpus)
    with pytest.raises(ConfigError) as caught:
        check(*overrides)
    assert str(caught.value) == message


def test_servers_that_fit_this_machine_pass(check, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    check("rollout.server.count=4", "rollout.server.tensor=2", "rollout.server.port=65532")
    check("rollout.colocated=true", "rollout.weight_sync.method=tensor")
    broadcast = ["rollout.weight_sync.method=broadcast", "rollout.weight_sync.backend=gloo"]
    check("rollout.colocated=true", *broadcast)
    # Others' servers are on other machines.
    check("rollout.servers=[http://a:1]", "rollout.server.count=9")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    check("rollout.server.count=4")  # SGLang's CPU engine


def test_generation_needs_no_layout_that_fits_the_trainer(check):
    overrides = ["algorithm.updates_per_batch=5", "train.max_tokens_per_micro_batch=8"]
    check_generate_config(load_config(Path("run.yaml"), [*overrides, "parallel.tensor=5"]))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["replay=dumps"],
            "replay: must be left out for generate, got 'dumps': these samples exist already; "
            "set replay.dumps=null",
        ),
        (
            ["data.train=null"],
            "data.train: needed to generate, got null; set data.train.path=FILE",
        ),
        (
            ["data.train.path=missing.jsonl"],
            "data.train.path: no such file 'missing.jsonl'; paths are relative to the current "
            "directory",
        ),
        (
            ["rollout.max_response_tokens=501"],
            "rollout.max_response_tokens: must leave room for data.max_prompt_tokens = 100 in the "
            "model's 600 positions, got 501; lower one of them",
        ),
        (
            ["rollout.server.tensor=4"],
            "rollout.server.tensor: must divide the model's 6 attention heads, got 4; choose a "
            "divisor",
        ),
    ],
)
def test_generation_is_refused_with_what_it_cannot_use(check, overrides, message):
    with pytest.raises(ConfigError) as caught:
        check_generate_config(load_config(Path("run.yaml"), overrides))
    assert str(caught.value) == message
