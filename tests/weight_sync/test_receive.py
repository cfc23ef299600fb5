"""Which servers take part in a weight sync, what they are told, and what becomes of failures."""

import asyncio
from typing import Any

import pytest

from bapo_megatron.engine.pooled import EngineState, PooledEngine
from bapo_megatron.errors import RolloutError
from bapo_megatron.weight_sync.receive import Opened, Receive
from tests.fakes.fake_weight_server import FakeWeightServer
from tests.weight_sync.setting import Setting, sync_on

BROADCAST, DISK = "/update_weights_from_distributed", "/update_weights_from_disk"


async def test_a_weight_sync_pauses_generation_and_labels_only_the_last_part(
    servers: list[FakeWeightServer],
) -> None:
    async with sync_on(servers) as setting:
        assert await setting.broadcast() == Opened(
            addresses=tuple(server.address for server in servers),
            num_ranks=(1, 2),
            gpus=((), ()),
            share_group=False,
        )
        assert setting.states == ["usable", "usable"]
        assert setting.pool.version == 7
        assert setting.generation.calls == ["pause", "resume"]
    for number, server in enumerate(servers):
        assert server.paths == [
            "/begin_weight_update",
            "/init_weights_update_group",
            BROADCAST,
            BROADCAST,
            "/end_weight_update",
            "/destroy_weights_update_group",
        ]
        _, (_, join), (_, first), (_, last), *_ = server.calls
        assert join == {
            "master_address": "127.0.0.1",
            "master_port": 1234,
            "rank_offset": 1 + number,
            "world_size": 4,
            "group_name": "group",
            "backend": "gloo",
        }
        assert first == {
            "names": ["w"],
            "dtypes": ["float32"],
            "shapes": [[2, 3]],
            "group_name": "group",
            "load_format": "flattened_bucket",
            "selector": "target",
            "flush_cache": False,
            "abort_all_requests": False,
        }
        assert last == {**first, "flush_cache": True, "weight_version": "7"}
        assert server.version == "7"


async def test_a_session_that_an_earlier_trainer_left_open_is_closed_first() -> None:
    with FakeWeightServer(in_session=True) as server:
        async with sync_on([server]) as setting:
            await setting.broadcast()
        assert server.version == "7"
        assert not server.in_session


@pytest.mark.parametrize("is_busy", [False, True])
async def test_the_cache_of_requests_that_are_paused_in_place_is_kept(is_busy: bool) -> None:
    with FakeWeightServer(is_busy=is_busy) as server:
        async with sync_on([server], weight_sync={"in_flight": "in_place"}) as setting:
            await setting.broadcast()
            assert setting.states == ["usable"]
        # The server itself decides whether requests are running.
        assert server.paths.count("/flush_cache") == 1


async def test_the_group_is_shared_until_a_member_is_lost_joins_or_leaves(
    servers: list[FakeWeightServer],
) -> None:
    async with sync_on(servers) as setting:
        first, second = setting.pool.engines
        setting.pool.engines = [first]
        assert (await setting.broadcast(1)).num_ranks == (1,)
        setting.pool.engines = [first, second]
        opened = await setting.broadcast(2)
        assert (opened.num_ranks, opened.share_group) == ((1, 2), False)

        await setting.receiver.begin(3)
        leaving = asyncio.create_task(setting.receiver.wait_idle())
        await asyncio.sleep(0.1)
        assert not leaving.done()  # a weight sync that has begun is finished first
        assert (await setting.broadcast(3)).share_group
        await leaving

        setting.pool.mark_lost(second, "test")
        opened = await setting.broadcast(4)
        assert (opened.addresses, opened.share_group) == ((first.address,), False)
        second.state = EngineState.STALE
        assert not (await setting.broadcast(5)).share_group

        setting.pool.engines = [first]
        await setting.receiver.forget(second)
        for server in servers:
            assert server.paths[-1] == "/destroy_weights_update_group"
        assert not (await setting.broadcast(6)).share_group
    assert [server.version for server in servers] == ["6", "5"]


async def test_a_server_that_refuses_is_left_out_until_the_next_weight_sync(
    servers: list[FakeWeightServer],
) -> None:
    servers[1].refusals[BROADCAST] = "wrong shape"
    async with sync_on(servers) as setting:
        await setting.begin()
        assert "wrong shape" in await setting.receive()
        opened = await setting.begin()
        assert (opened.addresses, opened.share_group) == ((servers[0].address,), False)
        assert "wrong shape" in setting.reason(1)
        # It answers again, while another one fails: even then it does not come back.
        setting.pool.engines[1].state = EngineState.STALE
        servers[0].refusals["/end_weight_update"] = "not now"
        assert await setting.receive() is None
        setting.receiver._group.is_shared = True  # nobody is blamed
        assert "not now" in await setting.receive(is_last=True)
        servers[0].refusals.clear()
        opened = await setting.broadcast()
        assert (opened.addresses, opened.share_group) == ((servers[0].address,), False)
        assert setting.states == ["usable", "stale"]
        assert setting.generation.calls == ["pause", "resume"]

        servers[1].refusals.clear()
        assert len((await setting.broadcast(8)).addresses) == 2
    assert [server.version for server in servers] == ["8", "8"]


