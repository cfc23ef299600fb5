import json
import re
from pathlib import Path

import pytest

from bapo_megatron.commands.evaluate import evaluate_model
from bapo_megatron.commands.generate import generate_batches
from bapo_megatron.config.check import (
    check_config,
    check_eval_config,
    check_generate_config,
    check_rewards,
)
from bapo_megatron.config.load import ConfigError, load_config
from bapo_megatron.config.reward import RewardConfig
from bapo_megatron.trainer.opening import open_run
from bapo_megatron.trainer.stopping import Stopping


def test_a_runnable_configuration_passes(check):
    check()
    check("parallel.tensor=2", "parallel.sequence=true", world_size=4)
    check("algorithm.bapo.scope=micro_batch", "algorithm.updates_per_batch=4")
    check("train.max_tokens_per_micro_batch=500")
    check("rollout.fixed_lag=2", "rollout.staleness.max_age=2")
    check("reward.overlong={buffer_tokens: 400}")
    check("rollout.keep_dumps=21", "checkpoint.every_steps=20")
    best = ("checkpoint.best=eval/train/pass_at_4", "eval.samples_per_prompt=5")
    check(*best, "eval.overlap=true", "checkpoint.every_steps=8", "eval.every_steps=16")
    check("checkpoint.best=eval/train/answer_found_share", "eval.at_end=true")
    check("optimizer.schedule=cosine", "optimizer.min_lr=1e-6", "optimizer.warmup_updates=100")


def test_what_is_not_read_or_used_need_not_be_there(check):
    no_prompts = ["data.train=null", "data.max_prompt_tokens=9999", "rollout.groups_per_step=7"]
    check("replay=dumps", "train.steps=2", *no_prompts, "algorithm.updates_per_batch=2")
    layout = ["algorithm.updates_per_batch=5", "train.max_tokens_per_micro_batch=8"]
    check_generate_config(load_config(Path("run.yaml"), [*layout, "parallel.tensor=5"]))
    no_training = ["data.train=null", "algorithm.updates_per_batch=5", f"{RESPONSE}=9999"]
    check_eval_config(load_config(Path("run.yaml"), no_training))
    Path("train.jsonl").unlink()
    check_config(load_config(Path("run.yaml"), ()), world_size=1, owns_files=False)


BEST, SCORE = "checkpoint.best", "checkpoint.best=eval/train/avg_at_k"
BUDGET = "train.max_tokens_per_micro_batch"
AGE, WARMUP = "rollout.staleness.max_age", "optimizer.warmup_updates"
RESPONSE, BACKEND = "rollout.max_response_tokens", "rollout.weight_sync.backend"
TOP = "algorithm.centering.top_k"
TENSOR, CONTEXT = "parallel.tensor", "parallel.context"
SAVES, SET = "checkpoint.every_steps", "eval.sets=[{path: train.jsonl,%s}]"
ADAPTERS, RANK = "rollout.weight_sync.adapters", "model.lora.rank"
EPOCHS = "algorithm.updates_per_batch=2 algorithm.epochs"


