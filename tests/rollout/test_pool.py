"""Several servers as one: routing, and what happens to requests when a server fails."""

from __future__ import annotations

import asyncio

import pytest

from bapo_megatron.config.rollout import HealthConfig, RolloutConfig
from bapo_megatron.engine.base import SamplingSettings
from bapo_megatron.errors import BrokenConnectionError, RolloutError
from bapo_megatron.rollout.pool import EnginePool
from bapo_megatron.telemetry import console
from bapo_megatron.types import FinishReason
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.fake_sglang import FakeSglang, token_at
from tests.launch import free_port
from tests.rollout.pool import PROMPT, Response, T, engine_of, pool_of, states_of, until


@pytest.mark.parametrize("is_incremental", [True, False])
def test_pieces_come_while_the_response_is_sampled(is_incremental: bool) -> None:
    async def run() -> None:
        with FakeSglang(stalls={3: 9}, is_incremental=is_incremental) as fake:
            async with pool_of(fake) as pool:
                response = Response(pool)
                # Events come after 1, 5 and 9 tokens; the rest only after the stall.
                await until(lambda: len(response.token_ids) == 9)
                assert [len(part.token_ids) for part in response.parts] == [1, 4, 4]
                fake.stalls.clear()
                completion = await response.check(20, FinishReason.LENGTH)
        assert [span.version for span in completion.versions] == [0]
        assert fake.requests[0]["sampling_params"]["stream_interval"] == 4

    asyncio.run(run())


def test_a_server_that_dies_loses_nothing_that_was_received() -> None:
    async def run() -> None:
        with FakeSglang(stalls={3: 9}) as dying, FakeSglang() as other:
            async with pool_of(dying, other) as pool:
                await pool.states.wait_for_engines()
                response = Response(pool)
                await until(lambda: len(response.token_ids) == 9)
                dying.crash()
                await response.check(20, FinishReason.LENGTH)
                assert states_of(pool) == ["lost", "usable"]
                assert pool.num_lost_requests == 1
        sent = other.requests[0]
        assert sent["input_ids"] == [*PROMPT, *(token_at(3 + index) for index in range(9))]
        assert sent["sampling_params"]["max_new_tokens"] == 11
        assert sent["rid"] != dying.requests[0]["rid"]

    asyncio.run(run())


def test_reported_loads_are_summed_up_until_they_are_taken() -> None:
    def load(running: int, waiting: int, used: float) -> dict[str, float]:
        return {"num_running_reqs": running, "num_waiting_reqs": waiting, "token_usage": used}

    async def run() -> dict[str, float]:
        with FakeSglang(stalls={3: 9}) as fake:
            fake.loads = [[load(4, 1, 0.25), load(2, 0, 0.5)], [load(1, 0, 0.125)]]
            async with pool_of(fake) as pool:
                response = Response(pool)
                # What cannot be understood is left out, and is nothing against the server.
                await until(lambda: fake.calls.count("/v1/loads") >= 4)
                found = pool.states.take_load()
                assert pool.states.take_load() == {}
                assert states_of(pool) == ["usable"]
                fake.stalls.clear()
                await response.check(20, FinishReason.LENGTH)
        return found

    assert asyncio.run(run()) == {
        "running": 3.5,
        "running_max": 6,
        "waiting": 0.5,
        "waiting_max": 1,
        "cache_used_share": 0.3125,
        "cache_used_share_max": 0.5,
    }


def test_a_connection_that_breaks_on_a_living_server_is_made_again() -> None:
    async def run() -> None:
        with FakeSglang(breaks_after={3: 9}, connections_to_drop=1) as fake:
            async with pool_of(fake) as pool:
                response = Response(pool)
                await response.check(20, FinishReason.LENGTH)
                assert states_of(pool) == ["usable"]
                assert pool.num_lost_requests == 0
        assert [len(request["input_ids"]) for request in fake.requests] == [3, 3, 12]
        assert len({request["rid"] for request in fake.requests}) == 3

    asyncio.run(run())


def test_a_response_that_is_continued_keeps_its_sampling_settings() -> None:
    async def run() -> None:
        settings = SamplingSettings(T, 20, top_p=0.9, top_k=5, seed=7)
        with FakeSglang(breaks_after={3: 9}, connections_to_drop=1) as fake:
            async with pool_of(fake) as pool:
                assert await Response(pool, sampling=settings).task is not None
        sent = [request["sampling_params"] for request in fake.requests]
        assert [params["max_new_tokens"] for params in sent] == [20, 20, 11]
        for params in sent:
            assert (params["top_p"], params["top_k"], params["sampling_seed"]) == (0.9, 5, 7)

    asyncio.run(run())


