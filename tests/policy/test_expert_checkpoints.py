"""Models with experts continue from checkpoints of any layout, also with another learning rate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.distributed_launch import joined, run_ranks
from tests.policy import checkpoint_ranks as ranks
from tests.policy.expert_layouts import CHECKPOINTS
from tests.policy.parity_ranks import build
from tests.policy.tiny_models import make_model
from tests.tolerances import assert_within

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.distributed, pytest.mark.exhaustive]

SOURCES = {
    "EP 2": ["EP 1"],
    "TP 2 × ETP 2": ["EP 2"],
    "PP 2": ["EP 1"],  # its first stage has no experts
    "CP 2 × EP 2": ["PP 2"],
    "TP 2 × EP 2": ["CP 2 × EP 2"],
}
"""Whose checkpoints layouts continue from, beside their own."""
LAST = {"EP 1": ["TP 2 × EP 2"]}
CROSSED = [f"{name} from {source}" for name, (source,) in (SOURCES | LAST).items()]
TESTED = [name for layouts in CHECKPOINTS.values() for name in layouts]


def changed_rate(model: Path, root: Path) -> list[float]:
    """Learning rates of an update that continues with another one."""
    from bapo_megatron.policy.checkpoint import load_checkpoint
    from bapo_megatron.policy.checkpoint_files import find_latest

    with joined(expert=2) as groups:
        state = build(model, groups, **{**ranks.OPTIMIZER, "lr": 2e-3, "schedule": "constant"})
        directory = find_latest(root)
        assert directory is not None
        load_checkpoint(directory, state)
        ranks.update(state)
        return [group["lr"] for group in state.optimizer.param_groups]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """By name, one entry per rank."""
    root = tmp_path_factory.mktemp("checkpoints")
    # A dense layer, experts, shared experts, and a buffer beside the parameters.
    model = make_model("glm4_moe", root / "model")
    results: dict[str, list[Any]] = {}
    for num_ranks, layouts in CHECKPOINTS.items():
        sources = {name: SOURCES.get(name, []) for name in layouts}
        job = run_ranks(ranks.run_layouts, num_ranks, model, root, layouts, sources)
        results |= {name: [rank[name] for rank in job] for name in job[0]}
    job = run_ranks(resume_last, 1, model, root)
    results |= {name: [rank[name] for rank in job] for name in job[0]}
    return results | {"rates": run_ranks(changed_rate, 2, model, root / "EP 2")}


def resume_last(model: Path, root: Path) -> dict[str, Any]:
    with joined() as groups:
        return {
            f"{name} from {source}": ranks.resume(model, root / source, groups)
            for name, sources in LAST.items()
            for source in sources
        }


@pytest.mark.parametrize(
    ("run", "expected", "tolerance"),
    [
        *((f"{name} from {name}", name, 0.0) for name in TESTED),
        *((name, name.split(" from ")[0], ranks.TOLERANCE) for name in CROSSED),
        *((name, "EP 1", ranks.TOLERANCE) for name in TESTED),
    ],
)
def test_updates_equal_those_of_an_uninterrupted_run_whatever_the_layout(
    results: dict[str, list[Any]], run: str, expected: str, tolerance: float
) -> None:
    pairs = list(zip(results[run][0]["weights"], results[expected][0]["weights"], strict=True))
    assert len(pairs) == ranks.NUM_UPDATES
    for after, reference in pairs:
        assert after.keys() == reference.keys()
        for name, weight in reference.items():
            assert_within((after[name] - weight).abs().max(), tolerance, name)


def test_updates_move_experts_and_router(results: dict[str, list[Any]]) -> None:
    before, after = results["EP 1"][0]["weights"]
    for name in ("mlp.gate.weight", "mlp.experts.3.up_proj.weight"):
        name = f"model.layers.1.{name}"
        assert (after[name] - before[name]).abs().max() > 1e-3


def test_a_run_continues_with_another_learning_rate(results: dict[str, list[Any]]) -> None:
    for rates in results["rates"]:
        assert rates == [2e-3] * len(rates)
        assert len(rates) >= 3  # of weights, of norms and biases, of experts
