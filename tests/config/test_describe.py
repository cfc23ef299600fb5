"""What a wrong value and a key are called in words."""

from __future__ import annotations

from pathlib import Path

import pytest

from bapo_megatron.config.describe import describe_keys
from tests.config.files import error_of, write


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "rollout: {temprature: 1}",
            "unknown key 'rollout.temprature'; did you mean 'rollout.temperature'?",
        ),
        ("temperature: 1", "unknown key 'temperature'; did you mean 'rollout.temperature'?"),
        (
            "model: {zzz: 1}",
            "unknown key 'model.zzz'; its section's keys: bapo-megatron config --key model",
        ),
        (
            "eval: {sets: [{zzz: 1}]}",
            "unknown key 'eval.sets[0].zzz'; its section's keys: bapo-megatron config --key "
            "eval.sets",
        ),
        ("zzz: 1", "unknown key 'zzz'; its section's keys: bapo-megatron config"),
        ("rollout: {lrr: 1}", "unknown key 'rollout.lrr'; did you mean 'optimizer.lr'?"),
        ("rollout: {n: 8}", "unknown key 'rollout.n'; did you mean 'rollout.samples_per_group'?"),
        (
            "reward: {functions: [{name: judge, url: 'http://judge:80x/grade'}]}",
            "'reward.functions[0].url' must be http://host… or https://host…, got "
            "'http://judge:80x/grade'; correct it",
        ),
        (
            "run_dir: ''",
            "'run_dir' must be a directory, got ''; name one (is a variable not set?)",
        ),
        (
            "eval: {sets: [{pth: x}]}",
            "unknown key 'eval.sets[0].pth'; did you mean 'eval.sets[0].path'?",
        ),
        (
            "eval: {sets: [{name: x}]}",
            "'eval.sets[0]' must have path or hub, got neither; set one of them",
        ),
        (
            "data: {train: {path: x.jsonl, hub: a/b}}",
            "'data.train' must have path or hub, got 'x.jsonl' and 'a/b'; set the other one to "
            "nothing (path: null, or hub: '')",
        ),
        (
            "data: {train: [{path: x.jsonl}, {hub: a/b}]}",
            "'data.train[1]' must have a split with hub = 'a/b', got none; set split, such as "
            "train",
        ),
        (
            "data: {train: [{path: x.jsonl, wieght: 2}]}",
            "unknown key 'data.train[0].wieght'; did you mean 'data.train[0].weight'?",
        ),
        (
            "data: {train: [{path: x.jsonl, weight: 0}]}",
            "'data.train[0].weight' must be greater than 0, got 0; its default is 1.0",
        ),
        (
            "data: {train: [{path: 'part-*.jsonl'}]}",
            "'data.train[0]' must have a name, since path = 'part-*.jsonl' matches several files; "
            "set name",
        ),
        (
            "data: {train: {path: x.jsonl, row_format: math, prompt_column: q}}",
            "'data.train' must have prompt_column and answer_column only with row_format auto or "
            "columns, got them with math; leave out one or the other",
        ),
        (
            "data: {train: {path: x.jsonl, split: train}}",
            "'data.train' must have subset and split only with hub, got 'train' with path; leave "
            "them out",
        ),
        (
            "data: {train: x.jsonl}",
            "'data.train' must be a section of keys, got 'x.jsonl'; indent its keys below it, or "
            "leave it out",
        ),
        (
            "train: {steps: many}",
            "'train.steps' must be an integer, got 'many'; its default is 100",
        ),
        (
            "train: {steps: '100'}",
            "'train.steps' must be an integer, got '100'; its default is 100",
        ),
        ("train: {steps: true}", "'train.steps' must be an integer, got true; its default is 100"),
        (
            "train: {steps: 0}",
            "'train.steps' must be greater than or equal to 1, got 0; its default is 100",
        ),
        (
            "optimizer: {lr: .nan}",
            "'optimizer.lr' must be a finite number, got NaN; its default is 1e-06",
        ),
        ("name: 5", "'name' must be a string, got 5; quote it to make it a text"),
        ("name: a b", "'name' must match pattern '^[A-Za-z0-9._-]+$', got 'a b'; correct it"),
        (
            "algorithm: {objective: bapoo}",
            "'algorithm.objective' must be bapo, clip, none, reinforce, cispo, sapo, ce_gppo, "
            "aspo, topr, dppo_tv, dcpo, gspo, gmpo, opsm, m2po or package.module:name, got "
            "'bapoo'; the loss of GRPO is clip",
        ),
        (
            "algorithm: {loss_aggregation: mean}",
            "'algorithm.loss_aggregation' must be 'token_mean', 'sequence_mean' or "
            "'token_sum_norm', got 'mean'; its default is token_mean",
        ),
        ("rollout: {servers: x}", "'rollout.servers' must be a list, got 'x'; its default is []"),
        (
            "rollout:",
            "'rollout' must be a section of keys, got null; indent its keys below it, or leave "
            "it out",
        ),
        (
            "rollout: {top_p: 0.9}",
            "'rollout.top_p' must be 1.0 for training, got 0.9: the engine's log-probs ignore this "
            "filter, so ratios would be biased; set top_p: 1.0",
        ),
        (
            "rollout: {fixed_lag: 2, partial: false}",
            "'rollout.partial' must be true with fixed_lag: 2, got false: responses must be kept "
            "for later steps; set partial: true, or leave fixed_lag out",
        ),
        *(
            (
                f"rollout: {{fixed_lag: 2, {name}: {value}}}",
                f"'rollout.{key}' must be left out with fixed_lag: 2, got {got}: each step's "
                "groups, and no others, are completed by the weights of one push, beside the "
                f"training; leave {key} or fixed_lag out",
            )
            for name, value, key, got in (
                ("async_steps", "1", "async_steps", "1"),
                ("oversample_groups", "3", "oversample_groups", "3"),
                ("tokens_per_step", "99", "tokens_per_step", "99"),
                ("dynamic_sampling", "{enabled: true}", "dynamic_sampling.enabled", "true"),
                ("colocated", "true", "colocated", "true"),
            )
        ),
        *(
            (
                f"rollout: {{partial_tokens: 99, {name}: 2}}",
                f"'rollout.{name}' must be left out with partial_tokens: 99, got 2: a round draws "
                "groups_per_step prompts and lasts until every response has ended or has got its "
                f"tokens, and nothing is sampled beside the training; leave {name} or "
                "partial_tokens out",
            )
            for name in ("async_steps", "fixed_lag", "oversample_groups", "tokens_per_step")
        ),
        (
            "rollout: {partial_tokens: 99, max_response_tokens: 99}",
            "'rollout.partial_tokens' must be below max_response_tokens: 99, got 99: no response "
            "would ever rest; lower it, or leave partial_tokens out",
        ),
        (
            "rollout: {partial_tokens: 99, partial: false}",
            "'rollout.partial' must be true with partial_tokens: 99, got false: responses must be "
            "kept for later steps; set partial: true, or leave partial_tokens out",
        ),
        (
            "rollout: {engine: vllm}",
            "'rollout.engine' must be sglang, local or package.module:Class, got 'vllm'; "
            "correct it",
        ),
        (
            "algorithm: {bapo: {lower: {start: 0.1}}}",
            "'algorithm.bapo' needs 0.5 <= lower.start <= lower.max <= 1, got 0.1 and 0.9; "
            "correct it",
        ),
        (
            "algorithm: {bapo: {upper: {max: 256}}}",
            "'algorithm.bapo' needs 1 <= upper.start <= upper.max < 256, got 1.2 and 256.0; "
            "correct it",
        ),
        (
            "algorithm: {bapo: 5}",
            "'algorithm.bapo' must be a section of keys, got 5; indent its keys below it, or leave "
            "it out",
        ),
        (
            "algorithm: bapo",
            "'algorithm' must be a section of keys, got 'bapo'; indent its keys below it, or leave "
            "it out",
        ),
        (
            "rollout: {staleness: {measure: token, action: drop}}",
            "'rollout.staleness.measure' must be mean or oldest with action: drop, got token: a "
            "response is dropped or regenerated as a whole; set action: mask, or another measure",
        ),
        (
            "rollout: {colocated: true, async_steps: 1}",
            "'rollout.async_steps' must be empty with colocated: true, got 1: the servers are the "
            "trainer's own and idle while it trains; leave async_steps out",
        ),
        (
            "replay: {dumps: old, batches: 2}",
            "'replay.batches' must be 0 with dumps, got 2: nothing is generated that could be "
            "added to; leave one of them out",
        ),
        (
            "eval: {top_k: 0}",
            "'eval.top_k' must be at least 1, or -1 for all tokens, got 0; correct it",
        ),
        (
            "eval: {k_values: [2, 2]}",
            "'eval.k_values' must be different numbers of samples, from 1 on, got [2, 2]; correct "
            "the list",
        ),
        (
            "algorithm: {bapo: {upper: {step: 0.001}}}",
            "'algorithm.bapo' upper has 1801 candidates from 1.2 to 3.0 by 0.001, at most 256 are "
            "searched; raise upper.step",
        ),
        (
            "algorithm: {bapo: {measure: ratio, target: 256}}",
            "'algorithm.bapo.target' must be below 256 with measure: ratio, got 256.0; correct it",
        ),
        (
            "algorithm: {dual_clip: 1.00000001}",
            "'algorithm.dual_clip' must be greater than or equal to 1.0001, got 1.00000001; its "
            "default is null",
        ),
        (
            "algorithm: {correction: {kind: token}}",
            "'algorithm.behaviour' must be recomputed with correction.kind: token, got rollout: "
            "the correction compares the trainer's log-probs with the engine's; set behaviour: "
            "recomputed, or correction.kind: none",
        ),
        (
            "parallel: {virtual_pipeline: 2}",
            "'parallel.virtual_pipeline' needs pipeline > 1, got 2 with 1; set it to 1, or raise "
            "pipeline",
        ),
        (
            "parallel: {sequence: true}",
            "'parallel.sequence' needs tensor > 1, got 1; set sequence to false, or raise tensor",
        ),
        ("run_dir: ${nope}", "Interpolation key 'nope' not found; correct this key"),
        (
            "inherit: [base.yaml]",
            "'inherit' must be one file name, got ['base.yaml']; name one file",
        ),
    ],
)
def test_an_error_is_one_line_with_place_rule_value_and_remedy(folder, text, message):
    inherit = "" if text.startswith("inherit") else "inherit: base.yaml\n"
    path = write(folder, f"{inherit}{text}\n")

    assert error_of(path).replace(f"{Path.cwd()}/", "") == f"configs/a.yaml: {message}"