@pytest.mark.parametrize(
    ("overrides", "key", "word"),
    [
        (f"{TENSOR}=2 {CONTEXT}=2 WORLD=6", "parallel", "got 4 with 6"),
        ("algorithm.updates_per_batch=5", "algorithm.updates_per_batch", "groups_per_step = 12"),
        ("rollout.fixed_lag=2 replay.batches=1", "replay.batches", "rollout.fixed_lag"),
        (f"rollout.fixed_lag=2 {AGE}=11 {EPOCHS}=3", AGE, "at least 12"),
        (f"{BUDGET}=499", BUDGET, "got 499"),
        (f"{CONTEXT}=2 {BUDGET}=249 WORLD=2", BUDGET, "= 500, in multiples of 4 over 2"),
        (f"{TENSOR}=3 parallel.sequence=true {BUDGET}=500 WORLD=3", BUDGET, "in multiples of 3"),
        (f"{RESPONSE}=501", RESPONSE, "600 positions"),
        ("reward.overlong.buffer_tokens=401", "reward.overlong.buffer_tokens", f"{RESPONSE} = 400"),
        ("eval.max_response_tokens=501", "eval.max_response_tokens", "600 positions"),
        ("data.train=null", "data.train", "needs prompts"),
        ("data.train.path=missing.jsonl", "data.train.path", "missing.jsonl"),
        ("data.train.path=run.yaml", "data.train.path", "must end in .jsonl"),
        ("data.train=[{path: train.jsonl},{path: no.jsonl}]", "data.train[1].path", "no.jsonl"),
        ("data.train=[{path: train.jsonl},{hub: a/train,split: x}]", "data.train", "'train' 2"),
        ("data.train={path: no-*.jsonl,name: parts}", "data.train.path", "no file matches"),
        ("data.chat_template=no.jinja", "data.chat_template", "no.jinja"),
        ("eval.sets=[{path: train.jsonl},{path: no.jsonl}]", "eval.sets[1].path", "no.jsonl"),
        ("eval.sets=[{path: train.jsonl},{path: train.jsonl}]", "eval.sets", "'train' 2 times"),
        ("eval.sets=[] eval.every_steps=5", "eval.every_steps", "needs eval.sets"),
        (SET % "max_response_tokens: 501", "eval.sets[0].max_response_tokens", "600 positions"),
        (SET % "name: a/b", "eval.sets[0].name", "'a/b'"),
        (f"{BEST}=avg@4", BEST, "one of eval/train/avg_at_k, eval/train/pass_at_k"),
        (f"{BEST}=eval/train/pass_at_4 eval.samples_per_prompt=4", BEST, "must be one of"),
        (f"{BEST}=eval/train/maj_at_1 eval.samples_per_prompt=4", BEST, "must be one of"),
        (f"{SCORE} eval.at_end=false", BEST, "needs evaluations after steps"),
        (
            f"{SCORE} {SAVES}=8 eval.every_steps=20 eval.overlap=true",
            BEST,
            f"{SAVES}, got 20 with 8",
        ),
        (f"{SCORE} replay=dumps train.steps=2", BEST, "which only engines can sample"),
        (f"{BACKEND}=nccl rollout.servers=[http://a:1]", BACKEND, "no GPU"),
        ("parallel.timeout_s=600", "rollout.health.patience_s", "below parallel.timeout_s = 600"),
        (f"rollout.keep_dumps=20 {SAVES}=20", SAVES, "below rollout.keep_dumps = 20"),
        ("log.hang_s=7200", "log.hang_s", "below parallel.timeout_s = 7200"),
        (f"{TOP}=65 ops.logits_chunk_tokens=1", TOP, "model's vocab_size 64, got 65"),
        ("model.path=missing", "model.path", "no such directory"),
        ("model.path=empty", "model.path", "has no config.json"),
        ("optimizer.schedule=cosine optimizer.min_lr=1", "optimizer.min_lr", "lr = 1e-06, got 1;"),
        (f"{ADAPTERS}=adapter", ADAPTERS, "must be merged with model.lora.rank: 0, got adapter"),
        (
            f"{ADAPTERS}=adapter rollout.engine=local rollout.local.sampling_bits=4 {RANK}=2",
            ADAPTERS,
            "must be merged with rollout.local.sampling_bits: 4, got adapter; leave it out",
        ),
        (f"{WARMUP}=13 train.steps=3 {EPOCHS}=2", WARMUP, "the run's 12 updates"),
    ],
)
def test_each_rule_names_key_rule_value_and_remedy(check, overrides, key, word):
    arguments = re.split(r" (?=[\w.]+=)", overrides)
    world_size = int(arguments.pop().partition("=")[2]) if "WORLD" in overrides else 1
    with pytest.raises(ConfigError) as refused:
        check(*arguments, world_size=world_size)
    message = str(refused.value)
    assert message.startswith(f"{key}: ")
    assert word in message
    assert ";" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("overrides", "sends_adapters"),
    [
        ([], False),
        ([f"{RANK}=2"], False),
        ([f"{RANK}=2", f"{ADAPTERS}=adapter"], True),
        (["rollout.engine=local"], False),
        (["rollout.engine=local", f"{RANK}=2"], True),
        (["rollout.engine=local", f"{RANK}=2", f"{ADAPTERS}=merged"], False),
        (["rollout.engine=local", f"{RANK}=2", "rollout.local.sampling_bits=8"], False),
    ],
)
@pytest.mark.usefixtures("check")
def test_adapters_are_sent_alone_where_that_costs_no_decoding_speed_or_if_asked_for(
    overrides, sends_adapters
):
    assert load_config(Path("run.yaml"), overrides).sends_adapters == sends_adapters


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("model.safetensors", None, "' has no "),
        ("tokenizer_config.json", None, "' has no "),
        ("config.json", "{", "/config.json': not valid JSON"),
        ("config.json", "[]", "/config.json': must be"),
    ],
)
def test_an_incomplete_or_broken_model_directory_is_refused(check, file, text, message):
    path = Path("model") / file
    path.unlink() if text is None else path.write_text(text)

    with pytest.raises(ConfigError, match=rf"^model\.path: '/.*/model{message}"):
        check()


