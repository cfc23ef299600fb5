"""A configuration as a flat table, and what of it leaves the machine."""

from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.config.load import ConfigError, dump_yaml
from bapo_megatron.config.schema import RunConfig
from bapo_megatron.config.settings import (
    differing,
    flat_settings,
    public_setting,
    read_settings,
)

SECRET = "sk-not-for-others"
CONFIG = RunConfig.model_validate(
    {
        "name": "sums",
        "run_dir": Path("/data/runs/sums"),
        "model": {"path": Path("/data/models/tiny")},
        "data": {"train": {"path": "/data/train.jsonl"}},
        "eval": {"sets": [{"path": "/data/one.jsonl"}, {"path": "/data/two.jsonl"}]},
        "algorithm": {
            "objective": "mine:loss",
            "objective_options": {"api_key": SECRET, "pin_key": 271828, "alpha": 0.5},
        },
    }
)


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("model.path", "/home/someone/models/Qwen", "Qwen"),
        ("model.path", "my runs/jane doe/Qwen 3", "Qwen 3"),
        ("model.path", "Qwen/Qwen3-8B/", "Qwen3-8B"),
        ("data.train.hub", "openai/gsm8k", "gsm8k"),
        ("eval.sets.12.path", "/home/someone/a b.jsonl", "a b.jsonl"),
        ("reward.functions.0.function", "/home/someone/mine.py:grade", "mine.py:grade"),
        ("reward.functions.0.function", "mine.token:grade", "mine.token:grade"),
        (
            "reward.functions.0.url",
            "https://me:pass@graders:8000/grade?token=1",
            "https://graders:8000",
        ),
        ("reward.functions.0.url", "s3://bucket:prod/x", "not shown"),
        (
            "rollout.servers",
            ["http://me@a.b:1", "http://[::1]:30/"],
            "http://a.b:1, http://[::1]:30",
        ),
        (
            "rollout.server.extra_args",
            ["--api-key", SECRET, f"--admin-api-key={SECRET}", f"--hf-token {SECRET}"],
            "--api-key, --admin-api-key, --hf-token",
        ),
        ("rollout.agent", f"/opt/me/python -m own.agent --key {SECRET}", "python -m own.agent"),
        ("rollout.agent", ["python", "/home/me/agent.py", "--key", SECRET], "python agent.py"),
        ("rollout.agent", "own.agents:play", "own.agents:play"),
        ("reward.functions.0.http.token_variable", "JUDGE_TOKEN", "JUDGE_TOKEN"),
        ("rollout.max_response_tokens", 80, "80"),
        ("replay.dumps", None, "none"),
        ("rollout.server.extra_args", [], "none"),
        ("data.system_prompt", f"Use https://me:{SECRET}@a.b: then answer", "not shown"),
        ("data.system_prompt", "Answer yes or no/maybe.", "Answer yes or no/maybe."),
        ("algorithm.objective_options.hub", SECRET, "not shown"),
        ("algorithm.objective_options.alpha", 0.5, "0.5"),
        ("algorithm.objective_options.pin_key", 271828, "not shown"),
        ("data.chat_template_arguments.mode", SECRET, "not shown"),
        ("former.key.of_another_version", SECRET, "not shown"),
    ],
)
def test_settings_show_no_outside_path_and_no_secret(key: str, value: object, shown: str) -> None:
    assert public_setting(key, value) == shown


def test_settings_are_read_from_a_configuration_file_by_dotted_key(tmp_path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("# commit unknown\n" + dump_yaml(CONFIG))
    assert read_settings(file)["eval.sets.1.path"] == "/data/two.jsonl"
    file.write_text("")
    assert read_settings(file) == {}
    file.write_text("a: [")
    with pytest.raises(ConfigError, match=r"config.yaml:2: not valid YAML: .*; correct this line"):
        read_settings(file)


def test_a_file_that_is_older_than_a_key_has_its_default(tmp_path) -> None:
    file = tmp_path / "config.yaml"
    text = dump_yaml(CONFIG)
    for newer in ("  async_steps: 0\n", "    weight: 1.0\n"):  # the second one is in a list
        assert newer in text
        text = text.replace(newer, "")
    file.write_text(text)
    now = flat_settings(CONFIG)
    assert differing(read_settings(file), now) == []
    assert differing(read_settings(file), {**now, "rollout.async_steps": 1}) == [
        "rollout.async_steps"
    ]
    file.write_text(text + "former: {key: 1}\n")  # of another version
    assert read_settings(file)["former.key"] == 1
    assert {"former.key", "rollout.async_steps"} < set(differing(read_settings(file), now))


@pytest.mark.parametrize(
    ("one", "other", "keys"),
    [
        ({"a": {"x": 1, "y": 2}}, {"a": {"x": 1, "y": 3}}, ["a.y"]),
        ({"a": {"x": 1, "y": 2}}, {"a": {"x": 1}}, ["a.y"]),
        ({"a": None}, {"a": {"x": 1}}, ["a.x"]),
        ({"a": [{"x": 1}]}, {"a": [{"x": 1}, {"x": 2}]}, ["a.1.x"]),
        ({"a": [{"x": 1}]}, {"a": [{"x": 1, "y": 2}]}, ["a.0.y"]),
        ({"a": []}, {"a": [{"x": 1}]}, ["a.0.x"]),
        *(
            ({section: {name: one}}, {section: {name: other}}, [f"{section}.{name}.{key}"])
            for section, name in (
                ("algorithm", "objective_options"),
                ("data", "chat_template_arguments"),
            )
            for one, other, key in (
                ({"high": 5}, {"high": 5, "low": 0.2}, "low"),
                ({"high": 5}, {}, "high"),
                ({"high": {"x": 1}}, {"high": {"x": 1, "y": 2}}, "high.y"),
            )
        ),
    ],
)
def test_configurations_differ_by_the_keys_below_which_they_do(
    one: dict[str, Any], other: dict[str, Any], keys: list[str]
) -> None:
    assert differing(flat_settings(one), flat_settings(other)) == keys
    assert differing(flat_settings(other), flat_settings(one)) == keys
