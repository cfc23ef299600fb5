"""Runs that are continued from checkpoints equal uninterrupted ones, in any layout."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed_launch import run_ranks
from tests.policy import checkpoint_ranks as ranks
from tests.policy.convert_models import assert_same
from tests.policy.tiny_models import Models
from tests.tolerances import assert_within

pytestmark = pytest.mark.distributed

LAYOUTS = [*ranks.ONE, *ranks.TWO, *ranks.FOUR]
VARIANTS = [*ranks.VARIANTS]

SOURCES = {
    "single": ["TP2", "CP2"],
    "TP2": ["single"],
    "DP2": ["TP2"],
    "PP2": ["TP2"],
    "PP2 VPP2": ["PP2", "DP2"],
    "CP2": ["PP2 VPP2"],
    "TP2 PP2": ["PP2 VPP2"],
    "DP2 CP2": ["TP2 PP2"],
    "overlapped DP2": ["TP2"],
}
"""Whose checkpoints each layout continues from, beside its own; "single" at the very end."""

Results = dict[str, list[Any]]
"""Results by name, one entry per rank."""
CROSSED = [f"{layout} from {source}" for layout in SOURCES for source in SOURCES[layout]]


@pytest.fixture(scope="module")
def model(deep_models: Models) -> Path:
    """Two interleaved stages have two chunks; tied embeddings."""
    return deep_models["qwen3"]


@pytest.fixture(scope="module")
def results(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Results by name, one entry per rank; a job finds what those before it have saved."""
    root = tmp_path_factory.mktemp("checkpoints")
    results: Results = {}
    alone = SOURCES | {"single": []}
    for num_ranks, layouts, sources in (
        (1, ranks.ONE, alone),
        (2, ranks.TWO, SOURCES),
        (4, ranks.FOUR, SOURCES),
    ):
        job = run_ranks(ranks.run_layouts, num_ranks, model, root, layouts, sources)
        results |= {name: [rank[name] for rank in job] for name in job[0]}
    (last,) = run_ranks(ranks.last_rank, 1, model, root, SOURCES["single"])
    return results | {name: [result] for name, result in last.items()}


@pytest.mark.parametrize(
    ("run", "expected", "tolerance"),
    [
        *((f"{layout} from {layout}", layout, 1e-6) for layout in (*LAYOUTS, *VARIANTS)),
        *((name, name.split(" from ")[0], ranks.TOLERANCE) for name in CROSSED),
        *((layout, "single", ranks.TOLERANCE) for layout in (*LAYOUTS[1:], *VARIANTS)),
    ],
)
def test_updates_equal_those_of_an_uninterrupted_run_whatever_the_layout_and_the_optimizer(
    results: Results, run: str, expected: str, tolerance: float
) -> None:
    pairs = list(zip(results[run][0]["weights"], results[expected][0]["weights"], strict=True))
    assert len(pairs) == ranks.NUM_UPDATES
    for after, reference in pairs:
        for name, weight in reference.items():
            assert_within((after[name] - weight).abs().max(), tolerance, name)


def test_updates_move_the_weights_far_beyond_the_tolerances(results: Results) -> None:
    for before, after in pairwise(results["single"][0]["weights"]):
        for name in ("model.embed_tokens.weight", "model.layers.3.mlp.up_proj.weight"):
            assert (after[name] - before[name]).abs().max() > 1e-3


@pytest.mark.parametrize("name", CROSSED)
def test_state_of_caller_and_schedule_come_back_on_every_rank(results: Results, name: str) -> None:
    for rank in results[name]:
        assert rank["extra"] == ranks.EXTRA
        assert rank["num_updates"] == 1
        assert rank["lr"] == pytest.approx(0.008)  # 0.01 · (1 − 2 / 10)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_random_streams_continue_in_the_layout_that_saved_them(
    results: Results, layout: str
) -> None:
    saved = [rank["drawn"] for rank in results[layout]]
    resumed = [rank["drawn"] for rank in results[f"{layout} from {layout}"]]
    for (number, tensor), (same_number, same_tensor) in zip(saved, resumed, strict=True):
        assert number == same_number
        assert torch.equal(tensor, same_tensor)


@pytest.mark.parametrize("layout", ["DP2", "CP2", "DP2 CP2", "overlapped DP2"])
def test_ranks_with_the_same_weights_write_and_read_equal_parts_of_a_checkpoint(
    results: Results, layout: str
) -> None:
    resumed = results[f"{layout} from {layout}"]
    sizes = resumed[0]["bytes_saved"]
    assert sorted(sizes) == [f"__{rank}_0.distcp" for rank in range(len(resumed))]
    share = sum(sizes.values()) / len(resumed)
    read = [rank["bytes_read"] for rank in resumed]
    # The largest parameter has a fifth of the elements.
    assert max(sizes.values()) < 1.25 * share
    assert sum(read) == pytest.approx(sum(sizes.values()), rel=0.02)
    assert max(read) < 1.25 * share


@pytest.mark.parametrize("name", ["PP2 from TP2", "PP2 VPP2 from PP2", "DP2 CP2 from TP2 PP2"])
def test_random_streams_of_another_layout_of_as_many_ranks_are_not_taken_over(
    results: Results, name: str
) -> None:
    source = results[name.split(" from ")[1]]
    for resumed, saved in zip(results[name], source, strict=True):
        assert resumed["drawn"][0] != saved["drawn"][0]
        assert not torch.equal(resumed["drawn"][1], saved["drawn"][1])


def test_a_single_rank_resumes_bit_by_bit_from_before_the_first_update(
    results: Results,
) -> None:
    (run,) = results["start"]
    assert len(run["resumed"]) == ranks.NUM_UPDATES
    for resumed, uninterrupted in zip(run["resumed"], run["uninterrupted"], strict=True):
        assert_same(resumed, uninterrupted)


def test_the_configuration_decides_on_weight_decay_and_learning_rate_and_not_the_checkpoint(
    results: Results,
) -> None:
    assert results["changed"][0] - {0.0} == {0.3, 2e-3}


def test_an_update_that_was_still_on_its_way_to_the_weights_is_in_the_checkpoint(
    results: Results,
) -> None:
    assert results["stale"] == [[]]
