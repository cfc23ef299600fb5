from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bapo_megatron.config.check import check_config, check_rewards
from bapo_megatron.config.load import ConfigError, load_config
from bapo_megatron.config.reward import RewardConfig


def test_a_runnable_configuration_passes(check):
    check()
    check("parallel.tensor=2", "parallel.sequence=true", world_size=4)
    check("algorithm.bapo.scope=micro_batch", "algorithm.updates_per_batch=4")
    check("train.max_tokens_per_micro_batch=500")
    check("rollout.fixed_lag=2", "rollout.staleness.max_age=2")
    check("reward.overlong={buffer_tokens: 400}")


def test_replay_needs_neither_prompts_nor_their_lengths(check):
    check(
        "replay=dumps",
        "train.steps=2",
        "data.train=null",
        "data.max_prompt_tokens=9999",
        "rollout.groups_per_step=7",
        "algorithm.updates_per_batch=2",
    )


def test_ranks_that_read_no_files_need_the_model_only(check, monkeypatch):
    Path("train.jsonl").unlink()
    config = load_config(Path("run.yaml"), ())
    check_config(config, world_size=1, owns_files=False)
    with pytest.raises(ConfigError, match=r"data\.train\.path: no such file"):
        check_config(config, world_size=1)


@pytest.mark.parametrize(
    ("overrides", "world_size", "message"),
    [
        (
            ["parallel.tensor=2"],
            3,
            "parallel.tensor: must divide the number of ranks, got 2 with 3 ranks; "
            "start a multiple of 2 ranks, or change it",
        ),
        (
            ["parallel.tensor=2", "parallel.context=2"],
            6,
            "parallel.tensor × parallel.context: must divide the number of ranks, got 4 with 6 "
            "ranks; start a multiple of 4 ranks, or change them",
        ),
        (
            ["parallel.pipeline=2", "parallel.virtual_pipeline=2"],
            2,
            "parallel.pipeline: pipeline × virtual_pipeline = 4 must divide the model's 6 layers; "
            "choose other sizes",
        ),
        (
            [
                "parallel.pipeline=2",
                "megatron.activation_offload_layers=1",
                "train.max_tokens_per_micro_batch=500",
            ],
            2,
            "megatron.activation_offload_layers: needs parallel.pipeline = 1, got 2; set one of "
            "them to its default",
        ),
        (
            ["megatron.activation_offload_layers=6"],
            1,
            "megatron.activation_offload_layers: must be below the model's 6 layers, got 6; "
            "lower it",
        ),
        (
            ["parallel.tensor=4"],
            4,
            "parallel.tensor: must divide the model's 6 attention heads, got 4; choose a divisor",
        ),
        (
            ["algorithm.updates_per_batch=5"],
            1,
            "algorithm.updates_per_batch: must divide rollout.groups_per_step, got 5 with 12 "
            "groups; choose a divisor of 12",
        ),
        (
            ["rollout.fixed_lag=2", "replay.batches=1"],
            1,
            "replay.batches: must be 0 with rollout.fixed_lag, got 1: groups of earlier batches "
            "are older; leave one of them out",
        ),
        (
            [
                "rollout.fixed_lag=2",
                "rollout.staleness.max_age=11",
                "algorithm.updates_per_batch=2",
                "algorithm.epochs=3",
            ],
            1,
            "rollout.staleness.max_age: must be at least the age that rollout.fixed_lag gives to "
            "every token, 12 updates (fixed lag × updates per batch × epochs), got 11; raise it, "
            "or leave one of them out",
        ),
        (
            ["train.max_tokens_per_micro_batch=499"],
            1,
            "train.max_tokens_per_micro_batch: must hold data.max_prompt_tokens + "
            "rollout.max_response_tokens = 500, got 499; raise it",
        ),
        (
            ["parallel.context=2", "train.max_tokens_per_micro_batch=249"],
            2,
            "train.max_tokens_per_micro_batch: must hold data.max_prompt_tokens + "
            "rollout.max_response_tokens = 500 in multiples of 4 over 2 context-parallel ranks, "
            "got 249; raise it",
        ),
        (
            [
                "parallel.tensor=3",
                "parallel.sequence=true",
                "train.max_tokens_per_micro_batch=500",
            ],
            3,
            "train.max_tokens_per_micro_batch: must hold data.max_prompt_tokens + "
            "rollout.max_response_tokens = 500 in multiples of 3, got 500; raise it",
        ),
        (
            ["rollout.max_response_tokens=501"],
            1,
            "rollout.max_response_tokens: must leave room for data.max_prompt_tokens = 100 in the "
            "model's 600 positions, got 501; lower one of them",
        ),
        (
            ["reward.overlong={buffer_tokens: 401}"],
            1,
            "reward.overlong.buffer_tokens: must be at most rollout.max_response_tokens = 400, got "
            "401; lower it",
        ),
        (
            ["eval.max_response_tokens=501"],
            1,
            "eval.max_response_tokens: must leave room for data.max_prompt_tokens = 100 in the "
            "model's 600 positions, got 501; lower one of them",
        ),
        (
            ["data.train=null"],
            1,
            "data.train: needed unless replay is set, got null; set data.train.path=FILE",
        ),
        (
            ["data.train.path=missing.jsonl"],
            1,
            "data.train.path: no such file 'missing.jsonl'; paths are relative to the current "
            "directory",
        ),
        (
            ["data.train.path=run.yaml"],
            1,
            "data.train.path: must end in .jsonl, .json, .parquet, got 'run.yaml'; "
            "convert the file",
        ),
        (
            ["data.train=[{path: train.jsonl}, {path: missing.jsonl}]"],
            1,
            "data.train[1].path: no such file 'missing.jsonl'; paths are relative to the current "
            "directory",
        ),
        (
            ["data.train=[{path: train.jsonl}, {hub: a/train, split: x}]"],
            1,
            "data.train: must differ, got 'train' 2 times; keep or rename one",
        ),
        (
            ["data.train={path: 'no-*.jsonl', name: parts}"],
            1,
            "data.train.path: no file matches 'no-*.jsonl'; paths are relative to the current "
            "directory",
        ),
        (
            ["data.chat_template=no.jinja"],
            1,
            "data.chat_template: no such file 'no.jinja'; paths are relative to the current "
            "directory",
        ),
        (
            ["eval.sets=[{path: train.jsonl}, {path: missing.jsonl}]"],
            1,
            "eval.sets[1].path: no such file 'missing.jsonl'; paths are relative to the current "
            "directory",
        ),
        (
            ["eval.sets=[{path: train.jsonl}, {path: train.jsonl}]"],
            1,
            "eval.sets: must differ, got 'train' 2 times; keep or rename one",
        ),
        (
            ["eval.sets=[]", "eval.every_steps=5"],
            1,
            "eval.every_steps: needs eval.sets, got 5 without a set; add a set, or leave it 0",
        ),
        (
            ["eval.sets=[{path: train.jsonl, max_response_tokens: 501}]"],
            1,
            "eval.sets[0].max_response_tokens: must leave room for data.max_prompt_tokens = 100 in "
            "the model's 600 positions, got 501; lower one of them",
        ),
        (
            ["eval.sets=[{path: train.jsonl, temperature: 0, samples_per_prompt: 2}]"],
            1,
            "eval.sets[0].samples_per_prompt: must be 1 with eval.sets[0].temperature = 0, since "
            "greedy samples are equal, got 2; set 1, or raise the temperature",
        ),
        (
            ["eval.sets=[{path: train.jsonl, name: a/b}]"],
            1,
            "eval.sets[0].name: must consist of letters, digits, '.', '_' and '-', since it is "
            "part of file and metric names, got 'a/b'; give another name",
        ),
        (
            ["checkpoint.best=avg@4"],
            1,
            "checkpoint.best: must be eval/<set>/<score>, such as eval/aime24/avg_at_k, with one "
            "of eval.sets (train), got 'avg@4'; correct it, or leave it empty",
        ),
        (
            ["checkpoint.best=eval/train/pass_at_4", "eval.samples_per_prompt=4"],
            1,
            "checkpoint.best: must end in one of avg_at_k, pass_at_k, maj_at_k, pass_at_1, "
            "answer_found_share, got 'eval/train/pass_at_4'; correct it, or leave it empty",
        ),
        (
            ["checkpoint.best=eval/train/avg_at_k", "eval.at_end=false"],
            1,
            "checkpoint.best: needs evaluations after steps, got eval.every_steps = 0 and "
            "eval.at_end = false; set eval.every_steps, or leave it empty",
        ),
        (
            [
                "checkpoint.best=eval/train/avg_at_k",
                "checkpoint.every_steps=8",
                "eval.every_steps=20",
                "eval.overlap=true",
            ],
            1,
            "checkpoint.best: with eval.overlap a step is saved before its score is known, so "
            "eval.every_steps must be a multiple of checkpoint.every_steps, got 20 with 8; change "
            "one of them, or set eval.overlap=false",
        ),
        (
            ["checkpoint.best=eval/train/avg_at_k", "replay=dumps", "train.steps=2"],
            1,
            "checkpoint.best: needs evaluations, and a replay has no server, got "
            "'eval/train/avg_at_k'; leave it empty",
        ),
        (
            ["eval.temperature=0", "eval.samples_per_prompt=4"],
            1,
            "eval.samples_per_prompt: must be 1 with eval.temperature = 0, since greedy samples "
            "are equal, got 4; set 1, or raise the temperature",
        ),
        (
            ["replay=missing"],
            1,
            "replay: no such directory 'missing'; give the rollouts directory of a run",
        ),
        (
            ["replay=empty"],
            1,
            "replay: 'empty' holds no step_*.parquet; give the rollouts directory of a run that "
            "had rollout.dump=true",
        ),
        (
            ["replay=dumps", "train.steps=4"],
            1,
            "replay: 'dumps' must hold a dump for each of train.steps = 4 steps, got no "
            "step_000003.parquet; set train.steps=2, or copy what is missing",
        ),
        (
            ["rollout.weight_sync.backend=nccl", "rollout.servers=[http://a:1]"],
            1,
            "rollout.weight_sync.backend: must be auto or gloo where rank 0 has no GPU, got nccl; "
            "set rollout.weight_sync.backend=auto",
        ),
        (
            ["parallel.timeout_s=600", "rollout.health.patience_s=900"],
            1,
            "rollout.health.patience_s: must be below parallel.timeout_s = 600, got 900: the other "
            "ranks wait no longer while rank 0 looks for a server that takes weights; lower it, or "
            "raise parallel.timeout_s",
        ),
        (
            ["rollout.keep_dumps=20", "checkpoint.every_steps=20"],
            1,
            "rollout.keep_dumps: must be above checkpoint.every_steps = 20, got 20: a replay from "
            "the newest checkpoint needs the steps after it; raise it, or keep all (0)",
        ),
        (
            ["log.hang_s=7200"],
            1,
            "log.hang_s: must be below parallel.timeout_s = 7200, got 7200: the run would end "
            "before it says who waits; lower it",
        ),
        (
            ["model.path=missing"],
            1,
            "model.path: no such directory 'missing'; download a Hugging Face model to it, or run "
            "make-tiny",
        ),
        (
            ["model.path=empty"],
            1,
            "model.path: 'empty' has no config.json; give a Hugging Face model directory",
        ),
        (
            ["optimizer.schedule=cosine", "optimizer.min_lr=1"],
            1,
            "optimizer.min_lr: must be at most optimizer.lr = 1e-06, got 1.0; lower it",
        ),
        (
            [
                "optimizer.warmup_updates=13",
                "train.steps=3",
                "algorithm.updates_per_batch=2",
                "algorithm.epochs=2",
            ],
            1,
            "optimizer.warmup_updates: must be at most the run's 12 updates (steps × updates per "
            "batch × epochs), got 13; lower it",
        ),
    ],
)
def test_each_rule_names_key_rule_value_and_remedy(check, overrides, world_size, message):
    with pytest.raises(ConfigError) as refused:
        check(*overrides, world_size=world_size)
    assert str(refused.value).replace(f"{Path.cwd()}/", "") == message


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("model.safetensors", r"model\.path: '/.*/model' has no \*\.safetensors; save the model"),
        (
            "tokenizer_config.json",
            r"model\.path: '/.*/model' has no tokenizer_config\.json; save the tok",
        ),
    ],
)
def test_an_incomplete_model_directory_is_refused(check, file, message):
    (Path("model") / file).unlink()

    with pytest.raises(ConfigError, match=message):
        check()


