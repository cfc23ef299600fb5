"""A real server: the contract of engines, and SGLang's own calls."""

import asyncio
import json
from pathlib import Path

import psutil
import pytest

from bapo_megatron.engine.base import Capabilities, MemoryPart, Readiness, SamplingSettings
from bapo_megatron.engine.sglang.protocol import score_body
from bapo_megatron.engine.sglang.server import SglangServer
from bapo_megatron.types import FinishReason
from tests.engine.contract import Case, Response, sglang_case
from tests.engine.helpers import ask, descendants
from tests.engine.sglang.servers import KEYS, connected, sample
from tests.engine.test_contract import *  # noqa: F403 (every test, also those that are added)

pytestmark = pytest.mark.sglang


@pytest.fixture(scope="module")
def case(server: SglangServer, model_dir: Path) -> Case:
    return sglang_case(server, model_dir)


def processes_of(server: SglangServer) -> list[psutil.Process]:
    (launcher,) = descendants(mentioning=f"--port={server.port}")
    processes = [launcher, *launcher.children(recursive=True)]
    assert len(processes) >= 3  # those of the scheduler and of the detokenizer
    return processes


async def test_the_server_says_what_it_can_do(server: SglangServer) -> None:
    async with connected(server.address, server.keys) as client:
        assert await client.capabilities() == Capabilities(
            num_ranks=1,
            methods=frozenset({"broadcast", "disk", "tensor"}),
            cache_tokens=8192,
            max_requests=4096,
            nccl_settings={"NCCL_CUMEM_ENABLE": "0"},
        )


async def test_only_what_comes_before_the_scored_tokens_is_read_from_the_cache(
    server: SglangServer,
) -> None:
    tokens, counts = [9, *range(100, 140)], []  # no other test begins with a 9
    async with connected(server.address, server.keys) as client:
        for start in (20, 20, 1):
            content, _ = await client.call("/generate", score_body(tokens, start, 2))
            counts.append(json.loads(content)["meta_info"]["cached_tokens"])
    assert counts == [0, 19, 0]


@pytest.mark.parametrize("is_given_up", [True, False])
async def test_a_request_that_nobody_waits_for_any_more_ends_on_the_server(
    server: SglangServer, is_given_up: bool
) -> None:
    async with connected(server.address, server.keys) as client:
        was_running = False
        while not was_running:  # it may have ended before
            response = Response(client)
            was_running = await response.is_on_its_way()
            if is_given_up:
                client.give_up("the test ends")
            else:
                response.task.cancel()
            await asyncio.gather(response.task, return_exceptions=True)
        async with asyncio.timeout(60):
            while (load := await client.report_load(60)).running + load.waiting:
                await asyncio.sleep(0.1)


def test_no_process_of_a_server_listens_beyond_the_loopback(server: SglangServer) -> None:
    addresses = {
        connection.laddr.ip
        for process in processes_of(server)
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert addresses == {"127.0.0.1"}


async def test_calls_need_their_key_and_no_key_is_told_listed_or_logged(
    server: SglangServer,
) -> None:
    async with connected(server.address, server.keys) as client:
        open_to_all, _ = await client.call("/model_info")
        info, _ = await client.call("/server_info")
    texts = [
        open_to_all.decode(),
        json.loads(info)["launch_command"],
        server.log_path.read_text(),
    ]
    assert "admin_api_key" in texts[-1]
    for path in ("/generate", "/abort_request", "/update_weights_from_disk"):
        assert ask(server.address + path, b"{}")[0] == 401
    adapter = f"{server.address}/load_lora_adapter_from_tensors"
    assert ask(adapter, b"", **server.keys.headers("/generate"))[0] == 401
    for path in ("/server_info", "/get_server_info", "/v1/loads", "/set_trace_level?level=1"):
        for key in ("nobody", server.keys.api_key):
            headers = {"Authorization": f"Bearer {key}", "Host": "x/health?"}
            status, text = ask(server.address + path, **headers)
            assert status == 401
            texts.append(text)
    for process in processes_of(server):
        for name in ("cmdline", "environ"):
            texts.append(Path(f"/proc/{process.pid}/{name}").read_text(errors="replace"))
    for key in (KEYS.api_key, KEYS.admin_api_key):
        assert len(key) == 32
        assert not any(key in text for text in texts)


async def test_a_server_generates_again_after_it_released_its_memory(server: SglangServer) -> None:
    """Without CUDA it keeps its memory; calls, their order and its state are the same."""
    long, short = (SamplingSettings(1.0, length, seed=0) for length in (200, 1))
    async with connected(server.address, server.keys) as client:
        sampling = asyncio.create_task(sample(client, [5, 6, 7], long))
        await asyncio.sleep(0.2)  # it need not have come yet; if it has, it is aborted
        await client.release_memory(120.0)
        # Its owner goes on asking, and must not take it for stuck.
        assert await server.ask(5.0) is Readiness.READY
        held_back = asyncio.create_task(sample(client, [5, 6, 7], short))
        await client.take_memory(MemoryPart.WEIGHTS, 120.0)
        await asyncio.sleep(1)
        assert not held_back.done()
        await client.take_memory(MemoryPart.CACHE, 120.0)
        completion = await held_back
        assert completion.finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
        assert len(completion.token_ids) == 1
        await sampling
        assert await server.ask(5.0) is Readiness.READY
    assert server.exit_reason() is None
