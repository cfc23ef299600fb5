"""The policy against transformers: on one rank, and on two in every kind of parallelism."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed_launch import run_ranks
from tests.policy import parity_ranks
from tests.policy.tiny_models import (
    FAMILIES,
    VOCAB_SIZE,
    Problem,
    load_reference,
    make_model,
    make_problems,
    reference_gradients,
    reference_logits,
    set_config_field,
)

pytestmark = pytest.mark.distributed

LAYOUTS = ("single", "tensor", "pipeline", "context", "data")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: make_model(family, root / family) for family in FAMILIES}


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("exports")
    return {"single": root / "one", "tensor": root / "two", "pipeline": root / "two" / "pipeline"}


@pytest.fixture(scope="module")
def one_rank(models: dict[str, Path], exports: dict[str, Path]) -> dict[str, Any]:
    return run_ranks(parity_ranks.single_rank, 1, models, exports["single"])[0]


@pytest.fixture(scope="module")
def two_ranks(models: dict[str, Path], exports: dict[str, Path]) -> list[dict[str, Any]]:
    return run_ranks(parity_ranks.two_ranks, 2, models, exports["tensor"])


@pytest.fixture(scope="module")
def results(one_rank: dict[str, Any], two_ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Results of each layout, one entry per rank."""
    return {
        "single": [one_rank],
        **{layout: [rank[layout] for rank in two_ranks] for layout in LAYOUTS[1:]},
    }


def problems_of(layout: str, rank: int) -> list[Problem]:
    """What a rank of the layout has computed."""
    if layout == "context":
        problems = make_problems(pad_to_multiple=4, sequence_multiple=4)
        return [problem.part(rank, 2) for problem in problems]
    return make_problems()[rank::2] if layout == "data" else make_problems()


def whole_problems(layout: str) -> list[Problem]:
    """The problems of all ranks together."""
    if layout == "context":
        return make_problems(pad_to_multiple=4, sequence_multiple=4)
    return make_problems()


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float(((actual - expected).norm() / expected.norm()).detach())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_equal_those_of_transformers(
    results: dict[str, Any], models: dict[str, Path], layout: str, family: str
) -> None:
    model = load_reference(family, models[family])
    with_logits = list(enumerate(results[layout]))
    if layout == "pipeline":
        assert with_logits.pop(0)[1][family]["logits"] == []
    for rank, result in with_logits:
        own = problems_of(layout, rank)
        assert len(result[family]["logits"]) == len(own)
        whole = whole_problems(layout) if layout == "context" else own
        for logits_NV, problem, reference in zip(result[family]["logits"], own, whole, strict=True):
            expected_NV = reference_logits(model, reference)
            if layout == "context":
                expected_NV = expected_NV[problem.micro_batch.target_T]  # its rows of the whole
            assert expected_NV.std() > 0.5
            assert (logits_NV - expected_NV).abs().max() < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_equal_those_of_transformers_summed_over_data_parallel_ranks(
    results: dict[str, Any], models: dict[str, Path], layout: str, family: str
) -> None:
    expected = reference_gradients(load_reference(family, models[family]), make_problems())
    for result in results[layout][: 1 if layout == "pipeline" else None]:
        gradients = result[family]["gradients"]
        assert gradients.keys() == expected.keys()
        for name, gradient in expected.items():
            # A shift of all keys hardly moves a softmax: a small rest of large terms.
            tolerance = 5e-5 if name.endswith("k_proj.bias") else 1e-5
            assert relative_error(gradients[name], gradient) < tolerance, name


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_that_layers_add_up_themselves_are_those_of_autograd(
    one_rank: dict[str, Any], two_ranks: list[dict[str, Any]], family: str
) -> None:
    expected = one_rank[family]["gradients"]
    for rank in (one_rank, *two_ranks):
        accumulated = rank["accumulated"][family]
        # Two micro-batches through two layers of four products each, and the output layer.
        assert accumulated["products"] == 18
        assert accumulated["gradients"].keys() == expected.keys()
        for name, gradient in expected.items():
            tolerance = 5e-5 if name.endswith("k_proj.bias") else 1e-5
            assert relative_error(accumulated["gradients"][name], gradient) < tolerance, name


@pytest.mark.parametrize("family", FAMILIES)
def test_two_data_parallel_ranks_have_the_gradients_of_one(
    results: dict[str, Any], family: str
) -> None:
    (single,) = results["single"]
    for result in results["data"]:
        for name, gradient in single[family]["gradients"].items():
            assert relative_error(result[family]["gradients"][name], gradient) < 1e-6, name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradient_norm_is_that_of_the_whole_model_on_every_rank(
    results: dict[str, Any], models: dict[str, Path], layout: str, family: str
) -> None:
    gradients = reference_gradients(load_reference(family, models[family]), make_problems())
    norm = math.sqrt(
        sum(float(gradient.double().square().sum()) for gradient in gradients.values())
    )
    for result in results[layout]:
        assert result[family]["step"].applied
        assert result[family]["step"].grad_norm == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_reports_come_back_for_each_micro_batch(results: dict[str, Any], layout: str) -> None:
    tokens = [[int(s["tokens"]) for s in rank["qwen2"]["sums"]] for rank in results[layout]]
    # 6 and 13 tokens, the second padded to 14.
    expected = {
        "single": [[6, 14]],
        "tensor": [[6, 14]] * 2,
        "pipeline": [[], [6, 14]],
        "context": [[6, 8]] * 2,  # 4 + 4 + 4 and 12 + 4, on two ranks
        "data": [[6], [14]],
    }
    assert tokens == expected[layout]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", ["single", "tensor", "pipeline"])
