"""What the client relies on, against real servers of every supported SGLang version.

The installed version is always tested. An older one is tested where ``BAPO_TEST_SGLANG_0_5_20``
names a directory that holds it, so that one environment serves both:

    pip install --no-deps --target DIR sglang==0.5.20
"""

from __future__ import annotations

import asyncio
import os
import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from bapo_megatron.config.megatron import ModelConfig
from bapo_megatron.config.rollout import ServerConfig
from bapo_megatron.data.version_spans import token_versions
from bapo_megatron.engine.base import (
    Completion,
    CompletionSink,
    GenerateRequest,
    SamplingSettings,
)
from bapo_megatron.engine.sglang.dialect import flushes_retracted, has_update_session
from bapo_megatron.engine.sglang.keys import ApiKeys
from bapo_megatron.engine.sglang.server import SglangServer
from bapo_megatron.errors import RolloutError
from bapo_megatron.types import FinishReason
from tests.engine.helpers import reference_logprobs
from tests.engine.sglang.servers import KEYS, SERVER, load_weights, running, with_client

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from typing import Any

    from bapo_megatron.engine.sglang.client import SglangClient

pytestmark = pytest.mark.sglang

PROMPT = [3, 20, 77, 4]
LONG = SamplingSettings(1.0, max_new_tokens=240)
OLDER_VERSIONS = {"0.5.20": "BAPO_TEST_SGLANG_0_5_20"}
"""Environment variable with the directory of each version that is not the installed one."""
CASES = [
    (version, is_incremental)
    for version in ("installed", *OLDER_VERSIONS)
    for is_incremental in (True, False)
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def contract(
    request: pytest.FixtureRequest,
    server: SglangServer,
    model_dir: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[SglangServer, str, bool]]:
    """A server, its version, and whether its events hold new tokens only."""
    version, is_incremental = request.param
    if version == "installed" and is_incremental:  # the server that other tests have started
        yield server, version, is_incremental
        return

    class CumulativeServer(SglangServer):
        def arguments(self) -> list[str]:
            return [a for a in super().arguments() if a != "--incremental-streaming-output"]

    with pytest.MonkeyPatch.context() as patch:
        if version != "installed":
            variable = OLDER_VERSIONS[version]
            directory = os.environ.get(variable)
            if directory is None:
                pytest.skip(f"{variable} does not name a directory with SGLang {version}")
            patch.setenv("PYTHONPATH", str(Path(directory).absolute()), prepend=os.pathsep)
        server_class = SglangServer if is_incremental else CumulativeServer
        other = server_class(
            ModelConfig(path=model_dir, dtype="float32"),
            ServerConfig.model_validate(SERVER),
            run_dir=tmp_path_factory.mktemp("server"),
            seed=0,
            device="cpu",
            keys=KEYS,
        )
        with running(other):
            yield other, version, is_incremental


def _run(
    contract: tuple[SglangServer, str, bool], use: Callable[[SglangClient], Awaitable[Any]]
) -> Any:
    server = contract[0]
    return with_client(server.address, use, server.keys)


class Sink(CompletionSink):
    """Knows when the first tokens came."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[Completion] = []
        self.has_tokens = asyncio.Event()

    def first_tokens(self, cached_tokens: int) -> None:
        self.has_tokens.set()

    def take(self, part: Completion) -> None:
        super().take(part)
        self.parts.append(part)

    @property
    def num_tokens(self) -> int:
        return sum(len(part.token_ids) for part in self.parts)


async def _start(
    client: SglangClient, sink: Sink, sampling: SamplingSettings = LONG, stream_tokens: int = 8
) -> asyncio.Task[None]:
    request = GenerateRequest(
        input_ids=PROMPT,
        sampling=sampling,
        label="contract",
        version=int(await client.version()),
        stream_tokens=stream_tokens,
    )
    return asyncio.create_task(client.stream(request, sink))


def _check_logprobs(model_dir: Path, completion: Completion) -> None:
    expected = reference_logprobs(model_dir, PROMPT, completion.token_ids, 1.0)
    np.testing.assert_allclose(completion.logprobs, expected, rtol=0, atol=1e-4)


def test_the_server_says_how_it_was_started(contract: tuple[SglangServer, str, bool]) -> None:
    async def ask(client: SglangClient) -> Any:
        return await client.info()

    info = _run(contract, ask)
    _, version, is_incremental = contract
    assert info.version == ("0.5.21" if version == "installed" else version)
    assert info.is_incremental is is_incremental
    assert info.num_ranks == 1


def test_tokens_logprobs_and_versions_come_in_pieces_and_belong_together(
    contract: tuple[SglangServer, str, bool], model_dir: Path
) -> None:
    async def generate(client: SglangClient) -> list[Sink]:
        sinks = [Sink() for _ in range(16)]
        tasks = [await _start(client, sink, SamplingSettings(1.0, 60)) for sink in sinks]
        await asyncio.gather(*tasks)
        return sinks

    sinks = _run(contract, generate)
    assert max(len(sink.parts) for sink in sinks) > 3
    for sink in sinks:
        completion = sink.completion()
        _check_logprobs(model_dir, completion)
        assert [span.version for span in completion.versions] == [0]
        if completion.finish_reason is FinishReason.STOP:
            assert completion.token_ids[-1] == 1
        else:
            assert completion.finish_reason is FinishReason.LENGTH
            assert len(completion.token_ids) == 60


def test_an_aborted_request_ends_with_what_it_has(
    contract: tuple[SglangServer, str, bool], model_dir: Path
) -> None:
    async def abort(client: SglangClient) -> list[Sink]:
        sinks = [Sink() for _ in range(8)]
        tasks = [await _start(client, sink) for sink in sinks]
        await sinks[0].has_tokens.wait()
        while client.num_in_flight:
            await client.abort(timeout_s=60)
            await asyncio.sleep(0.01)
        await asyncio.gather(*tasks)
        return sinks

    aborted = 0
    while not aborted:  # all may have ended before
        sinks = _run(contract, abort)
        for sink in sinks:
            aborted += sink.parts[-1].finish_reason is FinishReason.ABORT
            if sink.num_tokens:
                _check_logprobs(model_dir, sink.completion())


def test_a_request_that_is_aborted_while_it_waits_again_has_its_tokens_once(
    contract: tuple[SglangServer, str, bool], model_dir: Path
) -> None:
    async def retract_and_abort(client: SglangClient) -> Sink:
        sink = Sink()
        task = await _start(client, sink)
        await sink.has_tokens.wait()
        await client.pause("retract")
        while client.num_in_flight:
            await client.abort(timeout_s=60)
            await asyncio.sleep(0.05)
        await client.resume()
        await task
        return sink

    while True:
        sink = _run(contract, retract_and_abort)
        if sink.parts[-1].finish_reason is FinishReason.ABORT:
            break
    _check_logprobs(model_dir, sink.completion())


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_paused_server_samples_nothing_and_answers_the_cheap_question(
    contract: tuple[SglangServer, str, bool], model_dir: Path, mode: str
) -> None:
    async def pause(client: SglangClient) -> Sink:
        sink, held = Sink(), Sink()
        task = await _start(client, sink, stream_tokens=1)
        await sink.has_tokens.wait()
        await client.pause(mode)
        await asyncio.sleep(0.5)  # what was sampled before has arrived
        num_before, was_done = sink.num_tokens, task.done()
        other = await _start(client, held, SamplingSettings(1.0, 4))
        await asyncio.sleep(0.5)
        assert await client.version() == "0"
        assert (sink.num_tokens, held.num_tokens) == (num_before, 0)
        await client.resume()
        await asyncio.gather(task, other)
        assert held.num_tokens > 0
        return sink if not was_done else Sink()

    while not (sink := _run(contract, pause)).parts:
        pass  # it had ended before the pause
    _check_logprobs(model_dir, sink.completion())


@pytest.fixture
def changed_dir(model_dir: Path, tmp_path: Path) -> Path:
    """Other weights."""
    directory = tmp_path / "changed"
    shutil.copytree(model_dir, directory)
    tensors = load_file(model_dir / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"] *= 1.5
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _sample_over_an_update(
    contract: tuple[SglangServer, str, bool], mode: str, model_dir: Path, changed_dir: Path
) -> Completion:
    """A response of versions 0 and 7; what was received before the pause is not touched."""

    async def load(client: SglangClient, directory: Path, version: int) -> None:
        weights = {"model_path": str(directory), "weight_version": str(version)}
        ending = {"flush_cache": mode == "retract", "abort_all_requests": False}
        path = "/update_weights_from_disk"
        await client.call_once("POST", path, weights | ending, admin=True)

    async def update(client: SglangClient) -> Sink:
        sink = Sink()
        task = await _start(client, sink, stream_tokens=2)
        await sink.has_tokens.wait()
        await client.pause(mode)
        await load(client, changed_dir, 7)
        await client.resume()
        await task
        await load_weights(client, model_dir, 0)
        return sink

    while True:
        completion: Completion = _run(contract, update).completion()
        if [span.version for span in completion.versions] == [0, 7]:
            return completion  # else it had ended before


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_tokens_after_new_weights_have_the_new_version(
    contract: tuple[SglangServer, str, bool], model_dir: Path, changed_dir: Path, mode: str
) -> None:
    version = "0.5.21" if contract[1] == "installed" else contract[1]
    if mode == "retract" and not flushes_retracted(version):
        pytest.skip(f"SGLang {version} ends; see sglang_dialect")
    completion = _sample_over_an_update(contract, mode, model_dir, changed_dir)
    old = reference_logprobs(model_dir, PROMPT, completion.token_ids, 1.0)
    new = reference_logprobs(changed_dir, PROMPT, completion.token_ids, 1.0)
    is_old = token_versions(completion.versions) == 0
    np.testing.assert_allclose(completion.logprobs[is_old], old[is_old], rtol=0, atol=1e-4)
    if mode == "retract":  # else the keys and values of the old weights are still in use
        np.testing.assert_allclose(completion.logprobs[~is_old], new[~is_old], rtol=0, atol=1e-4)


def test_a_client_that_goes_away_leaves_no_request_behind(
    contract: tuple[SglangServer, str, bool],
) -> None:
    async def leave(client: SglangClient) -> bool:
        sink = Sink()
        task = await _start(client, sink, LONG)
        await sink.has_tokens.wait()
        if task.done():  # it had ended before
            return False
        client.give_up("the test ends")
        with pytest.raises(RolloutError, match="the test ends"):
            await task
        return True

    async def wait_until_idle(client: SglangClient) -> None:
        async with asyncio.timeout(60):
            while True:
                loads = await client.call_once("GET", "/v1/loads", None, admin=True)
                if sum(load["num_running_reqs"] for load in loads["loads"]) == 0:
                    return
                await asyncio.sleep(0.1)

    while not _run(contract, leave):
        pass
    _run(contract, wait_until_idle)


def test_what_the_server_refuses_is_told_apart_from_its_failures(
    contract: tuple[SglangServer, str, bool],
) -> None:
    async def too_long(client: SglangClient) -> None:
        await client.generate([5] * 200, SamplingSettings(1.0, 200), label="sample 3")

    with pytest.raises(RolloutError, match=r"HTTP 400: .*256 tokens.*request: sample 3"):
        _run(contract, too_long)


def test_control_calls_take_the_admin_key_only(contract: tuple[SglangServer, str, bool]) -> None:
    server = contract[0]

    async def abort(client: SglangClient) -> None:
        await client.call_once("POST", "/abort_request", {"rid": "nothing"}, admin=True)

    async def generate(client: SglangClient) -> None:
        await client.generate(PROMPT, SamplingSettings(1.0, 1), label="")

    user, admin = server.keys.api_key, server.keys.admin_api_key
    for use, wrong, variable in (
        (abort, ApiKeys(user, user), "BAPO_MEGATRON_ADMIN_API_KEY"),
        (generate, ApiKeys(admin, admin), "BAPO_MEGATRON_API_KEY"),
    ):
        with_client(server.address, use, server.keys)
        with pytest.raises(RolloutError, match=f"the key was refused .*{variable}"):
            with_client(server.address, use, wrong)


@pytest.mark.parametrize(
    "path", ["/server_info", "/get_server_info", "/v1/loads", "/set_trace_level?level=1"]
)
def test_nobody_but_the_admin_learns_the_keys_or_changes_the_server(
    contract: tuple[SglangServer, str, bool], path: str
) -> None:
    server = contract[0]
    for key in ("nobody", server.keys.api_key):
        reply = httpx.get(
            f"{server.address}{path}",
            headers={"Authorization": f"Bearer {key}", "Host": "x/health?"},
            trust_env=False,
        )
        assert reply.status_code == 401
        assert not any(secret in reply.text for secret in (KEYS.api_key, KEYS.admin_api_key))
    adapter = f"{server.address}/load_lora_adapter_from_tensors"
    headers = server.keys.headers(admin=False)
    assert httpx.post(adapter, headers=headers, trust_env=False).status_code == 401


def test_what_the_api_key_opens_and_the_command_of_the_server_hold_no_key(
    contract: tuple[SglangServer, str, bool],
) -> None:
    async def ask(client: SglangClient) -> tuple[str, str]:
        open_to_all = await client.call_once("GET", "/model_info", None, admin=False)
        of_admin = await client.call_once("GET", "/server_info", None, admin=True)
        return str(open_to_all), of_admin["launch_command"]

    for text in _run(contract, ask):
        assert not any(key in text for key in (KEYS.api_key, KEYS.admin_api_key))


def test_only_servers_with_sessions_have_their_endpoint(
    contract: tuple[SglangServer, str, bool],
) -> None:
    async def call(client: SglangClient, path: str) -> None:
        await client.call_once("POST", path, {}, admin=True)

    if contract[1] == "installed":
        assert has_update_session("0.5.21")
        for path in ("/begin_weight_update", "/end_weight_update"):
            _run(contract, partial(call, path=path))
    else:
        assert not has_update_session(contract[1])
        with pytest.raises(RolloutError, match="HTTP 404"):
            _run(contract, partial(call, path="/begin_weight_update"))
