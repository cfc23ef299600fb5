from __future__ import annotations

from pathlib import Path

import pytest

from bapo_megatron.config.describe import describe_keys
from bapo_megatron.config.load import ConfigError, dump_yaml, load_config, parse_section
from bapo_megatron.config.schema import BapoConfig, RunConfig

BASE = "name: demo\nrun_dir: runs/demo\nmodel: {path: models/tiny}\n"


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A current directory with configs/base.yaml."""
    monkeypatch.chdir(tmp_path)
    Path("configs").mkdir()
    Path("configs/base.yaml").write_text(BASE)
    return Path("configs")


def write(folder: Path, text: str, name: str = "a.yaml") -> Path:
    (folder / name).write_text(text)
    return folder / name


def error_of(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_what_is_not_given_has_the_schema_s_default(folder):
    config = load_config(folder / "base.yaml")

    assert config == RunConfig(name="demo", run_dir="runs/demo", model={"path": "models/tiny"})
    assert config.model.path == Path("models/tiny")
    assert config.algorithm.bapo.target == 0.4


def test_overrides_stand_above_the_file_which_stands_above_its_base(folder):
    write(
        folder, "inherit: base.yaml\nrollout: {temperature: 0.8, groups_per_step: 16}\n", "b.yaml"
    )
    path = write(folder, "inherit: b.yaml\nname: c\nrollout: {temperature: 0.7}\n")

    config = load_config(
        path,
        [
            "rollout.temperature=0.6",
            "algorithm.objective=clip",
            "rollout.servers=[http://127.0.0.1:1, http://127.0.0.1:2]",
            "optimizer.lr=2e-4",
            "rollout.server.max_total_tokens=null",
            "log.wandb_project=",
            "data.prompt_suffix=Put it in \\boxed{}.",
            "eval.sets=[{path: x.jsonl, name: x}]",
        ],
    )

    assert config.name == "c"
    assert config.rollout.temperature == 0.6
    assert config.rollout.groups_per_step == 16
    assert config.rollout.servers == ("http://127.0.0.1:1", "http://127.0.0.1:2")
    assert config.algorithm.objective == "clip"
    assert config.optimizer.lr == 0.0002
    assert config.log.wandb_project == ""
    assert config.data.prompt_suffix == "Put it in \\boxed{}."
    assert config.eval.sets[0].path == Path("x.jsonl")


def test_inherit_is_relative_to_the_file_that_says_it(folder):
    (folder / "deep").mkdir()
    write(folder / "deep", "inherit: ../base.yaml\nseed: 3\n", "d.yaml")
    path = write(folder, "inherit: deep/d.yaml\n")

    assert load_config(path).seed == 3


def test_a_preset_fills_what_is_not_given(folder):
    config = load_config(folder / "base.yaml", ["algorithm.bapo.preset=recipe"])

    assert config.algorithm.bapo.measure == "ratio"
    assert config.algorithm.behaviour == "recomputed"
    assert config.algorithm.dual_clip == 3.0


def test_references_are_resolved(folder, monkeypatch):
    monkeypatch.setenv("MODELS", "/models")
    path = write(folder, "name: r\nrun_dir: runs/${name}\nmodel: {path: '${oc.env:MODELS}/tiny'}\n")

    config = load_config(path)

    assert (config.run_dir, config.model.path) == (Path("runs/r"), Path("/models/tiny"))


def test_the_resolved_configuration_reads_back_equal(folder, tmp_path):
    config = load_config(
        folder / "base.yaml",
        [
            "algorithm.bapo.preset=recipe",
            "optimizer.lr=1e-7",
            "data.train={path: x.jsonl}",
            "data.prompt_suffix='a \\${b} \\boxed{} ü: # ''c'''",
            "rollout.servers=[http://a:1]",
        ],
    )
    assert config.data.prompt_suffix == "a ${b} \\boxed{} ü: # 'c'"

    (tmp_path / "config.yaml").write_text(dump_yaml(config))

    assert load_config(tmp_path / "config.yaml") == config


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
        ("name: a b", "'name' must match pattern '^[A-Za-z0-9._-]+$', got 'a b'"),
        (
            "algorithm: {objective: bapoo}",
            "'algorithm.objective' must be bapo, clip, none or package.module:name, got 'bapoo'",
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
        (
            "rollout: {engine: vllm}",
            "'rollout.engine' must be sglang, local or package.module:Class, got 'vllm'",
        ),
        (
            "algorithm: {bapo: {lower: {start: 0.1}}}",
            "'algorithm.bapo' needs 0.5 <= lower.start <= lower.max <= 1, got 0.1 and 0.9",
        ),
        (
            "algorithm: {bapo: {upper: {max: 256}}}",
            "'algorithm.bapo' needs 1 <= upper.start <= upper.max < 256, got 1.2 and 256.0",
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
            "'algorithm.bapo.target' must be below 256 with measure: ratio, got 256.0",
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

    assert error_of(path) == f"configs/a.yaml: {message}"


def test_training_prompts_are_one_set_or_a_list_of_sets(folder):
    path = write(folder, "inherit: base.yaml\ndata: {train: {path: a.jsonl, answer_column: x}}\n")

    one = load_config(path, ["data.train.path=b.jsonl"]).data
    several = load_config(path, ["data.train=[{path: b.jsonl, weight: 3}, {path: c.jsonl}]"]).data

    assert [(s.label, s.answer_column, s.weight) for s in one.train_sets] == [("b", "x", 1.0)]
    assert [(s.label, s.answer_column, s.weight) for s in several.train_sets] == [
        ("b", None, 3.0),
        ("c", None, 1.0),
    ]
    assert load_config(path, ["data.train=null"]).data.train_sets == ()


def test_a_list_of_sets_and_one_set_take_each_other_s_place(folder, tmp_path):
    write(
        folder, "inherit: base.yaml\ndata: {train: [{path: a.jsonl}, {path: b.jsonl}]}\n", "b.yaml"
    )
    path = write(folder, "inherit: b.yaml\ndata: {train: {path: c.jsonl}}\n")

    assert [s.label for s in load_config(path).data.train_sets] == ["c"]
    (overridden,) = load_config(folder / "b.yaml", ["data.train.path=d.jsonl"]).data.train_sets
    assert overridden.label == "d"
    config = load_config(path, ["data.train=[{hub: openai/gsm8k, split: train}]"])
    assert [s.label for s in config.data.train_sets] == ["gsm8k"]
    (tmp_path / "config.yaml").write_text(dump_yaml(config))
    assert load_config(tmp_path / "config.yaml") == config


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


def test_the_layer_that_holds_the_error_is_named(folder):
    write(folder, f"{BASE}seed: -1\n", "base.yaml")
    path = write(folder, "inherit: base.yaml\ntrain: {steps: 5}\n")

    assert error_of(path).startswith("configs/base.yaml: 'seed' must be greater than or equal to 0")
    assert error_of(path, "seed=0", "train.steps=0") == (
        "override 'train.steps=0': 'train.steps' must be greater than or equal to 1, got 0; "
        "its default is 100"
    )
    assert error_of(path, "seed=0", "rollout.temprature=0.6") == (
        "override 'rollout.temprature=0.6': unknown key 'rollout.temprature'; "
        "did you mean 'rollout.temperature'?"
    )


@pytest.mark.parametrize(
    "override", ["seed", "=3", "a b=3", "seed:3", "eval.sets.0.path=x", "--seed=3"]
)
def test_an_override_that_is_no_assignment_is_refused(folder, override):
    assert error_of(folder / "base.yaml", override) == (
        f"override '{override}': must be dotted.key=value, such as rollout.temperature=0.6"
    )


def test_an_override_whose_value_is_no_yaml_is_refused(folder):
    message = error_of(folder / "base.yaml", "rollout.servers=[a")

    assert message.startswith("override 'rollout.servers=[a': the value is not YAML (")
    assert message.endswith("); quote it, or close its brackets")


def test_broken_yaml_is_reported_with_its_line(folder):
    assert error_of(write(folder, "name: x\nrun_dir: b: c\n")) == (
        "configs/a.yaml:2: not valid YAML: mapping values are not allowed in this context; "
        "correct this line"
    )
    assert error_of(write(folder, "name: x\nseed: 1\nseed: 2\n")) == (
        "configs/a.yaml:3: not valid YAML: found duplicate key seed; correct this line"
    )
    assert error_of(write(folder, "- a\n- b\n")) == (
        "configs/a.yaml: must be a mapping of keys, got a list; write 'key: value' lines"
    )
    assert error_of(write(folder, "5\n")) == (
        "configs/a.yaml: Invalid loaded object type: int; give a readable YAML file"
    )


def test_a_missing_file_is_named_and_who_asked_for_it(folder):
    assert error_of(Path("configs/b.yaml")) == "configs/b.yaml: no such file; check the path"
    assert error_of(write(folder, "inherit: bse.yaml\n")) == (
        "configs/a.yaml: inherit: configs/bse.yaml: no such file; check the path"
    )


def test_files_that_inherit_in_a_circle_are_refused(folder):
    write(folder, "inherit: b.yaml\n")
    write(folder, "inherit: a.yaml\n", "b.yaml")

    assert error_of(folder / "a.yaml") == (
        "configs/a.yaml: inherits from itself "
        "(configs/a.yaml -> configs/b.yaml -> configs/a.yaml); remove one 'inherit'"
    )


def test_a_file_without_a_name_is_called_a_base(folder):
    path = write(folder, "run_dir: runs/${name}\nmodel: {path: m}\n")

    assert error_of(path) == (
        "configs/a.yaml: Interpolation key 'name' not found; this is a base for other files: give "
        "one that inherits it and has a name"
    )
    assert load_config(path, ["name=x"]).run_dir == Path("runs/x")


def test_a_section_is_parsed_from_options():
    config = parse_section(BapoConfig, {"preset": "recipe", "contribution": "gradient"}, "options")

    assert (config.contribution, config.measure) == ("gradient", "ratio")
    for given, message in (
        ({"preset": "x"}, "'preset' must be 'paper' or 'recipe', got 'x'; its default is paper"),
        ({"taget": 0.4}, "unknown key 'taget'; did you mean 'target'?"),
        ({"target": 1.5}, "'target' must be below 1 with measure: share, got 1.5"),
    ):
        with pytest.raises(ConfigError) as caught:
            parse_section(BapoConfig, given, "options")
        assert str(caught.value) == f"options: {message}"


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
