from __future__ import annotations

import pytest

from tests.benchmarks.bench_rewards import Load, _report, make_items, measure


def test_the_load_has_its_share_of_hostile_answers_in_a_fixed_order() -> None:
    load = Load(1000, 0.01, 0.1, 2, 5.0, 2048, 800)

    items = make_items(load)

    assert len(items) == 1000
    assert sum(bool(item.hostile) for item in items) == 10
    unlabelled = {(item.response, item.answer) for item in items if item.reward is None}
    assert len(unlabelled) >= 100
    assert items == make_items(load)


@pytest.mark.slow
def test_answers_are_graded_and_counted_while_a_heartbeat_goes_on() -> None:
    load = Load(40, 0.1, 0.5, 1, 5.0, 2048, 800)

    row = measure("1 in 10", load)

    assert (row.answers, row.hostile, row.wrong) == (40, 4, 0)
    assert 0 < row.p50_ms <= row.p99_ms <= row.max_ms
    assert row.heartbeat_max_ms >= row.heartbeat_p99_ms > 0
    machine = dict.fromkeys(("date", "commit", "processor", "python", "command", "cpus"), "x")
    machine |= {"load": 1.0, "packages": {"math-verify": "0.9.0"}}
    assert "| 1 in 10 |" in _report(load, [row], (1.0, 2.0), machine)
