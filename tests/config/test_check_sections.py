from __future__ import annotations

import re

import pytest

from bapo_megatron.config.check_sections import check_rewards, check_shaping
from bapo_megatron.config.load import ConfigError
from bapo_megatron.config.reward import RewardConfig


def test_the_buffer_of_the_soft_penalty_fits_the_longest_response():
    config = RewardConfig.model_validate({"overlong": {"buffer_tokens": 4096}})

    check_shaping(config, 4096)
    check_shaping(RewardConfig(), 1)
    message = (
        "reward.overlong.buffer_tokens: must be at most rollout.max_response_tokens = 4095, got "
        "4096; lower it"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        check_shaping(config, 4095)


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
