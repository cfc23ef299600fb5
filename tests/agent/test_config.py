"""The settings of agents, and the rules between them."""

from typing import Any

import pytest
from pydantic import ValidationError

from bapo_megatron.config.rollout import RolloutConfig
from bapo_megatron.rollout.saved import settings_of


@pytest.mark.parametrize(
    ("agent", "command", "name"),
    [
        ("games.chess:play", (), "games.chess:play"),
        ("python -m 'my game'", ("python", "-m", "my game"), "python -m 'my game'"),
        (["./play.sh"], ("./play.sh",), "./play.sh"),
        (None, (), None),
    ],
)
def test_an_agent_is_a_function_or_a_command(agent: Any, command: Any, name: Any) -> None:
    config = RolloutConfig(agent=agent)
    assert config.agent_command == command
    assert config.environment_name == name
    assert config.has_environment is (agent is not None)
    assert settings_of(config).get("agent") == name


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"agent": ""}, "agent must be package.module:function or a command, got ''"),
        ({"agent": "play 'it"}, "agent must be package.module:function or a command"),
        ({"agent": "a:b", "environment": "c:D"}, "environment must be left out with agent"),
        ({"agent": "a:b", "agent_sandbox": {"timeout_s": 5}}, "agent_sandbox.timeout_s"),
        ({"agent": "a:b", "agent_python": "/p"}, "agent_python must be left out with a sandbox"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        RolloutConfig.model_validate(settings)