def test_a_missing_key_is_named_with_its_meaning(folder):
    path = write(folder, "name: x\nrun_dir: y\n")

    assert error_of(path) == "configs/a.yaml: missing key 'model'; add it"
    assert error_of(path, "model.dtype=float32") == (
        "configs/a.yaml: missing key 'model.path' "
        "(Directory of a Hugging Face model (config.json, safetensors, tokenizer).); add it"
    )


def test_a_misspelt_key_is_reported_before_the_key_that_it_leaves_missing(folder):
    path = write(folder, "name: x\nrun_dri: y\nmodel: {path: m}\n")

    assert error_of(path) == "configs/a.yaml: unknown key 'run_dri'; did you mean 'run_dir'?"


def test_every_key_is_described():
    keys = {k.name: k for k in describe_keys()}

    assert all(k.description and k.type and k.default for k in keys.values())
    temperature = keys["rollout.temperature"]
    assert (temperature.type, temperature.default) == ("number > 0", "1.0")
    assert (
        temperature.description == "Sampling temperature; the trainer divides its logits by it too."
    )
    assert keys["algorithm.loss_aggregation"].type == (
        "token_mean | sequence_mean | token_sum_norm"
    )
    assert keys["model.path"].default == "required"
    assert keys["algorithm.bapo.lower.step"].default == "0.02 (preset paper)"
    assert keys["eval.sets[].path"].type == "path | null"
    assert keys["rollout.server.max_total_tokens"].type == "integer | null ≥ 1"


@pytest.mark.parametrize(
    ("overrides", "rule"),
    [
        (
            ["megatron.overlap_param_gather=true"],
            "'megatron.overlap_param_gather' needs distributed_optimizer and overlap_grad_reduce",
        ),
        (
            ["megatron.optimizer_offload_share=0.5", "megatron.distributed_optimizer=false"],
            "'megatron.optimizer_offload_share' needs distributed_optimizer",
        ),
        (
            ["megatron.activation_offload_layers=2", "megatron.recompute=full"],
            "'megatron.activation_offload_layers' does not go with recompute",
        ),
    ],
)
def test_what_megatron_cannot_combine_is_refused_before_it_starts(folder, overrides, rule):
    message = error_of(folder / "base.yaml", *overrides)

    assert rule in message


def test_a_run_dir_from_an_unset_variable_is_refused(folder):
    assert error_of(folder / "base.yaml", "run_dir=") == (
        "override 'run_dir=': 'run_dir' must be a directory, got ''; name one (is a variable not "
        "set?)"
    )
