"""Which servers take part in a weight sync, what they are told, and what becomes of failures."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from bapo_megatron.engine.sglang.keys import ApiKeys
from bapo_megatron.errors import RolloutError
from bapo_megatron.weight_sync.messages import (
    Load,
    Opened,
    Receive,
    Take,
)
from tests.fakes.fake_weight_server import FakeWeightServer
from tests.weight_sync.setting import BUCKET, EXPECTED, Setting, run_sync

if TYPE_CHECKING:
    from bapo_megatron.engine.pooled import PooledEngine


def test_a_sync_pauses_generation_and_labels_only_the_last_part(
    servers: list[FakeWeightServer],
) -> None:
    async def use(setting: Setting) -> None:
        opened = await setting.receive_all(7)
        assert opened == Opened(
            addresses=tuple(server.address for server in servers),
            num_ranks=(1, 1),
            gpus=((), ()),
            share_group=False,
        )
        assert setting.states() == ["usable", "usable"]
        assert setting.pool.version == 7
        assert setting.generation.calls == ["pause", "resume"]

    run_sync(servers, use)
    for number, server in enumerate(servers):
        assert server.paths == [
            "/begin_weight_update",
            "/init_weights_update_group",
            "/update_weights_from_distributed",
            "/update_weights_from_distributed",
            "/end_weight_update",
            "/continue_generation",  # the checks of a new server
            "/destroy_weights_update_group",
        ]
        _, (_, join), (_, first), (_, last), *_ = server.calls
        assert join == {
            "master_address": "127.0.0.1",
            "master_port": 1234,
            "rank_offset": 1 + number,
            "world_size": 3,
            "group_name": "group",
            "backend": "gloo",
        }
        assert first == {
            "names": ["w"],
            "dtypes": ["float32"],
            "shapes": [[2, 3]],
            "group_name": "group",
            "load_format": "flattened_bucket",
            "flush_cache": False,
            "abort_all_requests": False,
        }
        assert last == {**first, "flush_cache": True, "weight_version": "7"}
        assert server.version == "7"


def test_the_ranks_of_servers_follow_one_another_in_the_group() -> None:
    async def use(setting: Setting) -> None:
        assert (await setting.receive_all(1)).num_ranks == (2, 4)

    with FakeWeightServer(tensor_ranks=2) as first, FakeWeightServer(tensor_ranks=4) as second:
        run_sync([first, second], use)
        joins = [server.calls[1][1] for server in (first, second)]
    assert [join["rank_offset"] for join in joins] == [1, 3]
    assert [join["world_size"] for join in joins] == [7, 7]


def test_a_session_that_an_earlier_trainer_left_open_is_closed_first() -> None:
    async def use(setting: Setting) -> None:
        await setting.receive_all(7)

    with FakeWeightServer(in_session=True) as server:
        run_sync([server], use)
        assert server.version == "7"
        assert not server.in_session


@pytest.mark.parametrize("is_busy", [False, True])
def test_the_cache_of_requests_that_are_paused_in_place_is_kept(is_busy: bool) -> None:
    async def use(setting: Setting) -> None:
        await setting.receive_all(7)
        assert setting.states() == ["usable"]

    with FakeWeightServer(is_busy=is_busy) as server:
        run_sync([server], use, weight_sync={"in_flight": "in_place"})
        # The server itself decides whether requests are running.
        assert server.paths.count("/flush_cache") == 1


def test_the_group_is_shared_until_a_member_is_lost(servers: list[FakeWeightServer]) -> None:
    async def use(setting: Setting) -> None:
        assert not (await setting.receive_all(1)).share_group
        assert (await setting.receive_all(2, join=False)).share_group
        setting.pool.mark_lost(setting.pool.engines[1], "test")
        opened = await setting.receive_all(3)
        assert opened.addresses == (servers[0].address,)
        assert not opened.share_group

    run_sync(servers, use)
    assert servers[0].version == "3"
    assert servers[1].version == "2"


def test_a_new_group_is_formed_once_a_server_has_joined_or_left(
    servers: list[FakeWeightServer],
) -> None:
    async def use(setting: Setting) -> None:
        first, second = setting.pool.engines
        setting.pool.engines = [first]
        assert (await setting.receive_all(1)).num_ranks == (1,)
        setting.pool.engines = [first, second]
        opened = await setting.receive_all(2)
        assert (opened.num_ranks, opened.share_group) == ((1, 1), False)
        await setting.service.begin(3)
        leaving = asyncio.create_task(setting.service.wait_idle())
        await asyncio.sleep(0.1)
        assert not leaving.done()  # a push that has begun is finished first
        await setting.receive_all(3, join=False)
        await leaving
        setting.pool.engines = [first]
        await setting.service.forget(second)
        for server in servers:
            assert server.paths[-1] == "/destroy_weights_update_group"
        assert (await setting.receive_all(4)).share_group is False

    run_sync(servers, use)
    assert [server.version for server in servers] == ["4", "3"]


def test_a_server_that_refuses_is_taken_out_and_the_rest_goes_on(
    servers: list[FakeWeightServer],
) -> None:
    servers[1].refusals["/update_weights_from_distributed"] = "wrong shape"

    async def use(setting: Setting) -> None:
        await setting.service.begin(7)
        assert await setting.join() is None
        failed = await setting.service.receive(Receive(bucket=BUCKET, is_last=False))
        assert "wrong shape" in failed
        opened = await setting.receive_all(7)
        assert opened.addresses == (servers[0].address,)
        assert not opened.share_group
        assert setting.states() == ["usable", "lost"]
        assert "wrong shape" in setting.pool.reasons[servers[1].address]
        assert setting.generation.calls == ["pause", "resume"]

    run_sync(servers, use)
    assert (servers[0].version, servers[1].version) == ("7", "0")


def test_servers_that_all_refuse_end_the_run_with_their_words(
    servers: list[FakeWeightServer],
) -> None:
    for server in servers:
        server.refusals["/update_weights_from_disk"] = "no such directory"

    async def use(setting: Setting) -> None:
        with pytest.raises(RolloutError, match=r"update_weights_from_disk.*no such directory"):
            await setting.service.load(Load(model_dir=Path("/nowhere"), version=7))

    run_sync(servers, use)


def test_a_refusal_in_a_group_that_existed_before_is_held_against_nobody(
    servers: list[FakeWeightServer],
) -> None:
    async def use(setting: Setting) -> None:
        await setting.receive_all(1)
        servers[1].refusals["/update_weights_from_distributed"] = "unknown group"  # it restarted
        assert (await setting.service.begin(2)).share_group
        failed = await setting.service.receive(Receive(bucket=BUCKET, is_last=False))
        assert "unknown group" in failed
        servers[1].refusals.clear()
        assert not (await setting.receive_all(2)).share_group
        assert setting.states() == ["usable", "usable"]

    run_sync(servers, use)
    assert [server.version for server in servers] == ["2", "2"]


@pytest.mark.slow
def test_a_server_that_hangs_is_taken_out_after_the_time_limit(
    servers: list[FakeWeightServer],
) -> None:
    servers[0].hanging.add("/update_weights_from_distributed")

    async def use(setting: Setting) -> None:
        await setting.service.begin(7)
        assert await setting.join() is None
        failed = await setting.service.receive(Receive(bucket=BUCKET, is_last=False))
        assert "no answer within" in failed
        assert (await setting.receive_all(7)).addresses == (servers[1].address,)
        assert setting.states() == ["lost", "usable"]

    run_sync(servers, use, weight_sync={"timeout_s": 3})


@pytest.mark.slow
def test_a_server_that_is_lost_meanwhile_ends_the_attempt_at_once(
    servers: list[FakeWeightServer],
) -> None:
    servers[0].hanging.add("/update_weights_from_distributed")

    async def use(setting: Setting) -> None:
        await setting.service.begin(7)
        assert await setting.join() is None
        receiving = asyncio.create_task(
            setting.service.receive(Receive(bucket=BUCKET, is_last=False))
        )
        await asyncio.sleep(0.2)
        setting.pool.mark_lost(setting.pool.engines[0], "silent")
        assert "lost meanwhile" in await receiving
        assert (await setting.receive_all(7)).addresses == (servers[1].address,)

    run_sync(servers, use, health={"timeout_s": 2, "patience_s": 60})


def test_a_server_that_reports_another_version_is_taken_out(
    servers: list[FakeWeightServer],
) -> None:
    servers[0].ignores_labels = True

    async def use(setting: Setting) -> None:
        await setting.service.load(Load(model_dir=Path("/weights"), version=7))
        assert setting.states() == ["lost", "usable"]
        assert "reports '0'" in setting.pool.reasons[servers[0].address]

    run_sync(servers, use)


def test_a_directory_is_loaded_without_a_session(servers: list[FakeWeightServer]) -> None:
    async def use(setting: Setting) -> None:
        await setting.service.load(Load(model_dir=Path("/weights"), version=7))
        assert setting.states() == ["usable", "usable"]

    run_sync(servers, use)
    assert servers[0].calls == [
        (
            "/update_weights_from_disk",
            {
                "model_path": "/weights",
                "load_format": "auto",
                "flush_cache": True,
                "abort_all_requests": False,
                "weight_version": "7",
            },
        )
    ]


def test_each_server_takes_its_own_payloads(servers: list[FakeWeightServer]) -> None:
    async def use(setting: Setting) -> None:
        await setting.service.begin(7)
        take = Take(payloads=(("YQ==",), ("Yg==",)), is_last=True)
        assert await setting.service.take(take) is None
        assert await setting.service.finish(None) is None

    run_sync(servers, use)
    payloads = [dict(server.calls)["/update_weights_from_tensor"] for server in servers]
    assert [p["serialized_named_tensors"] for p in payloads] == [["YQ=="], ["Yg=="]]


def test_without_any_server_the_patience_ends(servers: list[FakeWeightServer]) -> None:
    async def use(setting: Setting) -> None:
        for engine in setting.pool.engines:
            setting.pool.mark_lost(engine, "test")
        with pytest.raises(RolloutError, match="no server took weights version 7 within"):
            await setting.service.begin(7)

    run_sync(servers, use, health={"patience_s": 0.5})


def test_control_calls_carry_the_admin_key_and_the_probe_the_other() -> None:
    keys = ApiKeys(api_key="user", admin_api_key="admin")

    async def use(setting: Setting) -> None:
        await setting.receive_all(7)
        await setting.service.verify(EXPECTED)
        assert setting.states() == ["usable"]

    with FakeWeightServer(keys=keys) as server:
        run_sync([server], use, keys)
        assert server.paths.count("/generate") == 2


def test_a_call_that_fails_in_an_unforeseen_way_is_told_with_its_kind_and_the_others_are_ended(
    servers: list[FakeWeightServer],
) -> None:
    ended: list[str] = []

    async def use(setting: Setting) -> None:
        await setting.service.begin(7)
        first, second = setting.pool.engines

        async def call(entry: PooledEngine, *_: Any) -> None:
            if entry is first:
                raise TimeoutError  # has no text
            try:
                await asyncio.sleep(60)
            finally:
                ended.append(entry.address)

        reason = f"{first.address}: a call failed (TimeoutError)"
        assert await setting.service._on_all(call) == reason
        await setting.service._take_out_failed(0.01)
        assert setting.pool.reasons[first.address] == reason
        assert "hangs" in setting.pool.reasons[second.address]
        assert ended == [second.address]

    run_sync(servers, use)


@pytest.mark.slow
def test_a_slow_server_loads_on_while_another_one_refuses(
    servers: list[FakeWeightServer],
) -> None:
    servers[0].refusals["/update_weights_from_disk"] = "no such directory"
    servers[1].delay_s = 3.0  # longer than a server may be silent

    async def use(setting: Setting) -> None:
        await setting.service.load(Load(model_dir=Path("/weights"), version=7))
        assert setting.states() == ["lost", "usable"]

    run_sync(servers, use, health={"timeout_s": 1.5, "patience_s": 60})
    assert servers[1].version == "7"
