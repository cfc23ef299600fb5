"""New weights, from rank 0's group and from a directory."""

from __future__ import annotations

import asyncio
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
from examples.tiny.model import build_tokenizer
from tests.engine.helpers import (
    LORA,
    change_weights,
    make_model_dir,
    reference_logprobs,
    write_adapter,
)
from tests.engine.local.setting import complete, finish, opened, request, start
from tests.policy.convert_models import copy_with, weights
from tests.policy.families import params
from tests.policy.tiny_models import load_reference, make_vision_model

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch import Tensor

    from bapo_megatron.data.record import Completion
    from bapo_megatron.engine.local.engine import LocalEngine

    Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]

PROMPT = [3, 20, 77, 4]
LONG = SamplingSettings(temperature=1.5, max_new_tokens=40, seed=41)
LIMIT_S = 30.0


@pytest.fixture(scope="module")
def changed_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return change_weights(model_dir, tmp_path_factory.mktemp("changed") / "qwen2")


async def _load(engine: LocalEngine, directory: Path, version: int) -> None:
    await engine.weights.load(directory, version=version, timeout_s=LIMIT_S)


def _assert_of(directory: Path, completion: Completion) -> None:
    tokens = completion.token_ids.tolist()
    expected = reference_logprobs(directory, PROMPT, tokens, LONG.temperature)
    np.testing.assert_allclose(completion.logprobs, expected, rtol=0, atol=1e-4)


async def test_a_group_brings_them_in_parts_again_and_again_and_a_missing_one_is_named(
    model_dir: Path, changed_dir: Path
) -> None:
    group = WeightGroup("127.0.0.1", "gloo", 2, LIMIT_S)
    place, completions = replace(group.place, first_rank=1), []
    async with opened(model_dir) as engine:
        receiver = engine.weights
        formed = asyncio.wrap_future(group.form())
        await asyncio.gather(formed, receiver.join_group(place, LIMIT_S))

        async def receive(part: Sequence[tuple[str, Tensor]], version: int | None) -> None:
            names, values = zip(*part, strict=True)
            shapes = tuple(tuple(tensor.shape) for tensor in values)
            layout = BucketLayout(names, ("float32",) * len(part), shapes)
            flat = torch.cat([tensor.flatten() for tensor in values]).view(torch.uint8)
            sent = asyncio.wrap_future(group.broadcast(flat))
            received = receiver.receive(layout, place.name, version=version, timeout_s=LIMIT_S)
            await asyncio.gather(received, sent)

        for version, directory in ((1, changed_dir), (2, model_dir)):
            tensors = list(weights(directory).items())
            await receiver.open_session(LIMIT_S)
            with pytest.raises(RolloutError, match=r"lack '.*' \(7 in all\)"):
                await receive(tensors[7:], version)
            await receiver.open_session(LIMIT_S)
            await receive(tensors[:7], None)
            assert await engine.version() == str(version - 1)
            await receive(tensors[7:], version)
            await receiver.close_session(LIMIT_S)
            await receiver.flush_idle(LIMIT_S)
            assert await engine.version() == str(version)
            completions += await complete(engine, request(PROMPT, LONG, version=version))
        await receiver.leave_group(place.name, LIMIT_S)
    assert group.close() is None
    for directory, completion in zip((changed_dir, model_dir), completions, strict=True):
        _assert_of(directory, completion)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lm_head.weight": torch.zeros(3, 32)}, r"'lm_head\.weight' must be .*\[267, 32\]"),
        ({"lm_head.bias": torch.zeros(3)}, r"'lm_head\.bias' is not the model's"),
        ({"model.norm.weight": None}, r"lack 'model\.norm\.weight'"),
    ],
)
async def test_a_weight_of_another_model_or_a_missing_one_is_named_and_changes_nothing(
    model_dir: Path, tmp_path: Path, change: dict[str, Tensor | None], message: str
) -> None:
    def merge(tensors: dict[str, Tensor]) -> None:
        for name, tensor in change.items():
            tensors.pop(name, None)
            tensors |= {} if tensor is None else {name: tensor}

    other = copy_with(model_dir, tmp_path / "other", merge)
    async with opened(model_dir) as engine:
        with pytest.raises(RolloutError, match=message):
            await _load(engine, other, 3)
        _assert_of(model_dir, (await complete(engine, request(PROMPT, LONG)))[0])


