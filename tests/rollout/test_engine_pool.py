"""Several servers as one: routing, and what happens to requests when a server fails."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from bapo_megatron.config.rollout import RolloutConfig
from bapo_megatron.rollout.base import RolloutError
from bapo_megatron.rollout.completion import SamplingSettings
from bapo_megatron.rollout.engine_pool import EnginePool
from bapo_megatron.rollout.sglang_client import ApiKeys
from bapo_megatron.types import FinishReason
from tests.fakes.fake_sglang import FakeSglang, logprob_of, token_at
from tests.launch import free_port

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from bapo_megatron.rollout.completion import Completion
    from bapo_megatron.rollout.engine import Engine

T = 0.5
PROMPT = [1, 2, 3]
LIMIT_S = 60
"""No test comes near it on a machine that works."""


@contextlib.asynccontextmanager
async def _pool(
    *servers: FakeSglang | str,
    version: int | None = 0,
    keys: ApiKeys | None = None,
    health: dict[str, float] | None = None,
    **rollout: Any,
) -> AsyncIterator[EnginePool]:
    config = RolloutConfig.model_validate(
        {
            "stream_tokens": 4,
            "health": {"interval_s": 0.1, "timeout_s": 2.0, "patience_s": 30.0, **(health or {})},
            **rollout,
        }
    )
    addresses = [server if isinstance(server, str) else server.address for server in servers]
    pool = EnginePool(addresses, keys or ApiKeys(), config, version)
    try:
        async with asyncio.timeout(LIMIT_S):
            yield pool
    finally:
        await pool.close()


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


class Response:
    """One request; its pieces as they come."""

    def __init__(
        self, pool: EnginePool, longest: int = 20, prompt: list[int] | None = None, **options: Any
    ) -> None:
        self.prompt = prompt or PROMPT
        self.parts: list[Completion] = []
        self.task = asyncio.create_task(
            pool.generate(
                self.prompt,
                SamplingSettings(T, longest),
                label="sample 1",
                on_part=self.parts.append,
                **options,
            )
        )

    @property
    def token_ids(self) -> list[int]:
        return [token_id for part in self.parts for token_id in part.token_ids.tolist()]

    async def check(self, length: int, finish: FinishReason) -> Completion:
        """Wait for the end: every token came once, in order, with its log-prob."""
        completion = await self.task
        assert completion is not None
        start = len(self.prompt)
        assert self.token_ids == [token_at(start + index) for index in range(length)]
        assert completion.token_ids.tolist() == self.token_ids
        expected = [logprob_of(token_id, T) for token_id in self.token_ids]
        np.testing.assert_allclose(completion.logprobs, expected, rtol=1e-6)
        assert len(completion.versions) == length
        assert completion.finish_reason is finish
        assert all(part.finish_reason is FinishReason.ABORT for part in self.parts[:-1])
        assert self.parts[-1].finish_reason is finish
        return completion


def _states(pool: EnginePool) -> list[str]:
    return [str(engine.state) for engine in pool.engines]


def _engine(pool: EnginePool, fake: FakeSglang) -> Engine:
    return next(engine for engine in pool.engines if engine.address == fake.address)


@pytest.mark.parametrize("is_incremental", [True, False])
def test_pieces_come_while_the_response_is_sampled(is_incremental: bool) -> None:
    async def run() -> None:
        with FakeSglang(stalls={3: 9}, is_incremental=is_incremental) as fake:
            async with _pool(fake) as pool:
                response = Response(pool)
                # Events come after 1, 5 and 9 tokens; the rest only after the stall.
                await _until(lambda: len(response.token_ids) == 9)
                assert [len(part.token_ids) for part in response.parts] == [1, 4, 4]
                fake.stalls.clear()
                completion = await response.check(20, FinishReason.LENGTH)
        assert set(completion.versions) == {0}
        assert fake.requests[0]["sampling_params"]["stream_interval"] == 4

    asyncio.run(run())


def test_a_server_that_dies_loses_nothing_that_was_received() -> None:
    async def run() -> None:
        with FakeSglang(stalls={3: 9}) as dying, FakeSglang() as other:
            async with _pool(dying, other) as pool:
                await pool.wait_for_servers()
                response = Response(pool)
                await _until(lambda: len(response.token_ids) == 9)
                dying.crash()
                await response.check(20, FinishReason.LENGTH)
                assert _states(pool) == ["lost", "usable"]
                assert pool.num_lost_requests == 1
        sent = other.requests[0]
        assert sent["input_ids"] == [*PROMPT, *(token_at(3 + index) for index in range(9))]
        assert sent["sampling_params"]["max_new_tokens"] == 11
        assert sent["rid"] != dying.requests[0]["rid"]

    asyncio.run(run())


def test_a_connection_that_breaks_on_a_living_server_is_made_again() -> None:
    async def run() -> None:
        with FakeSglang(breaks_after={3: 9}, connections_to_drop=1) as fake:
            async with _pool(fake) as pool:
                response = Response(pool)
                await response.check(20, FinishReason.LENGTH)
                assert _states(pool) == ["usable"]
                assert pool.num_lost_requests == 0
        assert [len(request["input_ids"]) for request in fake.requests] == [3, 3, 12]
        assert len({request["rid"] for request in fake.requests}) == 3

    asyncio.run(run())


def test_a_server_that_hangs_is_noticed_by_the_monitor() -> None:
    async def run() -> None:
        with FakeSglang(stalls={3: 5}) as hanging, FakeSglang() as other:
            async with _pool(hanging, other, request_timeout_s=1000) as pool:
                await pool.wait_for_servers()
                response = Response(pool)
                await _until(lambda: len(response.token_ids) == 5)
                hanging.is_hanging = True
                await response.check(20, FinishReason.LENGTH)
                engine = _engine(pool, hanging)
                assert engine.state == "lost"
                assert engine.reason.startswith("no answer for 2 s")

    asyncio.run(run())


def test_a_request_without_tokens_for_too_long_goes_elsewhere() -> None:
    async def run() -> None:
        with FakeSglang(stalls={3: 5}) as stuck, FakeSglang() as other:
            async with _pool(stuck, other, request_timeout_s=1.0) as pool:
                await pool.wait_for_servers()
                await Response(pool).check(20, FinishReason.LENGTH)
                reason = _engine(pool, stuck).reason
        assert "no token within 1 s; raise rollout.request_timeout_s" in reason

    asyncio.run(run())


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({"broken_at": 12}, "log-prob None at response token"),
        ({"changes": {"output_token_logprobs": []}}, "log-probs of 0 tokens do not belong"),
        ({"changes": {"weight_versions": [{"version": "9", "start": 0, "end": 20}]}}, "contradict"),
        ({"version": "9"}, "it has weights version 9"),
        ({"aborts_at": 12}, "gave up after 9 tokens"),
    ],
)
def test_a_server_that_answers_nonsense_is_not_asked_again(
    fault: dict[str, Any], reason: str
) -> None:
    async def run() -> None:
        with FakeSglang(**fault) as bad, FakeSglang() as good:
            async with _pool(bad, good, health={"interval_s": 1000.0}) as pool:
                await pool.wait_for_servers()
                await asyncio.gather(
                    *(Response(pool).check(20, FinishReason.LENGTH) for _ in range(4))
                )
                engine = _engine(pool, bad)
                assert engine.state != "usable"
                assert reason in engine.reason
                num_requests = len(bad.requests)
                await Response(pool).check(20, FinishReason.LENGTH)
                assert len(bad.requests) == num_requests

    asyncio.run(run())


def test_a_server_that_comes_back_serves_only_after_it_got_weights() -> None:
    async def run() -> None:
        with FakeSglang(stalls={3: 5}) as dying, FakeSglang() as other:
            async with _pool(dying, other) as pool:
                await pool.wait_for_servers()
                response = Response(pool)
                await _until(lambda: len(response.token_ids) == 5)
                dying.crash()
                await response.check(20, FinishReason.LENGTH)
                dying.stalls.clear()
                dying.requests.clear()
                dying.start()  # it reports version 0, as the pool needs, but is another process
                await _until(lambda: _states(pool) == ["stale", "usable"])
                await asyncio.gather(
                    *(Response(pool).check(20, FinishReason.LENGTH) for _ in range(4))
                )
                assert dying.requests == []
                pool.mark_updated(_engine(pool, dying), 0)
                assert _states(pool) == ["usable", "usable"]
                await asyncio.gather(
                    *(Response(pool).check(20, FinishReason.LENGTH) for _ in range(4))
                )
                assert dying.requests != []

    asyncio.run(run())


def test_without_a_usable_server_requests_wait_for_weights() -> None:
    async def run() -> None:
        with FakeSglang(version="7") as fake:
            async with _pool(fake, version=None) as pool:
                await pool.wait_for_servers()
                assert pool.needs_weights
                response = Response(pool)
                await asyncio.sleep(0.2)
                assert fake.requests == []
                fake.version = "8"
                pool.version = 8
                pool.mark_updated(pool.engines[0], 8)
                assert not pool.needs_weights
                completion = await response.check(20, FinishReason.LENGTH)
        assert set(completion.versions) == {8}

    asyncio.run(run())


def test_a_new_version_of_the_pool_leaves_the_servers_stale() -> None:
    async def run() -> None:
        with FakeSglang() as fake:
            async with _pool(fake) as pool:
                await pool.wait_for_servers()
                assert _states(pool) == ["usable"]
                pool.version = 1
                assert _states(pool) == ["stale"]

    asyncio.run(run())


def test_all_servers_lost_is_an_error_that_names_each_and_why() -> None:
    async def run() -> str:
        with FakeSglang(stalls={3: 5}) as one, FakeSglang(stalls={3: 5}) as two:
            async with _pool(one, two, health={"patience_s": 3.0}) as pool:
                await pool.wait_for_servers()
                responses = [Response(pool), Response(pool)]
                await _until(lambda: all(len(r.token_ids) == 5 for r in responses))
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


def test_servers_that_never_answer_are_named_at_the_start() -> None:
    missing = f"http://127.0.0.1:{free_port()}"

    async def run() -> None:
        with FakeSglang() as fake:
            async with _pool(fake, missing, health={"patience_s": 2.0}) as pool:
                with pytest.raises(RolloutError) as caught:
                    await pool.wait_for_servers()
        assert f"{missing} (starting): it never answered" in str(caught.value)
        assert fake.address not in str(caught.value)

    asyncio.run(run())


def test_servers_may_be_started_after_the_trainer() -> None:
    async def run() -> None:
        with FakeSglang() as fake:
            fake.crash()
            async with _pool(fake) as pool:
                waiting = asyncio.create_task(pool.wait_for_servers())
                await asyncio.sleep(0.3)
                assert not waiting.done()
                fake.start()
                await waiting
                assert _states(pool) == ["usable"]

    asyncio.run(run())


def test_a_refused_key_ends_the_wait_for_servers_at_once() -> None:
    async def run() -> None:
        with FakeSglang(api_key="right") as fake:
            async with _pool(fake, health={"patience_s": 1000.0}) as pool:
                with pytest.raises(RolloutError, match="set BAPO_MEGATRON_API_KEY"):
                    await pool.wait_for_servers()

    asyncio.run(run())


def test_a_server_of_the_wrong_convention_ends_the_run_at_its_start() -> None:
    async def run() -> None:
        with FakeSglang() as good, FakeSglang(ignores_temperature=True) as bad:
            async with _pool(good, bad) as pool:
                with pytest.raises(RolloutError, match="ignore the temperature") as caught:
                    await pool.check(T, [[5, 6, 7], [8, 9]])
        assert str(caught.value).startswith(bad.address)

    asyncio.run(run())


def test_a_server_that_cannot_retract_is_refused_where_that_is_wanted() -> None:
    async def run() -> None:
        with FakeSglang(sglang_version="0.5.20") as fake:
            async with _pool(fake, weight_sync={"in_flight": "in_place"}) as pool:
                await pool.wait_for_servers()
            async with _pool(fake, weight_sync={"in_flight": "retract"}) as pool:
                with pytest.raises(RolloutError, match=r"SGLang 0\.5\.20 .*in_flight: abort"):
                    await pool.wait_for_servers()

    asyncio.run(run())


def test_a_request_that_the_server_refuses_is_not_tried_elsewhere() -> None:
    async def run() -> None:
        cut_off = {"finish_reason": {"type": "length"}}
        with FakeSglang(stop_at=9, changes=cut_off) as one, FakeSglang() as two:
            async with _pool(one, two) as pool:
                await pool.wait_for_servers()
                with pytest.raises(RolloutError, match=r"cut off after 7 of 20 tokens"):
                    await Response(pool).task
                assert _states(pool) == ["usable", "usable"]
        assert two.requests == []

    asyncio.run(run())


def test_weights_that_break_every_server_end_the_run() -> None:
    async def run() -> None:
        with FakeSglang(broken_at=3) as fake:
            async with _pool(fake) as pool:
                task = Response(pool).task
                while not task.done():
                    if pool.needs_weights:
                        pool.mark_updated(pool.engines[0], 0)
                    await asyncio.sleep(0.01)
                with pytest.raises(RolloutError, match="3 answers in a row are unusable"):
                    await task
        assert len(fake.requests) == 3

    asyncio.run(run())


def test_drain_ends_every_request_with_what_it_has() -> None:
    async def run() -> None:
        with FakeSglang(stalls={3: 7}) as one, FakeSglang(stalls={3: 7}) as two:
            async with _pool(one, two, max_connections=4) as pool:
                await pool.wait_for_servers()
                sent = [Response(pool) for _ in range(4)]
                waiting = Response(pool)
                await _until(lambda: all(len(r.token_ids) == 5 for r in sent))
                await pool.drain()
                for response in sent:
                    # 5 tokens were streamed; the abort brings the other 2.
                    await response.check(7, FinishReason.ABORT)
                assert await waiting.task is None
                assert await pool.generate(PROMPT, SamplingSettings(T, 4), label="late") is None
                pool.reopen()
                one.stalls.clear()
                two.stalls.clear()
                await Response(pool).check(20, FinishReason.LENGTH)
                assert pool.num_lost_requests == 0

    asyncio.run(run())


def test_drain_ends_although_a_server_hangs_or_ignores_aborts() -> None:
    async def run() -> None:
        with FakeSglang(stalls={3: 5}) as hanging, FakeSglang(stalls={3: 5}) as deaf:
            deaf.ignores_aborts = True
            async with _pool(hanging, deaf) as pool:
                await pool.wait_for_servers()
                responses = [Response(pool), Response(pool)]
                await _until(lambda: all(len(r.token_ids) == 5 for r in responses))
                hanging.is_hanging = True
                await pool.drain()
                for response in responses:
                    await response.check(5, FinishReason.ABORT)

    asyncio.run(run())


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_paused_requests_go_on_with_new_weights_where_they_stopped(mode: str) -> None:
    async def run() -> None:
        with FakeSglang(token_interval_s=0.01) as fake:
            async with _pool(fake, request_timeout_s=2.0) as pool:
                response = Response(pool, 200)
                await _until(lambda: len(response.token_ids) >= 5)
                await pool.pause(mode)
                assert fake.pause_mode == mode
                await asyncio.sleep(3.0)  # longer than a request may be silent
                fake.version = "1"
                pool.version = 1
                pool.mark_updated(pool.engines[0], 1)
                await pool.resume()
                completion = await response.check(200, FinishReason.LENGTH)
                assert pool.num_lost_requests == 0
        versions = completion.versions.tolist()
        assert versions == sorted(versions)
        assert set(versions) == {0, 1}

    asyncio.run(run())


def test_requests_of_one_affinity_share_a_server_and_others_go_where_least_is_to_do() -> None:
    async def run() -> None:
        with FakeSglang(stalls={3: 5, 4: 5}) as one, FakeSglang(stalls={3: 5, 4: 5}) as two:
            async with _pool(one, two) as pool:
                await pool.wait_for_servers()
                first = [Response(pool, affinity=1) for _ in range(4)]
                second = [Response(pool, prompt=[1, 2, 3, 4], affinity=2) for _ in range(4)]
                await _until(lambda: all(r.token_ids for r in first + second))
                lengths = [{len(r["input_ids"]) for r in fake.requests} for fake in (one, two)]
                assert lengths == [{3}, {4}]
                await pool.drain()
                assert len(pool._balancer._engine_by_affinity) == 0

    asyncio.run(run())


def test_a_large_group_is_spread_once_its_server_has_much_more_to_do() -> None:
    async def run() -> None:
        with FakeSglang(stalls={3: 5}) as one, FakeSglang(stalls={3: 5}) as two:
            async with _pool(one, two) as pool:
                await pool.wait_for_servers()
                responses = [Response(pool, affinity=1) for _ in range(16)]
                await _until(lambda: all(r.token_ids for r in responses))
                # 0 to 4 others are no reason to move; then the other one takes up to 1.25 × 5 + 4.
                assert sorted((len(one.requests), len(two.requests))) == [5, 11]
                await pool.drain()

    asyncio.run(run())


def test_a_server_of_more_ranks_gets_more_requests() -> None:
    async def run() -> None:
        with FakeSglang(stalls={3: 5}) as small, FakeSglang(stalls={3: 5}, num_ranks=3) as large:
            async with _pool(small, large) as pool:
                await pool.wait_for_servers()
                responses = [Response(pool) for _ in range(8)]
                await _until(lambda: all(r.token_ids for r in responses))
                assert (len(small.requests), len(large.requests)) == (2, 6)
                await pool.drain()

    asyncio.run(run())


def test_a_server_that_is_lost_after_the_last_token_is_not_replaced() -> None:
    class Cut(FakeSglang):
        """Sends all tokens, and breaks before it says that they are all."""

        def generate(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
            *_, last = super().generate(body)
            meta = {**last["meta_info"], "finish_reason": None}
            del meta["weight_versions"]
            yield {**last, "meta_info": meta}
            raise ConnectionError

    async def run() -> None:
        with FakeSglang() as other, Cut(is_incremental=False) as cut:
            async with _pool(cut, other) as pool:
                await pool.wait_for_servers()
                await Response(pool, 13).check(13, FinishReason.LENGTH)
        assert other.requests == []

    asyncio.run(run())