@pytest.mark.parametrize(("text", "message"), [("{", "is not valid JSON"), ("[]", "a JSON object")])
def test_a_broken_model_configuration_is_refused(check, text, message):
    Path("model/config.json").write_text(text)

    with pytest.raises(ConfigError, match=rf"model\.path: '/.*/model/config\.json' .*{message}"):
        check()


def test_numbers_of_the_model_that_are_texts_are_left_to_its_reader(check):
    names = ("num_attention_heads", "num_hidden_layers", "max_position_embeddings")
    Path("model/config.json").write_text(json.dumps(dict.fromkeys(names, "6")))

    check("parallel.tensor=2", "parallel.pipeline=2", world_size=4)
    check("megatron.activation_offload_layers=1")


def test_a_token_of_a_service_must_be_in_its_variable(monkeypatch):
    functions = [
        {"name": "math", "function": "math"},
        {"name": "judge", "url": "https://judge.example", "http": {"token_variable": "JUDGE"}},
    ]
    config = RewardConfig.model_validate({"functions": functions})
    message = (
        "reward.functions[1].http.token_variable: the environment variable must hold the service's "
        "token, got none in JUDGE; set it, or leave the key empty"
    )

    monkeypatch.delenv("JUDGE", raising=False)
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        check_rewards(config.functions)
    monkeypatch.setenv("JUDGE", "token")
    check_rewards(config.functions)
    check_rewards(RewardConfig().functions)
