"""Compiled kernels, the readable reference and the chunked path train alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed_launch import run_ranks
from tests.trainer.aggregation_ranks import gradients_of_each_objective, gradients_of_each_path

pytestmark = pytest.mark.distributed

PATHS = {
    "reference": {"backend": "reference"},
    "compiled": {"backend": "cpu"},
    "chunked": {"backend": "cpu", "logits_chunk_tokens": 13},
}

SEARCHES = {
    "update": {"bapo": {"target": 0.38}},
    "micro_batch": {"bapo": {"target": 0.38, "scope": "micro_batch"}, "dual_clip": 3.0},
    "fixed": {"objective": "clip", "entropy_coefficient": 0.0},
}

LAYOUTS = {
    "one rank": (1, 1, False),
    "TP 2 with SP": (2, 2, True),
    "DP 2": (2, 1, False),
}
"""Number of ranks, tensor-parallel size, and whether sequence parallel."""


@pytest.fixture(scope="module", params=LAYOUTS)
def ranks(
    request: pytest.FixtureRequest, random_model: Path, mixed_dumps: Path
) -> list[dict[tuple[str, str], dict[str, Any]]]:
    """What each rank of a layout computes, by search and path."""
    num_ranks, tensor, sequence = LAYOUTS[request.param]
    dump = mixed_dumps / "step_000001.parquet"
    return run_ranks(
        gradients_of_each_path, num_ranks, random_model, dump, tensor, sequence, PATHS, SEARCHES
    )


def _assert_equal(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual["loss"] == pytest.approx(expected["loss"], abs=1e-6)
    assert actual["entropy"] == pytest.approx(expected["entropy"], rel=1e-6)
    assert actual["bounds"] == expected["bounds"]
    assert actual["gradients"].keys() == expected["gradients"].keys()
    for name, gradient in expected["gradients"].items():
        scale = float(gradient.abs().max())
        difference = float((actual["gradients"][name] - gradient).abs().max())
        assert difference <= 2e-5 * scale + 1e-8, name


@pytest.mark.parametrize("search", SEARCHES)
def test_every_path_gives_the_loss_and_the_gradients_of_the_reference(
    ranks: list[dict[tuple[str, str], dict[str, Any]]], search: str
) -> None:
    for results in ranks:
        for path in ("compiled", "chunked"):
            _assert_equal(results[search, path], results[search, "reference"])


def test_one_fresh_update_is_the_same_under_all_bounds(
    random_model: Path, mixed_dumps: Path
) -> None:
    """Without lag every ratio is 1, so nothing is clipped, whatever the search has found."""
    dump = mixed_dumps / "step_000001.parquet"
    bounds = {"grpo": (0.8, 1.2), "start": (0.6, 1.2), "corner": (0.9, 3.0)}
    algorithms: dict[str, dict[str, Any]] = {
        name: {"objective": "clip", "fixed": {"low": low, "high": high}}
        for name, (low, high) in bounds.items()
    }
    algorithms["bapo"] = {"bapo": {"target": 0.99}}
    for algorithm in algorithms.values():
        algorithm["behaviour"] = "recomputed"  # by the weights that are about to be updated
    (found,) = run_ranks(gradients_of_each_objective, 1, random_model, dump, {}, algorithms, 64, 0)
    assert found["bapo"]["bounds"] == pytest.approx((0.9, 3.0))
    for name in bounds:
        for parameter, gradient in found[name]["gradients"].items():
            assert gradient.abs().max() > 0, parameter
            assert torch.equal(gradient, found["bapo"]["gradients"][parameter]), (name, parameter)
