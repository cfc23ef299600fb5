"""Loss and gradient of an update do not depend on micro-batches or ranks, for every aggregation.

Most responses have tokens that an environment wrote.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed_launch import run_ranks
from tests.trainer.aggregation_ranks import (
    AGGREGATIONS,
    gradients_in_each_layout,
    gradients_of_each_aggregation,
)

pytestmark = pytest.mark.distributed

WHOLE, SMALL = 4096, 64
"""Token budgets: everything in one micro-batch, or one or two samples in each."""

LAYOUTS: dict[str, dict[str, int]] = {
    "TP 2": {"tensor": 2},
    "DP 2": {},
    "CP 2": {"context": 2},
    "PP 2": {"pipeline": 2},
}
"""Sizes of ``ParallelConfig``, by name."""


@pytest.fixture(scope="module")
def one_rank(random_model: Path, episode_dump: Path) -> dict[tuple[str, int], dict[str, Any]]:
    budgets = (WHOLE, SMALL)
    return run_ranks(gradients_of_each_aggregation, 1, random_model, episode_dump, {}, budgets)[0]


@pytest.fixture(scope="module")
def two_ranks(
    random_model: Path, episode_dump: Path
) -> list[dict[str, dict[tuple[str, int], dict[str, Any]]]]:
    """Results by layout, of each rank."""
    return run_ranks(gradients_in_each_layout, 2, random_model, episode_dump, LAYOUTS, (SMALL,))


def _assert_equal(actual: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    assert actual["loss"] == pytest.approx(expected["loss"], abs=tolerance)
    assert actual["bounds"] == expected["bounds"]
    assert actual["gradients"].keys() == expected["gradients"].keys()
    for name, gradient in expected["gradients"].items():
        scale = max(1.0, float(gradient.abs().max()))
        difference = float((actual["gradients"][name] - gradient).abs().max())
        assert difference <= tolerance * scale, name


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_micro_batches_do_not_change_the_gradient(
    one_rank: dict[tuple[str, int], dict[str, Any]], aggregation: str
) -> None:
    _assert_equal(one_rank[aggregation, SMALL], one_rank[aggregation, WHOLE], 1e-6)


def test_aggregations_differ_from_each_other(
    one_rank: dict[tuple[str, int], dict[str, Any]],
) -> None:
    losses = {round(one_rank[aggregation, WHOLE]["loss"], 4) for aggregation in AGGREGATIONS}
    assert len(losses) == 3
    name = "lm_head.weight"
    first, second, third = (one_rank[a, WHOLE]["gradients"][name] for a in AGGREGATIONS)
    assert not torch.allclose(first, second, rtol=1e-2)
    assert not torch.allclose(second, third, rtol=1e-2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_do_not_change_the_gradient(
    one_rank: dict[tuple[str, int], dict[str, Any]],
    two_ranks: list[dict[str, dict[tuple[str, int], dict[str, Any]]]],
    layout: str,
) -> None:
    for results in two_ranks[:1] if layout == "PP 2" else two_ranks:
        for aggregation in AGGREGATIONS:
            expected = one_rank[aggregation, WHOLE]
            _assert_equal(results[layout][aggregation, SMALL], expected, 1e-5)
