"""Clip rules choose bounds; what tokens contribute within them is tested in tests/ops."""

from __future__ import annotations

import math

import pytest
import torch

from bapo_megatron.algorithm.clipping import make_clip_rule
from bapo_megatron.config.schema import AlgorithmConfig
from bapo_megatron.ops.backend import select_kernels
from bapo_megatron.ops.contributions import accumulate, to_clip_bounds

CPU = torch.device("cpu")
KERNELS = select_kernels("auto", CPU)


@pytest.mark.parametrize(
    ("algorithm", "low", "high"),
    [
        ({"clip": "fixed", "fixed": {"low": 0.8, "high": 1.28}}, 0.8, 1.28),
        ({"clip": "none"}, 0.0, math.inf),
    ],
)
def test_a_constant_clip_searches_nothing(
    algorithm: dict[str, object], low: float, high: float
) -> None:
    rule = make_clip_rule(AlgorithmConfig.model_validate(algorithm), CPU)
    table = rule.new_table(KERNELS)
    assert table is None
    bounds = to_clip_bounds(rule.bounds(table).tolist())
    assert (bounds.low, bounds.high, bounds.exit) == (low, high, "fixed")
    assert math.isnan(bounds.positive_share)
    assert math.isnan(bounds.positive_share_start)


def test_bapo_bounds_come_from_the_table() -> None:
    config = AlgorithmConfig.model_validate(
        {
            "bapo": {
                "lower": {"start": 0.75, "max": 1.0, "step": 0.25},
                "upper": {"start": 1.0, "max": 1.25, "step": 0.25},
                "target": 0.45,
            }
        }
    )
    rule = make_clip_rule(config, CPU)
    table = rule.new_table(KERNELS)
    assert table is not None
    # P is 1 at c_high 1 and 1.25 at 1.25; N is 2 · 0.75.
    logprob_T = torch.tensor([2.0, 0.5]).log()
    accumulate(table, logprob_T, torch.zeros(2), torch.tensor([1.0, -2.0]), torch.ones(2))
    bounds = to_clip_bounds(rule.bounds(table).tolist())
    assert (bounds.low, bounds.high, bounds.exit) == (0.75, 1.25, "met")
    assert bounds.positive_share_start == pytest.approx(1 / 2.5)
    assert bounds.positive_share == pytest.approx(1.25 / 2.75)
    assert (bounds.tokens, bounds.nonfinite_tokens, bounds.out_of_range_tokens) == (2, 0, 0)
    with pytest.raises(ValueError, match="needs a contribution table"):
        rule.bounds(None)
