"""Speculation and FP8 on a GPU: exact sampling, the sampler's log-probs, weights that change."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from bapo_megatron.engine.sglang.client import SglangClient

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.sglang,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
pytest.importorskip("sglang")

from bapo_megatron.engine.base import BucketLayout, SamplingSettings, Scores  # noqa: E402
from bapo_megatron.engine.sglang.server import SglangServer  # noqa: E402
from tests.engine.helpers import make_model_dir  # noqa: E402
from tests.engine.sglang.servers import (  # noqa: E402
    KEYS,
    connected,
    running,
    sample,
    server_config,
)

RESPONSES, TOKENS = 64, 128
PROMPT = [5, 6, 7]
SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 with heads of a real size."""
    return make_model_dir(tmp_path_factory.mktemp("model"), "qwen3", **SIZES)


def z_values(tokens_R: np.ndarray, scores: Scores) -> np.ndarray:
    """Standardised sums: of log-probs, and of how often token 0 was sampled; N(0, 1) if exact."""
    vocabulary = scores.top_ids.shape[1]
    logprobs_RV = np.empty((len(tokens_R), vocabulary))
    np.put_along_axis(logprobs_RV, scores.top_ids, scores.top_logprobs.astype(float), axis=1)
    p_RV = np.exp(logprobs_RV)
    p_RV /= p_RV.sum(axis=1, keepdims=True)
    sums = []
    for value_RV in (logprobs_RV, np.broadcast_to(np.arange(vocabulary) == 0, p_RV.shape)):
        mean_R = (p_RV * value_RV).sum(axis=1)
        variance = ((p_RV * value_RV**2).sum(axis=1) - mean_R**2).sum()
        sampled_R = value_RV[np.arange(len(tokens_R)), tokens_R]
        sums.append((sampled_R - mean_R).sum() / np.sqrt(variance))
    return np.array(sums)


async def sync(client: SglangClient, model_dir: Path) -> None:
    """Send the weights that it has, by shared memory."""
    from safetensors.torch import load_file

    from bapo_megatron.weight_sync.send import shared_memory_payload

    loaded = load_file(model_dir / "model.safetensors", "cuda")
    tensors = {name: tensor.bfloat16() for name, tensor in loaded.items()}
    shapes = tuple(tuple(tensor.shape) for tensor in tensors.values())
    layout = BucketLayout(tuple(tensors), ("bfloat16",) * len(tensors), shapes)
    flat = torch.cat([tensor.flatten() for tensor in tensors.values()]).view(torch.uint8)
    control = client.weights
    await control.open_session(60)
    await control.take([shared_memory_payload(layout, flat)], version=1, timeout_s=60)
    await control.close_session(60)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"speculative": {"method": "draft", "draft_tokens": 3}},
        {"quantization": "fp8"},
    ],
    ids=["plain", "draft", "fp8"],
)
def test_tokens_are_sampled_from_the_log_probs_that_come_with_them(
    settings: dict[str, dict[str, object]], model_dir: Path, tmp_path: Path
) -> None:
    speculative = dict(settings.get("speculative", {}))
    if speculative.get("method") == "draft":
        speculative["draft_model"] = model_dir  # every draft is the policy's likeliest token
    limits = {"mem_fraction": 0.3, "max_running_requests": 64}
    server = {**limits, **settings, "speculative": speculative}
    config = server_config(model_dir, tmp_path, dtype="bfloat16", server=server)

    async def use(address: str) -> None:
        async with connected(address, KEYS) as client:
            await client.check()
            sampling = SamplingSettings(temperature=1.0, max_new_tokens=TOKENS, seed=0)
            vocabulary = json.loads((model_dir / "config.json").read_text())["vocab_size"]
            length = None
            for _ in range(2):  # with the weights of its start, and after a weight sync
                requests = [sample(client, PROMPT, sampling) for _ in range(RESPONSES)]
                completions = await asyncio.gather(*requests)
                length = (await client.report_load(60)).acceptance_length
                z_N, differences = [], []
                for completion in completions:
                    ids = [*PROMPT, *completion.token_ids.tolist()]
                    scores = await client.score(ids, 60, start=len(PROMPT), top_k=vocabulary)
                    z_N.append(z_values(completion.token_ids, scores))
                    differences.append(np.abs(scores.logprobs - completion.logprobs).mean())
                assert np.mean(differences) < 0.05
                assert np.abs(np.sum(z_N, axis=0) / np.sqrt(RESPONSES)).max() < 4
                await sync(client, model_dir)
            assert (length is not None and length > 1) == bool(speculative)

    with running(SglangServer(config, "cuda", KEYS)) as started:
        asyncio.run(use(started.address))
