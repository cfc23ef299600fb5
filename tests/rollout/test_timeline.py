"""The timeline of requests, on a clock that the test moves."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bapo_megatron.rollout.timeline import RequestTrace, Timeline, allocate_lanes


class Clock:
    """Seconds since a start that is not 0."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def wait(self, duration_s: float) -> None:
        self.now_s += duration_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def timeline(clock: Clock) -> Timeline:
    return Timeline(clock)


def slices(timeline: Timeline) -> dict[str, list[dict[str, Any]]]:
    """The slices of each row as the file has them."""
    events = json.loads(timeline.render())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in names.values()}
    for event in events:
        if event["ph"] == "X":
            rows[names[event["pid"]]].append(event)
    return rows


def times(row: list[dict[str, Any]]) -> list[tuple[str, int, int, int]]:
    """Name, lane, start and duration in microseconds."""
    return [(e["name"], e["tid"], e["ts"], e["dur"]) for e in row]


def test_a_request_is_queued_then_read_then_sampled(timeline: Timeline, clock: Clock) -> None:
    clock.wait(1.0)
    trace = RequestTrace(timeline, "sample 3 of group 7")
    clock.wait(0.5)
    trace.sent("http://a", 0)
    clock.wait(0.25)
    trace.first_tokens(cached_tokens=96)
    clock.wait(2.0)
    trace.ended("stop", 40)
    rows = slices(timeline)
    assert list(rows) == ["step", "queue", "http://a"]
    assert times(rows["queue"]) == [("queued", 0, 1_000_000, 500_000)]
    assert times(rows["http://a"]) == [
        ("prefill", 0, 1_500_000, 250_000),
        ("decode", 0, 1_750_000, 2_000_000),
    ]
    label = "sample 3 of group 7"
    assert [event["args"] for event in rows["http://a"]] == [
        {"label": label, "prefix_tokens": 0, "end": "done", "cached_tokens": 96},
        {"label": label, "end": "stop", "tokens": 40},
    ]


def test_a_lost_request_waits_again_and_is_resumed_on_another_server(
    timeline: Timeline, clock: Clock
) -> None:
    trace = RequestTrace(timeline, "r")
    trace.sent("http://b", 0)
    clock.wait(1.0)
    trace.first_tokens(0)
    clock.wait(1.0)
    trace.ended("lost", 64)
    clock.wait(3.0)
    trace.sent("http://a", 64)
    clock.wait(0.5)
    trace.first_tokens(0)
    trace.ended("length", 36)
    rows = slices(timeline)
    assert list(rows) == ["step", "queue", "http://a", "http://b"]
    assert times(rows["http://b"])[-1] == ("decode, lost", 0, 1_000_000, 1_000_000)
    assert times(rows["queue"])[-1] == ("queued", 0, 2_000_000, 3_000_000)
    assert times(rows["http://a"]) == [
        ("prefill (resumed)", 0, 5_000_000, 500_000),
        ("decode", 0, 5_500_000, 0),
    ]
    assert rows["http://a"][0]["args"]["prefix_tokens"] == 64


def test_a_response_of_an_earlier_step_is_resumed_with_all_its_tokens(timeline: Timeline) -> None:
    trace = RequestTrace(timeline, "r")
    trace.sent("a", 100)
    trace.first_tokens(0)
    trace.ended("lost", 20)
    trace.sent("a", 120)
    prefills = [e for e in slices(timeline)["a"] if e["name"] != "decode, lost"]
    assert [event["name"] for event in prefills] == ["prefill (resumed)"] * 2
    assert [event["args"]["prefix_tokens"] for event in prefills] == [100, 120]


@pytest.mark.parametrize(
    ("num_phases", "row", "name"),
    [(1, "queue", "queued, abort"), (2, "a", "prefill, abort"), (3, "a", "decode, abort")],
)
def test_a_request_can_be_aborted_in_every_phase(
    timeline: Timeline, clock: Clock, num_phases: int, row: str, name: str
) -> None:
    trace = RequestTrace(timeline, "r")
    for enter in (lambda: trace.sent("a", 5), lambda: trace.first_tokens(0))[: num_phases - 1]:
        enter()
    clock.wait(1.0)
    trace.ended("abort", 0)
    last = slices(timeline)[row][-1]
    assert last["name"].replace(" (resumed)", "") == name
    assert last["args"]["end"] == "abort"


def test_what_goes_on_is_drawn_until_now_and_is_whole_in_the_next_file(
    timeline: Timeline, clock: Clock
) -> None:
    done, running = RequestTrace(timeline, "done"), RequestTrace(timeline, "running")
    clock.wait(1.0)
    done.ended("abort", 0)
    first = slices(timeline)["queue"]
    assert times(first) == [("queued, abort", 0, 0, 1_000_000), ("queued", 1, 0, 1_000_000)]
    assert first[1]["args"] == {"label": "running", "end": "running"}
    timeline.clear()
    clock.wait(1.0)
    running.ended("abort", 0)
    assert times(slices(timeline)["queue"]) == [("queued, abort", 0, 0, 2_000_000)]
    timeline.clear()
    assert slices(timeline) == {"step": [], "queue": []}


def test_spans_are_on_the_row_of_the_step_and_name_a_failure(
    timeline: Timeline, clock: Clock
) -> None:
    def fail() -> None:
        clock.wait(1.0)
        raise OSError("gone")

    with timeline.span("weight sync"):
        clock.wait(2.0)
        with pytest.raises(OSError, match="gone"), timeline.span("probe"):
            fail()
    assert times(slices(timeline)["step"]) == [
        ("weight sync", 0, 0, 3_000_000),
        ("probe, failed", 1, 2_000_000, 1_000_000),
    ]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)), max_size=40))
def test_intervals_of_a_lane_never_overlap_and_lanes_are_as_few_as_possible(
    drawn: list[tuple[int, int]],
) -> None:
    intervals = sorted((start, start + length) for start, length in drawn)
    lanes = list(allocate_lanes(intervals))
    for lane in set(lanes):
        own = [interval for interval, given in zip(intervals, lanes, strict=True) if given == lane]
        assert all(before[1] <= after[0] for before, after in pairwise(own))
    # The oracle: as many as are under way at once, at any start; an empty one needs a lane too.
    at_once = [
        sum(start <= time < end for start, end in intervals) for time in {s for s, _ in intervals}
    ]
    num_lanes = len(set(lanes))
    assert max(at_once, default=0) <= num_lanes <= max(at_once, default=0) + bool(intervals)


def test_requests_in_flight_at_once_lie_on_lanes_of_their_own(
    timeline: Timeline, clock: Clock
) -> None:
    traces = [RequestTrace(timeline, f"r{number}") for number in range(3)]
    for trace in traces[:2]:
        trace.sent("a", 0)
        clock.wait(1.0)
    traces[0].ended("abort", 0)
    traces[2].sent("a", 0)
    traces[2].first_tokens(0)
    row = slices(timeline)["a"]
    lanes = {event["args"]["label"]: event["tid"] for event in row}
    assert lanes == {"r0": 0, "r1": 1, "r2": 0}


def test_a_timeline_that_is_off_takes_everything_and_keeps_nothing() -> None:
    timeline = Timeline(is_kept=False)
    trace = RequestTrace(timeline, "r")
    trace.sent("a", 0)
    trace.ended("lost", 3)
    trace.first_tokens(0)
    with timeline.span("sync"):
        assert slices(timeline) == {"step": [], "queue": []}
