"""A reward function: a right answer is worth more the shorter its response is.

reward:
  functions:
    - {name: short, function: "examples.rewards.short_answers:grade"}
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bapo_megatron.reward.math_answer import grade_math_answer

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from bapo_megatron.reward.base import SampleFacts


def grade(
    response: str, answer: str, sample: SampleFacts, row: Mapping[str, Any]
) -> dict[str, Any]:
    """From 1 for a right answer of no tokens down to 0.5 for one of the row's ``token_budget``."""
    right = grade_math_answer(response, answer)
    used_share = min(sample.num_tokens / row.get("token_budget", 4096), 1.0)
    return {
        "reward": right.reward * (1.0 - 0.5 * used_share),
        "answer_found": right.answer_found,
        "extracted": right.extracted,
        "reason": right.reason,
        "used_share": used_share,  # a metric: reward/short/used_share
    }
