"""Servers that fail in ways other than ending, and what is left of their requests."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from bapo_megatron.errors import RolloutError
from bapo_megatron.rollout.buffer import PendingGroup
from bapo_megatron.types import FinishReason, Prompt
from tests.fakes.fake_sglang import FakeSglang, token_at
from tests.rollout.pool import PROMPT, Response, T, engine_of, pool_of, states_of, until

if TYPE_CHECKING:
    from collections.abc import Iterator


def test_a_server_that_hangs_is_noticed_by_the_monitor() -> None:
    async def run() -> None:
        with FakeSglang(stalls={3: 5}) as hanging, FakeSglang() as other:
            async with pool_of(hanging, other, request_timeout_s=1000) as pool:
                await pool.states.wait_for_engines()
                response = Response(pool)
                await until(lambda: len(response.token_ids) == 5)
                hanging.is_hanging = True
                await response.check(20, FinishReason.LENGTH)
                engine = engine_of(pool, hanging)
                assert engine.state == "lost"
                assert engine.reason.startswith("no answer for 2 s")

    asyncio.run(run())


def test_a_request_without_tokens_for_too_long_goes_elsewhere() -> None:
    async def run() -> None:
        with FakeSglang(stalls={3: 5}) as stuck, FakeSglang() as other:
            async with pool_of(stuck, other, request_timeout_s=1.0) as pool:
                await pool.states.wait_for_engines()
                await Response(pool).check(20, FinishReason.LENGTH)
                reason = engine_of(pool, stuck).reason
        assert "no token of any request within 1 s; raise rollout.request_timeout_s" in reason

    asyncio.run(run())


@pytest.mark.slow
def test_a_request_that_waits_for_its_turn_while_others_get_tokens_is_left_alone() -> None:
    async def run() -> None:
        with FakeSglang(stalls={3: 5}, token_interval_s=0.05) as fake:
            async with pool_of(fake, request_timeout_s=1.0) as pool:
                await pool.states.wait_for_engines()
                waiting = Response(pool)
                busy = Response(pool, 60, prompt=[1, 2, 3, 4])
                await busy.check(60, FinishReason.LENGTH)  # 3 s
                fake.stalls.clear()
                await waiting.check(20, FinishReason.LENGTH)
                assert pool.num_lost_requests == 0

    asyncio.run(run())


def test_a_server_that_breaks_every_connection_is_taken_out_although_it_answers() -> None:
    async def run() -> None:
        with FakeSglang() as sick, FakeSglang() as other:
            sick.connections_to_drop = 1000
            async with pool_of(sick, other) as pool:
                await pool.states.wait_for_engines()
                responses = [Response(pool, affinity=1) for _ in range(4)]
                for response in responses:
                    await response.check(20, FinishReason.LENGTH)
                engine = engine_of(pool, sick)
                assert engine.state != "usable"
                assert "the connection broke" in engine.reason
                assert "(3 in a row)" in engine.reason
        assert len(sick.requests) <= 3 * 4

    asyncio.run(run())


@pytest.mark.parametrize(
    "changes",
    [
        {"finish_reason": "stop"},
        {"completion_tokens": "many"},
        {"output_token_logprobs": "none"},
        {"weight_versions": [{"version": str(1 << 70), "start": 0, "end": 20}]},
        {"weight_versions": 7},
    ],
)
def test_an_answer_of_another_form_costs_its_server_only(changes: dict[str, Any]) -> None:
    async def run() -> None:
        with FakeSglang(changes=changes) as bad, FakeSglang() as good:
            async with pool_of(bad, good) as pool:
                await pool.states.wait_for_engines()
                await asyncio.gather(
                    *(Response(pool).check(20, FinishReason.LENGTH) for _ in range(2))
                )
                assert "unusable answer (sample 1)" in engine_of(pool, bad).reason

    asyncio.run(run())


@pytest.mark.parametrize("token_id", [-1, 1 << 70])
def test_token_ids_that_cannot_be_cost_their_server_only(token_id: int) -> None:
    class Odd(FakeSglang):
        def generate(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
            for event in super().generate(body):
                event["output_ids"][-1] = token_id
                yield event

    async def run() -> None:
        with Odd() as bad, FakeSglang() as good:
            async with pool_of(bad, good) as pool:
                await pool.states.wait_for_engines()
                responses = [Response(pool, return_logprobs=False) for _ in range(2)]
                for response in responses:
                    await response.task
                    assert response.token_ids == [token_at(3 + i) for i in range(20)]
                assert "unusable answer (sample 1)" in engine_of(pool, bad).reason

    asyncio.run(run())


def test_a_server_without_its_memory_is_admitted_without_a_request() -> None:
    async def run() -> None:
        with FakeSglang() as fake:
            async with pool_of(fake, temperature=T) as pool:
                await pool.states.wait_for_engines([[5, 6, 7]])
                pool.states.memory_is_away = True
                fake.crash()
                await until(lambda: states_of(pool) == ["lost"])
                fake.requests.clear()
                fake.calls.clear()
                fake.start()
                await until(lambda: states_of(pool) == ["stale"])
                assert fake.requests == []
                assert set(fake.calls) == {"/model_info", "/server_info"}

    asyncio.run(run())


FALLING = [
    {"version": "9", "start": 0, "end": 12},
    {"version": "0", "start": 12, "end": 20},
]
"""Versions of a response's tokens that get older."""


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({"broken_at": 12}, "log-prob None at response token"),
        ({"changes": {"output_token_logprobs": []}}, "log-probs of 0 tokens do not belong"),
        ({"changes": {"weight_versions": FALLING}}, "contradict"),
        ({"version": "9"}, "it has weights version 9"),
        ({"aborts_at": 12}, "gave up after 9 tokens"),
    ],
)
def test_a_server_that_answers_nonsense_is_not_asked_again(
    fault: dict[str, Any], reason: str
) -> None:
    async def run() -> None:
        with FakeSglang(**fault) as bad, FakeSglang() as good:
            async with pool_of(bad, good, health={"interval_s": 1000.0}) as pool:
                await pool.states.wait_for_engines()
                await asyncio.gather(
                    *(Response(pool).check(20, FinishReason.LENGTH) for _ in range(4))
                )
                engine = engine_of(pool, bad)
                assert engine.state != "usable"
                assert reason in engine.reason
                num_requests = len(bad.requests)
                await Response(pool).check(20, FinishReason.LENGTH)
                assert len(bad.requests) == num_requests

    asyncio.run(run())


