"""Which engines of a run may be used, and what is said of those that may not."""

import asyncio

import pytest

from bapo_megatron.config.rollout import RolloutConfig
from bapo_megatron.engine.sglang.keys import ApiKeys
from bapo_megatron.errors import RolloutError
from bapo_megatron.telemetry import console
from bapo_megatron.types import FinishReason
from tests.fakes.fake_sglang import FakeSglang
from tests.launch import free_port
from tests.rollout.pool import Response, clients_of, engine_of, pool_of, states_of, until


async def test_a_server_that_comes_back_serves_only_after_it_got_weights() -> None:
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
            await asyncio.gather(*(Response(pool).check(20, FinishReason.LENGTH) for _ in range(4)))
            assert dying.requests == []
            pool.states.mark_updated(engine_of(pool, dying), 0)
            assert states_of(pool) == ["usable", "usable"]
            await asyncio.gather(*(Response(pool).check(20, FinishReason.LENGTH) for _ in range(4)))
            assert dying.requests != []
            assert engine_of(pool, dying).properties.cache_tokens == 1 << 18


async def test_without_a_usable_server_requests_wait_for_weights() -> None:
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
            pool.states.version = 9
            assert states_of(pool) == ["stale"]
    assert [span.version for span in completion.versions] == [8]


@pytest.mark.slow
async def test_all_servers_lost_is_an_error_that_names_each_and_why() -> None:
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
        assert f"{fake.address} (lost): the connection broke" in error
    assert error.endswith("resume=true")
    assert "\n" not in error


@pytest.mark.parametrize("quorum", [None, 2])
async def test_servers_that_never_answer_are_named_while_they_are_waited_for_and_at_the_end(
    monkeypatch: pytest.MonkeyPatch, quorum: int | None
) -> None:
    monkeypatch.setattr(console, "_REPORT_INTERVAL_S", 0.2)
    missing = [f"http://127.0.0.1:{free_port()}" for _ in range(quorum or 1)]
    lines: list[str] = []
    with FakeSglang() as fake:
        async with pool_of(fake, *missing, min_servers=quorum, health={"patience_s": 3.0}) as pool:
            with pytest.raises(RolloutError) as caught:
                await pool.states.wait_for_engines(report=lines.append)
    error = str(caught.value)
    assert error.startswith(f"rollout.min_servers: fewer than {quorum} " if quorum else "no answer")
    assert "for 3 s (rollout.health.patience_s): " in error
    assert all(f"{address} (starting): it never answered (" in error for address in missing)
    assert fake.address not in error
    assert error.endswith("or lower rollout.min_servers")
    assert "\n" not in error
    assert lines[-1].startswith(f"waiting for {len(missing)} of {len(missing) + 1} servers, first ")
    assert missing[0] in lines[-1]


async def test_a_server_added_during_the_wait_for_a_quorum_does_not_prolong_it() -> None:
    silent = [f"http://127.0.0.1:{free_port()}" for _ in range(2)]
    with FakeSglang() as fake:
        fake.crash()
        async with pool_of(fake, silent[0], min_servers=1, health={"patience_s": 3.0}) as pool:
            waiting = asyncio.create_task(pool.states.wait_for_engines())
            await asyncio.sleep(0)
            pool.states.add(clients_of(silent[1:], RolloutConfig())[0])
            fake.start()
            await waiting
            assert states_of(pool) == ["usable", "starting", "starting"]


@pytest.mark.parametrize("method", ["broadcast", "disk"])
async def test_servers_with_other_settings_of_nccl_are_refused_where_weights_are_broadcast(
    method: str,
) -> None:
    with FakeSglang(nccl_settings={"NCCL_CUMEM_ENABLE": "1"}) as fake:
        async with pool_of(fake, weight_sync={"method": method}) as pool:
            if method == "disk":
                await pool.states.wait_for_engines()
                return
            with pytest.raises(RolloutError, match="NCCL_CUMEM_ENABLE: must be the same for"):
                await pool.states.wait_for_engines()


@pytest.mark.parametrize(("version", "state"), [(None, "stale"), (0, "usable")])
async def test_beyond_a_quorum_servers_join_when_they_are_ready(
    version: int | None, state: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Only what the run has started itself is known to hold what its label says."""
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
            await asyncio.gather(*(Response(pool).check(20, FinishReason.LENGTH) for _ in range(6)))
            assert bool(late.requests) == (state == "usable")
            await until(lambda: states_of(pool)[3] == "lost")
            last.start()
            await until(lambda: states_of(pool)[3] == "stale")
    first, second, third = (record.getMessage() for record in caplog.records)
    assert first == f"{late.address} joins the run ({state})"
    assert second.startswith(f"{last.address} is lost: it never answered (")
    assert third == f"{last.address} answers again and needs weights"


async def test_a_refused_key_ends_the_wait_for_servers_at_once() -> None:
    with FakeSglang(keys=ApiKeys("right")) as fake:
        async with pool_of(fake, health={"patience_s": 1000.0}) as pool:
            with pytest.raises(RolloutError, match="set BAPO_MEGATRON_API_KEY"):
                await pool.states.wait_for_engines()


async def test_reported_loads_are_summed_up_until_they_are_taken() -> None:
    def load(running: int, waiting: int, used: float) -> dict[str, object]:
        return {"num_running_reqs": running, "num_waiting_reqs": waiting, "token_usage": used}

    speculating = {**load(1, 0, 0.125), "speculative": {"accept_length": 2.5, "accept_rate": 0.5}}
    with FakeSglang(stalls={3: 9}) as fake:
        fake.loads = [[load(4, 1, 0.25), load(2, 0, 0.5)], [speculating]]
        async with pool_of(fake) as pool:
            response = Response(pool)
            # What cannot be understood is left out, and is nothing against the server.
            await until(lambda: fake.calls.count("/v1/loads") >= 4)
            assert pool.states.take_load() == {
                "usable": 1,
                "known": 1,
                "running": 3.5,
                "running_max": 6,
                "waiting": 0.5,
                "waiting_max": 1,
                "cache_used_share": 0.3125,
                "cache_used_share_max": 0.5,
                "acceptance_length": 2.5,
                "acceptance_length_max": 2.5,
            }
            assert pool.states.take_load() == {"usable": 1, "known": 1}
            assert states_of(pool) == ["usable"]
            fake.stalls.clear()
            await response.check(20, FinishReason.LENGTH)
