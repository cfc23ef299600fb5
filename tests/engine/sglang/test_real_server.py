"""A real SGLang server agrees with transformers, before and after new weights and aborts."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from bapo_megatron.data.version_spans import num_spanned
from bapo_megatron.engine.base import START_VERSION, SamplingSettings
from bapo_megatron.errors import RolloutError
from bapo_megatron.types import FinishReason
from tests.engine.helpers import reference_logprobs
from tests.engine.sglang.servers import load_weights, with_client

if TYPE_CHECKING:
    from bapo_megatron.engine.base import Completion
    from bapo_megatron.engine.sglang.client import SglangClient
    from bapo_megatron.engine.sglang.server import SglangServer

pytestmark = pytest.mark.sglang

PROMPT = [3, 20, 77, 4]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_those_of_transformers(
    server: SglangServer, model_dir: Path, temperature: float
) -> None:
    async def generate(client: SglangClient) -> list[Completion]:
        settings = SamplingSettings(temperature, max_new_tokens=48)
        return await asyncio.gather(
            *(client.generate([*PROMPT, n], settings, label="") for n in range(10, 18))
        )

    for n, completion in enumerate(with_client(server.address, generate, server.keys)):
        expected = reference_logprobs(
            model_dir, [*PROMPT, 10 + n], completion.token_ids, temperature
        )
        np.testing.assert_allclose(completion.logprobs, expected, rtol=0, atol=1e-4)
        assert [span.version for span in completion.versions] == [START_VERSION]
        if completion.finish_reason is FinishReason.STOP:
            assert completion.token_ids[-1] == 1  # the end-of-sequence token is a sampled token
        else:
            assert len(completion.token_ids) == 48


def test_after_a_weight_update_the_server_runs_the_new_weights(
    server: SglangServer, model_dir: Path, tmp_path: Path
) -> None:
    changed_dir = tmp_path / "changed"
    shutil.copytree(model_dir, changed_dir)
    tensors = load_file(model_dir / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"] *= 1.5
    save_file(tensors, changed_dir / "model.safetensors", metadata={"format": "pt"})

    async def update_and_generate(client: SglangClient) -> Completion:
        # Fills the prefix cache with the old weights' keys and values, which must not survive.
        settings = SamplingSettings(1.0, max_new_tokens=32)
        await client.generate(PROMPT, settings, label="")
        await load_weights(client, changed_dir, 7)
        try:
            return await client.generate(PROMPT, settings, label="")
        finally:
            await load_weights(client, model_dir, START_VERSION)

    completion = with_client(server.address, update_and_generate, server.keys)
    assert [span.version for span in completion.versions] == [7]
    new = reference_logprobs(changed_dir, PROMPT, completion.token_ids, 1.0)
    old = reference_logprobs(model_dir, PROMPT, completion.token_ids, 1.0)
    assert np.abs(new - old).max() > 0.01
    np.testing.assert_allclose(completion.logprobs, new, rtol=0, atol=1e-4)


def test_an_aborted_response_continues_with_tokens_and_logprobs_aligned(
    server: SglangServer, model_dir: Path
) -> None:
    async def abort_and_continue(client: SglangClient) -> tuple[Completion, Completion]:
        while True:  # a response may end before it is aborted
            request = asyncio.create_task(
                client.generate(PROMPT, SamplingSettings(1.0, 240), label="first part")
            )
            await asyncio.sleep(0.05)
            while client.num_in_flight:
                await client.abort(timeout_s=60)
                await asyncio.sleep(0.01)
            first = await request
            if first.finish_reason is FinishReason.ABORT and len(first.token_ids):
                break
        prefix = [*PROMPT, *first.token_ids.tolist()]
        return first, await client.generate(prefix, SamplingSettings(1.0, 20), label="second part")

    first, second = with_client(server.address, abort_and_continue, server.keys)
    assert len(first.logprobs) == len(first.token_ids) == num_spanned(first.versions) < 240
    tokens = np.concatenate((first.token_ids, second.token_ids))
    logprobs = np.concatenate((first.logprobs, second.logprobs))
    expected = reference_logprobs(model_dir, PROMPT, tokens, 1.0)
    np.testing.assert_allclose(logprobs, expected, rtol=0, atol=1e-4)


def test_an_update_from_a_missing_directory_is_an_error_and_the_server_lives(
    server: SglangServer, tmp_path: Path
) -> None:
    async def update(client: SglangClient) -> str:
        with pytest.raises(RolloutError, match="update_weights_from_disk: HTTP 400"):
            await load_weights(client, tmp_path / "nothing", 3)
        return await client.version()

    assert with_client(server.address, update, server.keys) == str(START_VERSION)


def test_requests_longer_than_the_model_name_the_limit(server: SglangServer) -> None:
    async def generate(client: SglangClient) -> None:
        await client.generate([5] * 200, SamplingSettings(1.0, 200), label="sample 3")

    with pytest.raises(RolloutError, match=r"context length of 256 tokens.*request: sample 3"):
        with_client(server.address, generate, server.keys)


def test_keys_are_needed_and_neither_listed_nor_logged(server: SglangServer) -> None:
    keys = (server.keys.api_key, server.keys.admin_api_key)
    for path in ("/generate", "/abort_request", "/update_weights_from_disk"):
        assert httpx.post(server.address + path, json={}).status_code == 401
    listed = "".join(
        file.read_text(errors="replace")
        for process in Path("/proc").glob("[0-9]*")
        for file in (process / "cmdline", process / "environ")
        if _is_readable(file)
    )
    log = server.log_path.read_text()
    assert "admin_api_key" in log
    for key in keys:
        assert len(key) == 32
        assert key not in listed
        assert key not in log


def _is_readable(file: Path) -> bool:
    try:
        file.read_bytes()
    except OSError:
        return False
    return True