def test_a_server_that_comes_back_serves_only_after_it_got_weights() -> None:
    async def run() -> None:
        with FakeSglang(stalls={3: 5}) as dying, FakeSglang() as other:
            async with pool_of(dying, other) as pool:
                await pool.states.wait_for_engines()
                response = Response(pool)
                await until(lambda: len(response.token_ids) == 5)
                dying.crash()
                await response.check(20, FinishReason.LENGTH)
                dying.stalls.clear()
                dying.requests.clear()
                dying.cache_tokens = 1 << 18
                dying.start()  # it reports version 0, as the pool needs, but is another process
                await until(lambda: states_of(pool) == ["stale", "usable"])
                await asyncio.gather(
                    *(Response(pool).check(20, FinishReason.LENGTH) for _ in range(4))
                )
                assert dying.requests == []
                pool.states.mark_updated(engine_of(pool, dying), 0)
                assert states_of(pool) == ["usable", "usable"]
                await asyncio.gather(
                    *(Response(pool).check(20, FinishReason.LENGTH) for _ in range(4))
                )
                assert dying.requests != []
                assert engine_of(pool, dying).cache_tokens == 1 << 18

    asyncio.run(run())


def test_without_a_usable_server_requests_wait_for_weights() -> None:
    async def run() -> None:
        with FakeSglang(version="7") as fake:
            async with pool_of(fake, version=None) as pool:
                await pool.states.wait_for_engines()
                assert pool.states.needs_weights
                response = Response(pool)
                await asyncio.sleep(0.2)
                assert fake.requests == []
                fake.version = "8"
                pool.states.version = 8
                pool.states.mark_updated(pool.states.engines[0], 8)
                assert not pool.states.needs_weights
                completion = await response.check(20, FinishReason.LENGTH)
        assert [span.version for span in completion.versions] == [8]

    asyncio.run(run())


def test_a_new_version_of_the_pool_leaves_the_servers_stale() -> None:
    async def run() -> None:
        with FakeSglang() as fake:
            async with pool_of(fake) as pool:
                await pool.states.wait_for_engines()
                assert states_of(pool) == ["usable"]
                pool.states.version = 1
                assert states_of(pool) == ["stale"]

    asyncio.run(run())


@pytest.mark.slow
def test_all_servers_lost_is_an_error_that_names_each_and_why() -> None:
    async def run() -> str:
        with FakeSglang(stalls={3: 5}) as one, FakeSglang(stalls={3: 5}) as two:
            async with pool_of(one, two, health={"patience_s": 3.0}) as pool:
                await pool.states.wait_for_engines()
                responses = [Response(pool), Response(pool)]
                await until(lambda: all(len(r.token_ids) == 5 for r in responses))
                one.crash()
                two.crash()
                with pytest.raises(RolloutError) as caught:
                    await responses[0].task
                with pytest.raises(RolloutError):
                    await responses[1].task
        error = str(caught.value)
        assert error.startswith("no usable server for 3 s (rollout.health.patience_s): ")
        for fake in (one, two):
            assert f"{fake.address} (lost): {fake.address}: the connection broke" in error
        assert error.endswith("start them again and continue with resume=true")
        return error

    assert "\n" not in asyncio.run(run())


def test_servers_that_never_answer_are_named_while_they_are_waited_for_and_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(console, "_REPORT_INTERVAL_S", 1.3)
    missing = f"http://127.0.0.1:{free_port()}"
    lines: list[str] = []

    async def run() -> None:
        with FakeSglang() as fake:
            async with pool_of(fake, missing, health={"patience_s": 2.0}) as pool:
                with pytest.raises(RolloutError) as caught:
                    await pool.states.wait_for_engines(report=lines.append)
        error = str(caught.value)
        assert f"{missing} (starting): it never answered" in error
        assert fake.address not in error
        assert error.endswith("; start them, correct rollout.servers, or lower rollout.min_servers")
        assert lines == [
            f"waiting for 2 of 2 servers, first {fake.address}: 0 s of at most 2 s "
            "(rollout.health.patience_s)",
            f"waiting for 1 of 2 servers, first {missing}: 1 s of at most 2 s "
            "(rollout.health.patience_s)",
        ]

    asyncio.run(run())


