import gc
import operator
import os
import re
from pathlib import Path

import pytest

from bapo_megatron.config.evaluation import EvalSetConfig
from bapo_megatron.config.load import dump_yaml, load_config
from bapo_megatron.config.schema import RunConfig
from tests.config.files import BASE, error_of, write


def test_what_is_not_given_has_the_schema_s_default_and_references_are_resolved(
    folder, monkeypatch
):
    monkeypatch.setenv("MODELS", "/models")
    path = write(folder, "name: r\nrun_dir: runs/${name}\nmodel: {path: '${oc.env:MODELS}/tiny'}\n")
    config = load_config(path)

    assert config == RunConfig(name="r", run_dir="runs/r", model={"path": "/models/tiny"})
    assert config.algorithm.bapo.target == 0.4


def test_overrides_stand_above_the_file_which_stands_above_its_base(folder):
    (folder / "deep").mkdir()
    text = "inherit: ../base.yaml\nrollout: {temperature: 0.8, groups_per_step: 16}\n"
    write(folder / "deep", text, "b.yaml")
    path = write(folder, "inherit: deep/b.yaml\nname: c\nrollout: {temperature: 0.7}\n")

    config = load_config(path, ["rollout.temperature=0.6"])

    rollout = config.rollout
    assert (config.name, rollout.temperature, rollout.groups_per_step) == ("c", 0.6, 16)


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("optimizer.lr=2e-4", 0.0002),
        ("rollout.server.max_total_tokens=null", None),
        ("rollout.servers=[http://a:1, http://b:2]", ("http://a:1", "http://b:2")),
        ("eval.sets=[{path: /x.jsonl, name: x}]", (EvalSetConfig(path="/x.jsonl", name="x"),)),
        ("algorithm.objective=mine:loss", "mine:loss"),
        # Texts arrive exactly as given.
        ("log.wandb_project=", ""),
        ("log.wandb_group=2024", "2024"),
        ("data.chat_template=null", None),
        ("data.prompt_suffix=Put it in \\boxed{}.", "Put it in \\boxed{}."),
        ("data.prompt_suffix= Put your answer after ####.", " Put your answer after ####."),
        ("data.system_prompt=Rule: be brief\nand [right", "Rule: be brief\nand [right"),
        (r'data.prompt_suffix="\n #1"', "\n #1"),
        ("run_dir=/runs/a #b", Path("/runs/a #b")),
        ("data.train.path=/x #y.jsonl", Path("/x #y.jsonl")),
    ],
)
def test_an_override_is_read_by_the_type_of_its_key(folder, override, value):
    config = load_config(folder / "base.yaml", [override])
    assert operator.attrgetter(override.partition("=")[0])(config) == value


def test_an_override_may_need_another_one(folder):
    config = load_config(
        folder / "base.yaml",
        [
            "algorithm.objective_options.note= a #b",
            "algorithm.objective_options.scale=2.5",
            "algorithm.objective=mine:loss",
            "algorithm.distillation.teacher.servers=[http://a:1]",
            "algorithm.distillation.teacher.engine=sglang",
        ],
    )
    assert config.algorithm.distillation.teacher.servers == ("http://a:1",)
    assert config.algorithm.objective_options == {"note": " a #b", "scale": 2.5}


def test_the_resolved_configuration_reads_back_equal(folder, tmp_path):
    config = load_config(
        folder / "base.yaml",
        [
            "algorithm.bapo.preset=recipe",
            "optimizer.lr=1e-7",
            "data.train=[{hub: openai/gsm8k, split: train}]",
            "data.prompt_suffix='a \\${b} \\boxed{} ü: # ''c'''",
            r"data.system_prompt='a\\\${b} \\'",
            "rollout.servers=[http://a:1]",
        ],
    )
    assert config.data.prompt_suffix == "a ${b} \\boxed{} ü: # 'c'"
    assert config.data.system_prompt == r"a\${b} \\"

    (tmp_path / "config.yaml").write_text(dump_yaml(config))

    assert load_config(tmp_path / "config.yaml") == config


@pytest.mark.parametrize(
    ("file", "overrides", "sets"),
    [
        ("a.yaml", [], [("c", "x", 1.0)]),
        ("a.yaml", ["data.train.path=d.jsonl"], [("d", "x", 1.0)]),
        ("b.yaml", ["data.train.path=d.jsonl"], [("d", None, 1.0)]),
        (
            "a.yaml",
            ["data.train=[{path: d.jsonl, weight: 3}, {hub: openai/gsm8k, split: train}]"],
            [("d", None, 3.0), ("gsm8k", None, 1.0)],
        ),
        ("a.yaml", ["data.train=null"], []),
    ],
)
def test_a_list_of_sets_and_one_set_take_each_other_s_place(folder, file, overrides, sets):
    text = "inherit: base.yaml\ndata: {train: [{path: a.jsonl}, {path: b.jsonl}]}\n"
    write(folder, text, "b.yaml")
    write(folder, "inherit: b.yaml\ndata: {train: {path: c.jsonl, answer_column: x}}\n")

    train_sets = load_config(folder / file, overrides).data.train_sets
    assert [(s.label, s.answer_column, s.weight) for s in train_sets] == sets


