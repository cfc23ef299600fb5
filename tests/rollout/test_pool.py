"""Several servers as one: what happens to requests when a server fails, pauses or is drained."""

import asyncio
from typing import Any

import pytest

from bapo_megatron.config.rollout import RolloutConfig
from bapo_megatron.data.record import Completion, EnoughTokensError
from bapo_megatron.errors import BrokenConnectionError, RolloutError
from bapo_megatron.rollout.pool import EnginePool
from bapo_megatron.types import FinishReason
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.fake_sglang import FakeSglang, token_at
from tests.rollout.pool import PROMPT, Response, engine_of, pool_on, states_of, until


async def test_pieces_come_while_the_response_is_sampled() -> None:
    fake = FakeSglang(stalls={3: 9})
    async with pool_on(fake) as pool:
        response = Response(pool)
        # Events come after 1, 5 and 9 tokens; the rest only after the stall.
        await until(lambda: len(response.token_ids) == 9)
        assert [len(part.token_ids) for part in response.parts] == [1, 4, 4]
        fake.stalls.clear()
        completion = await response.check(20, FinishReason.LENGTH)
    assert [span.version for span in completion.versions] == [0]
    assert fake.requests[0]["sampling_params"]["stream_interval"] == 4


@pytest.mark.parametrize(
    ("fault", "request_timeout_s", "affinity", "num_lost", "reason"),
    [
        ("death", 1000, None, 1, "the connection broke"),
        ("death", 1000, -1, 0, "the connection broke"),  # of an evaluation
        ("hang", 1000, None, 1, "no answer for 2 s"),
        ("silence", 1, None, 1, "no token of any request within 1 s; raise rollout.request_time"),
    ],
)
async def test_a_server_that_fails_loses_nothing_that_was_received(
    fault: str, request_timeout_s: float, affinity: int | None, num_lost: int, reason: str
) -> None:
    failing, other = FakeSglang(stalls={3: 9}), FakeSglang()
    async with pool_on(failing, other, request_timeout_s=request_timeout_s) as pool:
        response = Response(pool, affinity=affinity)
        await until(lambda: len(response.token_ids) == 9)
        if fault == "death":
            failing.crash()
        failing.is_hanging = fault == "hang"
        await response.check(20, FinishReason.LENGTH)
        assert engine_of(pool, failing).state == "lost" or fault == "silence"
        assert reason in engine_of(pool, failing).reason
        assert pool.num_lost_requests == num_lost
    [sent] = other.requests
    assert sent["input_ids"] == [*PROMPT, *(token_at(3 + index) for index in range(9))]
    assert sent["sampling_params"]["max_new_tokens"] == 11
    assert sent["rid"] != failing.requests[0]["rid"]


async def test_a_connection_that_breaks_on_a_living_server_is_made_again() -> None:
    fake = FakeSglang(breaks_after={3: 9}, connections_to_drop=1)
    async with pool_on(fake) as pool:
        await Response(pool).check(20, FinishReason.LENGTH)
        assert states_of(pool) == ["usable"]
        assert pool.num_lost_requests == 0
    assert [len(request["input_ids"]) for request in fake.requests] == [3, 3, 12]
    assert len({request["rid"] for request in fake.requests}) == 3


async def test_a_request_that_the_server_refuses_is_not_tried_elsewhere() -> None:
    cut_off = {"finish_reason": {"type": "length"}}
    one, two = FakeSglang(stop_at=9, changes=cut_off), FakeSglang()
    async with pool_on(one, two) as pool:
        with pytest.raises(RolloutError, match=r"cut off after 7 of 20 tokens"):
            await Response(pool).task
        assert states_of(pool) == ["usable", "usable"]
    assert two.requests == []


async def test_a_drain_interrupts_an_evaluation_which_then_goes_on_where_it_stopped() -> None:
    one, two = FakeSglang(stalls={3: 7}), FakeSglang(stalls={3: 7})
    async with pool_on(one, two, max_connections=4) as pool:
        evaluated = [Response(pool, affinity=-1 - number) for number in range(3)]
        batch = Response(pool)
        waiting = [Response(pool, affinity=-4), Response(pool)]
        await until(lambda: all(len(r.token_ids) == 5 for r in [batch, *evaluated]))
        await pool.drain()
        # 5 tokens were streamed; the abort brings the other 2.
        await batch.check(7, FinishReason.ABORT)
        assert await waiting[1].task is False
        assert await Response(pool).task is False
        one.stalls.clear()
        two.stalls.clear()
        for response in [*evaluated, waiting[0]]:  # nobody has reopened the pool
            await response.check(20, FinishReason.LENGTH)
        assert pool.num_lost_requests == 0
        pool.reopen()
        await Response(pool).check(20, FinishReason.LENGTH)
    lengths = sorted(len(r["input_ids"]) for fake in (one, two) for r in fake.requests)
    assert lengths == [3, 3, 3, 3, 3, 3, 10, 10, 10]  # those interrupted had seven tokens


