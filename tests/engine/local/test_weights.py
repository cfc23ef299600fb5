"""New weights, from rank 0's group and from a directory."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from bapo_megatron.engine.base import BucketLayout, SamplingSettings
from bapo_megatron.engine.collective import WeightGroup
from bapo_megatron.errors import RolloutError, ServerGoneError
from bapo_megatron.types import VersionSpan
from tests.engine.helpers import change_weights, make_model_dir, reference_logprobs
from tests.engine.local.setting import complete, finish, opened, request, start

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch import Tensor

    from bapo_megatron.data.completion import Completion
    from bapo_megatron.engine.local.engine import LocalEngine

    Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]

PROMPT = [3, 20, 77, 4]
LONG = SamplingSettings(temperature=1.5, max_new_tokens=40, seed=41)
LIMIT_S = 30.0


@pytest.fixture(scope="module")
def changed_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return change_weights(model_dir, tmp_path_factory.mktemp("changed") / "qwen2")


def _weights(directory: Path) -> dict[str, Tensor]:
    return {
        name: tensor
        for path in sorted(directory.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def _changed(source: Path, directory: Path, change: Change) -> Path:
    """A copy of a model with other weights."""
    shutil.copytree(source, directory)
    tensors = change(_weights(source))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


async def _load(engine: LocalEngine, directory: Path, version: int) -> None:
    weights = await engine.weights(LIMIT_S)
    await weights.load(directory, version=version, timeout_s=LIMIT_S)


class _Trainer:
    """Rank 0's side of a push, its blocking calls in threads of the group."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine
        self._group = WeightGroup("127.0.0.1", "gloo", 2, LIMIT_S)

    async def join(self) -> None:
        weights = await self._engine.weights(LIMIT_S)
        assert weights.tensor_ranks == 1
        place = replace(self._group.place, first_rank=1)
        formed = asyncio.wrap_future(self._group.form())
        await asyncio.gather(formed, weights.join_group(place, LIMIT_S))

    async def send(self, tensors: Mapping[str, Tensor], version: int | None) -> None:
        weights = await self._engine.weights(LIMIT_S)
        bucket = BucketLayout(
            names=tuple(tensors),
            dtypes=tuple(str(t.dtype).removeprefix("torch.") for t in tensors.values()),
            shapes=tuple(tuple(t.shape) for t in tensors.values()),
        )
        flat = torch.cat([t.contiguous().view(-1).view(torch.uint8) for t in tensors.values()])
        sent = asyncio.wrap_future(self._group.broadcast(flat))
        received = weights.receive(
            bucket, self._group.place.name, version=version, timeout_s=LIMIT_S
        )
        outcome, _ = await asyncio.gather(received, sent, return_exceptions=True)
        if isinstance(outcome, BaseException):
            raise outcome

    async def leave(self) -> None:
        weights = await self._engine.weights(LIMIT_S)
        await weights.leave_group(self._group.place.name, LIMIT_S)
        assert self._group.close() is None


def _assert_of(directory: Path, completion: Completion, prompt: list[int] = PROMPT) -> None:
    tokens = completion.token_ids.tolist()
    expected = reference_logprobs(directory, prompt, tokens, LONG.temperature)
    np.testing.assert_allclose(completion.logprobs, expected, rtol=0, atol=1e-4)


async def test_a_group_brings_them_in_parts_again_and_again(
    model_dir: Path, changed_dir: Path
) -> None:
    async with opened(model_dir) as engine:
        trainer = _Trainer(engine)
        await trainer.join()
        weights = await engine.weights(LIMIT_S)
        completions = []
        for version, directory in ((1, changed_dir), (2, model_dir)):
            await weights.open_session(LIMIT_S)
            tensors = list(_weights(directory).items())
            await trainer.send(dict(tensors[:7]), None)
            assert await engine.version() == str(version - 1)
            await trainer.send(dict(tensors[7:]), version)
            await weights.close_session(LIMIT_S)
            await weights.flush_idle(LIMIT_S)
            assert await engine.version() == str(version)
            completions += await complete(engine, request(PROMPT, LONG, version=version))
        await trainer.leave()
        first, second = completions
    _assert_of(changed_dir, first)
    _assert_of(model_dir, second)


