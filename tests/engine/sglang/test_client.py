"""What the client sends, how it uses connections, and what it does if a server misbehaves."""

import asyncio
import contextlib
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.config.megatron import LoraConfig
from bapo_megatron.config.rollout import ServerConfig, SpeculativeConfig
from bapo_megatron.data.record import Completion, EnoughTokensError
from bapo_megatron.engine.base import (
    CompletionSink,
    GenerateRequest,
    MemoryPart,
    SamplingSettings,
)
from bapo_megatron.engine.sglang import client as sglang_client
from bapo_megatron.engine.sglang.client import SglangClient
from bapo_megatron.engine.sglang.keys import ApiKeys
from bapo_megatron.engine.sglang.settings import LORA_TARGETS
from bapo_megatron.errors import BrokenConnectionError, RolloutError, ServerError, ServerGoneError
from bapo_megatron.types import FinishReason
from tests.engine.sglang.servers import connected, sample
from tests.fakes.fake_server import FakeServer
from tests.fakes.fake_sglang import FakeSglang
from tests.fakes.fake_weight_server import MEMORY, FakeWeightServer
from tests.fakes.wave_server import WaveServer

SAMPLING = SamplingSettings(temperature=0.5, max_new_tokens=4, seed=0)
RELEASE = [
    ("/pause_generation", {"mode": "abort"}),
    ("/flush_cache?timeout=0.5", {}),
    ("/release_memory_occupation", {"tags": ["kv_cache", "cuda_graph", "weights"]}),
]
TAKE_WEIGHTS = [("/resume_memory_occupation", {"tags": ["weights"]})]
TAKE_CACHE = [
    ("/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]}),
    ("/continue_generation", {}),
]


@pytest.fixture(autouse=True)
def _dead_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy of the environment must not come between trainer and server."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")


async def _generate(client: SglangClient) -> Completion:
    return await sample(client, [7, 8, 9], SAMPLING, "sample 1 of group 5")


@contextlib.asynccontextmanager
async def client_of(fake: FakeServer, keys: ApiKeys | None = None) -> AsyncIterator[SglangClient]:
    """A client of a fake server, which is started for it."""
    with fake:
        async with connected(fake.address, keys) as client:
            yield client


@contextlib.asynccontextmanager
async def waves() -> AsyncIterator[tuple[WaveServer, SglangClient]]:
    """A server to which many requests come at a time, and a client."""
    server = WaveServer()
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0, backlog=1024)
    port = listener.sockets[0].getsockname()[1]
    async with connected(f"http://127.0.0.1:{port}") as client:
        yield server, client
    listener.close()


async def send(client: SglangClient, count: int) -> None:
    sampled = await asyncio.gather(*(_generate(client) for _ in range(count)))
    assert all(completion.finish_reason is FinishReason.ABORT for completion in sampled)


async def test_requests_in_flight_have_a_connection_each_and_later_ones_reuse_them() -> None:
    async with waves() as (server, client):
        for server.wave in (50, 50, 7):
            await send(client, server.wave)
        assert server.num_connections == 50


async def test_a_connection_that_was_idle_for_too_long_is_not_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sglang_client, "_KEEPALIVE_EXPIRY_S", 0.01)
    async with waves() as (server, client):
        await send(client, 1)
        await asyncio.sleep(0.05)
        await send(client, 1)
        assert server.num_connections == 2


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes the certificate")
async def test_https_servers_are_checked_against_the_authorities_of_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate = tmp_path / "server.pem"
    subprocess.run(
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=server "
        "-addext subjectAltName=IP:127.0.0.1 -keyout server.pem -out public.pem && "
        "cat public.pem >> server.pem",
        shell=True,
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )
    with FakeSglang(certificate=certificate) as fake:
        async with connected(fake.address) as client:
            with pytest.raises(BrokenConnectionError, match="certificate verify failed"):
                await client.version()
        # What OpenSSL, and with it every program of the system, takes for its authorities.
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "public.pem"))
        async with connected(fake.address) as client:
            assert await client.version() == "0"


