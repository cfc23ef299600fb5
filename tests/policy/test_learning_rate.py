"""The learning-rate schedule, in updates counted from 0."""

from typing import Any

import pytest

from bapo_megatron.config.megatron import OptimizerConfig
from bapo_megatron.policy.optimizer import learning_rate

SCHEDULES: dict[str, tuple[dict[str, Any], int, list[float]]] = {
    "constant stays also beyond the end": ({}, 3, [0.8] * 5),
    "warm-up from the first on": ({"warmup_updates": 4}, 9, [0.2, 0.4, 0.6, 0.8, 0.8, 0.8]),
    "linear to the minimum, where it stays": (
        {"schedule": "linear", "min_lr": 0.4},
        4,
        [0.8, 0.7, 0.6, 0.5, 0.4, 0.4],
    ),
    # Quarter points of a half cosine: (1 + √½) / 2 and (1 − √½) / 2 of the way.
    "cosine": ({"schedule": "cosine"}, 4, [0.8, 0.682842712, 0.4, 0.117157288, 0.0]),
    "decay begins after the warm-up": (
        {"schedule": "linear", "warmup_updates": 2},
        6,
        [0.4, 0.8, 0.8, 0.6, 0.4, 0.2, 0.0],
    ),
    "no decay within warm-up": ({"schedule": "cosine", "warmup_updates": 4}, 2, [0.2, 0.4]),
    "rate 0": ({"lr": 0.0, "schedule": "cosine", "warmup_updates": 2}, 4, [0.0] * 4),
}
"""Settings, number of all updates, and rates of the first ones."""


@pytest.mark.parametrize("name", SCHEDULES)
def test_rates_follow_the_schedule(name: str) -> None:
    settings, total, rates = SCHEDULES[name]
    config = OptimizerConfig.model_validate({"lr": 0.8, **settings})
    actual = [learning_rate(config, update, total) for update in range(len(rates))]
    assert actual == pytest.approx(rates)
