"""What conversion refuses: sources that do not fit or are damaged, targets that hold something."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.policy.checkpoint_damages import (
    craft_metadata,
    edit_metadata,
    flip_bit,
    forget_checksums,
)
from tests.policy.convert_models import assert_same, copy_with, error_of, run_convert, weights
from tests.policy.tiny_models import Models, set_config_field

FC1 = "decoder.layers.mlp.linear_fc1.weight"
QKV = "decoder.layers.self_attention.linear_qkv.weight"


def test_a_model_with_weights_of_several_dtypes_needs_a_choice(
    deep_models: Models, tmp_path: Path
) -> None:
    norm = {"model.norm.weight": torch.ones(32, dtype=torch.bfloat16)}
    model = copy_with(deep_models["qwen2"], tmp_path / "model", lambda t: t.update(norm))
    error = error_of(model, tmp_path / "megatron")
    assert "several dtypes" in error
    assert "--dtype" in error
    run_convert(model, tmp_path / "megatron", dtype="float32")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"intermediate_size": 64}, f"{FC1} is [4, 96, 32], config.json asks for [4, 128, 32]"),
        ({"num_hidden_layers": 3}, f"{QKV} is [4, 64, 32], config.json asks for [3, 64, 32]"),
        (
            {"model_type": "llama", "architectures": None},
            "unexpected decoder.layers.self_attention.linear_qkv.bias",
        ),
        ({"tie_word_embeddings": True, "vocab_size": 200}, "unexpected output_layer.weight"),
        ({"vocab_size": 129}, "output_layer.weight is [128, 32], config.json asks for"),
        ({"mlp_bias": True}, "mlp_bias"),
    ],
)
def test_a_config_of_another_model_is_refused_in_both_directions(
    deep_models: Models,
    converted: Models,
    tmp_path: Path,
    fields: dict[str, Any],
    message: str,
) -> None:
    model = copy_with(deep_models["qwen2"], tmp_path / "model")
    set_config_field(model, **fields)
    assert str(model) in error_of(model, tmp_path / "megatron")
    assert message in error_of(converted["qwen2"], tmp_path / "back", hf_dir=model)


@pytest.mark.parametrize(
    "change",
    [
        lambda output: output[96].add_(1.0),
        lambda output: output.resize_(96, 32),
        lambda output: output[0].fill_(torch.nan),
    ],
    ids=["one row", "fewer rows", "no number"],
)
def test_tied_weights_that_are_not_equal_are_refused_with_both_names(
    deep_models: Models,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[torch.Tensor], object],
) -> None:
    def add_output_layer(tensors: dict[str, torch.Tensor]) -> None:
        output = tensors["model.embed_tokens.weight"].clone()
        change(output)
        tensors["lm_head.weight"] = output.clone()

    monkeypatch.setattr("bapo_megatron.policy.hf_weights.TIED_ROWS", 40)
    model = copy_with(deep_models["qwen3"], tmp_path / "model", add_output_layer)
    error = error_of(model, tmp_path / "megatron")
    assert f"{model}: lm_head.weight must equal model.embed_tokens.weight" in error


def test_a_field_of_config_json_that_is_to_be_ignored_is_written_back(
    deep_models: Models, tmp_path: Path
) -> None:
    model = copy_with(deep_models["qwen2"], tmp_path / "model")
    set_config_field(model, logit_scale=0.5)
    assert "--ignore-field" in error_of(model, tmp_path / "megatron")
    run_convert(model, tmp_path / "megatron", ignored_fields=["logit_scale"])
    config = tmp_path / "megatron" / "hf" / "config.json"
    assert json.loads(config.read_text())["logit_scale"] == 0.5


@pytest.fixture
def checkpoint(deep_models: Models, tmp_path: Path) -> Path:
    """A checkpoint of several files, to be damaged."""
    run_convert(deep_models["qwen2"], tmp_path / "megatron", max_file_bytes=40_000)
    return tmp_path / "megatron"


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5000])


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (lambda d: _cut(d / "__1_0.distcp"), "__1_0.distcp cannot be read"),
    "missing file": (lambda d: (d / "__1_0.distcp").unlink(), "__1_0.distcp is missing"),
    "crafted description": (craft_metadata, ".metadata names posix.mkdir"),
    "missing parameter": (
        lambda d: edit_metadata(d, lambda m: m.state_dict_metadata.pop(FC1)),
        f"missing {FC1}",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_without_checksums_is_refused_by_name(
    checkpoint: Path, damage: str
) -> None:
    apply, message = DAMAGES[damage]
    apply(checkpoint)
    if (checkpoint / "checksums.json").exists():
        forget_checksums(checkpoint)
    assert message in error_of(checkpoint, checkpoint.with_name("back"))
    assert not (checkpoint / "executed").exists()


@pytest.mark.parametrize("name", [".metadata", "__1_0.distcp", "common.pt", "metadata.json"])
def test_a_flipped_bit_is_found_by_the_checksums(checkpoint: Path, name: str) -> None:
    flip_bit(checkpoint / name)
    message = f"{checkpoint}: damaged, {name} has changed"
    assert message in error_of(checkpoint, checkpoint.with_name("back"))


def test_a_companion_that_leads_nowhere_is_refused_before_anything_is_written(
    deep_models: Models, tmp_path: Path
) -> None:
    source, target = tmp_path / "source", tmp_path / "megatron"
    shutil.copytree(deep_models["qwen2"], source)
    (source / "tokenizer.json").unlink(missing_ok=True)
    (source / "tokenizer.json").symlink_to("/nowhere/tokenizer.json")
    assert f"{source / 'tokenizer.json'}: must be a file" in error_of(source, target)
    assert not list(tmp_path.glob(".megatron*"))


def test_a_checkpoint_says_which_model_it_is_of_or_needs_an_option(
    deep_models: Models, converted: Models, tmp_path: Path
) -> None:
    step, config = tmp_path / "run" / "checkpoints" / "step_3", tmp_path / "run" / "config.yaml"
    shutil.copytree(converted["qwen2"], step)
    shutil.rmtree(step / "hf")
    assert "--hf" in error_of(step, tmp_path / "hf")
    for text in ("model:\n  path: /nowhere\n", "model: 3\n"):
        config.write_text(text)
        assert f"model.path in {config}" in error_of(step, tmp_path / "hf")
    with pytest.raises(FileNotFoundError, match=r"/nowhere/config\.json"):
        run_convert(step, tmp_path / "hf", hf_dir=Path("/nowhere"))
    config.write_text(f"model:\n  path: {deep_models['qwen2']}\n")
    run_convert(step, tmp_path / "hf")
    assert_same(weights(tmp_path / "hf"), weights(deep_models["qwen2"]))


@pytest.mark.parametrize(
    ("options", "key"), [({"dtype": "float8"}, "--dtype"), ({"hf_dir": Path("elsewhere")}, "--hf")]
)
def test_options_that_make_no_sense_are_refused(
    deep_models: Models, tmp_path: Path, options: dict[str, Any], key: str
) -> None:
    assert error_of(deep_models["qwen2"], tmp_path / "megatron", **options).startswith(f"{key}: ")


def test_a_source_of_no_known_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for source in (tmp_path / "nothing", tmp_path / "empty"):
        assert f"{source}: neither a Hugging Face" in error_of(source, tmp_path / "out")


def test_a_target_that_is_not_empty_is_replaced_only_by_force(
    deep_models: Models, tmp_path: Path
) -> None:
    target = tmp_path / "megatron"
    target.mkdir()
    run_convert(deep_models["qwen2"], target)  # an empty one is as good as none
    (target / "precious").touch()
    with pytest.raises(ValueError, match=f"{target}: .*--force"):
        run_convert(deep_models["qwen2"], target)
    assert (target / "precious").exists()
    run_convert(deep_models["qwen2"], target, force=True)
    assert not (target / "precious").exists()
    run_convert(target, tmp_path / "back")


def test_a_conversion_never_deletes_its_source(deep_models: Models, tmp_path: Path) -> None:
    model = copy_with(deep_models["qwen2"], tmp_path / "parent" / "model")
    for target in (model, model.parent, tmp_path / "parent" / ".." / "parent"):
        with pytest.raises(ValueError, match="would delete"):
            run_convert(model, target, force=True)
    assert_same(weights(model), weights(deep_models["qwen2"]))
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="/file"):
        run_convert(model, tmp_path / "file")
