"""Runs that are continued from checkpoints equal uninterrupted ones, in any layout."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed_launch import run_ranks
from tests.policy import checkpoint_ranks as ranks
from tests.policy.convert_models import assert_same
from tests.policy.tiny_models import make_model
from tests.tolerances import assert_within

pytestmark = pytest.mark.distributed

Results = dict[str, list[Any]]
"""Results by name, one entry per rank."""


@dataclass(frozen=True)
class Saves:
    """A model that is saved and continued in every layout."""

    family: str
    layouts: ranks.Layouts
    sources: dict[str, list[str]]
    """Whose checkpoints each layout continues from, beside its own; "single" at the very end."""
    layers: int = 4
    own_tolerance: float = 1e-6
    """Of weights that continue in the layout that saved them."""

    @property
    def names(self) -> list[str]:
        """Of layouts."""
        return [name for layouts in self.layouts.values() for name in layouts]

    @property
    def crossed(self) -> list[str]:
        return [f"{name} from {source}" for name in self.sources for source in self.sources[name]]

    def comparisons(self) -> Iterator[tuple[str, str, float]]:
        """A run, the one that it equals, and how far it may be off."""
        for name in self.names:
            yield f"{name} from {name}", name, self.own_tolerance
            if name != "single":
                yield name, "single", ranks.TOLERANCE
        for name in self.crossed:
            yield name, name.split(" from ")[0], ranks.TOLERANCE


SAVES = {
    "dense": Saves(
        "qwen3",
        ranks.DENSE,
        {
            "single": ["TP2", "CP2"],
            "TP2": ["single"],
            "DP2": ["TP2"],
            "PP2": ["TP2"],
            "PP2 VPP2": ["PP2", "DP2"],
            "CP2": ["PP2 VPP2"],
            "TP2 PP2": ["PP2 VPP2"],
            "DP2 CP2": ["TP2 PP2"],
            "overlapped DP2": ["TP2"],
        },
    ),
    # A dense layer, experts, shared experts, and a buffer beside the parameters.
    "experts": Saves(
        "glm4_moe",
        ranks.EXPERTS,
        {
            "single": ["TP2 EP2"],
            "EP2": ["single"],
            "TP2 ETP2": ["EP2"],
            "PP2": ["single"],
            "CP2 EP2": ["PP2"],
            "TP2 EP2": ["CP2 EP2"],
        },
        layers=2,
        own_tolerance=0.0,
    ),
    "hybrid": Saves(
        "qwen3_5_text",
        ranks.HYBRID,
        {"single": [], "TP2": ["single"], "PP2 VPP2": ["TP2"], "CP2": ["PP2 VPP2"]},
    ),
}
MARKS = {"experts": pytest.mark.exhaustive, "hybrid": pytest.mark.exhaustive}
KINDS = [pytest.param(name, marks=MARKS.get(name, ()), id=name) for name in SAVES]
COMPARED = [
    pytest.param(
        kind, *compared, marks=MARKS.get(kind, ()), id=f"{kind}: {' is '.join(compared[:2])}"
    )
    for kind, saves in SAVES.items()
    for compared in saves.comparisons()
]
LAYOUTS, CROSSED = SAVES["dense"].names, SAVES["dense"].crossed


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def runs(root: Path) -> Callable[[str], Results]:
    """Results of each kind of model; a job finds what those before it have saved."""

    @cache
    def run(kind: str) -> Results:
        saves, results = SAVES[kind], {}
        model = make_model(saves.family, root / kind / "model", num_hidden_layers=saves.layers)
        for num_ranks, layouts in saves.layouts.items():
            sources = saves.sources | ({"single": []} if num_ranks == 1 else {})
            job = run_ranks(ranks.run_layouts, num_ranks, model, root / kind, layouts, sources)
            results |= {name: [rank[name] for rank in job] for name in job[0]}
        (last,) = run_ranks(ranks.last_rank, 1, model, root / kind, saves.sources["single"])
        return results | {name: [result] for name, result in last.items()}

    return run


@pytest.fixture(scope="module")
def results(runs: Callable[[str], Results]) -> Results:
    return runs("dense")


@pytest.fixture(scope="module")
def single(root: Path, results: Results) -> dict[str, Any]:
    assert results
    model = root / "dense" / "model"
    return run_ranks(ranks.single_rank, 1, model, root / "dense")[0]


@pytest.mark.parametrize(("kind", "run", "expected", "tolerance"), COMPARED)
def test_updates_equal_those_of_an_uninterrupted_run_whatever_the_layout_and_the_optimizer(
    runs: Callable[[str], Results], kind: str, run: str, expected: str, tolerance: float
) -> None:
    compared = [runs(kind)[name][0]["weights"] for name in (run, expected)]
    pairs = list(zip(*compared, strict=True))
    assert len(pairs) == ranks.NUM_UPDATES
    for after, reference in pairs:
        assert after.keys() == reference.keys()
        for name, weight in reference.items():
            assert_within((after[name] - weight).abs().max(), tolerance, name)


@pytest.mark.parametrize("kind", KINDS)
def test_updates_move_all_weights_but_buffers_far_beyond_the_tolerances(
    runs: Callable[[str], Results], kind: str
) -> None:
    for before, after in pairwise(runs(kind)["single"][0]["weights"]):
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
