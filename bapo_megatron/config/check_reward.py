"""Rules of the rewards that need other sections or the environment.

Whether a reward function can be imported is found by a grader process, at the start of a run.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from bapo_megatron.config.load import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bapo_megatron.config.reward import RewardConfig, RewardFunctionConfig


def check_rewards(functions: Sequence[RewardFunctionConfig], key: str = "reward.functions") -> None:
    """The tokens of services are there.

    Args:
        functions: What scores.
        key: Where they are configured.

    Raises:
        ConfigError: A variable is not set.
    """
    for number, entry in enumerate(functions):
        variable = entry.http.token_variable
        if entry.url is not None and variable and not os.environ.get(variable):
            raise ConfigError(
                f"{key}[{number}].http.token_variable: the environment variable must "
                f"hold the service's token, got none in {variable}; set it, or leave the key empty"
            )


def check_shaping(reward: RewardConfig, max_response_tokens: int) -> None:
    """The buffer of the soft penalty fits the longest response.

    Raises:
        ConfigError: It does not.
    """
    if reward.overlong is not None and reward.overlong.buffer_tokens > max_response_tokens:
        raise ConfigError(
            "reward.overlong.buffer_tokens: must be at most rollout.max_response_tokens = "
            f"{max_response_tokens}, got {reward.overlong.buffer_tokens}; lower it"
        )
