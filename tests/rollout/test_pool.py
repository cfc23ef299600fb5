"""Several servers as one: what happens to requests when a server fails, pauses or is drained."""

from __future__ import annotations

import asyncio

import pytest

from bapo_megatron.config.rollout import RolloutConfig
from bapo_megatron.engine.base import SamplingSettings
from bapo_megatron.errors import BrokenConnectionError, RolloutError
from bapo_megatron.rollout.pool import EnginePool
from bapo_megatron.types import FinishReason
from tests.fakes.fake_engine import FakeEngine, NoStepper
from tests.fakes.fake_sglang import FakeSglang, token_at
from tests.rollout.pool import PROMPT, Response, T, pool_of, states_of, until


def test_pieces_come_while_the_response_is_sampled() -> None:
    async def run() -> None:
        with FakeSglang(stalls={3: 9}) as fake:
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
                assert await Response(pool, sampling=settings).task
        sent = [request["sampling_params"] for request in fake.requests]
        assert [params["max_new_tokens"] for params in sent] == [20, 20, 11]
        for params in sent:
            assert (params["top_p"], params["top_k"], params["sampling_seed"]) == (0.9, 5, 7)

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
                assert await waiting.task is False
                assert await Response(pool).task is False
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
                assert await waiting[1].task is False
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
