"""Adapters against PEFT and against full gradients of transformers, in every layout."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bapo_megatron.config.load import ConfigError
from bapo_megatron.config.megatron import LoraConfig
from bapo_megatron.policy.adapters import check_targets
from bapo_megatron.policy.hf_config import read_hf_config_file
from bapo_megatron.tools.planning.memory import stage_adapters
from tests.distributed_launch import run_ranks
from tests.policy.convert_models import weights
from tests.policy.layouts import BATCHES, LR, Results, by_rank, check_logits, run_layouts
from tests.policy.lora_ranks import ALL, DENSE, LAYOUTS, LORA, train_some, untrained_logits
from tests.policy.oracle import Gradients, Oracle
from tests.policy.tiny_models import load_reference, make_model, make_problems, reference_logits
from tests.tolerances import assert_within
from tests.tools.planning.cases import layout_of

pytestmark = pytest.mark.distributed

SCALE = LORA["alpha"] / LORA["rank"]
CASES = [(layout, family) for layout in LAYOUTS for family in layout.models or ALL]
in_every_layout = pytest.mark.parametrize(("layout", "family"), CASES, ids=str)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: make_model(name, root / name, num_hidden_layers=4) for name in ALL}


@pytest.fixture(scope="module")
def adapters(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """PEFT directories with random A and B."""
    root = tmp_path_factory.mktemp("adapters")
    for family, directory in models.items():
        (root / family).mkdir()
        write_random_adapter(directory, root / family)
    return {family: root / family for family in models}


def write_random_adapter(model: Path, directory: Path) -> None:
    """Every 2-D weight of a layer but routers has an adapter, under the names of its own."""
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for name, weight in weights(model).items():
        if ".layers." in name and weight.dim() == 2 and not name.endswith("gate.weight"):
            outputs, inputs = weight.shape
            part = f"base_model.model.{name.removesuffix('.weight')}"
            drawn = torch.randn(LORA["rank"], inputs, generator=generator)
            tensors[f"{part}.lora_A.weight"] = 0.2 * drawn
            drawn = torch.randn(outputs, LORA["rank"], generator=generator)
            tensors[f"{part}.lora_B.weight"] = 0.2 * drawn
    save_file(tensors, directory / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": LORA["rank"], "lora_alpha": LORA["alpha"]}
    targets = sorted({name.split(".")[-3] for name in tensors})
    (directory / "adapter_config.json").write_text(
        json.dumps({**fields, "target_modules": targets})
    )


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exports")


@pytest.fixture(scope="module")
def results(models: dict[str, Path], adapters: dict[str, Path], exports: Path) -> Results:
    configs = {family: LoraConfig(**LORA, path=path) for family, path in adapters.items()}
    return by_rank(run_layouts, LAYOUTS, models, exports, BATCHES, configs)


def pairs(adapter: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """A and B of each linear, by the name of its weight."""
    tensors = load_file(adapter / "adapter_model.safetensors")
    return {
        name.removeprefix("base_model.model.").replace(".lora_A", ""): (
            a,
            tensors[name.replace(".lora_A", ".lora_B")],
        )
        for name, a in tensors.items()
        if ".lora_A." in name
    }


@pytest.fixture(scope="module")
def merged(
    models: dict[str, Path], adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Oracle]:
    """Models of transformers whose weights are W + α/r · B A."""
    root = tmp_path_factory.mktemp("merged")
    references = {}
    for family, directory in models.items():
        changed = root / family
        make_model(family, changed, num_hidden_layers=4)  # for the files beside the weights
        tensors = dict(weights(directory))
        for name, (a, b) in pairs(adapters[family]).items():
            tensors[name] = tensors[name].double() + SCALE * b.double() @ a.double()
        save_file(tensors, changed / "model.safetensors", metadata={"format": "pt"})
        references[family] = Oracle.of(family, changed)
    return references


@pytest.fixture(scope="module")
def base(models: dict[str, Path]) -> dict[str, Oracle]:
    return {family: Oracle.of(family, directory) for family, directory in models.items()}


@pytest.fixture(scope="module")
def expected(merged: dict[str, Oracle], adapters: dict[str, Path]) -> dict[str, Gradients]:
    """By family: dA = α/r · Bᵀ dW and dB = α/r · dW Aᵀ, of the gradients of whole weights."""
    problems = make_problems(batches=BATCHES)
    expected = {}
    for family, oracle in merged.items():
        both: list[dict[str, Tensor]] = []
        for whole in oracle.both_gradients(problems):
            gradients = {}
            for name, (a, b) in pairs(adapters[family]).items():
                part, dtype = name.removesuffix(".weight"), whole[name].dtype
                part = f"base_model.model.{part}"
                gradients[f"{part}.lora_A.weight"] = SCALE * b.to(dtype).T @ whole[name]
                gradients[f"{part}.lora_B.weight"] = SCALE * whole[name] @ a.to(dtype).T
            both.append(gradients)
        expected[family] = Gradients.of(*both)
    return expected


@in_every_layout
def test_logits_are_those_of_merged_weights_and_without_adapters_those_of_the_base(
    results: Results,
    base: dict[str, Oracle],
    merged: dict[str, Oracle],
    layout: Any,
    family: str,
) -> None:
    of_ranks = results[f"{layout.name}, {family}"]
    check_logits(of_ranks, merged[family])
    check_logits(of_ranks, base[family], kind="base")


@in_every_layout
def test_gradients_and_their_norm_are_those_of_the_formula(
    results: Results, expected: dict[str, Gradients], layout: Any, family: str
) -> None:
    of_ranks = results[f"{layout.name}, {family}"]
    expected[family].check(of_ranks[0]["gradients"])
    assert expected[family].norm > 0.1
    for result in of_ranks:
        expected[family].check_norm(result["step"].grad_norm)


@in_every_layout
def test_exports_hold_merged_weights_and_the_trained_adapters_alone(
    results: Results,
    exports: Path,
    models: dict[str, Path],
    adapters: dict[str, Path],
    layout: Any,
    family: str,
) -> None:
    root, base = exports / f"{layout.name}, {family}", weights(models[family])
    whole, start = weights(root / "model"), pairs(adapters[family])
    for name, weight in base.items():
        expected = weight
        if name in start:
            a, b = start[name]
            expected = weight + SCALE * b @ a
        assert (whole[name] - expected).abs().max() <= (1e-6 if name in start else 0.0), name
    after = pairs(root / "adapter")
    assert after.keys() == start.keys()
    steps = torch.cat(
        [
            (new - old).flatten()
            for name, parts in after.items()
            for new, old in zip(parts, start[name], strict=True)
        ]
    )
    assert steps.abs().max() <= 1.001 * LR  # Adam's first step
    assert (steps != 0).float().mean() > 0.5  # some experts have no tokens
    of_ranks = results[f"{layout.name}, {family}"]
    assert sum(result["trained"] for result in of_ranks) >= sum(
        a.numel() + b.numel() for a, b in start.values()
    )
    hf = read_hf_config_file(models[family] / "config.json")
    for rank, result in enumerate(of_ranks):
        stage = rank if "pipeline" in layout.sizes else 0
        planned = stage_adapters(hf, LoraConfig(**LORA), layout_of(layout.sizes), stage)
        assert result["trained"] == sum(planned)


@pytest.mark.parametrize("family", DENSE)
def test_peft_computes_the_same_with_what_is_written_and_has_the_same_gradients(
    merged: dict[str, Oracle],
    expected: dict[str, Gradients],
    models: dict[str, Path],
    adapters: dict[str, Path],
    exports: Path,
    family: str,
) -> None:
    from peft import PeftModel

    problems = make_problems(batches=BATCHES)
    model = PeftModel.from_pretrained(
        load_reference(family, models[family]), adapters[family], is_trainable=True
    )
    # Our logits and gradients are compared with the same float64 above.
    for problem in problems:
        expected_NV, bound = merged[family].logits(problem)
        actual_NV = reference_logits(model, problem)
        assert_within((actual_NV.detach() - expected_NV).abs().max(), bound, "logits")
        problem.loss(actual_NV).backward()
    expected[family].check(
        {
            name.replace(".default.", "."): parameter.grad
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
    )
    # What is written after the update is read back to the same adapters.
    written = exports / f"one rank, {family}" / "adapter"
    again = PeftModel.from_pretrained(load_reference(family, models[family]), written)
    saved = load_file(written / "adapter_model.safetensors")
    values = {n.replace(".default.", "."): v for n, v in again.named_parameters() if "lora_" in n}
    assert values.keys() == saved.keys()
    assert all(torch.equal(values[name], value) for name, value in saved.items())


def test_updates_reach_the_next_pass_in_every_kind_of_optimizer(
    models: dict[str, Path], tmp_path: Path
) -> None:
    results = run_ranks(train_some, 2, {**models, "qwen3_5_text": two_layers(tmp_path)}, tmp_path)
    first, second = results
    plain = first["plain"]["norms"]
    assert len(set(plain)) == 3
    assert first["overlap"]["norms"] == pytest.approx(plain, rel=1e-5)
    assert first["bfloat16"]["norms"] == pytest.approx(plain, rel=0.1)
    assert first["bfloat16"]["dtypes"] == {"torch.float32"}
    assert [rank["a stage without"]["adapters"] for rank in (first, second)] == [0, 1]
    assert len(pairs(tmp_path / "a stage without")) == 1
    whole, rounded = pairs(tmp_path / "plain"), pairs(tmp_path / "bfloat16")
    for name, (_, b) in whole.items():
        assert torch.equal(pairs(tmp_path / "overlap")[name][1].sign(), b.sign())
        assert (rounded[name][1] - b).abs().mean() < 0.3 * b.abs().mean()


def two_layers(root: Path) -> Path:
    """A gated delta net and attention, one on each stage."""
    return make_model("qwen3_5_text", root / "model")


def test_new_adapters_change_nothing_bit_for_bit(models: dict[str, Path]) -> None:
    results = run_ranks(untrained_logits, 1, models)[0]
    for family in models:
        for dtype in ("float32", "bfloat16"):
            new, none = (results[f"{family}, {kind}, {dtype}"] for kind in ("new", "none"))
            for new_NV, none_NV in zip(new, none, strict=True):
                assert torch.equal(new_NV, none_NV)


def test_inputs_of_delta_nets_that_ranks_would_divide_by_parts_are_refused(
    models: dict[str, Path],
) -> None:
    hf = read_hf_config_file(models["qwen3_5_text"] / "config.json")
    check_targets(hf, LoraConfig(rank=1), 1)
    check_targets(hf, LoraConfig(rank=1, targets=("q_proj", "out_proj")), 2)
    with pytest.raises(
        ConfigError,
        match=r"^model\.lora\.targets: .* in_proj_qkv, in_proj_z, with parallel.tensor = 2; name",
    ):
        check_targets(hf, LoraConfig(rank=1), 2)
    hf = read_hf_config_file(models["qwen3_next"] / "config.json")
    with pytest.raises(ConfigError, match=r"in_proj_ba, in_proj_qkvz, with parallel.tensor = 2"):
        check_targets(hf, LoraConfig(rank=1), 2)


def test_unknown_targets_are_refused_with_the_known_ones(models: dict[str, Path]) -> None:
    hf = read_hf_config_file(models["qwen2"] / "config.json")
    check_targets(hf, LoraConfig(rank=1, targets=("q_proj", "down_proj")), 2)
    with pytest.raises(
        ConfigError,
        match=r"^model\.lora\.targets: .* down_proj, gate_proj, k_proj, .* got qkv_proj; choose",
    ):
        check_targets(hf, LoraConfig(rank=1, targets=("qkv_proj",)), 1)
