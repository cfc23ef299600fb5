"""Every rank learns of faults before an optimizer step, and of sums at the end of the step."""

from __future__ import annotations

import pytest

from tests.distributed_launch import run_ranks
from tests.trainer.reduction_ranks import (
    compare_on_two_stages,
    reduce_on_two_stages,
    reduce_over_data_ranks,
)

pytestmark = pytest.mark.distributed


def test_a_stage_without_logits_learns_sums_and_decisions_of_the_last_stage() -> None:
    first, last = run_ranks(reduce_on_two_stages, 2, 0.0, False)
    assert first == last
    assert first["tokens"] == [11, 22]
    assert first["oldest"] == [10, 20]
    assert first["low"] == [[1, 10], [2, 20]]
    assert first["faults"] == [0, 0, 0, 0, 0]


def test_faults_of_the_last_stage_and_of_its_collection_pass_reach_the_other_stages() -> None:
    for rank in run_ranks(reduce_on_two_stages, 2, 3.0, True, (5, 7)):
        assert rank["faults"] == [3, 0, 5, 7, 1]


def test_all_stages_learn_whether_a_prediction_was_wrong() -> None:
    for remarks in run_ranks(compare_on_two_stages, 2):
        assert remarks == [[0, 0], [1, 0]]


def test_sums_are_added_and_maxima_compared_over_data_parallel_ranks() -> None:
    for rank in run_ranks(reduce_over_data_ranks, 2):
        assert rank["tokens"] == [3, 9]
        assert rank["oldest"] == [2, 5]
        assert rank["faults"] == [0, 0, 3, 4, 0]
        assert rank["low"] == [[3], [3]]
