"""When ``auto`` relies on predictions: a class that only counts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

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
    found = Speculation("auto", groups)
    for share in shares:
        assert found.is_trial
        assert not found.relies
        found.count(missed=False)
        found.end_trial(share * 8.0, 8.0, differs=False)
    return found


def test_auto_relies_on_predictions_after_two_updates(groups: ProcessGroups) -> None:
    found = _after_trial(groups, 0.5, 0.25)
    assert not found.is_trial
    assert found.relies


def test_auto_stops_where_misses_cost_more_than_hits_save_and_goes_on_later(
    groups: ProcessGroups,
) -> None:
    # The smaller share counts: a loss pass costs four passes without gradients.
    found = _after_trial(groups, 0.5, 0.25)
    relied = []
    for missed in (False, True, True, False, False, False, False, False, False):
        found.count(missed=missed)
        relied.append(found.relies)
    # Misses of predictions so far: 0/3, 1/4, 2/5, 2/6, 2/7, 2/8, 2/9, ...
    assert relied == [True, False, False, False, False, False, True, True, True]


def test_old_misses_are_forgotten(groups: ProcessGroups) -> None:
    found = _after_trial(groups, 0.25, 0.25)
    for _ in range(speculation.WINDOW):
        found.count(missed=True)
    assert not found.relies
    for _ in range(speculation.WINDOW):
        found.count(missed=False)
    assert found.relies


def test_other_log_probs_end_the_trial_and_all_predictions(
    groups: ProcessGroups, capsys: pytest.CaptureFixture[str]
) -> None:
    found = Speculation("auto", groups)
    found.end_trial(1.0, 3.0, differs=True)
    assert [found.is_trial, found.predicts, found.relies] == [False, False, False]
    assert "give different log-probs on this device" in capsys.readouterr().err


@pytest.mark.parametrize("mode", ["always", "never"])
def test_the_other_modes_ask_for_no_trial(groups: ProcessGroups, mode: str) -> None:
    found = Speculation(mode, groups)  # type: ignore[arg-type]
    for _ in range(3):
        found.count(missed=True)
    assert not found.is_trial
    assert found.relies == found.predicts == (mode == "always")
