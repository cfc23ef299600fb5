"""What a wrong value and a key are called in words."""

import pytest

from bapo_megatron.config.describe import describe_keys
from tests.config.files import error_of, write

MEANT, KEYS = "did you mean ", "its section's keys: "


@pytest.mark.parametrize(
    ("text", "key", "remedy"),
    [
        ("rollout: {temprature: 1}", "rollout.temprature", f"{MEANT}'rollout.temperature'?"),
        ("temperature: 1", "temperature", f"{MEANT}'rollout.temperature'?"),
        ("rollout: {lrr: 1}", "rollout.lrr", f"{MEANT}'optimizer.lr'?"),
        ("eval: {sets: [{pth: x}]}", "eval.sets[0].pth", f"{MEANT}'eval.sets[0].path'?"),
        (
            "data: {train: [{path: x.jsonl, wieght: 2}]}",
            "data.train[0].wieght",
            f"{MEANT}'data.train[0].weight'?",
        ),
        ("model: {zzz: 1}", "model.zzz", f"{KEYS}path, dtype"),
        ("algorithm: {bapo: {zzz: 1}}", "algorithm.bapo.zzz", f"{KEYS}preset, target"),
        *(
            (f"{section}: {value}", section, f"{KEYS}name, run_dir, ")
            for section, value in (
                *(("zzz", "1"), ("critic", "{lr: 1.0e-5}")),
                *(("lora", "{rank: 8}"), ("lora", "8")),
            )
        ),
    ],
)
def test_an_unknown_key_is_named_with_the_one_that_was_meant_or_the_list(folder, text, key, remedy):
    path = write(folder, f"inherit: base.yaml\n{text}\n")
    assert error_of(path).startswith(f"configs/a.yaml: unknown key '{key}'; {remedy}")


