"""Reward functions by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bapo_megatron.reward.math_answer import grade_math_answer

if TYPE_CHECKING:
    from bapo_megatron.reward.base import RewardFunction

REWARD_FUNCTIONS: dict[str, RewardFunction] = {"math": grade_math_answer}
"""Every function that a ``RewardPool`` can run."""
