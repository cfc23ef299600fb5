"""Rules of servers, and of commands other than ``train``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bapo_megatron.commands.evaluate import evaluate_model
from bapo_megatron.commands.generate import generate_batches
from bapo_megatron.config.check import check_eval_config, check_generate_config
from bapo_megatron.config.load import ConfigError, load_config
from bapo_megatron.trainer.opening import open_run
from bapo_megatron.trainer.stopping import Stopping


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
        (["eval.sets=[{path: no.jsonl}]"], "eval.sets[0].path: no such file '{}/no.jsonl'"),
    ):
        with pytest.raises(ConfigError, match=f"^{re.escape(message.format(Path.cwd()))}"):
            check_eval_config(load_config(Path("run.yaml"), overrides))


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
    ],
)
def test_generation_is_refused_with_what_it_cannot_use(check, overrides, message):
    with pytest.raises(ConfigError) as caught:
        check_generate_config(load_config(Path("run.yaml"), overrides))
    assert str(caught.value).replace(f"{Path.cwd()}/", "") == message


@pytest.mark.parametrize("command", ["train", "eval", "generate"])
def test_a_command_refuses_what_its_engine_cannot_do_before_anything_is_started(check, command):
    run = {"train": start_training, "eval": evaluate_model, "generate": generate_one}[command]
    with pytest.raises(ConfigError, match=r"rollout\.servers: must be addresses like http://host"):
        run(load_config(Path("run.yaml"), ["rollout.servers=[a:1]"]))
    assert not Path("runs").exists()


def start_training(config):
    with open_run(config, Stopping(config.train)):
        pass


def generate_one(config):
    generate_batches(config, 1)
