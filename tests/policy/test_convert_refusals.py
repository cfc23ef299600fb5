"""What conversion refuses: sources that do not fit or are damaged, targets that hold something."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.policy.checkpoint_damages import Crafted
from tests.policy.convert_models import (
    assert_same,
    copy_with,
    error_of,
    run_convert,
    weights,
)
from tests.policy.tiny_models import set_config_field


def _drop(name: str) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors.pop(name)


def _set(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors.update({name: tensor})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_drop("model.layers.2.mlp.up_proj.weight"), "missing model.layers.2.mlp.up_proj.weight"),
        (_set("model.layers.4.bias", torch.ones(1)), "unexpected model.layers.4.bias"),
        (
            _set("model.norm.weight", torch.ones(31)),
            "model.norm.weight is [31], config.json asks for [32]",
        ),
        (
            _set("model.norm.weight", torch.ones(32, dtype=torch.int8)),
            "model.norm.weight must be stored as F32, F16, BF16, got I8",
        ),
        (
            _set("model.norm.weight", torch.ones(32, dtype=torch.bfloat16)),
            "weights of several dtypes",
        ),
    ],
)
def test_a_model_with_wrong_tensors_is_refused_by_name(
    models: dict[str, Path],
    tmp_path: Path,
    change: Callable[[dict[str, Tensor]], Any],
    message: str,
) -> None:
    model = copy_with(models["qwen2"], tmp_path / "model", change)
    assert message in error_of(model, tmp_path / "megatron")


@pytest.mark.parametrize(
    ("fields", "of_model", "of_checkpoint"),
    [
        (
            {"intermediate_size": 64},
            "model.layers.0.mlp.gate_proj.weight is [48, 32], config.json asks for [64, 32]",
            "decoder.layers.mlp.linear_fc1.weight is [4, 96, 32], config.json asks for [4, 128, 32",
        ),
        (
            {"num_hidden_layers": 3},
            "unexpected model.layers.3.input_layernorm.weight",
            "decoder.layers.mlp.linear_fc1.weight is [4, 96, 32], config.json asks for [3, 96, 32]",
        ),
        (
            {"model_type": "llama", "architectures": None},
            "unexpected model.layers.0.self_attn.k_proj.bias",
            "unexpected decoder.layers.self_attention.linear_qkv.bias",
        ),
        (
            {"tie_word_embeddings": True, "vocab_size": 200},
            "model.embed_tokens.weight is [97, 32], config.json asks for [200, 32]",
            "unexpected output_layer.weight",
        ),
        (
            {"vocab_size": 129},
            "[129, 32]",
            "output_layer.weight is [128, 32], config.json asks for",
        ),
        ({"mlp_bias": True}, "mlp_bias", "mlp_bias"),
    ],
)
def test_a_config_of_another_model_is_refused_in_both_directions(
    models: dict[str, Path],
    converted: dict[str, Path],
    tmp_path: Path,
    fields: dict[str, Any],
    of_model: str,
    of_checkpoint: str,
) -> None:
    model = tmp_path / "model"
    shutil.copytree(models["qwen2"], model)
    set_config_field(model, **fields)
    assert of_model in error_of(model, tmp_path / "megatron")
    assert of_checkpoint in error_of(converted["qwen2"], tmp_path / "back", hf_dir=model)


def test_a_truncated_model_file_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(models["qwen2"], model)
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert "not a readable safetensors file" in error_of(model, tmp_path / "megatron")


@pytest.mark.parametrize("place", ["../secret.safetensors", "/etc/secret.safetensors", "a/b"])
def test_an_index_that_leaves_its_directory_is_refused(
    models: dict[str, Path], tmp_path: Path, place: str
) -> None:
    model = tmp_path / "model"
    shutil.copytree(models["qwen2"], model)
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": place}}))
    message = f"{index}: names '{place}', which is not a file beside it; restore the file"
    assert message in error_of(model, tmp_path / "megatron")


def _edit_metadata(checkpoint: Path, edit: Callable[[Any], Any]) -> None:
    path = checkpoint / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    edit(metadata)
    path.write_bytes(pickle.dumps(metadata))


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5000])


def _overwrite(checkpoint: Path) -> None:
    """Zeroes over the beginning of a tensor's record."""
    path = checkpoint / "__1_0.distcp"
    content = bytearray(path.read_bytes())
    content[:200] = bytes(200)
    path.write_bytes(content)


def _rename_a_module(checkpoint: Path) -> None:
    path = checkpoint / ".metadata"
    path.write_bytes(path.read_bytes().replace(b"checkpoint.metadata", b"checkpoint.metadatb"))