@pytest.mark.parametrize("kind", ["", "_in_files"])
def test_export_gives_back_the_weights_bit_by_bit(
    results: dict[str, Any],
    models: dict[str, Path],
    exports: dict[str, Path],
    layout: str,
    family: str,
    kind: str,
) -> None:
    exported = exports[layout] / (family + kind)
    expected = parity_ranks.load_all(models[family])
    tensors = parity_ranks.load_all(exported)
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    assert (exported / "tokenizer_config.json").read_bytes() == (
        models[family] / "tokenizer_config.json"
    ).read_bytes()
    assert (exported / "generation_config.json").is_file()
    assert not list(exports[layout].glob(".*"))
    reloaded = load_reference(family, exported).state_dict()
    assert all(torch.equal(reloaded[name], expected[name]) for name in expected)


GENERATE = """
import sys, torch
from transformers import AutoModelForCausalLM
for directory in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.generation_config.eos_token_id = None  # the model is random
    tokens = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=8, do_sample=False)
    print(*tokens[0].tolist())
"""


def test_an_exported_model_generates_with_transformers_alone(
    one_rank: dict[str, Any], models: dict[str, Path], exports: dict[str, Path]
) -> None:
    directories = [exports["single"] / family for family in FAMILIES]
    command = [sys.executable, "-c", GENERATE, *map(str, directories)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stderr
    generated = [[int(token) for token in line.split()] for line in result.stdout.splitlines()]
    assert generated == [_greedy(load_reference(family, models[family])) for family in FAMILIES]


def _greedy(model: Any) -> list[int]:
    tokens = [1, 2, 3]
    for _ in range(8):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens


def test_large_exports_are_divided_over_files_with_an_index(
    results: dict[str, Any], exports: dict[str, Path]
) -> None:
    directory = exports["tensor"] / "qwen2_in_files"
    files = sorted(path.name for path in directory.glob("*.safetensors"))
    assert len(files) > 2
    assert all((directory / name).stat().st_size < 22_000 for name in files)
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(files)
    tensors = parity_ranks.load_all(directory)
    assert index["metadata"]["total_size"] == sum(t.numel() * 4 for t in tensors.values())


def test_a_model_in_several_files_loads(one_rank: dict[str, Any], models: dict[str, Path]) -> None:
    expected = parity_ranks.load_all(models["qwen2"])
    assert all(torch.equal(one_rank["from_files"][name], expected[name]) for name in expected)


def test_learning_rate_0_leaves_every_bit_of_the_weights(one_rank: dict[str, Any]) -> None:
    run = one_rank["lr_zero"]
    assert run["step"].applied
    assert run["step"].grad_norm > 0
    assert run["num_updates"] == 1
    assert all(torch.equal(run["after"][name], run["before"][name]) for name in run["before"])


def test_weight_decay_leaves_norms_and_biases_alone(one_rank: dict[str, Any]) -> None:
    before, after = one_rank["decay"]["before"], one_rank["decay"]["after"]
    for name, weight in before.items():
        # lr 0.1 · weight decay 0.5: a matrix keeps 95 %.
        expected = weight if weight.dim() == 1 else 0.95 * weight
        assert torch.allclose(after[name], expected, rtol=1e-6, atol=0), name


def test_a_gradient_that_is_not_finite_is_reported_and_changes_nothing(
    one_rank: dict[str, Any],
) -> None:
    run = one_rank["non_finite"]
    assert not run["step"].applied
    assert math.isnan(run["step"].grad_norm)
    assert run["num_updates"] == 0
    assert all(torch.equal(run["after"][name], run["before"][name]) for name in run["before"])


def test_the_update_after_a_gradient_that_is_not_finite_is_like_a_first_one(
    one_rank: dict[str, Any],
) -> None:
    after = one_rank["non_finite"]["next"]
    assert after["step"].applied
    assert after["num_updates"] == 1
    # Adam's first update moves a weight by the learning rate (1e-3), whatever its gradient.
    moved = after["after"]["lm_head.weight"] - after["before"]["lm_head.weight"]
    assert moved.abs().max() == pytest.approx(1e-3, rel=1e-2)


def test_bfloat16_logits_are_near_those_in_float32(
    one_rank: dict[str, Any], models: dict[str, Path]
) -> None:
    model = load_reference("qwen2", models["qwen2"])
    for logits_NV, problem in zip(one_rank["bfloat16"]["logits"], make_problems(), strict=True):
        assert logits_NV.dtype is torch.bfloat16
        expected_NV = reference_logits(model, problem)
        assert relative_error(logits_NV[:, :VOCAB_SIZE].float(), expected_NV) < 0.02


def test_bfloat16_trains(one_rank: dict[str, Any]) -> None:
    run = one_rank["bfloat16"]
    assert run["step"].applied
    assert all(tensor.dtype is torch.bfloat16 for tensor in run["after"].values())
    changed = [
        name for name in run["before"] if not torch.equal(run["before"][name], run["after"][name])
    ]
    assert len(changed) > len(run["before"]) / 2


def test_tokens_outside_sequences_are_refused(one_rank: dict[str, Any]) -> None:
    assert "cu_seqlens ends at 5 but the micro-batch has 6 tokens" in one_rank["unpadded"]


def test_an_update_without_micro_batches_is_refused(one_rank: dict[str, Any]) -> None:
    assert one_rank["no_batch"].startswith("AssertionError: forward_backward needs a micro-batch")


def test_sequence_parallel_refuses_what_it_cannot_divide(two_ranks: list[dict[str, Any]]) -> None:
    for rank in two_ranks:
        assert rank["odd_tokens"] == "AssertionError: 13 tokens over 2 ranks"


def test_an_export_that_cannot_be_written_fails_on_every_rank(
    two_ranks: list[dict[str, Any]],
) -> None:
    assert two_ranks[0]["unwritable"].startswith("NotADirectoryError")
    assert two_ranks[1]["unwritable"].startswith("OSError")
    assert all("blocked" in rank["unwritable"] for rank in two_ranks)


def test_bytes_reach_every_rank(two_ranks: list[dict[str, Any]]) -> None:
    for rank in two_ranks:
        assert rank["collectives"]["bytes"]
        assert rank["collectives"]["empty"] == b""


def test_a_flag_on_any_rank_is_seen_by_all(two_ranks: list[dict[str, Any]]) -> None:
    for rank in two_ranks:
        assert rank["collectives"]["any"] == [True, True, False]


def test_a_failure_on_one_rank_is_raised_on_all(two_ranks: list[dict[str, Any]]) -> None:
    for rank in two_ranks:
        assert "No space left on device: '/some/file'" in rank["collectives"]["together"]


def test_all_ranks_learn_the_message_of_the_lowest_that_has_one(
    two_ranks: list[dict[str, Any]],
) -> None:
    for rank in two_ranks:
        assert rank["collectives"]["first"] == ["0", "1", None]


def test_weights_that_do_not_fit_are_named(models: dict[str, Path], tmp_path: Path) -> None:
    def copy(name: str, **config: Any) -> Path:
        shutil.copytree(models["qwen2"], tmp_path / name)
        set_config_field(tmp_path / name, **config)
        return tmp_path / name

    cases = {
        "missing": copy("missing", num_hidden_layers=3, layer_types=None),
        "unexpected": copy("unexpected", tie_word_embeddings=True, num_hidden_layers=1),
        "shape": copy("shape", intermediate_size=50),
        "no_weights": copy("no_weights"),
        "damaged": copy("damaged"),
        "lost_file": copy("lost_file"),
        "lost_tensor": copy("lost_tensor"),
        "odd_index": copy("odd_index"),
    }
    (cases["no_weights"] / "model.safetensors").unlink()
    (cases["damaged"] / "model.safetensors").write_bytes(b"not safetensors")
    index = {"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
    (cases["lost_file"] / "model.safetensors.index.json").write_text(json.dumps(index))
    index = {"weight_map": {"model.norm.bias": "model.safetensors"}}
    (cases["lost_tensor"] / "model.safetensors.index.json").write_text(json.dumps(index))
    (cases["odd_index"] / "model.safetensors.index.json").write_text('{"weight_map": []}')

    (errors,) = run_ranks(parity_ranks.faulty_models, 1, cases)

    assert all(error.startswith("ValueError") for error in errors.values())
    assert "missing model.layers.2.input_layernorm.weight, " in errors["missing"]
    assert "and 7 more" in errors["missing"]  # 12 tensors of a layer, 5 are named
    assert "unexpected model.layers.1.input_layernorm.weight, " in errors["unexpected"]
    assert "lm_head" not in errors["unexpected"]
    assert (
        "model.layers.0.mlp.gate_proj.weight is [48, 32], config.json asks for [50, 32]"
        in errors["shape"]
    )
    assert "neither model.safetensors nor model.safetensors.index.json" in errors["no_weights"]
    assert "damaged/model.safetensors: not a readable safetensors file" in errors["damaged"]
    assert "missing model-00002-of-00002.safetensors" in errors["lost_file"]
    assert "index.json: its files do not hold model.norm.bias" in errors["lost_tensor"]
    assert "index.json: 'weight_map' must be an object, got []" in errors["odd_index"]