def test_numbers_of_the_model_that_are_texts_are_left_to_its_reader(check):
    names = ("num_attention_heads", "num_hidden_layers", "max_position_embeddings")
    Path("model/config.json").write_text(json.dumps(dict.fromkeys(names, "6")))

    check("parallel.tensor=2", "parallel.pipeline=2", world_size=4)


def test_a_token_of_a_service_must_be_in_its_variable(monkeypatch):
    functions = [
        {"name": "math", "function": "math"},
        {"name": "judge", "url": "https://judge.example", "http": {"token_variable": "JUDGE"}},
    ]
    config = RewardConfig.model_validate({"functions": functions})
    monkeypatch.delenv("JUDGE", raising=False)
    with pytest.raises(
        ConfigError, match=r"^reward\.functions\[1\]\.http\.token_variable: .* JUDGE"
    ):
        check_rewards(config.functions)
    monkeypatch.setenv("JUDGE", "token")
    check_rewards(config.functions)
    check_rewards(RewardConfig().functions)


@pytest.mark.parametrize(
    ("check_command", "override", "message"),
    [
        (check_eval_config, "eval.sets=[]", "eval.sets: needs at least one set, got none"),
        (check_eval_config, "eval.max_response_tokens=501", "eval.max_response_tokens: must leave"),
        (check_eval_config, "eval.sets=[{path: no.jsonl}]", "eval.sets[0].path: no such file "),
        (check_generate_config, "replay=dumps", "replay: "),
        (check_generate_config, "data.train=null", "data.train: "),
        (check_generate_config, "data.train.path=missing.jsonl", "data.train.path: "),
        (check_generate_config, f"{RESPONSE}=501", f"{RESPONSE}: "),
    ],
)
@pytest.mark.usefixtures("check")
def test_evaluation_and_generation_are_refused_with_what_they_cannot_use(
    check_command, override, message
):
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}.*;"):
        check_command(load_config(Path("run.yaml"), [override]))


@pytest.mark.parametrize("command", ["train", "eval", "generate"])
def test_a_command_refuses_what_its_engine_cannot_do_before_anything_is_started(check, command):
    config = load_config(Path("run.yaml"), ["rollout.servers=[a:1]"])
    run = {
        "train": lambda: open_run(config, Stopping(config.train)).__enter__(),
        "eval": lambda: evaluate_model(config),
        "generate": lambda: generate_batches(config, 1),
    }[command]
    with pytest.raises(ConfigError, match=r"rollout\.servers: must be addresses like http://host"):
        run()
    assert not Path("runs").exists()
