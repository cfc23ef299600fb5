"""Hugging Face ↔ Megatron: bit by bit, and into and out of every layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from bapo_megatron.policy import hf_weights
from bapo_megatron.policy.convert import Amount
from tests.distributed_launch import run_ranks
from tests.policy import convert_ranks
from tests.policy.convert_models import (
    COMPANIONS,
    assert_same,
    copy_with,
    run_convert,
    weights,
)
from tests.policy.tiny_models import FAMILIES, load_reference, set_config_field


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back_changes_no_bit(
    models: dict[str, Path], tmp_path: Path, family: str, dtype: torch.dtype
) -> None:
    def in_dtype(tensors: dict[str, Tensor]) -> None:
        tensors.update({name: tensor.to(dtype) for name, tensor in tensors.items()})

    model = copy_with(models[family], tmp_path / "model", in_dtype)
    set_config_field(model, dtype=str(dtype).removeprefix("torch."))

    run_convert(model, tmp_path / "megatron")
    run_convert(tmp_path / "megatron", tmp_path / "back")

    assert_same(weights(tmp_path / "back"), weights(model))
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == json.loads(
        (model / "config.json").read_text()
    )
    for name, text in COMPANIONS.items():
        assert (tmp_path / "back" / name).read_text() == text


def test_an_output_layer_stored_beside_the_tied_embedding_is_dropped(
    models: dict[str, Path], tmp_path: Path
) -> None:
    def untie(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    model = copy_with(models["llama"], tmp_path / "model", untie)
    run_convert(model, tmp_path / "megatron")
    run_convert(tmp_path / "megatron", tmp_path / "back")
    assert_same(weights(tmp_path / "back"), weights(models["llama"]))


def test_beside_a_gpu_torch_does_not_change_the_order_of_the_parameters(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_available", lambda: True)
        run_convert(models["qwen3"], tmp_path / "megatron")
    run_convert(tmp_path / "megatron", tmp_path / "back")
    assert_same(weights(tmp_path / "back"), weights(models["qwen3"]))


def test_weights_are_cast_where_another_dtype_is_asked_for(
    models: dict[str, Path], tmp_path: Path
) -> None:
    model = copy_with(models["qwen3"], tmp_path / "model", lambda tensors: None)
    set_config_field(model, torch_dtype="float32")  # both spellings
    run_convert(model, tmp_path / "megatron", dtype="bfloat16")
    run_convert(tmp_path / "megatron", tmp_path / "back", dtype="float32")
    cast = {name: t.bfloat16().float() for name, t in weights(models["qwen3"]).items()}
    assert_same(weights(tmp_path / "back"), cast)
    kept = json.loads((tmp_path / "megatron" / "hf" / "config.json").read_text())
    assert kept["dtype"] == kept["torch_dtype"] == "bfloat16"
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "float32"


def test_weights_beyond_the_limit_are_divided_over_files(
    models: dict[str, Path], tmp_path: Path
) -> None:
    made = run_convert(models["qwen2"], tmp_path / "megatron", max_file_bytes=40_000)
    pieces = sorted(path.name for path in (tmp_path / "megatron").glob("*.distcp"))
    assert made.num_files == len(pieces) > 3
    assert pieces[:3] == ["__0_0.distcp", "__1_0.distcp", "__2_0.distcp"]

    made = run_convert(tmp_path / "megatron", tmp_path / "back", max_file_bytes=40_000)

    files = sorted((tmp_path / "back").glob("*.safetensors"))
    assert made.num_files == len(files) > 3
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    for file in files:
        assert sum(tensor.nbytes for tensor in load_file(file).values()) <= 40_000
    assert_same(weights(tmp_path / "back"), weights(models["qwen2"]))
    # What the library makes of the index.
    read = load_reference("qwen2", tmp_path / "back").state_dict()
    assert_same({name: read[name] for name in weights(models["qwen2"])}, weights(models["qwen2"]))


def test_a_checkpoint_with_another_padding_of_the_vocabulary_is_read(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(hf_weights, "padded_vocab_size", lambda vocab_size, tensor: 100)
        run_convert(models["qwen2"], tmp_path / "megatron")
    run_convert(tmp_path / "megatron", tmp_path / "back")
    assert_same(weights(tmp_path / "back"), weights(models["qwen2"]))


def test_progress_counts_the_tensors_and_bytes_of_the_target(
    models: dict[str, Path], tmp_path: Path
) -> None:
    reports: list[tuple[Amount, Amount]] = []
    made = run_convert(
        models["qwen2"],
        tmp_path / "megatron",
        dtype="bfloat16",
        report=lambda done, total: reports.append((done, total)),
    )
    # Of each layer 2 norms, 4 + 3 matrices, 3 biases; embedding, final norm, output layer.
    num_tensors = 4 * 12 + 3
    num_bytes = sum(2 * tensor.numel() for tensor in weights(models["qwen2"]).values())
    assert made.amount == Amount(num_tensors, num_bytes)
    assert [total for _, total in reports] == [made.amount] * len(reports)
    assert reports[0][0] == Amount(1, 2 * 97 * 32)
    assert reports[-1][0] == made.amount


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def loaded(
    models: dict[str, Path], converted: dict[str, Path], saved: Path
) -> dict[tuple[str, str], dict[str, Tensor]]:
    """Weights that each layout loaded from the converted checkpoints; each saves into ``saved``."""
    two = run_ranks(convert_ranks.two_ranks, 2, models, converted, saved)[0]
    (one,) = run_ranks(convert_ranks.one_rank, 1, models, converted, saved)
    return {**two["loaded"], **one["loaded"]}


@pytest.mark.distributed
@pytest.mark.parametrize("layout", ["single", *convert_ranks.LAYOUTS])
@pytest.mark.parametrize("family", FAMILIES)
def test_megatron_loads_a_converted_model_into_every_layout(
    models: dict[str, Path],
    loaded: dict[tuple[str, str], dict[str, Tensor]],
    family: str,
    layout: str,
) -> None:
    assert_same(loaded[family, layout], weights(models[family]))


@pytest.mark.distributed
@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("layout", ["single", *convert_ranks.LAYOUTS])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_of_the_trainer_becomes_what_the_trainer_exports(
    models: dict[str, Path], saved: Path, tmp_path: Path, family: str, layout: str
) -> None:
    run_dir = saved / layout / family
    run_convert(run_dir / "checkpoints" / "step_1", tmp_path / "hf")
    for path in (run_dir / "export").iterdir():
        assert (tmp_path / "hf" / path.name).read_bytes() == path.read_bytes(), path.name
    original = weights(models[family])
    assert_same(weights(tmp_path / "hf"), {name: 1.5 * t for name, t in original.items()})


@pytest.mark.distributed
@pytest.mark.usefixtures("loaded")
def test_layers_that_are_stored_one_by_one_are_read(
    models: dict[str, Path], saved: Path, tmp_path: Path
) -> None:
    run_convert(saved / "layer by layer", tmp_path / "hf", hf_dir=models["qwen3"])
    original = weights(models["qwen3"])
    assert_same(weights(tmp_path / "hf"), {name: 1.5 * t for name, t in original.items()})