@pytest.mark.parametrize(
    ("text", "key", "words"),
    [
        ("reward: {functions: [{name: j, url: 'http://j:80x'}]}", "reward.functions[0].url", ""),
        ("run_dir: ''", "run_dir", "must be a path"),
        ("eval: {sets: [{name: x}]}", "eval.sets[0]", "path, hub or gym, got none"),
        ("data: {train: {path: x.jsonl, hub: a/b}}", "data.train", "got path and hub"),
        ("data: {train: [{path: x.jsonl}, {hub: a/b}]}", "data.train[1]", "needs split with hub"),
        ("data: {train: {path: x.jsonl, split: train}}", "data.train", "only with hub"),
        ("data: {train: [{path: x.jsonl, weight: 0}]}", "data.train[0].weight", "greater than 0"),
        ("data: {train: [{path: 'part-*.jsonl'}]}", "data.train[0]", "must have a name"),
        (
            "data: {train: {path: x.jsonl, row_format: math, prompt_column: q}}",
            "data.train.row_format",
            "auto or columns",
        ),
        ("data: {train: x.jsonl}", "data.train", "a section of keys, got 'x.jsonl'; indent"),
        (
            "sources: [{path: m}]",
            "sources[0]",
            "either repo, or url and sha256, got repo: '', url: ''",
        ),
        ("sources: [{path: m, repo: a/b, url: 'http://c'}]", "sources[0]", "url: 'http://c'"),
        ("sources: [{path: m, url: 'http://c'}]", "sources[0]", "sha256: ''; correct them"),
        (
            f"sources: [{{path: m, url: 'http://c', sha256: {'a' * 64}, revision: v1}}]",
            "sources[0]",
            "file and revision only with repo, got url: 'http://c'",
        ),
        ("sources: [{path: m, repo: ../b/c}]", "sources[0].repo", "must match pattern"),
        ("train: {steps: many}", "train.steps", "an integer, got 'many'; its default is 100"),
        ("train: {steps: '100'}", "train.steps", "an integer, got '100'"),
        ("train: {steps: true}", "train.steps", "an integer, got true"),
        ("train: {steps: 0}", "train.steps", "greater than or equal to 1"),
        ("optimizer: {lr: .nan}", "optimizer.lr", "a finite number, got NaN"),
        ("name: 5", "name", "a string, got 5"),
        ("name: a b", "name", "must match pattern"),
        ("algorithm: {objective: bpao}", "algorithm.objective", "'bpao'; did you mean 'bapo'?"),
        ("algorithm: {objective: GRPO}", "algorithm.objective", "the loss of GRPO is clip"),
        ("algorithm: {objective: a.loss}", "algorithm.objective", "put a colon before the name's"),
        ("algorithm: {advantage: rlooo}", "algorithm.advantage", "did you mean 'rloo'?"),
        ("algorithm: {loss_aggregation: mean}", "algorithm.loss_aggregation", "'sequence_mean' or"),
        ("rollout: {servers: x}", "rollout.servers", "a list, got 'x'; its default is []"),
        ("rollout:", "rollout", "a section of keys, got null"),
        ("rollout: {fixed_lag: 2, partial: false}", "rollout.partial", "true with fixed_lag"),
        *(
            (f"rollout: {{fixed_lag: 2, {name}: {value}}}", f"rollout.{key}", "with fixed_lag: 2")
            for name, value, key in (
                ("async_steps", "1", "async_steps"),
                ("oversample_groups", "3", "oversample_groups"),
                ("tokens_per_step", "99", "tokens_per_step"),
                ("dynamic_sampling", "{enabled: true}", "dynamic_sampling.enabled"),
                ("colocated", "true", "colocated"),
            )
        ),
        *(
            (f"rollout: {{partial_tokens: 99, {name}: 2}}", f"rollout.{name}", "partial_tokens: 99")
            for name in ("async_steps", "fixed_lag", "oversample_groups", "tokens_per_step")
        ),
        *(
            (f"rollout: {{colocated: true, {name}: {value}}}", f"rollout.{name}", "with colocated")
            for name, value in (
                *(("async_steps", "1"), ("servers", "['http://a:1']"), ("servers_file", "x")),
                ("min_servers", "1"),
            )
        ),
        (
            "rollout: {servers: ['http://a:1'], servers_file: x}",
            "rollout.servers_file",
            "with servers",
        ),
        ("rollout: {engine: vllm}", "rollout.engine", "sglang, local or package.module:Class"),
        ("algorithm: {bapo: {lower: {start: 0.1}}}", "algorithm.bapo", "got 0.1, 0.9,"),
        ("algorithm: {bapo: {upper: {max: 256}}}", "algorithm.bapo", "1.2, 256.0;"),
        ("algorithm: {bapo: {preset: x}}", "algorithm.bapo.preset", "'paper' or 'recipe', got 'x'"),
        ("algorithm: {bapo: {preset: []}}", "algorithm.bapo.preset", "'paper' or 'recipe', got "),
        ("algorithm: {bapo: {target: 1.5}}", "algorithm.bapo.target", "below 1 with this measure"),
        ("algorithm: {bapo: {target: 1.0e-9}}", "algorithm.bapo.target", "than 0.0000000298"),
        ("algorithm: {bapo: 5}", "algorithm.bapo", "a section of keys, got 5"),
        ("algorithm: {bapo: {upper: {step: 0.001}}}", "algorithm.bapo.upper.step", "got 1801"),
        ("algorithm: {bapo: {measure: ratio, target: 256}}", "algorithm.bapo.target", "below 256"),
        ("algorithm: {dual_clip: 1.00000001}", "algorithm.dual_clip", "its default is null"),
        (
            "algorithm: {correction: {kind: token}}",
            "algorithm.behaviour",
            "with correction.kind: token, got rollout",
        ),
        (
            "rollout: {staleness: {measure: token, action: drop}}",
            "rollout.staleness.measure",
            "with action: drop",
        ),
        ("replay: {dumps: old, batches: 2}", "replay.batches", "must be 0 with dumps"),
        ("eval: {k_values: [2, 0]}", "eval.k_values[1]", "got 0"),
        ("parallel: {virtual_pipeline: 2}", "parallel.virtual_pipeline", "needs pipeline > 1"),
        (
            "megatron: {overlap_param_gather: true}",
            "megatron.overlap_param_gather",
            "needs overlap_grad_reduce",
        ),
        (
            "megatron: {batch_invariant_mode: true}",
            "megatron",
            "batch_invariant_mode is not supported, got True",
        ),
        ("log: {wandb_tags: ['']}", "log.wandb_tags[0]", "at least 1 character"),
        (f"log: {{wandb_tags: [a, {'a' * 65}]}}", "log.wandb_tags[1]", "at most 64 characters"),
        ("seed: 1e30", "seed", "integer"),
        (f"seed: {2**53 + 1}", "seed", "less than or equal to 4294967295"),
        (f"train: {{dump_tokens: {2**53 + 1}}}", "train.dump_tokens", "at most 2^53"),
        ("reward: {timeout_s: 1.0e+9}", "reward.timeout_s", "at most 1e+08 s"),
        ("inherit: [base.yaml]", "inherit", "one file name"),
    ],
)
def test_an_error_is_one_line_with_place_rule_value_and_remedy(folder, text, key, words):
    inherit = "" if text.startswith("inherit") else "inherit: base.yaml\n"
    message = error_of(write(folder, f"{inherit}{text}\n"))
    assert message.startswith(f"configs/a.yaml: '{key}' ")
    assert words in message
    assert ";" in message


@pytest.mark.parametrize(
    ("text", "overrides", "problem"),
    [
        ("name: x\nrun_dir: y\n", [], "missing key 'model'; add it"),
        ("name: x\nrun_dir: y\n", ["model.dtype=float32"], "missing key 'model.path'; add it"),
        # The misspelt key comes before the one that it leaves missing.
        (
            "name: x\nrun_dri: y\nmodel: {path: m}\n",
            [],
            "unknown key 'run_dri'; did you mean 'run_dir'?",
        ),
    ],
)
def test_a_missing_key_is_named(folder, text, overrides, problem):
    assert error_of(write(folder, text), *overrides) == f"configs/a.yaml: {problem}"


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
    assert keys["algorithm.bapo.lower.step"].default == "0.02"
    assert keys["eval.sets[].path"].type == "path | null"
    assert keys["rollout.server.max_total_tokens"].type == "integer | null ≥ 1"
    assert keys["log.wandb_tags"].type == "list of text"
