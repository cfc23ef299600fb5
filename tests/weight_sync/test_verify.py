"""What comparing the servers with the trainer finds, and for how long generation stands still."""

import asyncio

import pytest

from bapo_megatron.engine.pooled import EngineState
from bapo_megatron.errors import RolloutError
from tests.fakes.fake_weight_server import LOGPROB, FakeWeightServer
from tests.weight_sync.setting import PROBE, sync_on


async def test_servers_that_compute_as_the_trainer_does_are_kept(
    servers: list[FakeWeightServer],
) -> None:
    async with sync_on(servers) as setting:
        await setting.load()
        assert await setting.receiver.probe(None) == PROBE
        resumed = await setting.receiver.resume(((LOGPROB + 0.03, LOGPROB), (LOGPROB - 0.03,)))
        assert resumed.difference == pytest.approx(0.02)
        assert setting.states == ["usable", "usable"]


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (LOGPROB + 0.2, "log-probs differ"),
        (None, "log-probs differ"),
        (float("nan"), "unusable answer"),  # no JSON
    ],
)
async def test_a_server_that_computes_otherwise_serves_nobody(
    servers: list[FakeWeightServer], wrong: float | None, reason: str
) -> None:
    servers[1].logprob = wrong
    async with sync_on(servers) as setting:
        assert (await setting.compare()).difference == 0.0
        assert setting.states == ["usable", "lost"]
        assert reason in setting.reason(1)


async def test_if_every_server_computes_otherwise_the_run_ends(
    servers: list[FakeWeightServer],
) -> None:
    for server in servers:
        server.logprob = LOGPROB + 0.2
    async with sync_on(servers) as setting:
        with pytest.raises(RolloutError, match=r"by 0\.2 .*verify_tolerance"):
            await setting.compare()


async def test_servers_that_end_during_the_probe_do_not_end_the_run(
    servers: list[FakeWeightServer],
) -> None:
    servers[0].hanging.add("/generate")
    async with sync_on(servers[:1], weight_sync={"timeout_s": 1}) as setting:
        assert (await setting.compare()).difference is None
        assert setting.states == ["lost"]
        assert "does not answer the probe" in setting.reason(0)


@pytest.mark.parametrize("in_flight", ["abort", "retract"])
async def test_the_pause_lasts_from_the_stop_of_generation_until_it_goes_on(
    servers: list[FakeWeightServer], in_flight: str
) -> None:
    servers[1].delay_s = 0.3
    async with sync_on(servers, weight_sync={"in_flight": in_flight}) as setting:
        clock_s = asyncio.get_running_loop().time
        started_s = clock_s()
        await setting.load()
        loaded_s = clock_s() - started_s
        assert setting.generation.calls == ["pause"]
        servers[0].logprob = LOGPROB + 0.2
        resumed = await setting.receiver.resume(((LOGPROB, LOGPROB), (LOGPROB,)))
        assert 0.3 <= resumed.pause_s <= clock_s() - started_s
        if in_flight == "retract":  # requests that are paused go on before the probe
            assert resumed.pause_s < loaded_s + 0.05
        assert set(setting.generation.calls[1:]) == {"resume"}
        setting.generation.is_running = False
        assert (await setting.compare(version=8)).pause_s == 0.0


async def test_by_default_only_servers_that_are_new_or_came_back_are_compared(
    servers: list[FakeWeightServer],
) -> None:
    async with sync_on(servers, weight_sync={"verify": "first"}) as setting:

        async def scored(version: int) -> list[int]:
            """What each server had to score up to this weight sync."""
            await setting.compare(version=version)
            return [server.paths.count("/generate") for server in servers]

        second = setting.pool.engines[1]
        assert await scored(1) == [2, 2]
        assert await scored(2) == [2, 2]
        setting.pool.mark_lost(second, "it restarts")
        assert await scored(3) == [2, 2]
        second.state = EngineState.STALE  # it answers again
        assert await scored(4) == [2, 4]
        setting.pool.mark_lost(second, "it restarts")
        second.state, servers[1].logprob = EngineState.STALE, LOGPROB + 0.2
        assert await scored(5) == [2, 6]
        assert setting.states == ["usable", "lost"]


async def test_a_number_compares_every_so_many_weight_syncs(
    servers: list[FakeWeightServer],
) -> None:
    async with sync_on(servers, weight_sync={"verify": 2}) as setting:
        compared = []
        for version in range(1, 6):
            await setting.compare(version=version)
            compared.append([server.paths.count("/generate") for server in servers])
        assert compared == [[2, 2], [2, 2], [4, 4], [4, 4], [6, 6]]


async def test_nothing_is_compared_if_that_is_not_wanted(servers: list[FakeWeightServer]) -> None:
    async with sync_on(servers, weight_sync={"verify": "none"}) as setting:
        assert (await setting.compare()).difference is None
        assert setting.states == ["usable", "usable"]
    assert [server.paths.count("/generate") for server in servers] == [0, 0]
