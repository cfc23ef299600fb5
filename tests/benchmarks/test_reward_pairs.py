from __future__ import annotations

from tests.benchmarks.reward_pairs import (
    Rewritten,
    _report_pairs,
    _report_universal,
    _spellings,
    data_pairs,
    grade,
)


def test_answers_are_graded_and_accepted_ones_are_listed() -> None:
    graded = grade([("line", "1+2x", "2x+1"), ("line", "|x|", "2x+1"), ("list", "1,2", "1,3")])

    assert [one.reward for one in graded] == [1.0, 0.0, 0.0]
    machine = dict.fromkeys(("date", "commit", "processor", "python", "command"), "x")
    machine |= {"packages": {"math-verify": "0.9.0"}}
    assert "2 gradings: 0 were taken" in _report_universal(graded[1:], machine)
    report = _report_pairs(graded, Rewritten(3, 2, (("x", "y"),)), machine)
    assert "3 pairs" in report
    assert "| line | `1+2x` | `2x+1` | `equal_value` |" in report
    assert "- `x` for `y`" in report


def test_a_reference_is_rewritten_in_several_ways() -> None:
    spellings = _spellings("(x+1)(x-1)")

    assert "x^{2} - 1" in spellings
    assert len(spellings) == len(set(spellings)) >= 2
    assert _spellings("x=1") == []


def test_pairs_of_data_sets_are_different_and_the_same_each_time(shared_data) -> None:
    drawn = data_pairs(shared_data, 50)

    assert drawn == data_pairs(shared_data, 50)
    assert {form for form, _, _ in drawn} == {"gsm8k_test", "aime24", "aime25"}
    assert all(given != wanted for _, given, wanted in drawn)
