"""A server freezes in a broadcast, and another one hangs in it: the weight sync goes on.

Real processes and a real gloo group; three servers, whose schedulers are fakes.
"""

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bapo_megatron.config.schema import RunConfig
from bapo_megatron.engine.base import BucketLayout
from bapo_megatron.engine.sglang import server as sglang_server
from bapo_megatron.engine.sglang.client import SglangClient
from bapo_megatron.engine.sglang.keys import ApiKeys
from bapo_megatron.engine.sglang.server import own_servers
from bapo_megatron.engine.supervisor import ServerSupervisor
from bapo_megatron.rollout.pool import EnginePool
from bapo_megatron.runtime.calls import Answers, Call, Request
from bapo_megatron.weight_sync.receive import RECEIVE, WeightReceiver
from bapo_megatron.weight_sync.send import BroadcastTransport, Bucket, _send_all
from tests.launch import REPOSITORY

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.exhaustive]

LAYOUT = BucketLayout(names=("w",), dtypes=("float32",), shapes=((1 << 20,),))
"""Larger than what sockets hold, so that a frozen member stops those behind it."""
LIMIT_S = 120


class TwoBuckets:
    def __len__(self) -> int:
        return 2

    def gather(self, number: int) -> Bucket:
        return Bucket(LAYOUT, torch.zeros(4 << 20, dtype=torch.uint8), is_last=number == 1)


class LoopCaller:
    """Rank 0's calls, answered by a receiver in the event loop.

    ``before_last`` is called before the second bucket.
    """

    def __init__(self, answers: Answers, before_last: Callable[[], None] = lambda: None) -> None:
        self._answers = answers
        self._before_last = before_last
        self._loop = asyncio.get_running_loop()
        self.calls: list[str] = []

    def start(self, call: Call[Any, Any], request: Any, /) -> Callable[[], Any]:
        self.calls.append(call.name.removeprefix("weights."))
        if call is RECEIVE and self.calls.count("receive") == 2:
            self._before_last()
        answer = self._answers.answer(Request(0, call.name, request))
        return asyncio.run_coroutine_threadsafe(answer, self._loop).result


def test_who_hangs_in_a_broadcast_that_others_left_is_restarted_and_the_rest_gets_all_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sglang_server, "LAUNCHER", "tests.weight_sync.broadcast_server")
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    config = RunConfig.model_validate(
        {
            "name": "test",
            "run_dir": tmp_path,
            "model": {"path": tmp_path},
            "rollout": {
                "server": {"count": 3},
                "health": {"interval_s": 0.5, "timeout_s": 3, "stuck_timeout_s": 3},
                "weight_sync": {"timeout_s": 7, "verify": "none"},
            },
        }
    )
    rollout, keys = config.rollout, ApiKeys()
    servers = own_servers(config, "cpu", keys, awaits_weights=True)
    frozen, _, hanging = servers  # in gloo's tree the last one gets what the first one got
    arguments = hanging.arguments
    monkeypatch.setattr(hanging, "arguments", lambda: [*arguments(), "--hangs"])

    def freeze() -> None:
        assert frozen._process is not None
        os.killpg(frozen._process.pid, signal.SIGSTOP)

    async def run() -> None:
        supervisor = ServerSupervisor(servers, rollout)
        supervisor.start()
        clients = [SglangClient(s.address, keys, request_timeout_s=60) for s in servers]
        pool = EnginePool(clients, rollout, version=None)
        receiver = WeightReceiver(pool.states, rollout, None)
        answers = Answers()
        receiver.bind_to(answers)
        transport = BroadcastTransport(rollout.weight_sync, torch.device("cpu"))

        async def sync(version: int, before_last: Callable[[], None] = lambda: None) -> list[str]:
            caller = LoopCaller(answers, before_last)
            await asyncio.to_thread(_send_all, TwoBuckets(), caller, version, transport)
            await receiver.resume(())
            return caller.calls

        try:
            await supervisor.wait_ready(lambda line: None)
            await pool.states.wait_for_engines()
            states = pool.states.engines
            attempt = ["begin", "join", "receive", "receive"]
            assert await sync(1, freeze) == attempt * 2
            assert [pooled.is_usable for pooled in states] == [False, True, False]

            while [s.num_starts for s in servers] != [2, 1, 2] or not all(
                pooled.is_answering for pooled in states
            ):
                await asyncio.sleep(0.1)
            assert await sync(2) == attempt
            assert [await client.version(10.0) for client in clients] == ["2", "2", "2"]
            assert [server.num_starts for server in servers] == [2, 1, 2]
        finally:
            transport.close()
            await receiver.close()
            await pool.states.close()
            await supervisor.close()

    async def bounded() -> None:
        async with asyncio.timeout(LIMIT_S):
            await run()

    asyncio.run(bounded())
    warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    for server in (frozen, hanging):
        assert any(f"{server.address} is lost" in line for line in warnings)
    restarted = [
        line.partition(" did not answer for 3 s ")[0] for line in warnings if "restarting" in line
    ]
    assert {f"the SGLang server at {s.address}" for s in (frozen, hanging)} <= set(restarted)
