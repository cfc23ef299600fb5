"""What several tests of this package use."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Protocol, TypeVar

import httpx
import psutil
import torch

from bapo_megatron.config.megatron import ModelConfig
from bapo_megatron.config.rollout import ServerConfig
from bapo_megatron.engine.processes import tail
from bapo_megatron.engine.sglang.client import ApiKeys, SglangClient
from bapo_megatron.engine.sglang.server import SglangServer
from bapo_megatron.engine.sglang.weights import SglangWeightControl
from bapo_megatron.tiny.tokenizer import build_tokenizer
from tests.policy.tiny_models import load_reference, make_model

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence
    from pathlib import Path
    from typing import Any

    import numpy as np

    from bapo_megatron.config.schema import RunConfig


class MakeConfig(Protocol):
    """The ``make_config`` fixture."""

    def __call__(self, **rollout: Any) -> RunConfig: ...


KEYS = ApiKeys(api_key="a" * 32, admin_api_key="b" * 32)
LONGEST = 256
SERVER = {"max_total_tokens": 8192, "mem_fraction": 0.3}
_T = TypeVar("_T")


def make_model_dir(directory: Path) -> Path:
    """Write a random Qwen2 whose logits are far from uniform, with the tiny tokenizer."""
    tokenizer = build_tokenizer(LONGEST)
    make_model(
        "qwen2",
        directory,
        vocab_size=len(tokenizer),
        max_position_embeddings=LONGEST,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    tokenizer.save_pretrained(directory)
    return directory


def make_server(model_dir: Path, run_dir: Path) -> SglangServer:
    """Prepare a real server."""
    return SglangServer(
        ModelConfig(path=model_dir, dtype="float32"),
        ServerConfig.model_validate(SERVER),
        run_dir=run_dir,
        seed=0,
        device="cpu",
        keys=KEYS,
    )


def with_client(
    address: str,
    use: Callable[[SglangClient], Awaitable[_T]],
    keys: ApiKeys | None = None,
) -> _T:
    """Run ``use`` with a client in an event loop of its own."""

    async def run() -> _T:
        client = SglangClient(
            address,
            keys or ApiKeys(),
            request_timeout_s=60.0,
        )
        try:
            return await use(client)
        finally:
            await client.close()

    return asyncio.run(run())


@contextlib.contextmanager
def running(server: SglangServer) -> Iterator[SglangServer]:
    """Start a server and wait until it takes requests; it ends with the block."""
    server.start()
    try:
        wait_until_ready(server)
        yield server
    finally:
        server.close()


def wait_until_ready(server: SglangServer) -> None:
    """Wait until a server that was started takes requests."""
    while True:
        assert server.exit_reason() is None, tail(server.log_path)
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{server.address}/ready", trust_env=False).status_code == 200:
                return
        time.sleep(0.2)


async def load_weights(client: SglangClient, model_dir: Path, version: int) -> None:
    """Have one server load a Hugging Face directory."""
    control = SglangWeightControl(client, await client.ask_info())
    await control.load(model_dir, version=version, flush_cache=True, timeout_s=60)


def reference_logprobs(
    model_dir: Path,
    prompt: Sequence[int],
    response: Sequence[int] | np.ndarray,
    temperature: float,
) -> np.ndarray:
    """[R] log_softmax(logits / T) of a response by transformers."""
    model = load_reference("qwen2", model_dir)
    response_R = torch.as_tensor(response)
    with torch.no_grad():
        logits = model(torch.cat([torch.tensor(prompt), response_R])[None]).logits[0]
    rows_RV = (logits[len(prompt) - 1 : -1] / temperature).log_softmax(dim=-1)
    return rows_RV.gather(1, response_R[:, None])[:, 0].numpy()


def descendants(pid: int | None = None, mentioning: str = "") -> set[psutil.Process]:
    """What a process (this one, if not given) started, directly or not, by command line."""
    found = set()
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if mentioning in " ".join(process.cmdline()):
                found.add(process)
    return found
