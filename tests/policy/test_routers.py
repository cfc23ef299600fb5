"""Routers that repeat choices: their own give the same numbers, others change them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.distributed_launch import run_ranks
from tests.policy.expert_layouts import LAYOUTS, REPLAYED, run_replays
from tests.policy.tiny_models import make_model

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.distributed

FAMILIES = ("qwen3_moe", "glm4_moe")
TESTED = [layout for layout in LAYOUTS if layout.name in REPLAYED]
CASES = [f"{layout.name}, {family}" for layout in TESTED for family in FAMILIES]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """By layout and family, of each rank."""
    root: Path = tmp_path_factory.mktemp("models")
    models = {name: make_model(name, root / name, num_hidden_layers=4) for name in FAMILIES}
    of_layouts: dict[str, list[dict[str, Any]]] = {}
    for ranks in sorted({layout.ranks for layout in TESTED}):
        layouts = [layout for layout in TESTED if layout.ranks == ranks]
        by_rank = run_ranks(run_replays, ranks, layouts, models, timeout_s=300)
        for name in by_rank[0]:
            of_layouts[name] = [results[name] for results in by_rank]
    return of_layouts


@pytest.mark.parametrize("repeated", ["own", "half"])
@pytest.mark.parametrize("case", CASES)
def test_the_routers_own_choices_give_the_same_logits_and_gradients_bit_for_bit(
    results: dict[str, Any], case: str, repeated: str
) -> None:
    for passes in results[case]:
        free, again = passes["free"], passes[repeated]
        for free_NV, again_NV in zip(free["logits"], again["logits"], strict=True):
            assert torch.equal(free_NV, again_NV)
    free, again = (results[case][0][name]["gradients"] for name in ("free", repeated))
    assert len(free) > 50
    for name, gradient in free.items():
        assert torch.equal(again[name], gradient), name


@pytest.mark.parametrize("case", CASES)
def test_other_choices_move_the_logits_and_train_the_router(
    results: dict[str, Any], case: str
) -> None:
    moved = [
        float((free_NV - other_NV).abs().max())
        for passes in results[case]
        for free_NV, other_NV in zip(
            passes["free"]["logits"], passes["other"]["logits"], strict=True
        )
    ]
    assert min(moved) > 0.1
    free, other = (results[case][0][name]["gradients"] for name in ("free", "other"))
    routers = [name for name in free if name.endswith("mlp.gate.weight")]
    assert len(routers) >= 3
    for name in routers:
        assert other[name].norm() > 1e-4
        assert not torch.allclose(other[name], free[name], rtol=0.1)


@pytest.mark.parametrize("case", CASES)
def test_metrics_say_what_was_repeated_and_where_the_router_agrees(
    results: dict[str, Any], case: str
) -> None:
    (free, own, half, other), *further = (
        [passes[name]["sums"] for name in ("free", "own", "half", "other")]
        for passes in results[case]
    )
    assert all(sums == [free, own, half, other] for sums in further)  # on every rank
    assert free["router_replayed"] == free["router_compared"] == 0
    assert own["router_replayed"] == own["router_tokens"] > 0
    assert own["router_matches"] == own["router_compared"]
    assert 0 < half["router_replayed"] < half["router_tokens"]
    assert half["router_matches"] == half["router_compared"]
    assert 0 < other["router_matches"] < 0.7 * other["router_compared"]
    per_token = {"qwen3_moe": 2, "glm4_moe": 3}[case.rpartition(", ")[2]]
    assert own["router_compared"] == per_token * own["router_tokens"]
    for sums in (free, own, half):
        assert sums["router_entropy"] == pytest.approx(free["router_entropy"])
        assert 0 < sums["router_entropy"] / sums["router_tokens"] < 2.08  # log 8
        assert sums["router_load"] == pytest.approx(free["router_load"])
        assert 1 < sums["router_load"] / sums["router_layers"] <= sums["router_load_max"] <= 8