@pytest.mark.parametrize("method", ["broadcast", "disk"])
def test_servers_with_other_settings_of_nccl_are_refused_where_weights_are_broadcast(
    method: str,
) -> None:
    async def run() -> None:
        with FakeSglang(nccl_settings={"NCCL_CUMEM_ENABLE": "1"}) as fake:
            async with pool_of(fake, weight_sync={"method": method}) as pool:
                if method == "disk":
                    await pool.states.wait_for_engines()
                    return
                with pytest.raises(RolloutError, match="NCCL_CUMEM_ENABLE: must be the same for"):
                    await pool.states.wait_for_engines()

    asyncio.run(run())


def test_a_quorum_that_never_comes_is_one_line_that_names_those_that_are_silent() -> None:
    missing = [f"http://127.0.0.1:{free_port()}" for _ in range(2)]

    async def run() -> str:
        with FakeSglang() as fake:
            async with pool_of(fake, *missing, min_servers=2, health={"patience_s": 1}) as pool:
                with pytest.raises(RolloutError) as caught:
                    await pool.states.wait_for_engines()
        assert fake.address not in str(caught.value)
        return str(caught.value)

    error = asyncio.run(run())
    start = "rollout.min_servers: fewer than 2 answer for 1 s (rollout.health.patience_s): "
    assert error.startswith(f"{start}{missing[0]} (starting): it never answered (")
    assert f"; {missing[1]} (starting): it never answered (" in error
    assert error.endswith("; start them, correct rollout.servers, or lower rollout.min_servers")
    assert "\n" not in error