async def test_silence_counts_from_the_last_token_of_any_request_and_not_while_paused() -> None:
    async with client_of(FakeSglang(stalls={3: 1})) as client:
        assert client.silence_s == 0.0
        tasks = [asyncio.create_task(_generate(client)) for _ in range(2)]
        while client.silence_s < 0.5:
            await asyncio.sleep(0.05)
        await client.pause("retract")
        assert client.silence_s == 0.0
        resumed_s = time.monotonic()
        await client.resume()
        assert client.silence_s <= time.monotonic() - resumed_s
        client.give_up("the test ends")
        for task in tasks:
            with pytest.raises(ServerGoneError, match="the test ends"):
                await task
        assert client.silence_s == 0.0


async def test_a_refused_key_names_the_variable_to_set() -> None:
    fake = FakeSglang(keys=ApiKeys("one", "two"))
    async with client_of(fake, ApiKeys("one", "two")) as client:
        assert len((await _generate(client)).token_ids) == 4
        await client.pause("retract")
        assert fake.pause_mode == "retract"
        async with connected(fake.address, ApiKeys("two", "two")) as other:
            with pytest.raises(RolloutError, match="set BAPO_MEGATRON_API_KEY "):
                await _generate(other)
        async with connected(fake.address, ApiKeys("one", "one")) as other:
            with pytest.raises(RolloutError, match="set BAPO_MEGATRON_ADMIN_API_KEY "):
                await other.resume()
    assert "secret" not in repr(ApiKeys("secret-1", "secret-2"))


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (SglangClient.capabilities, "KeyError: 'version'"),
        (SglangClient.version, "KeyError: 'weight_version'"),
        (lambda client: client.score([1, 2], 10.0), ""),
    ],
)
async def test_an_answer_of_another_program_is_refused(call: Any, problem: str) -> None:
    class Other(FakeSglang):
        def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
            return {"hello": "world"}

        def generate(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
            yield {"meta_info": {}}

    async with client_of(Other()) as client:
        with pytest.raises(ServerError, match=f"unusable answer .*: .*{problem}"):
            await call(client)


async def test_a_call_without_an_answer_finds_the_server_gone() -> None:
    fake = FakeSglang()
    async with client_of(fake) as client:
        fake.is_hanging = True
        with pytest.raises(ServerGoneError, match=r"no answer within 0\.5 s"):
            await client.version(0.5)
        fake.crash()
        for call in (_generate, SglangClient.version):
            with pytest.raises(BrokenConnectionError, match=f"^{fake.address}"):
                await call(client)


async def test_a_server_may_be_given_up_while_it_ends_a_request_with_enough_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Sink(CompletionSink):
        def take(self, part: Completion) -> None:
            raise EnoughTokensError

    is_asked = asyncio.Event()

    async def hang(path: str, body: Any) -> None:
        assert path == "/abort_request"
        is_asked.set()
        await asyncio.sleep(3600)

    long = SamplingSettings(temperature=0.5, max_new_tokens=1000, seed=0)
    request = GenerateRequest(input_ids=[7, 8, 9], sampling=long, label="it", stream_tokens=1)
    async with client_of(FakeSglang(token_interval_s=0.01)) as client:
        monkeypatch.setattr(client, "call", hang)
        streaming = asyncio.create_task(client.stream(request, Sink()))
        await is_asked.wait()
        client.give_up("it hangs")
        with pytest.raises(ServerGoneError, match="it hangs"):
            await streaming


async def test_a_server_that_a_killed_trainer_left_paused_goes_on_when_it_is_checked() -> None:
    fake = FakeSglang()
    async with client_of(fake) as client:
        await client.pause("retract")
        await client.check()
        assert fake.pause_mode is None


async def test_memory_is_released_by_an_idle_server_and_taken_again_part_by_part() -> None:
    fake = FakeWeightServer()
    async with client_of(fake) as client:
        for _ in range(2):
            await client.release_memory(1.0)
            assert (fake.memory, fake.is_paused) == (set(), True)
            await client.take_memory(MemoryPart.WEIGHTS, 1.0)
            assert (fake.memory, fake.is_paused) == ({"weights"}, True)
            await client.take_memory(MemoryPart.CACHE, 1.0)
            assert (fake.memory, fake.is_paused) == (MEMORY, False)
    assert fake.calls == [*RELEASE, *TAKE_WEIGHTS, *TAKE_CACHE] * 2


async def test_a_busy_server_is_not_told_to_release_what_would_crash_it() -> None:
    fake = FakeWeightServer(is_busy=True)
    async with client_of(fake) as client:
        with pytest.raises(RolloutError, match=r"is still busy 0\.5 s .*resume=true") as caught:
            await client.release_memory(1.0)
    assert not isinstance(caught.value, ServerError)
    assert fake.calls == RELEASE[:2]


async def test_a_call_that_breaks_is_not_repeated() -> None:
    fake = FakeWeightServer()
    async with client_of(fake) as client:
        with pytest.raises(BrokenConnectionError, match="/resume_memory_occupation"):
            await client.take_memory(MemoryPart.WEIGHTS, 1.0)
    assert fake.calls == TAKE_WEIGHTS


@pytest.mark.parametrize("path", ["/pause_generation", "/release_memory_occupation"])
async def test_a_refusal_leaves_a_server_of_which_nobody_knows_what_it_holds(path: str) -> None:
    async with client_of(FakeWeightServer(refusals={path: "no"})) as client:
        with pytest.raises(ServerError, match=f"{path}: HTTP 400"):
            await client.release_memory(1.0)


MTP = {"settings": ServerConfig(speculative=SpeculativeConfig(method="mtp"))}
SPECULATES = {"speculative_algorithm": "EAGLE", "speculative_num_draft_tokens": 2}
ROUTES = {"returns_routes": True}
LORA = {"lora": LoraConfig(rank=4)}
SERVES_LORA = {
    "enable_lora": True,
    "max_lora_rank": 4,
    "lora_target_modules": list(LORA_TARGETS),
    "load_format": "auto",
}


@pytest.mark.parametrize(
    ("needs", "info", "message"),
    [
        (MTP, SPECULATES, ""),
        (MTP, {"speculative_algorithm": "NGRAM"}, "speculative_algorithm EAGLE .*got NGRAM"),
        (MTP, {"speculative_num_draft_tokens": 12}, "num_draft_tokens 2 .*got 12"),
        (MTP, {"speculative_accept_threshold_acc": 0.9}, "threshold_acc 1.0 .*got 0.9"),
        (MTP, {"quantization": "fp8"}, "must have quantization None .*got fp8"),
        (ROUTES, {"enable_return_routed_experts": True}, ""),
        (ROUTES, {}, "start it with --enable-return-routed-experts"),
        ({}, {"enable_return_routed_experts": True}, ""),
        (LORA, SERVES_LORA, ""),
        (LORA, {}, "must have --enable-lora, rank 4 .*got enable_lora False"),
        (LORA, SERVES_LORA | {"max_lora_rank": 2}, "got .* max_lora_rank 2"),
        (LORA, SERVES_LORA | {"lora_target_modules": ["q_proj"]}, r"targets \['q_proj'\]"),
        (LORA, SERVES_LORA | {"load_format": "dummy"}, "load_format dummy"),
        (LORA, SERVES_LORA | {"dp_size": 2}, "dp_size 2"),
        ({}, SERVES_LORA, "must have no --enable-lora .* start it without it"),
    ],
)
async def test_a_server_that_was_started_otherwise_than_the_run_needs_is_refused(
    needs: dict[str, Any], info: dict[str, object], message: str
) -> None:
    with FakeSglang(info=(SPECULATES if needs is MTP else {}) | info) as fake:
        refused = pytest.raises(RolloutError, match=f"^{fake.address}: .*{message}")
        async with connected(fake.address, **needs) as client:
            with refused if message else contextlib.nullcontext():
                await client.check()
