"""When ``auto`` relies on predictions: a class that only counts."""

from collections.abc import Iterator

import pytest

from bapo_megatron.algorithm.objectives.bapo import Bapo, BapoConfig
from bapo_megatron.runtime.distributed import ProcessGroups
from bapo_megatron.trainer import speculation
from bapo_megatron.trainer.speculation import Speculation
from tests.fakes.given_tokens import one_rank


@pytest.fixture
def groups() -> Iterator[ProcessGroups]:
    with one_rank() as groups:
        yield groups


def _after_trial(groups: ProcessGroups, *shares: float) -> Speculation:
    """One whose passes without gradients took these shares of a loss pass; both were foreseen."""
    auto = Speculation("auto", Bapo(BapoConfig(), None), groups)
    for share in shares:
        assert auto.is_trial
        assert not auto.relies
        auto._missed.append(False)
        auto.end_trial(share * 8.0, 8.0, differs=False)
    return auto


def test_auto_stops_where_misses_cost_more_than_hits_save_and_goes_on_later(
    groups: ProcessGroups,
) -> None:
    # The smaller share counts: a loss pass costs four passes without gradients.
    auto = _after_trial(groups, 0.5, 0.25)
    relied = []
    for missed in (False, True, True, False, False, False, False, False, False):
        auto._missed.append(missed)
        relied.append(auto.relies)
    # Misses of predictions so far: 0/3, 1/4, 2/5, 2/6, 2/7, 2/8, 2/9, ...
    assert relied == [True, False, False, False, False, False, True, True, True]


def test_old_misses_are_forgotten(groups: ProcessGroups) -> None:
    auto = _after_trial(groups, 0.25, 0.25)
    for _ in range(speculation.WINDOW):
        auto._missed.append(True)
    assert not auto.relies
    for _ in range(speculation.WINDOW):
        auto._missed.append(False)
    assert auto.relies
