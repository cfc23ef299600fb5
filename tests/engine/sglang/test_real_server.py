"""A real server: the contract of engines, and SGLang's own calls."""

import asyncio
import contextlib
import json
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file

from bapo_megatron.data.record import Completion
from bapo_megatron.engine.base import (
    BucketLayout,
    Capabilities,
    MemoryPart,
    Readiness,
    SamplingSettings,
)
from bapo_megatron.engine.sglang.protocol import score_body
from bapo_megatron.engine.sglang.server import SglangServer
from bapo_megatron.types import FinishReason
from bapo_megatron.weight_sync.send import SharedMemoryTransport, shared_memory_payload
from tests.engine.contract import PROMPT, Case, Response, sglang_case
from tests.engine.helpers import (
    LORA,
    ask,
    descendants,
    make_model_dir,
    reference_logprobs,
    write_adapter,
)
from tests.engine.sglang.servers import (
    KEYS,
    SERVER,
    adapter_versions,
    connected,
    running,
    sample,
    server_config,
)
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


@pytest.mark.parametrize(
    "family",
    [
        "qwen2",
        *(
            pytest.param(family, marks=pytest.mark.exhaustive)
            for family in ("llama", "mistral", "qwen3")
        ),
    ],
)
async def test_each_version_is_an_adapter_and_no_token_has_that_of_another(
    tmp_path: Path, family: str
) -> None:
    """Against transformers with merged weights; the last client is a trainer that came later."""
    base = make_model_dir(tmp_path / "base", family, intermediate_size=64)  # the CPU pads others
    sync = {"adapters": "adapter", "method": "disk"}
    config = server_config(base, tmp_path, lora=LORA, server=SERVER, weight_sync=sync)
    places = [write_adapter(base, tmp_path / f"a{n}", tmp_path / f"m{n}", n) for n in (1, 2)]
    (first, merged_first), (second, merged_second) = places

    def assert_computes(completion: Completion, merged: Path, version: int) -> None:
        assert [span.version for span in completion.versions] == [version]
        expected = reference_logprobs(merged, PROMPT, completion.token_ids)
        np.testing.assert_allclose(completion.logprobs, expected, rtol=0, atol=2e-5)

    server = SglangServer(config, "cpu", KEYS, awaits_weights=True)
    with contextlib.ExitStack() as stack:
        await asyncio.to_thread(stack.enter_context, running(server))
        async with connected(server.address, KEYS, lora=LORA) as client:
            await client.check()
            await client.weights.load(first, version=1, timeout_s=60)
            response = Response(client)
            await response.is_on_its_way()
            payload = shared_payload(second)
            switch = client.weights.take([payload], version=2, timeout_s=60)
            switching = asyncio.create_task(switch)
            await asyncio.sleep(0.5)
            assert not switching.done() or response.task.done()
            assert response.task.done() or await client.version() == "1"
            await client.abort(60)
            await asyncio.gather(response.task, switching)
            assert_computes(response.sink.completion(), merged_first, 1)
            settings = SamplingSettings(1.0, 32, seed=0)
            assert_computes(await sample(client, PROMPT, settings), merged_second, 2)
        async with connected(server.address, KEYS, lora=LORA) as client:
            await client.check()
            await client.weights.load(first, version=2, timeout_s=60)
            assert_computes(await sample(client, PROMPT, settings), merged_first, 2)
            tokens = [*PROMPT, 5, 6, 7]
            scores = await client.score(tokens, 60)
            expected = reference_logprobs(merged_first, PROMPT[:1], tokens[1:])
            np.testing.assert_allclose(scores.logprobs, expected, rtol=0, atol=2e-5)
        assert await adapter_versions(server) == ["2"]


def shared_payload(adapter: Path) -> str:
    tensors = load_file(adapter / "adapter_model.safetensors")
    SharedMemoryTransport(torch.device("cpu"))
    shapes = tuple(tuple(tensor.shape) for tensor in tensors.values())
    layout = BucketLayout(tuple(tensors), ("float32",) * len(tensors), shapes)
    flat = torch.cat([tensor.flatten() for tensor in tensors.values()]).view(torch.uint8)
    return shared_memory_payload(layout, flat)
