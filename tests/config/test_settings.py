"""A configuration as a flat table, and what of it leaves the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from bapo_megatron.config.load import ConfigError, dump_yaml
from bapo_megatron.config.schema import RunConfig
from bapo_megatron.config.settings import public_setting, public_settings, read_settings

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
        ("reward.functions.0.function", "/home/someone/mine.py:grade", "mine.py:grade"),
        (
            "reward.functions.0.url",
            "https://me:pass@graders:8000/grade?token=1",
            "https://graders:8000",
        ),
        (
            "rollout.server.extra_args",
            ["--api-key", SECRET, f"--admin-api-key={SECRET}"],
            "--api-key, --admin-api-key",
        ),
        ("custom.api_key", SECRET, "not shown"),
        ("algorithm.objective_options.hub_token", SECRET, "not shown"),
        ("reward.functions.0.token_variable", "JUDGE_TOKEN", "JUDGE_TOKEN"),
        ("rollout.max_response_tokens", 80, "80"),
        ("replay.dumps", None, "none"),
    ],
)
def test_settings_show_no_outside_path_and_no_secret(key: str, value: object, shown: str) -> None:
    assert public_setting(key, value) == shown


def test_settings_for_trackers_keep_numbers_and_hold_every_key_but_no_secret() -> None:
    settings = public_settings(CONFIG)
    assert settings["seed"] == 0
    assert settings["optimizer.lr"] == 1e-6
    assert settings["resume"] is False
    assert settings["model.path"] == "tiny"
    assert settings["replay.dumps"] == "none"
    assert settings["eval.sets.1.path"] == "two.jsonl"
    assert settings["algorithm.objective_options.alpha"] == 0.5
    assert settings["algorithm.objective_options.api_key"] == "not shown"
    assert settings["algorithm.objective_options.pin_key"] == "not shown"
    assert all(isinstance(value, bool | int | float | str) for value in settings.values())


def test_settings_are_read_from_a_configuration_file_by_dotted_key(tmp_path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("# commit unknown\n" + dump_yaml(CONFIG))
    settings = read_settings(file)
    assert settings["eval.sets.1.path"] == "/data/two.jsonl"
    assert settings["optimizer.lr"] == 1e-6
    file.write_text("a: [")
    with pytest.raises(ConfigError, match=r"config.yaml: not readable YAML \(.*\); restore it"):
        read_settings(file)