async def test_a_missing_weight_is_named_and_a_complete_sync_repairs_it(
    model_dir: Path, changed_dir: Path
) -> None:
    async with opened(model_dir) as engine:
        trainer = _Trainer(engine)
        await trainer.join()
        tensors = _weights(changed_dir)
        left_out = {n: t for n, t in tensors.items() if n != "model.layers.0.mlp.up_proj.weight"}
        with pytest.raises(RolloutError, match=r"lack 'model\.layers\.0\.mlp\.up_proj\.weight'"):
            await trainer.send(left_out, 3)
        assert await engine.version() == "0"
        [stream] = await start(engine, request(PROMPT, LONG))
        await (await engine.weights(LIMIT_S)).open_session(LIMIT_S)
        await trainer.send(tensors, 3)
        await finish(engine, [stream])
        await trainer.leave()
        [completion] = [stream.completion]
    assert completion.versions == (VersionSpan(3, 40),)
    _assert_of(changed_dir, completion)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lm_head.weight": torch.zeros(3, 32)}, r"'lm_head\.weight' must be .*\[267, 32\]"),
        ({"lm_head.bias": torch.zeros(3)}, r"'lm_head\.bias' is not the model's"),
    ],
)
async def test_a_weight_of_another_model_is_named_and_changes_nothing(
    model_dir: Path, tmp_path: Path, change: dict[str, Tensor], message: str
) -> None:
    other = _changed(model_dir, tmp_path / "other", lambda tensors: tensors | change)

    async with opened(model_dir) as engine:
        with pytest.raises(RolloutError, match=message):
            await _load(engine, other, 3)
        _assert_of(model_dir, (await complete(engine, request(PROMPT, LONG)))[0])


def _with_other_embeddings(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """They are tied: the head's have no name of their own."""
    assert "lm_head.weight" not in tensors
    return tensors | {"model.embed_tokens.weight": 1.3 * tensors["model.embed_tokens.weight"]}


def _with_other_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    layer = "model.layers.1.mlp"
    for expert in range(8):
        for part in ("gate_proj", "up_proj", "down_proj"):
            tensors[f"{layer}.experts.{expert}.{part}.weight"] *= 1 + (expert + 1) / 10
    if (bias := f"{layer}.gate.e_score_correction_bias") in tensors:
        tensors[bias] += torch.arange(8) / 10
    return tensors


def _of_a_vision_tower(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name.replace("model.", "model.language_model.", 1): 1.1 * tensor
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("llama", _with_other_embeddings),
        ("qwen3_moe", _with_other_experts),
        ("glm4_moe", _with_other_experts),
        ("deepseek_v3", _with_other_experts),
        ("qwen3_5_text", _of_a_vision_tower),
    ],
)
async def test_weights_have_the_names_of_their_family(
    tmp_path: Path, family: str, change: Change
) -> None:
    directory = make_model_dir(tmp_path / family, family)
    changed = _changed(directory, tmp_path / "changed", change)

    async with opened(directory) as engine:
        await _load(engine, changed, 1)
        (completion,) = await complete(engine, request(PROMPT, LONG, version=1))
    _assert_of(changed, completion)
    with pytest.raises(AssertionError):
        _assert_of(directory, completion)


async def test_a_group_that_does_not_form_ends_in_time(model_dir: Path) -> None:
    async with opened(model_dir) as engine:
        group = WeightGroup("127.0.0.1", "gloo", 2, LIMIT_S)
        place = replace(group.place, first_rank=1)
        weights = await engine.weights(LIMIT_S)
        with pytest.raises((RolloutError, ServerGoneError), match="could not join the group"):
            await weights.join_group(place, 0.5)
        group.close()


async def test_weights_wait_for_the_running_burst(model_dir: Path, changed_dir: Path) -> None:
    async with opened(model_dir) as engine:
        [stream] = await start(engine, request(PROMPT, replace(LONG, max_new_tokens=30)))
        decoding = asyncio.create_task(engine.decode(20))
        await asyncio.sleep(0)
        await _load(engine, changed_dir, 1)
        assert await decoding == 20
        await finish(engine, [stream])
        assert stream.completion.versions == (VersionSpan(0, 20), VersionSpan(1, 10))


@pytest.mark.parametrize("family", ["qwen2", "qwen3_5_text", "qwen3_next"])
async def test_a_response_goes_on_after_new_weights_as_if_they_had_read_all_of_it(
    tmp_path: Path, family: str
) -> None:
    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {n: tensor * 1.1 if tensor.dim() > 1 else tensor for n, tensor in tensors.items()}

    old = make_model_dir(tmp_path / "old", family)
    new = _changed(old, tmp_path / "new", change)
    prompts = [list(range(1, n + 3)) for n in range(12)]
    requests = [request(prompt, replace(LONG, seed=n)) for n, prompt in enumerate(prompts)]
    async with opened(old) as engine:
        streams = await start(engine, *requests)
        await engine.decode(8)
        await _load(engine, new, 1)
        await finish(engine, streams)
    completions = [stream.completion for stream in streams]
    assert sum(len(completion.versions) == 2 for completion in completions) >= 6
    for prompt, completion in zip(prompts, completions, strict=True):
        tokens = completion.token_ids.tolist()
        expected = [
            reference_logprobs(path, prompt, tokens, LONG.temperature) for path in (old, new)
        ]
        both = np.concatenate((expected[0][:8], expected[1][8:]))
        np.testing.assert_allclose(completion.logprobs, both, rtol=0, atol=1e-5)
