"""The benchmark of connections runs at a small size; what it costs is not looked at."""

from __future__ import annotations

import asyncio

import pytest

from tests.benchmarks.bench_connections import measure, servers, time_waves
from tests.benchmarks.stream_server import Load


def test_waves_of_requests_are_timed_one_by_one() -> None:
    seconds = asyncio.run(time_waves(num_requests=5, num_waves=2))
    assert len(seconds) == 2
    assert min(seconds) > 0


@pytest.mark.slow
def test_one_client_is_measured_against_engines_of_several_processes() -> None:
    load = Load(requests=8, prompt_tokens=8, response_tokens=32, tokens_per_s=400.0)
    with servers(load, processes=2, engines=4) as addresses:
        assert len(set(addresses)) == 4
        row = asyncio.run(measure(addresses, load, piece_tokens=8, seconds=1.0))
    assert row.errors == 0
    assert row.received_per_s > 0
    assert row.core_share > 0