async def test_drain_ends_although_a_server_hangs_or_ignores_aborts() -> None:
    hanging, deaf = FakeSglang(stalls={3: 5}), FakeSglang(stalls={3: 5})
    deaf.ignores_aborts = True
    async with pool_on(hanging, deaf) as pool:
        responses = [Response(pool), Response(pool)]
        await until(lambda: all(len(r.token_ids) == 5 for r in responses))
        hanging.is_hanging = True
        await pool.drain()
        for response in responses:
            await response.check(5, FinishReason.ABORT)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_paused_requests_go_on_with_new_weights_where_they_stopped(mode: str) -> None:
    changes = {"num_retractions": 3}  # one of them by the pause, if it retracts
    fake = FakeSglang(token_interval_s=0.01, changes=changes)
    async with pool_on(fake, request_timeout_s=1.0) as pool:
        response = Response(pool, 200)
        await until(lambda: len(response.token_ids) >= 5)
        await pool.pause(mode)
        assert fake.pause_mode == mode
        await asyncio.sleep(1.5)  # longer than a request may be silent
        fake.version = "1"
        pool.states.version = 1
        pool.states.mark_updated(pool.states.engines[0], 1)
        await pool.resume()
        completion = await response.check(200, FinishReason.LENGTH)
        assert pool.num_lost_requests == 0
        assert pool.num_retractions == {"retract": 2, "in_place": 3}[mode]
    assert [span.version for span in completion.versions] == [0, 1]


@pytest.mark.parametrize(
    ("max_response_tokens", "expected"), [(100, 64), (8192, 128), (32_768, 512), (65_536, 512)]
)
def test_long_responses_are_sent_in_longer_pieces(max_response_tokens: int, expected: int) -> None:
    config = RolloutConfig(max_response_tokens=max_response_tokens)
    assert config.piece_tokens == expected
    assert config.model_copy(update={"stream_tokens": 8}).piece_tokens == 8


async def test_a_server_that_breaks_every_connection_is_taken_out_although_it_answers() -> None:
    sick, other = FakeSglang(connections_to_drop=1000), FakeSglang()
    async with pool_on(sick, other) as pool:
        responses = [Response(pool, affinity=1) for _ in range(4)]
        for response in responses:
            await response.check(20, FinishReason.LENGTH)
        engine = engine_of(pool, sick)
        assert engine.state != "usable"
        assert "the connection broke" in engine.reason
    assert len(sick.requests) <= 3 * 4


async def test_a_server_without_its_memory_is_admitted_without_a_request() -> None:
    fake = FakeSglang()
    async with pool_on(fake) as pool:
        pool.states.memory_is_released = True
        fake.crash()
        await until(lambda: states_of(pool) == ["lost"])
        fake.calls.clear()
        fake.start()
        await until(lambda: states_of(pool) == ["stale"])
        assert set(fake.calls) == {"/model_info", "/server_info"}


FALLING = [{"version": "9", "start": 0, "end": 12}, {"version": "0", "start": 12, "end": 20}]
"""Versions of a response's tokens that get older."""
HUGE = [{"version": str(1 << 70), "start": 0, "end": 20}]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({"changes": {"finish_reason": "stop"}}, "unusable answer (sample 1)"),
        ({"changes": {"completion_tokens": "many"}}, "unusable answer (sample 1)"),
        ({"changes": {"output_token_logprobs": "none"}}, "unusable answer (sample 1)"),
        ({"changes": {"weight_versions": HUGE}}, "unusable answer (sample 1)"),
        ({"changes": {"weight_versions": 7}}, "unusable answer (sample 1)"),
        ({"broken_at": 12}, "log-prob None at response token"),
        ({"changes": {"output_token_logprobs": []}}, "log-probs of 0 tokens do not belong"),
        ({"changes": {"weight_versions": FALLING}}, "contradict"),
        ({"version": "9"}, "it has weights version 9"),
        ({"aborts_at": 12}, "ended sample 1 after 9 tokens"),
    ],
)
async def test_a_server_that_answers_nonsense_is_not_asked_again(
    fault: dict[str, Any], reason: str
) -> None:
    bad, good = FakeSglang(**fault), FakeSglang()
    async with pool_on(bad, good, health={"interval_s": 1000.0}) as pool:
        await asyncio.gather(*(Response(pool).check(20, FinishReason.LENGTH) for _ in range(4)))
        engine = engine_of(pool, bad)
        assert engine.state != "usable"
        assert reason in engine.reason
        later = [7, 8, 9]  # requests of the first ones may still be arriving
        await Response(pool, prompt=later).check(20, FinishReason.LENGTH)
        assert all(request["input_ids"][:3] != later for request in bad.requests)


async def test_a_response_that_fails_on_every_attempt_ends_the_run() -> None:
    fake = FakeSglang(broken_at=3)
    async with pool_on(fake) as pool:
        task = Response(pool).task
        while not task.done():
            if pool.states.needs_weights:
                pool.states.mark_updated(pool.states.engines[0], 0)
            await asyncio.sleep(0.01)
        with pytest.raises(RolloutError, match="10 attempts at this request"):
            await task
    assert len(fake.requests) == 10


async def test_a_response_that_lost_its_server_after_its_last_token_needs_no_other_one() -> None:
    engine = FakeEngine()
    pool = EnginePool([engine], RolloutConfig(), version=0)
    response = Response(pool, 3)
    await until(lambda: len(engine.flights) == 1)
    engine.flights[0].give([50, 51, 52])
    engine.flights[0].ended.set_exception(BrokenConnectionError("test"))
    assert await response.task
    assert response.token_ids == [50, 51, 52]
    assert len(engine.flights) == 1
    await pool.states.close()


async def test_a_request_of_whose_tokens_there_are_enough_ends_on_the_server() -> None:
    fake = FakeSglang(stalls={3: 9})

    async with pool_on(fake) as pool:
        response = Response(pool)

        def take(part: Completion) -> None:
            response.parts.append(part)
            if len(response.token_ids) == 9:
                raise EnoughTokensError

        response.task.cancel()
        assert await pool.generate(response._plan, take, 7)
        await until(lambda: not fake._running)
        assert len(response.token_ids) == 9
        assert pool.num_ended == 1
        assert states_of(pool) == ["usable"]
        assert fake.calls.count("/abort_request") == 1
