"""Hugging Face ↔ Megatron: bit by bit, into and out of every layout, within bounds of memory."""

import gc
import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from safetensors.torch import load_file
from torch import Tensor

from bapo_megatron.config.schema import CheckpointConfig
from bapo_megatron.policy import hf_weights, weight_table
from bapo_megatron.policy.checkpoint import CheckpointSaver
from bapo_megatron.policy.train_state import TrainState
from tests.launch import run
from tests.policy.checkpoint_damages import limited
from tests.policy.convert_models import COMPANIONS, assert_same, copy_with, run_convert, weights
from tests.policy.families import FAMILIES, params
from tests.policy.layouts import Case, Results, built, by_rank, cases_of, chosen, in_every_case
from tests.policy.parity_ranks import snapshot
from tests.policy.tiny_models import Models, load_reference, set_config_field

CASES = cases_of(FAMILIES, "one rank", "TP 2, ETP 1", "PP 2 × VPP 2")


def run_conversions(
    cases: Sequence[Case], models: Models, converted: Models, root: Path
) -> dict[str, dict[str, Tensor]]:
    """Load what was converted into each layout; save changed weights in each layout."""
    loaded = {}
    for case, _, state in built(cases, models):
        name = case.family
        _load(state, converted[name])
        loaded[str(case)] = snapshot(state)
        _change_and_save(state, models[name], root / str(case))
        if str(case) == "one rank, qwen3":
            _save_layer_by_layer(state, root / "layer by layer")
    return loaded


def _save_layer_by_layer(state: TrainState, directory: Path) -> None:
    directory.mkdir()
    (chunk,) = state.model.chunks
    shards = chunk.sharded_state_dict(metadata={"non_homogeneous_layers": True})
    dist_checkpointing.save(shards, str(directory))


def _load(state: TrainState, checkpoint: Path) -> None:
    """Overwrite all weights with those of a checkpoint, as any user of Megatron-core would."""
    for number, chunk in enumerate(state.model.chunks):
        for parameter in chunk.parameters():
            parameter.data.fill_(float("nan"))
        shards = {"model": chunk.sharded_state_dict()}
        loaded = dist_checkpointing.load(
            shards, str(checkpoint), validate_access_integrity=len(state.model.chunks) == 1
        )
        assert loaded["checkpoint_version"] == 3.0, number
        chunk.load_state_dict(loaded["model"])
    state.optimizer.reload_model_params()


def _change_and_save(state: TrainState, model: Path, run: Path) -> None:
    """A run directory with a checkpoint of other weights than the model's, and their export."""
    for chunk in state.model.chunks:
        for parameter in chunk.parameters():
            parameter.data.mul_(1.5)
    state.optimizer.reload_model_params()
    CheckpointSaver(run / "checkpoints", CheckpointConfig()).save(1, state, {})
    state.model.export_hf(run / "export")
    if state.model.groups.rank == 0:
        (run / "config.yaml").write_text(f"model:\n  path: {model}\n")


def there_and_back(model: Path, scratch: Path) -> dict[str, Tensor]:
    """The weights of a model that was a checkpoint in between."""
    run_convert(model, scratch / "megatron")
    run_convert(scratch / "megatron", scratch / "back")
    return weights(scratch / "back")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", params())
def test_there_and_back_changes_no_bit(
    deep_models: Models, tmp_path: Path, family: str, dtype: torch.dtype
) -> None:
    def in_dtype(tensors: dict[str, Tensor]) -> None:
        buffers = [name for name in tensors if name.endswith("e_score_correction_bias")]
        trained = {name: t.to(dtype) for name, t in tensors.items() if name not in buffers}
        tensors.update(trained)

    model = copy_with(deep_models[family], tmp_path / "model", in_dtype)
    set_config_field(model, dtype=str(dtype).removeprefix("torch."))
    assert_same(there_and_back(model, tmp_path), weights(model))
    assert config_of(tmp_path / "back") == config_of(model)
    for name, text in COMPANIONS.items():
        assert (tmp_path / "back" / name).read_text() == text


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_draft_layers_are_kept_as_config_json_counts_them(
    deep_models: Models, tmp_path: Path, family: str
) -> None:
    layer = f"model.layers.{config_of(deep_models[family])['num_hidden_layers']}"
    draft = {
        f"{layer}.eh_proj.weight": torch.randn(32, 64),
        f"{layer}.embed_tokens.weight": torch.randn(97, 32),
        f"{layer}.mlp.gate.e_score_correction_bias": torch.randn(8),
    }

    model = copy_with(deep_models[family], tmp_path / "model", lambda ts: ts.update(draft))
    set_config_field(model, num_nextn_predict_layers=1)
    assert_same(there_and_back(model, tmp_path), weights(deep_models[family]) | draft)
    assert config_of(tmp_path / "back")["num_nextn_predict_layers"] == 1