FC1 = "decoder.layers.mlp.linear_fc1.weight"
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (lambda d: _truncate(d / "__1_0.distcp"), "damaged, __1_0.distcp has "),
    "missing file": (lambda d: (d / "__1_0.distcp").unlink(), "damaged, __1_0.distcp is missing"),
    "overwritten": (_overwrite, "is damaged ("),
    "no description": (lambda d: (d / ".metadata").unlink(), "incomplete checkpoint, .metadata"),
    "damaged description": (
        lambda d: _truncate(d / ".metadata"),
        "damaged, .metadata cannot be read (",
    ),
    "description of another module": (
        _rename_a_module,
        "damaged, .metadata names torch.distributed.checkpoint.metadatb.",
    ),
    "no format": (lambda d: (d / "metadata.json").unlink(), "metadata.json is missing"),
    "damaged format": (lambda d: (d / "metadata.json").write_text("{"), "metadata.json: damaged"),
    "other format": (
        lambda d: (d / "metadata.json").write_text('{"sharded_backend": "zarr"}'),
        "not a torch_dist checkpoint (zarr)",
    ),
    "missing parameter": (
        lambda d: _edit_metadata(d, lambda m: m.state_dict_metadata.pop(FC1)),
        f"missing {FC1}",
    ),
    "unexpected parameter": (
        lambda d: _edit_metadata(
            d, lambda m: m.state_dict_metadata.update(extra=m.state_dict_metadata[FC1])
        ),
        "unexpected extra",
    ),
    "missing part": (
        lambda d: _edit_metadata(d, lambda m: m.state_dict_metadata[FC1].chunks.pop()),
        f"damaged, parts of {FC1} are missing",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_by_name(
    models: dict[str, Path], tmp_path: Path, damage: str
) -> None:
    checkpoint = tmp_path / "megatron"
    run_convert(models["qwen2"], checkpoint, max_file_bytes=40_000)
    (checkpoint / "checksums.json").unlink()  # other tools write none
    apply, message = DAMAGES[damage]
    apply(checkpoint)
    assert message in error_of(checkpoint, tmp_path / "back")


@pytest.mark.parametrize("name", [".metadata", "__1_0.distcp", "common.pt", "metadata.json"])
def test_a_flipped_bit_is_found_by_the_checksums(
    models: dict[str, Path], tmp_path: Path, name: str
) -> None:
    checkpoint = tmp_path / "megatron"
    run_convert(models["qwen2"], checkpoint, max_file_bytes=40_000)
    content = bytearray((checkpoint / name).read_bytes())
    content[len(content) // 2] ^= 1
    (checkpoint / name).write_bytes(content)
    message = f"{checkpoint}: damaged, {name} has changed since it was written"
    assert message in error_of(checkpoint, tmp_path / "back")


def test_nothing_that_a_crafted_checkpoint_holds_is_run(
    models: dict[str, Path], tmp_path: Path
) -> None:
    checkpoint, mark = tmp_path / "megatron", tmp_path / "executed"
    run_convert(models["qwen2"], checkpoint, max_file_bytes=40_000)
    (checkpoint / "checksums.json").unlink()
    _edit_metadata(checkpoint, lambda m: setattr(m, "planner_data", Crafted(mark)))
    assert ".metadata names posix.mkdir, which" in error_of(checkpoint, tmp_path / "back")
    assert not mark.exists()


def test_a_checkpoint_says_which_model_it_is_of_or_must_be_told(
    models: dict[str, Path], converted: dict[str, Path], tmp_path: Path
) -> None:
    step = tmp_path / "run" / "checkpoints" / "step_3"
    shutil.copytree(converted["qwen2"], step)
    shutil.rmtree(step / "hf")
    assert "with --hf" in error_of(step, tmp_path / "hf")
    config = tmp_path / "run" / "config.yaml"
    config.write_text("model:\n  path: /nowhere\n")
    assert "model.path /nowhere is not a model" in error_of(step, tmp_path / "hf")
    config.write_text("model: 3\n")
    assert "model.path None is not a model" in error_of(step, tmp_path / "hf")
    assert "no config.json in /nowhere" in error_of(step, tmp_path / "hf", hf_dir=Path("/nowhere"))
    config.write_text(f"model:\n  path: {models['qwen2']}\n")
    run_convert(step, tmp_path / "hf")
    assert_same(weights(tmp_path / "hf"), weights(models["qwen2"]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float8"}, "--dtype: float8 is none of float32, bfloat16"),
        ({"hf_dir": Path("elsewhere")}, "leave --hf out"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    models: dict[str, Path], tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    assert message in error_of(models["qwen2"], tmp_path / "megatron", **options)


def test_a_source_of_no_known_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "no such directory" in error_of(tmp_path / "nothing", tmp_path / "out")
    assert "neither a Hugging Face model" in error_of(tmp_path / "empty", tmp_path / "out")


def test_a_target_that_is_not_empty_is_replaced_only_by_force(
    models: dict[str, Path], tmp_path: Path
) -> None:
    target = tmp_path / "megatron"
    target.mkdir()
    run_convert(models["qwen2"], target)  # an empty one is as good as none
    (target / "precious").touch()
    with pytest.raises(ValueError, match="exists and is not empty"):
        run_convert(models["qwen2"], target)
    assert (target / "precious").exists()
    run_convert(models["qwen2"], target, force=True)
    assert not (target / "precious").exists()
    run_convert(target, tmp_path / "back")


def test_a_conversion_never_deletes_its_source(models: dict[str, Path], tmp_path: Path) -> None:
    model = tmp_path / "parent" / "model"
    shutil.copytree(models["qwen2"], model)
    for target in (model, model.parent, tmp_path / "parent" / ".." / "parent"):
        with pytest.raises(ValueError, match="would delete"):
            run_convert(model, target, force=True)
    assert_same(weights(model), weights(models["qwen2"]))
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file: not a directory"):
        run_convert(model, tmp_path / "file", force=True)