def test_weights_that_break_every_server_end_the_run() -> None:
    async def run() -> None:
        with FakeSglang(broken_at=3) as fake:
            async with pool_of(fake) as pool:
                task = Response(pool).task
                while not task.done():
                    if pool.states.needs_weights:
                        pool.states.mark_updated(pool.states.engines[0], 0)
                    await asyncio.sleep(0.01)
                with pytest.raises(RolloutError, match="3 answers in a row are unusable"):
                    await task
        assert len(fake.requests) == 3

    asyncio.run(run())


def test_a_server_that_is_lost_after_the_last_token_is_not_replaced() -> None:
    class Cut(FakeSglang):
        """Sends all tokens, and breaks before it says that they are all."""

        def generate(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
            for event in super().generate(body):
                meta = {**event["meta_info"], "finish_reason": None}
                meta.pop("weight_versions", None)
                yield {**event, "meta_info": meta}
            raise ConnectionError

    (pending,) = PendingGroup.start(0, Prompt("", tuple(PROMPT), "", ""), 1).samples

    async def run() -> None:
        with FakeSglang() as other, Cut() as cut:
            async with pool_of(cut, other) as pool:
                await pool.states.wait_for_engines()
                response = Response(pool, 13)
                await response.check(13, FinishReason.ABORT)
                for part in response.parts:
                    pending.append(part, 13)
        assert pending.sample.finish_reason is FinishReason.LENGTH
        assert len(pending.sample.response_token_ids) == 13
        assert other.requests == []

    asyncio.run(run())