@pytest.mark.parametrize("family", params())
async def test_weights_have_the_names_of_their_family(tmp_path: Path, family: str) -> None:
    draw = torch.Generator().manual_seed(0)
    # Of tied embeddings the head's have no name of their own; Qwen3.5's are beside a vision tower.
    prefix = "model.language_model." if family.startswith("qwen3_5") else "model."

    def change(tensors: dict[str, Tensor]) -> None:
        assert family not in ("llama", "qwen3") or "lm_head.weight" not in tensors
        for name in [*tensors]:
            tensor = tensors.pop(name)
            shift = 0.1 * torch.rand(tensor.shape, generator=draw)
            tensors[name.replace("model.", prefix, 1)] = tensor + shift

    directory = make_model_dir(tmp_path / family, family)
    changed = copy_with(directory, tmp_path / "changed", change)
    async with opened(directory) as engine:
        await _load(engine, changed, 1)
        (completion,) = await complete(engine, request(PROMPT, LONG, version=1))
    _assert_of(changed, completion)
    with pytest.raises(AssertionError):
        _assert_of(directory, completion)


@pytest.mark.parametrize("family", params())
async def test_adapters_compute_what_merged_weights_do_and_replace_each_other(
    tmp_path: Path, family: str
) -> None:
    directory = make_model_dir(tmp_path / family, family)
    adapters = [
        write_adapter(directory, tmp_path / f"adapter{seed}", tmp_path / f"merged{seed}", seed)
        for seed in (1, 2)
    ]
    tokens = [*PROMPT, *range(5, 60)]
    async with opened(directory, lora=LORA) as engine, opened(directory) as reference:
        base = (await engine.score(tokens, LIMIT_S)).logprobs
        for version, (adapter, merged) in enumerate(adapters, start=1):
            await _load(engine, adapter, version)
            await _load(reference, merged, version)
            scores = (await engine.score(tokens, LIMIT_S)).logprobs
            expected = (await reference.score(tokens, LIMIT_S)).logprobs
            np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-5)
            assert np.abs(scores - base).mean() > 0.01
            assert await engine.version() == str(version)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("lora_A", r"the adapter of '.*proj.weight' must be an A and a B that fit a weight"),
        ("lora_B", r"the adapter of '.*proj.weight' must be an A and a B that fit a weight"),
        ("down_proj.lora", r"must change 'model.layers.0.mlp.down_proj.weight', .* got 12 others"),
    ],
)
async def test_an_adapter_that_lacks_a_tensor_is_refused_and_changes_nothing(
    model_dir: Path, tmp_path: Path, part: str, message: str
) -> None:
    adapter, merged = write_adapter(model_dir, tmp_path / "adapter", tmp_path / "merged", seed=1)
    async with opened(model_dir, lora=LORA) as engine:
        await _load(engine, adapter, 1)
        file = adapter / "adapter_model.safetensors"
        save_file({n: 2 * t for n, t in load_file(file).items() if part not in n}, file)
        with pytest.raises(RolloutError, match=message):
            await _load(engine, adapter, 2)
        _assert_of(merged, (await complete(engine, request(PROMPT, LONG, version=1)))[0])


async def test_tokens_have_the_version_of_their_adapter_when_it_changes_under_way(
    model_dir: Path, tmp_path: Path
) -> None:
    places = [
        write_adapter(model_dir, tmp_path / f"a{seed}", tmp_path / f"m{seed}", seed)
        for seed in (1, 2)
    ]
    async with opened(model_dir, lora=LORA) as engine:
        await _load(engine, places[0][0], 1)
        settings = replace(LONG, max_new_tokens=30)
        streams = await start(engine, *[request(PROMPT, settings, version=1)] * 3)
        await engine.decode(11)
        await _load(engine, places[1][0], 2)
        await finish(engine, streams)
    for stream in streams:
        completion = stream.completion
        assert completion.versions == (VersionSpan(1, 11), VersionSpan(2, 19))
        first, second = (
            reference_logprobs(merged, PROMPT, completion.token_ids, LONG.temperature)
            for _, merged in places
        )
        expected = np.concatenate((first[:11], second[11:]))
        np.testing.assert_allclose(completion.logprobs, expected, rtol=0, atol=1e-4)


