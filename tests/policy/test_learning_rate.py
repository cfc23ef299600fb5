"""The learning-rate schedule, in updates counted from 0."""

from typing import Any

import pytest

from bapo_megatron.config.megatron import OptimizerConfig
from bapo_megatron.policy.optimizer import learning_rate


@pytest.mark.parametrize(
    ("settings", "total", "rates"),
    [
        pytest.param({}, 3, [0.8] * 5, id="constant stays also beyond the end"),
        pytest.param(
            {"warmup_updates": 4}, 9, [0.2, 0.4, 0.6, 0.8, 0.8, 0.8], id="warm-up from the first on"
        ),
        pytest.param(
            {"schedule": "linear", "min_lr": 0.4},
            4,
            [0.8, 0.7, 0.6, 0.5, 0.4, 0.4],
            id="linear to the minimum, where it stays",
        ),
        # Quarter points of a half cosine: (1 + √½) / 2 and (1 − √½) / 2 of the way.
        pytest.param(
            {"schedule": "cosine"}, 4, [0.8, 0.682842712, 0.4, 0.117157288, 0.0], id="cosine"
        ),
        pytest.param(
            {"schedule": "linear", "warmup_updates": 2},
            6,
            [0.4, 0.8, 0.8, 0.6, 0.4, 0.2, 0.0],
            id="decay begins after the warm-up",
        ),
        pytest.param(
            {"schedule": "cosine", "warmup_updates": 4}, 2, [0.2, 0.4], id="no decay within warm-up"
        ),
        pytest.param(
            {"lr": 0.0, "schedule": "cosine", "warmup_updates": 2}, 4, [0.0] * 4, id="rate 0"
        ),
    ],
)
def test_rates_follow_the_schedule(
    settings: dict[str, Any], total: int, rates: list[float]
) -> None:
    config = OptimizerConfig.model_validate({"lr": 0.8, **settings})
    actual = [learning_rate(config, update, total) for update in range(len(rates))]
    assert actual == pytest.approx(rates)