def config_of(model: Path) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads((model / "config.json").read_text())
    return fields


def test_an_output_layer_stored_beside_the_tied_embedding_is_dropped(
    deep_models: Models, tmp_path: Path
) -> None:
    def untie(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    model = copy_with(deep_models["llama"], tmp_path / "model", untie)
    assert_same(there_and_back(model, tmp_path), weights(deep_models["llama"]))


def test_weights_are_cast_where_another_dtype_is_asked_for(
    deep_models: Models, tmp_path: Path
) -> None:
    model = copy_with(deep_models["qwen3"], tmp_path / "model")
    set_config_field(model, torch_dtype="float32")  # both spellings
    run_convert(model, tmp_path / "megatron", dtype="bfloat16")
    run_convert(tmp_path / "megatron", tmp_path / "back", dtype="float32")
    cast = {name: t.bfloat16().float() for name, t in weights(deep_models["qwen3"]).items()}
    assert_same(weights(tmp_path / "back"), cast)
    kept = config_of(tmp_path / "megatron" / "hf")
    assert kept["dtype"] == kept["torch_dtype"] == "bfloat16"
    assert config_of(tmp_path / "back")["dtype"] == "float32"


def test_weights_beyond_the_limit_are_divided_over_files(
    deep_models: Models, tmp_path: Path
) -> None:
    expected = weights(deep_models["qwen2"])
    done = run_convert(deep_models["qwen2"], tmp_path / "megatron", max_file_bytes=40_000)
    pieces = sorted(path.name for path in (tmp_path / "megatron").glob("*.distcp"))
    assert done.num_files == len(pieces) > 3
    assert pieces[:3] == ["__0_0.distcp", "__1_0.distcp", "__2_0.distcp"]
    done = run_convert(tmp_path / "megatron", tmp_path / "back", max_file_bytes=40_000)
    files = sorted((tmp_path / "back").glob("*.safetensors"))
    assert done.num_files == len(files) > 3
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    for file in files:
        assert sum(tensor.nbytes for tensor in load_file(file).values()) <= 40_000
    read = load_reference("qwen2", tmp_path / "back").state_dict()  # by the index
    assert_same({name: read[name] for name in expected}, expected)
    assert_same(there_and_back(tmp_path / "back", tmp_path / "again"), expected)


def test_a_checkpoint_with_another_padding_of_the_vocabulary_is_read(
    deep_models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        for module in (hf_weights, weight_table):
            patched.setattr(module, "padded_vocab_size", lambda vocab_size, tensor: 100)
        run_convert(deep_models["qwen2"], tmp_path / "megatron")
    run_convert(tmp_path / "megatron", tmp_path / "back")
    assert_same(weights(tmp_path / "back"), weights(deep_models["qwen2"]))


def test_progress_counts_the_tensors_and_bytes_of_the_target(
    deep_models: Models, tmp_path: Path
) -> None:
    reports: list[tuple[int, int]] = []
    conversion = run_convert(
        deep_models["qwen2"],
        tmp_path / "megatron",
        dtype="bfloat16",
        report=lambda done, total: reports.append((done, total)),
    )
    # In each layer 2 norms, 4 + 3 matrices, 3 biases; embedding, final norm, output layer.
    num_tensors = 4 * 12 + 3
    num_bytes = sum(2 * tensor.numel() for tensor in weights(deep_models["qwen2"]).values())
    assert (conversion.num_tensors, conversion.num_bytes) == (num_tensors, num_bytes)
    assert {total for _, total in reports} == {num_bytes}
    assert (reports[0][0], reports[-1][0]) == (2 * 97 * 32, num_bytes)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def loaded(
    request: pytest.FixtureRequest, deep_models: Models, converted: Models, saved: Path
) -> Results:
    """Weights that each layout loaded from the converted checkpoints; each saves into ``saved``."""
    cases = chosen(request)
    checkpoints = {name: converted[name] for _, name in cases}
    return by_rank(run_conversions, cases, deep_models, checkpoints, saved)


@pytest.mark.exhaustive
@pytest.mark.distributed
@in_every_case(CASES)
def test_megatron_loads_a_converted_model_and_what_it_saves_becomes_what_it_exports(
    deep_models: Models, loaded: Results, saved: Path, tmp_path: Path, case: Case
) -> None:
    original, run = weights(deep_models[case.family]), saved / str(case)
    assert_same(loaded[str(case)][0], original)
    run_convert(run / "checkpoints" / "step_1", tmp_path / "hf")
    for path in (run / "export").iterdir():
        assert (tmp_path / "hf" / path.name).read_bytes() == path.read_bytes(), path.name
    trained = {n: 1.5 * t for n, t in original.items() if not n.endswith("e_score_correction_bias")}
    assert_same(weights(tmp_path / "hf"), original | trained)


@pytest.mark.distributed
@in_every_case(cases_of(("qwen3",), "one rank"))
def test_layers_that_are_stored_one_by_one_are_read(
    deep_models: Models, loaded: Results, saved: Path, tmp_path: Path, case: Case
) -> None:
    assert loaded[str(case)]
    model = deep_models[case.family]
    run_convert(saved / "layer by layer", tmp_path / "hf", hf_dir=model)
    original = weights(model)
    assert_same(weights(tmp_path / "hf"), {name: 1.5 * t for name, t in original.items()})


def _tensor_bytes() -> int:
    """Memory of all tensors of this process."""
    tensors = [found for found in gc.get_objects() if issubclass(type(found), Tensor)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def test_memory_holds_one_parameter_and_one_file_whatever_the_model_weighs(
    deep_models: Models, tmp_path: Path
) -> None:
    peak_bytes = [0, 0]
    sources = (deep_models["qwen2"], tmp_path / "megatron")
    for number, (source, target) in enumerate(pairwise((*sources, tmp_path / "back"))):
        gc.collect()
        before = _tensor_bytes()

        def watch(*_: int, number: int = number, before: int = before) -> None:
            peak_bytes[number] = max(peak_bytes[number], _tensor_bytes() - before)

        run_convert(source, target, max_file_bytes=40_000, report=watch)
    # The largest parameter, the output layer, has 97 rows of 32 channels, padded to 128: 16,384
    # bytes; a second copy may be on its way from or to its file. All weigh 149,888.
    assert 12_000 < peak_bytes[0] < 2 * 16_384
    assert 40_000 < peak_bytes[1] < 40_000 + 2 * 16_384


@pytest.mark.parametrize("kind", ["model", "checkpoint"])
def test_a_full_disk_is_reported_and_leaves_nothing(
    deep_models: Models, converted: Models, tmp_path: Path, kind: str
) -> None:
    source = {"model": deep_models, "checkpoint": converted}[kind]["qwen2"]
    with limited(4096), pytest.raises(OSError, match=r"^[^\n]*File too large[^\n]*$"):
        run_convert(source, tmp_path / "target")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("target", [".", "..", "x/.."])
def test_a_target_needs_a_name_of_its_own(deep_models: Models, target: str) -> None:
    with pytest.raises(ValueError, match=f"^{target}: must end in a name of its own"):
        run_convert(deep_models["qwen3"], Path(target))


@pytest.mark.slow
def test_the_command_says_what_it_wrote(deep_models: Models, tmp_path: Path) -> None:
    target = tmp_path / "megatron"
    arguments = ["convert", str(deep_models["qwen3"]), str(target), "--dtype", "bfloat16"]
    for options, files in (["--max-file-gb", "2e-5"], "6 files"), (["--force"], "1 file"):
        result = run([*arguments, *options])
        assert result.returncode == 0, result.stderr
        assert f"wrote {target} (Megatron): 46 tensors, " in result.stdout
        assert f" bfloat16, {files}, " in result.stdout
        assert result.stderr == ""