async def test_a_language_model_is_loaded_without_its_vision_tower(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(512)
    directory = make_vision_model("gemma3", tmp_path / "model", vocab_size=len(tokenizer))
    tokenizer.save_pretrained(directory)

    def change(tensors: dict[str, Tensor]) -> None:
        for name in [*tensors]:
            tensor = tensors.pop(name)
            if name.startswith("language_model."):
                tensors[name] = 1.1 * tensor

    changed = copy_with(directory, tmp_path / "changed", change)
    async with opened(directory) as engine:
        completions = await complete(engine, request(PROMPT, LONG))
        await _load(engine, changed, 1)
        completions += await complete(engine, request(PROMPT, LONG, version=1))
    tensors = weights(directory) | weights(changed)
    save_file(tensors, changed / "model.safetensors", metadata={"format": "pt"})
    for source, completion in zip((directory, changed), completions, strict=True):
        _assert_of(source, completion)


async def test_a_group_that_does_not_form_ends_in_time(model_dir: Path) -> None:
    async with opened(model_dir) as engine:
        group = WeightGroup("127.0.0.1", "gloo", 2, LIMIT_S)
        place = replace(group.place, first_rank=1)
        with pytest.raises((RolloutError, ServerGoneError), match="could not join the group"):
            await engine.weights.join_group(place, 0.5)
        group.close()


async def test_weights_wait_for_the_running_burst(model_dir: Path, changed_dir: Path) -> None:
    async with opened(model_dir) as engine:
        [stream] = await start(engine, request(PROMPT, replace(LONG, max_new_tokens=30)))
        decoding = asyncio.create_task(engine.decode(20))
        await asyncio.sleep(0)
        await _load(engine, changed_dir, 1)
        assert await decoding == 20
        await finish(engine, [stream])
    completion = stream.completion
    assert completion.versions == (VersionSpan(0, 20), VersionSpan(1, 10))
    new = reference_logprobs(changed_dir, PROMPT, completion.token_ids, LONG.temperature)
    np.testing.assert_allclose(completion.logprobs[20:], new[20:], rtol=0, atol=1e-4)


def _rounded(tensors: dict[str, Tensor], bits: int) -> dict[str, Tensor]:
    """The matrices of layers at the nearest point of each row's grid, by a search in float64."""
    grid = np.arange(-(2 ** (bits - 1)) + 1, 2 ** (bits - 1))

    def nearest(matrix: Tensor) -> Tensor:
        if matrix.ndim == 3:  # experts, [E, inputs, outputs]
            return torch.stack([nearest(expert.T).T for expert in matrix])
        points = np.abs(matrix.double().numpy()).max(1)[:, None] * grid / grid[-1]
        distance = np.abs(matrix.double().numpy()[..., None] - points[:, None])
        return torch.from_numpy(np.take_along_axis(points, distance.argmin(-1), 1)).float()

    return {
        name: nearest(t) if ".layers." in name and name.endswith(("proj", "proj.weight")) else t
        for name, t in tensors.items()
    }


@pytest.mark.parametrize(
    ("family", "bits"), [("qwen2", 4), ("llama", 8), ("qwen3_moe", 4), ("gpt_oss", 4)]
)
async def test_rounded_weights_lie_on_the_grid_of_their_row_and_others_stay(
    tmp_path: Path, family: str, bits: int
) -> None:
    directory = make_model_dir(tmp_path / family, family)
    expected = _rounded(weights(directory), bits)
    async with opened(directory, sampling_bits=bits) as engine:
        for version in (None, 1):  # as loaded, and after a weight sync
            if version is not None:
                await _load(engine, directory, version)
            held = engine.weights._parameters
            for name, tensor in expected.items():
                torch.testing.assert_close(held[name].detach(), tensor, rtol=2e-6, atol=1e-9)
    original = weights(directory)
    moved = {name for name, tensor in expected.items() if not tensor.equal(original[name])}
    assert moved == {name for name in expected if name.endswith(("proj", "proj.weight"))}


async def test_the_recorded_log_probs_are_the_rounded_model_s_also_over_a_weight_sync(
    model_dir: Path, changed_dir: Path, tmp_path: Path
) -> None:
    old, new = (
        copy_with(
            model_dir, tmp_path / name, lambda ts, d=source: ts.update(_rounded(weights(d), 4))
        )
        for name, source in (("old", model_dir), ("new", changed_dir))
    )
    async with opened(model_dir, sampling_bits=4) as engine:
        [stream] = await start(engine, request(PROMPT, replace(LONG, max_new_tokens=30, seed=3)))
        await engine.decode(20)
        await _load(engine, changed_dir, 1)
        await finish(engine, [stream])
    q, tokens = stream.completion.logprobs, stream.completion.token_ids
    for part, directory, exact_dir in (
        (slice(0, 20), old, model_dir),
        (slice(20, 30), new, changed_dir),
    ):
        model = load_reference("qwen2", directory).double()
        with torch.no_grad():
            logits_TV = model(torch.tensor([[*PROMPT, *tokens]])).logits[0, len(PROMPT) - 1 : -1]
        logprob_TV = (logits_TV / LONG.temperature).log_softmax(dim=-1).numpy()
        expected = logprob_TV[np.arange(30), tokens]
        np.testing.assert_allclose(q[part], expected[part], rtol=0, atol=2e-5)
        exact = reference_logprobs(exact_dir, PROMPT, tokens, LONG.temperature)
        assert np.abs(q[part] - exact[part]).mean() > 0.01