@pytest.mark.parametrize(
    ("fault", "sync", "reason"),
    [
        ({"ignores_labels": True}, Setting.load, "reports '0'"),
        (
            {"refusals": {"/begin_weight_update": "no", "/end_weight_update": "no"}},
            Setting.broadcast,
            "/end_weight_update",
        ),
    ],
    ids=["another version", "no session"],
)
async def test_a_server_that_fails_at_the_end_or_the_beginning_is_left_out(
    servers: list[FakeWeightServer], fault: dict[str, Any], sync: Any, reason: str
) -> None:
    vars(servers[0]).update(fault)
    async with sync_on(servers) as setting:
        await sync(setting)
        assert setting.states == ["lost", "usable"]
        assert reason in setting.reason(0)


@pytest.mark.parametrize("path", [BROADCAST, DISK])
async def test_servers_that_all_refuse_end_the_run_with_their_words(
    servers: list[FakeWeightServer], path: str
) -> None:
    for server in servers:
        server.refusals[path] = "no such weight"
    async with sync_on(servers) as setting:
        if path == BROADCAST:
            await setting.begin()
            assert "no such weight" in await setting.receive()
        with pytest.raises(RolloutError, match=rf"^http.*{path}: .*no such weight"):
            await (setting.begin() if path == BROADCAST else setting.load())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("is_noticed", "timeout_s", "reason"), [(False, 3, "no answer within"), (True, 60, "silent")]
)
async def test_a_server_that_hangs_is_left_out_after_the_time_limit_or_when_it_is_lost(
    servers: list[FakeWeightServer], is_noticed: bool, timeout_s: float, reason: str
) -> None:
    servers[0].hanging.add(BROADCAST)

    health = {"timeout_s": 2, "patience_s": 60}
    sync = {"timeout_s": timeout_s}
    async with sync_on(servers, weight_sync=sync, health=health) as setting:
        await setting.begin()
        receiving = asyncio.create_task(setting.receive())
        await asyncio.sleep(0.2)
        if is_noticed:
            setting.pool.mark_lost(setting.pool.engines[0], "silent")
        assert ("lost during the call" if is_noticed else reason) in await receiving
        assert (await setting.broadcast()).addresses == (servers[1].address,)
        assert setting.states == ["lost", "usable"]


async def test_a_directory_is_loaded_without_a_session(servers: list[FakeWeightServer]) -> None:
    async with sync_on(servers) as setting:
        await setting.load()
        assert setting.states == ["usable", "usable"]
    assert servers[0].calls == [
        (
            DISK,
            {
                "model_path": "/weights",
                "load_format": "auto",
                "flush_cache": True,
                "abort_all_requests": False,
                "weight_version": "7",
            },
        )
    ]


@pytest.mark.slow
async def test_a_slow_server_loads_on_while_another_one_refuses(
    servers: list[FakeWeightServer],
) -> None:
    servers[0].refusals[DISK] = "no such directory"
    servers[1].delay_s = 3.0  # longer than a server may be silent
    async with sync_on(servers, health={"timeout_s": 1.5, "patience_s": 60}) as setting:
        await setting.load()
        assert setting.states == ["lost", "usable"]
    assert servers[1].version == "7"


async def test_nobody_waits_for_a_lost_server_to_load(servers: list[FakeWeightServer]) -> None:
    servers[0].hanging.add(DISK)
    async with sync_on(servers) as setting:
        loading = asyncio.create_task(setting.load())
        await asyncio.sleep(0.2)
        setting.pool.mark_lost(setting.pool.engines[0], "silent")
        await asyncio.wait_for(loading, 5)
        assert setting.states == ["lost", "usable"]


async def test_each_server_takes_its_own_payloads(servers: list[FakeWeightServer]) -> None:
    async with sync_on(servers) as setting:
        await setting.receiver.begin(7)
        request = Receive(bucket=(("YQ==",), ("Yg==",)), is_last=True)
        assert await setting.receiver.receive(request) is None
        assert setting.states == ["usable", "usable"]
    payloads = [dict(server.calls)["/update_weights_from_tensor"] for server in servers]
    assert [p["serialized_named_tensors"] for p in payloads] == [["YQ=="], ["Yg=="]]


@pytest.mark.parametrize("refuses", [False, True])
async def test_without_any_server_the_patience_ends(
    servers: list[FakeWeightServer], refuses: bool
) -> None:
    async with sync_on(servers[:1], health={"patience_s": 0.5}) as setting:
        for engine in setting.pool.engines:
            if refuses:
                servers[0].refusals["/end_weight_update"] = "stuck"
                servers[0].in_session = True
            else:
                setting.pool.mark_lost(engine, "killed")
        with pytest.raises(RolloutError, match=r"version 7 .*health\.patience_s.*(stuck|killed)"):
            await setting.begin()


async def test_a_call_that_fails_in_an_unforeseen_way_is_told_with_its_kind_and_ends_others(
    servers: list[FakeWeightServer],
) -> None:
    ended: list[str] = []
    async with sync_on(servers) as setting:
        await setting.receiver.begin(7)
        first, second = setting.pool.engines

        async def call(entry: PooledEngine, *_: Any) -> None:
            if entry is first:
                raise TimeoutError  # has no text
            try:
                await asyncio.sleep(60)
            finally:
                ended.append(entry.address)

        reason = f"{first.address}: a call failed (TimeoutError)"
        assert await setting.receiver._call_members(call) == reason
        await setting.receiver._remove_failed(0.01)
        assert setting.reason(0) == reason
        assert "hangs" in setting.reason(1)
        assert ended == [second.address]