def test_the_layer_that_holds_the_error_is_named(folder):
    write(folder, f"{BASE}seed: -1\n", "base.yaml")
    path = write(folder, "inherit: base.yaml\ntrain: {steps: 5}\n")

    assert error_of(path).startswith("configs/base.yaml: 'seed' ")
    for override, key in (("train.steps=0", "train.steps"), ("rollout.n=6", "rollout.n")):
        message = error_of(path, "seed=0", override)
        assert re.match(rf"override '{override}': (unknown key )?'{key}'", message)


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("rollout.servers=[a", "not valid YAML: .*; quote the value, or close its brackets"),
        (f"seed={'[' * 300}{']' * 300}", "maximum recursion depth"),
        (f"seed={'[' * 5000}", "not valid YAML: exceeded maximum nesting depth"),
        (f"seed={'1' * 5000}", "integer string conversion"),
        ("seed=!!binary aGk=", "not JSON serializable"),
        ("run_dir=", "'run_dir' must be a path"),
        ("run_dir= ", "'run_dir' must be a path"),
        *(
            (text, f"^override '{text}': must be dotted.key=value")
            for text in ("seed", "=3", "a b=3", "seed:3", "eval.sets.0.path=x", "--seed=3")
        ),
    ],
)
def test_an_override_that_cannot_be_read_is_refused(folder, override, problem):
    gc.collect()  # so that nothing is finalized at the limit of recursion
    message = error_of(folder / "base.yaml", override)
    assert re.search(problem, message)
    assert message.startswith("override '")


@pytest.mark.parametrize(
    ("text", "place", "problem"),
    [
        ("name: x\nrun_dir: b: c\n", ":2", "not valid YAML: mapping values are not allowed"),
        ("name: x\nseed: 1\nseed: 2\n", ":3", "duplicate key seed"),
        ("- a\n- b\n", "", "must be a mapping of keys"),
        ("5\n", "", "Invalid loaded object type: int"),
        ("a: &a [*a]\n", ":1", "recursive aliases"),
        (f"a: {'[' * 300}{']' * 300}", "", "maximum recursion depth"),
        ("run_dir: ${nope}", "", "Interpolation key 'nope' not found"),
        ("inherit: bse.yaml\n", ": inherit: configs/bse.yaml", "no such file"),
        ("inherit: b.yaml\n", "", "configs/a.yaml -> configs/b.yaml -> configs/a.yaml"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_its_line(folder, text, place, problem):
    gc.collect()  # so that nothing is finalized at the limit of recursion
    write(folder, "inherit: a.yaml\n", "b.yaml")
    message = error_of(write(folder, text))
    assert message.startswith(f"configs/a.yaml{place}: ")
    assert problem in message


def test_what_is_no_text_file_is_refused(folder):
    assert error_of(Path("configs/b.yaml")) == "configs/b.yaml: no such file; check the path"
    (folder / "c.yaml").write_bytes(b"name: \xff")
    (folder / "d.yaml").symlink_to("d.yaml")
    (folder / "e.yaml").mkdir()
    for name in "cde":
        message = error_of(Path(f"configs/{name}.yaml"))
        assert message.startswith(f"configs/{name}.yaml: ")
        assert message.endswith("; give a readable YAML file")


def test_paths_are_absolute_from_the_start_and_a_tilde_is_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    Path("home").mkdir()
    Path("home/base.yaml").write_text("name: a\n")
    Path("a.yaml").write_text(
        "inherit: ~/base.yaml\nrun_dir: ~/runs/a\nmodel: {path: ./model}\n"
        "data: {train: {path: 'parts/*.jsonl', name: parts}, chat_template: ./t.jinja}\n"
        "eval: {sets: [{path: e.jsonl}]}\n"
    )
    config = load_config(Path("a.yaml"), ["replay=old/rollouts"])
    os.chdir("/")
    assert [
        str(path.relative_to(tmp_path))
        for path in (
            config.run_dir,
            config.model.path,
            config.data.train_sets[0].path,
            config.data.chat_template,
            config.eval.sets[0].path,
            config.replay.dumps,
        )
    ] == ["home/runs/a", "model", "parts/*.jsonl", "t.jinja", "e.jsonl", "old/rollouts"]


@pytest.mark.parametrize("key", ["algorithm.objective", "rollout.engine", "data.train.path"])
def test_a_long_value_is_cut_in_the_message(folder, key):
    message = error_of(folder / "base.yaml", f"{key}={'[' * 5000}")
    assert re.search(rf"'{key.removesuffix('.path')}' must .*…", message)
    assert len(message) < 600


def test_a_divergence_in_a_reward_that_does_not_count_is_refused(folder):
    teacher = "algorithm.distillation={coefficient: 1, teacher: {path: teacher}}"
    overrides = (teacher, "algorithm.advantage=distill", "algorithm.kl.where=reward")
    load_config(folder / "base.yaml", overrides)
    for ignoring in (overrides, ("algorithm.objective=nll", "algorithm.kl.where=reward")):
        message = error_of(folder / "base.yaml", *ignoring, "algorithm.kl.coefficient=0.1")
        assert "kl.where' must be loss with advantage: distill or objective: nll" in message
    message = error_of(folder / "base.yaml", teacher, "algorithm.objective=nll")
    assert "distillation.loss' must not be tokens with objective: nll" in message
