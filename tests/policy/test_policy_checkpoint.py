"""Runs that are continued from checkpoints equal uninterrupted ones, in any layout."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed_launch import run_ranks
from tests.policy import checkpoint_ranks as ranks
from tests.policy.convert_models import assert_same
from tests.policy.families import FAMILIES
from tests.policy.layouts import Case, by_rank, cases_of, chosen, in_every_case
from tests.policy.tiny_models import Lazy, Models
from tests.tolerances import assert_within

pytestmark = pytest.mark.distributed

Results = dict[str, list[Any]]
"""Results by name, one entry per rank."""
OWN_TOLERANCE = 1e-6
"""Tolerance for weights that continue in the layout that saved them."""
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
LAYOUTS = [name for layouts in ranks.DENSE.values() for name in layouts]
CROSSED = [f"{name} from {source}" for name in SOURCES for source in SOURCES[name]]
COMPARED = [
    *((f"{name} from {name}", name, OWN_TOLERANCE) for name in LAYOUTS),
    *((name, "single", ranks.TOLERANCE) for name in LAYOUTS[1:]),
    *((name, name.split(" from ")[0], ranks.TOLERANCE) for name in CROSSED),
]
"""A run, the one that it equals, and how far it may be off."""
CHAINED = [
    *cases_of(FAMILIES, "one rank", "TP 2, ETP 1", "PP 2 × VPP 2"),
    *cases_of(("glm4_moe",), "EP 2", "CP 2 × EP 2", "TP 2 × EP 2, ETP 2"),
    *cases_of(("qwen3_5_text",), "CP 2"),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def results(root: Path, deep_models: Models) -> Results:
    """A job finds what those before it have saved."""
    model, results = deep_models["qwen3"], {}
    for num_ranks, layouts in ranks.DENSE.items():
        sources = SOURCES | ({"single": []} if num_ranks == 1 else {})
        job = run_ranks(ranks.run_layouts, num_ranks, model, root, layouts, sources)
        results |= {name: [rank[name] for rank in job] for name in job[0]}
    (last,) = run_ranks(ranks.last_rank, 1, model, root, SOURCES["single"])
    return results | {name: [result] for name, result in last.items()}


@pytest.fixture(scope="module")
def single(root: Path, results: Results, deep_models: Models) -> dict[str, Any]:
    assert results
    return run_ranks(ranks.single_rank, 1, deep_models["qwen3"], root)[0]


@pytest.fixture(scope="module")
def chains(
    request: pytest.FixtureRequest, deep_models: Models, tmp_path_factory: pytest.TempPathFactory
) -> Results:
    cases, root = chosen(request), tmp_path_factory.mktemp("chains")
    jobs, names = by_rank(ranks.run_chains, cases, deep_models, root, cases), [*map(str, cases)]
    return Lazy(lambda case: [jobs[name] for name in names[: names.index(case) + 1]][-1])


def assert_equal_runs(run: list[Any], expected: list[Any], tolerance: float) -> None:
    """The weights after every update are equal."""
    assert len(run) == len(expected) == ranks.NUM_UPDATES
    for after, reference in zip(run, expected, strict=True):
        assert after.keys() == reference.keys()
        for name, weight in reference.items():
            assert_within((after[name] - weight).abs().max(), tolerance, name)


@pytest.mark.parametrize(("run", "expected", "tolerance"), COMPARED)
def test_updates_equal_those_of_an_uninterrupted_run_whatever_the_layout_and_the_optimizer(
    results: Results, run: str, expected: str, tolerance: float
) -> None:
    assert_equal_runs(*(results[name][0]["weights"] for name in (run, expected)), tolerance)


@pytest.mark.exhaustive
@in_every_case(CHAINED)
def test_every_family_continues_from_its_checkpoint_and_from_that_of_another_layout(
    chains: Results, case: Case
) -> None:
    trained, (own, *others) = (chains[str(case)][0][name] for name in ("trained", "resumed"))
    assert_equal_runs(own, trained, OWN_TOLERANCE)
    for other in others:
        assert_equal_runs(other, trained, ranks.TOLERANCE)
    for before, after in pairwise(trained):
        moves = {name: float((weight - before[name]).abs().max()) for name, weight in after.items()}
        still = [name for name, move in moves.items() if move < 3e-4]
        assert all(name.endswith("e_score_correction_bias") for name in still)


@pytest.mark.parametrize("name", CROSSED)
def test_state_of_caller_and_schedule_come_back_on_every_rank(results: Results, name: str) -> None:
    for rank in results[name]:
        assert rank["extra"] == ranks.EXTRA
        assert rank["num_updates"] == 1
        assert rank["lr"] == pytest.approx(0.008)  # 0.01 · (1 − 2 / 10)


@pytest.mark.parametrize(
    ("name", "continue_"),
    [
        *((f"{layout} from {layout}", True) for layout in LAYOUTS),
        # Other layouts of as many ranks.
        *((name, False) for name in ("PP2 from TP2", "PP2 VPP2 from PP2", "DP2 CP2 from TP2 PP2")),
    ],
)
def test_random_streams_continue_in_the_layout_that_saved_them_alone(
    results: Results, name: str, continue_: bool
) -> None:
    for resumed, saved in zip(results[name], results[name.split(" from ")[1]], strict=True):
        (number, tensor), (saved_number, saved_tensor) = resumed["drawn"], saved["drawn"]
        assert (number == saved_number) is continue_
        assert torch.equal(tensor, saved_tensor) is continue_


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


def test_a_single_rank_resumes_bit_by_bit_from_before_the_first_update(
    single: dict[str, Any],
) -> None:
    run = single["start"]
    assert len(run["resumed"]) == ranks.NUM_UPDATES
    for resumed, uninterrupted in zip(run["resumed"], run["uninterrupted"], strict=True):
        assert_same(resumed, uninterrupted)


def test_the_configuration_decides_on_the_settings_of_adam_and_not_the_checkpoint(
    single: dict[str, Any],
) -> None:
    settings = {(group["lr"], group["betas"], group["eps"]) for group in single["changed"]}
    assert settings == {(2e-3, (0.8, 0.9), 1e-4)}
    assert {group["weight_decay"] for group in single["changed"]} == {0.0, 0.3}


def test_an_update_that_was_still_on_its_way_to_the_weights_is_in_the_checkpoint(
    single: dict[str, Any],
) -> None:
    assert single["stale"] == []
