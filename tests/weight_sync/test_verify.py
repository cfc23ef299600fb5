"""What comparing the servers with the trainer finds, and for how long generation stands still."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from bapo_megatron.engine.pooled import EngineState
from bapo_megatron.errors import RolloutError
from bapo_megatron.weight_sync.messages import (
    Load,
)
from tests.fakes.fake_sglang import FakeSglang
from tests.fakes.fake_weight_server import LOGPROB, FakeWeightServer
from tests.weight_sync.setting import EXPECTED, Setting, run_sync


def test_servers_that_compute_as_the_trainer_does_are_kept(
    servers: list[FakeWeightServer],
) -> None:
    async def use(setting: Setting) -> None:
        await setting.receive_all(7)
        assert await setting.service.probe(None) == ((3, 1, 4), (1, 5))
        found = await setting.service.verify(((LOGPROB + 0.03, LOGPROB), (LOGPROB - 0.03,)))
        assert found == pytest.approx(0.02)
        assert setting.states() == ["usable", "usable"]

    run_sync(servers, use)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (LOGPROB + 0.2, "log-probs differ"),
        (None, "log-probs differ"),
        (float("nan"), "unusable answer"),  # no JSON
    ],
)
def test_a_server_that_computes_otherwise_serves_nobody(
    servers: list[FakeWeightServer], wrong: float | None, reason: str
) -> None:
    servers[1].logprob = wrong

    async def use(setting: Setting) -> None:
        await setting.receive_all(7)
        assert await setting.service.verify(EXPECTED) == 0.0
        assert setting.states() == ["usable", "lost"]
        assert reason in setting.pool.reasons[servers[1].address]

    run_sync(servers, use)


def test_if_every_server_computes_otherwise_the_run_ends(
    servers: list[FakeWeightServer],
) -> None:
    for server in servers:
        server.logprob = LOGPROB + 0.2

    async def use(setting: Setting) -> None:
        await setting.receive_all(7)
        with pytest.raises(RolloutError, match=r"no server computes as the trainer does.*0\.2"):
            await setting.service.verify(EXPECTED)

    run_sync(servers, use)


def test_servers_that_end_during_the_probe_do_not_end_the_run(
    servers: list[FakeWeightServer],
) -> None:
    servers[0].hanging.add("/generate")

    async def use(setting: Setting) -> None:
        await setting.service.load(Load(model_dir=Path("/weights"), version=7))
        assert await setting.service.verify(EXPECTED) is None
        assert setting.states() == ["lost"]
        assert "does not answer the probe" in setting.pool.reasons[servers[0].address]

    run_sync(servers[:1], use, weight_sync={"timeout_s": 1})


@pytest.mark.parametrize(
    ("in_flight", "calls"),
    [("abort", ["pause"]), ("retract", ["pause", "resume"])],
)
def test_paused_requests_go_on_before_the_probe(
    servers: list[FakeWeightServer], in_flight: str, calls: list[str]
) -> None:
    async def use(setting: Setting) -> None:
        await setting.service.load(Load(model_dir=Path("/weights"), version=7))
        await setting.service.verify(EXPECTED)
        assert setting.generation.calls == calls
        await setting.service.resume(None)
        assert setting.generation.calls == ["pause", "resume"]

    run_sync(servers, use, weight_sync={"in_flight": in_flight})


@pytest.mark.parametrize("in_flight", ["abort", "retract"])
def test_the_pause_lasts_from_the_stop_of_generation_until_it_goes_on(
    servers: list[FakeWeightServer], in_flight: str
) -> None:
    servers[1].delay_s = 0.3

    async def use(setting: Setting) -> None:
        clock_s = asyncio.get_running_loop().time
        started_s = clock_s()
        await setting.service.load(Load(model_dir=Path("/weights"), version=7))
        loaded_s = clock_s() - started_s
        await setting.service.verify(EXPECTED)
        pause_s = await setting.service.resume(None)
        assert 0.3 <= pause_s <= clock_s() - started_s
        if in_flight == "retract":  # it goes on before the probe, which takes 0.3 s and more
            assert pause_s < loaded_s + 0.3
        assert await setting.service.resume(None) == 0.0
        setting.generation.is_running = False
        await setting.service.load(Load(model_dir=Path("/weights"), version=8))
        assert await setting.service.resume(None) == 0.0

    run_sync(servers, use, weight_sync={"in_flight": in_flight})


def test_by_default_only_servers_that_are_new_or_came_back_are_compared(
    servers: list[FakeWeightServer],
) -> None:
    async def use(setting: Setting) -> None:
        async def push(version: int) -> tuple[int, list[int]]:
            """How many sequences are compared, and what each server had to score so far."""
            await setting.service.load(Load(model_dir=Path("/weights"), version=version))
            probe = await setting.service.probe(None)
            if probe:
                await setting.service.verify(EXPECTED)
            await setting.service.resume(None)
            return len(probe), [s.paths.count("/generate") for s in servers]

        second = setting.pool.engines[1]
        assert await push(1) == (2, [2, 2])
        assert await push(2) == (0, [2, 2])
        setting.pool.mark_lost(second, "it restarts")
        assert await push(3) == (0, [2, 2])
        second.state = EngineState.STALE  # it answers again
        assert await push(4) == (2, [2, 4])
        setting.pool.mark_lost(second, "it restarts")
        second.state, servers[1].logprob = EngineState.STALE, LOGPROB + 0.2
        assert await push(5) == (2, [2, 6])
        assert setting.states() == ["usable", "lost"]

    run_sync(servers, use, weight_sync={"verify": "first"})


@pytest.mark.parametrize("num_wrong", [1, 2])
def test_what_log_probs_mean_is_checked_after_the_first_push_of_a_server(num_wrong: int) -> None:
    """With the weights that it started with they may all be equal, and show nothing."""

    async def use(setting: Setting) -> None:
        async def push(version: int) -> None:
            await setting.service.load(Load(model_dir=Path("/weights"), version=version))
            await setting.service.resume(None)

        if num_wrong == 2:
            with pytest.raises(RolloutError, match="its log-probs ignore the temperature"):
                await push(1)
            return
        await push(1)
        await push(2)
        assert setting.states() == ["usable", "lost"]
        assert "ignore the temperature" in setting.pool.reasons[wrong.address]
        assert len(right.requests) == 4  # of one push: two for each sequence

    with (
        FakeSglang(ignores_temperature=num_wrong == 2) as right,
        FakeSglang(ignores_temperature=True) as wrong,
    ):
        run_sync([right, wrong], use, temperature=0.5)