@pytest.mark.parametrize(("version", "state"), [(None, "stale"), (0, "usable")])
def test_beyond_a_quorum_servers_join_when_they_are_ready(
    version: int | None, state: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Only what the run has started itself is known to hold what its label says."""

    async def run() -> list[str]:
        with FakeSglang() as one, FakeSglang() as two, FakeSglang() as late, FakeSglang() as last:
            late.crash()
            last.crash()
            servers, health = (one, two, late, last), {"patience_s": 1.5}
            async with pool_of(*servers, version=version, min_servers=2, health=health) as pool:
                await pool.states.wait_for_engines()
                assert states_of(pool)[2:] == ["starting", "starting"]
                pool.states.version = 0
                for fake in (one, two):
                    pool.states.mark_updated(engine_of(pool, fake), 0)
                late.start()  # it reports version 0
                await until(lambda: states_of(pool)[2] == state)
                await asyncio.gather(
                    *(Response(pool).check(20, FinishReason.LENGTH) for _ in range(6))
                )
                assert bool(late.requests) == (state == "usable")
                await until(lambda: states_of(pool)[3] == "lost")
                last.start()
                await until(lambda: states_of(pool)[3] == "stale")
        return [late.address, last.address]

    late, last = asyncio.run(run())
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == f"{late} joins the run ({state})"
    assert said[1].startswith(f"{last} is taken out: it never answered (")
    assert said[2:] == [f"{last} answers again and needs weights"]


def test_servers_may_be_started_after_the_trainer() -> None:
    async def run() -> None:
        with FakeSglang() as fake:
            fake.crash()
            async with pool_of(fake) as pool:
                waiting = asyncio.create_task(pool.states.wait_for_engines())
                await asyncio.sleep(0.3)
                assert not waiting.done()
                fake.start()
                await waiting
                assert states_of(pool) == ["usable"]

    asyncio.run(run())


def test_a_refused_key_ends_the_wait_for_servers_at_once() -> None:
    async def run() -> None:
        with FakeSglang(api_key="right") as fake:
            async with pool_of(fake, health={"patience_s": 1000.0}) as pool:
                with pytest.raises(RolloutError, match="set BAPO_MEGATRON_API_KEY"):
                    await pool.states.wait_for_engines()

    asyncio.run(run())


def test_a_server_of_the_wrong_convention_ends_the_run_at_its_start() -> None:
    async def run() -> None:
        with FakeSglang() as good, FakeSglang(ignores_temperature=True) as bad:
            async with pool_of(good, bad, temperature=T) as pool:
                with pytest.raises(RolloutError, match="ignore the temperature") as caught:
                    await pool.states.wait_for_engines([[5, 6, 7], [8, 9]])
        assert str(caught.value).startswith(bad.address)

    asyncio.run(run())


def test_a_server_that_cannot_retract_is_refused_where_that_is_wanted() -> None:
    async def run() -> None:
        with FakeSglang(sglang_version="0.5.20") as fake:
            async with pool_of(fake, weight_sync={"in_flight": "in_place"}) as pool:
                await pool.states.wait_for_engines()
            async with pool_of(fake, weight_sync={"in_flight": "retract"}) as pool:
                with pytest.raises(RolloutError, match=r"SGLang 0\.5\.20 .*in_flight: abort"):
                    await pool.states.wait_for_engines()

    asyncio.run(run())


def test_a_request_that_the_server_refuses_is_not_tried_elsewhere() -> None:
    async def run() -> None:
        cut_off = {"finish_reason": {"type": "length"}}
        with FakeSglang(stop_at=9, changes=cut_off) as one, FakeSglang() as two:
            async with pool_of(one, two) as pool:
                await pool.states.wait_for_engines()
                with pytest.raises(RolloutError, match=r"cut off after 7 of 20 tokens"):
                    await Response(pool).task
                assert states_of(pool) == ["usable", "usable"]
        assert two.requests == []

    asyncio.run(run())


def test_drain_ends_every_request_with_what_it_has() -> None:
    async def run() -> None:
        with FakeSglang(stalls={3: 7}) as one, FakeSglang(stalls={3: 7}) as two:
            async with pool_of(one, two, max_connections=4) as pool:
                await pool.states.wait_for_engines()
                sent = [Response(pool) for _ in range(4)]
                waiting = Response(pool)
                await until(lambda: all(len(r.token_ids) == 5 for r in sent))
                await pool.drain()
                for response in sent:
                    # 5 tokens were streamed; the abort brings the other 2.
                    await response.check(7, FinishReason.ABORT)
                assert await waiting.task is None
                assert await Response(pool).task is None
                pool.reopen()
                one.stalls.clear()
                two.stalls.clear()
                await Response(pool).check(20, FinishReason.LENGTH)
                assert pool.num_lost_requests == 0

    asyncio.run(run())


def test_a_drain_interrupts_an_evaluation_which_then_goes_on_where_it_stopped() -> None:
    async def run() -> None:
        with FakeSglang(stalls={3: 7}) as one, FakeSglang(stalls={3: 7}) as two:
            async with pool_of(one, two, max_connections=4) as pool:
                await pool.states.wait_for_engines()
                evaluated = [Response(pool, affinity=-1 - number) for number in range(3)]
                batch = Response(pool)
                waiting = [Response(pool, affinity=-4), Response(pool)]
                await until(lambda: all(len(r.token_ids) == 5 for r in [batch, *evaluated]))
                await pool.drain()
                await batch.check(7, FinishReason.ABORT)
                assert await waiting[1].task is None
                one.stalls.clear()
                two.stalls.clear()
                for response in [*evaluated, waiting[0]]:  # nobody has reopened the pool
                    await response.check(20, FinishReason.LENGTH)
        lengths = sorted(len(r["input_ids"]) for fake in (one, two) for r in fake.requests)
        assert lengths == [3, 3, 3, 3, 3, 10, 10, 10]  # those interrupted had seven tokens

    asyncio.run(run())


def test_requests_that_an_evaluation_lost_are_not_those_of_a_batch() -> None:
    async def run() -> None:
        with FakeSglang(stalls={3: 5}) as dying, FakeSglang() as other:
            async with pool_of(dying, other) as pool:
                await pool.states.wait_for_engines()
                responses = [Response(pool, affinity=affinity) for affinity in (-1, -1)]
                await until(lambda: all(len(r.token_ids) == 5 for r in responses))
                dying.crash()
                for response in responses:
                    await response.check(20, FinishReason.LENGTH)
                assert len(other.requests) == 2
                assert pool.num_lost_requests == 0

    asyncio.run(run())


def test_drain_ends_although_a_server_hangs_or_ignores_aborts() -> None:
    async def run() -> None:
        with FakeSglang(stalls={3: 5}) as hanging, FakeSglang(stalls={3: 5}) as deaf:
            deaf.ignores_aborts = True
            async with pool_of(hanging, deaf) as pool:
                await pool.states.wait_for_engines()
                responses = [Response(pool), Response(pool)]
                await until(lambda: all(len(r.token_ids) == 5 for r in responses))
                hanging.is_hanging = True
                await pool.drain()
                for response in responses:
                    await response.check(5, FinishReason.ABORT)

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_paused_requests_go_on_with_new_weights_where_they_stopped(mode: str) -> None:
    async def run() -> None:
        changes = {"num_retractions": 3}  # one of them by the pause, if it retracts
        with FakeSglang(token_interval_s=0.01, changes=changes) as fake:
            async with pool_of(fake, request_timeout_s=2.0) as pool:
                response = Response(pool, 200)
                await until(lambda: len(response.token_ids) >= 5)
                await pool.pause(mode)
                assert fake.pause_mode == mode
                await asyncio.sleep(3.0)  # longer than a request may be silent
                fake.version = "1"
                pool.states.version = 1
                pool.states.mark_updated(pool.states.engines[0], 1)
                await pool.resume()
                completion = await response.check(200, FinishReason.LENGTH)
                assert pool.num_lost_requests == 0
                assert pool.num_retractions == {"retract": 2, "in_place": 3}[mode]
        assert [span.version for span in completion.versions] == [0, 1]

    asyncio.run(run())


def test_requests_of_one_affinity_share_a_server_and_others_go_where_least_is_to_do() -> None:
    async def run() -> None:
        with FakeSglang(stalls={3: 5, 4: 5}) as one, FakeSglang(stalls={3: 5, 4: 5}) as two:
            async with pool_of(one, two) as pool:
                await pool.states.wait_for_engines()
                first = [Response(pool, affinity=1) for _ in range(4)]
                second = [Response(pool, prompt=[1, 2, 3, 4], affinity=2) for _ in range(4)]
                await until(lambda: all(r.token_ids for r in first + second))
                lengths = [{len(r["input_ids"]) for r in fake.requests} for fake in (one, two)]
                assert lengths == [{3}, {4}]
                await pool.drain()
                assert pool._admission._engine_by_affinity == {}

    asyncio.run(run())


def test_requests_wait_until_the_cache_is_expected_to_hold_them() -> None:
    async def run() -> None:
        # One request holds 3 tokens at once, and its response of 20 must fit, too.
        with FakeSglang(stalls={3: 5}, cache_tokens=30) as fake:
            async with pool_of(fake) as pool:
                responses = [Response(pool) for _ in range(3)]
                await until(lambda: bool(responses[0].token_ids))
                assert pool.num_in_flight == 1
                fake.stalls.clear()
                for response in responses:
                    await response.check(20, FinishReason.LENGTH)
                assert fake.most_concurrent == 1

    asyncio.run(run())


def test_a_server_with_a_larger_cache_gets_more_requests() -> None:
    async def run() -> None:
        with FakeSglang(stalls={3: 5}) as small, FakeSglang(stalls={3: 5}) as large:
            large.cache_tokens *= 3
            async with pool_of(small, large) as pool:
                await pool.states.wait_for_engines()
                responses = [Response(pool) for _ in range(8)]
                await until(lambda: all(r.token_ids for r in responses))
                assert (len(small.requests), len(large.requests)) == (2, 6)
                await pool.drain()

    asyncio.run(run())


class NoStepper:
    """Is there, that is all."""

    async def decode(self, max_steps: int) -> int:
        return 0


@pytest.mark.parametrize("stepper", [None, NoStepper()])
def test_requests_wait_for_a_connection_only_where_an_engine_samples_by_itself(
    stepper: NoStepper | None,
) -> None:
    async def run() -> int:
        engine = FakeEngine(stepper)
        config = RolloutConfig(max_connections=2, health=HealthConfig(interval_s=0.1))
        pool = EnginePool([engine], config, version=0)
        assert pool.stepper is stepper
        await pool.states.wait_for_engines()
        responses = [Response(pool) for _ in range(5)]
        await asyncio.sleep(0.2)
        num_in_flight = pool.num_in_flight
        for response in responses:
            response.task.cancel()
        await asyncio.gather(*(r.task for r in responses), return_exceptions=True)
        await pool.states.close()
        return num_in_flight

    assert asyncio.run(run()) == (2 if stepper is None else 5)


def test_an_engine_with_a_stepper_is_alone() -> None:
    engines = [FakeEngine(), FakeEngine(NoStepper())]

    async def make() -> None:
        EnginePool(engines, RolloutConfig(), version=0)

    with pytest.raises(AssertionError):
        asyncio.run(make())


def test_an_engine_is_told_how_much_of_its_input_the_response_has_already() -> None:
    async def run() -> None:
        engine = FakeEngine()
        pool = EnginePool([engine], RolloutConfig(), version=0)
        response = Response(pool, prompt=[1, 2, 3, 50, 51], sampled_tokens=2)
        await until(lambda: len(engine.flights) == 1)
        engine.flights[0].give([52, 53, 54])
        engine.flights[0].ended.set_exception(BrokenConnectionError("test"))
        await until(lambda: len(engine.flights) == 2)
        engine.flights[1].give([55], FinishReason.STOP)
        await response.task
        first, second = (flight.request for flight in engine.flights)
        assert (list(first.input_ids), first.sampled_tokens) == ([1, 2, 3, 50, 51], 2)
        assert list(second.input_ids) == [1, 2, 3, 50, 51, 52, 53, 54]
        assert (second.sampled_tokens, second.sampling.max_new_tokens) == (5, 17)
        await pool.states.close()

    asyncio.run(run())
