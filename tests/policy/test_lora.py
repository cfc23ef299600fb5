"""Adapters against merged weights and full gradients of transformers, in every layout."""

import json
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from bapo_megatron.config.load import ConfigError
from bapo_megatron.config.megatron import LoraConfig
from bapo_megatron.policy.adapters import check_targets
from bapo_megatron.policy.hf_config import read_hf_config_file
from bapo_megatron.tools.planning.memory import stage_adapters
from tests.distributed_launch import joined, run_ranks
from tests.policy.convert_models import adapter_pairs, copy_with, merge_adapter, weights
from tests.policy.families import FAMILIES, RECURRENT, WITH_EXPERTS
from tests.policy.layouts import (
    BATCHES,
    LR,
    Case,
    Results,
    batches_of,
    by_rank,
    cases_of,
    check_logits,
    chosen,
    in_every_case,
    run_cases,
)
from tests.policy.oracle import Gradients, Oracle
from tests.policy.parity_ranks import build, forward_backward, problems_of
from tests.policy.tiny_models import Lazy, Models, make_model, make_problems
from tests.tools.planning.cases import layout_of

pytestmark = pytest.mark.distributed

LORA = {"rank": 3, "alpha": 6.0}
SCALE = LORA["alpha"] / LORA["rank"]
DIVIDED = tuple(name for name in FAMILIES if name not in RECURRENT)
"""Tensor-parallel ranks do not divide the inputs of recurrences by rows."""
in_every_layout = in_every_case(
    [
        *cases_of(FAMILIES, "one rank, recomputed", "PP 2 × VPP 2"),
        *cases_of(DIVIDED, "TP 2, ETP 1"),
        *cases_of(WITH_EXPERTS, "EP 2"),
        *cases_of(("llama", "deepseek_v3", "qwen3_5_text"), "CP 2"),
        *cases_of(("qwen2",), "TP 2 without SP"),
        *cases_of(("deepseek_v3",), "TP 2", "DP 2, ETP 2"),
    ]
)


@pytest.fixture(scope="module")
def adapters(deep_models: Models, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """PEFT directories with random A and B."""
    root = tmp_path_factory.mktemp("adapters")
    return Lazy(lambda name: write_random_adapter(deep_models[name], root / name))


def write_random_adapter(model: Path, directory: Path) -> Path:
    """Every 2-D weight of a layer but routers has an adapter, under the names of its own."""
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for name, weight in weights(model).items():
        is_router = name.endswith(("gate.weight", "router.weight"))
        if ".layers." in name and name.endswith(".weight") and weight.dim() == 2 and not is_router:
            outputs, inputs = weight.shape
            part = f"base_model.model.{name.removesuffix('.weight')}"
            drawn = torch.randn(LORA["rank"], inputs, generator=generator)
            tensors[f"{part}.lora_A.weight"] = 0.2 * drawn
            drawn = torch.randn(outputs, LORA["rank"], generator=generator)
            tensors[f"{part}.lora_B.weight"] = 0.2 * drawn
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": LORA["rank"], "lora_alpha": LORA["alpha"]}
    targets = sorted({name.split(".")[-3] for name in tensors})
    (directory / "adapter_config.json").write_text(
        json.dumps({**fields, "target_modules": targets})
    )
    return directory


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exports")


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest,
    deep_models: Models,
    adapters: dict[str, Path],
    exports: Path,
) -> Results:
    cases = chosen(request)
    configs = {name: LoraConfig(**LORA, path=adapters[name]) for _, name in cases}
    return by_rank(run_cases, cases, deep_models, exports, configs)


@pytest.fixture(scope="module")
def merged(
    deep_models: Models, adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Oracle]:
    """Models of transformers whose weights are W + α/r · B A."""
    root = tmp_path_factory.mktemp("merged")

    def merge(name: str) -> Oracle:
        change = partial(merge_adapter, adapter=adapters[name], scale=SCALE)
        return Oracle.of(name, copy_with(deep_models[name], root / name, change))

    return Lazy(merge)


@pytest.fixture(scope="module")
def expected(merged: dict[str, Oracle], adapters: dict[str, Path]) -> dict[str, Gradients]:
    """By family: dA = α/r · Bᵀ dW and dB = α/r · dW Aᵀ, of the gradients of whole weights."""

    def expect(family: str) -> Gradients:
        both: list[dict[str, Tensor]] = []
        for whole in merged[family].both_gradients(make_problems(batches=batches_of(family))):
            gradients = {}
            for name, (a, b) in adapter_pairs(adapters[family]).items():
                part, dtype = name.removesuffix(".weight"), whole[name].dtype
                part = f"base_model.model.{part}"
                gradients[f"{part}.lora_A.weight"] = SCALE * b.to(dtype).T @ whole[name]
                gradients[f"{part}.lora_B.weight"] = SCALE * whole[name] @ a.to(dtype).T
            both.append(gradients)
        return Gradients.of(*both)

    return Lazy(expect)


@in_every_layout
def test_logits_are_those_of_merged_weights_and_without_adapters_those_of_the_base(
    results: Results, oracles: dict[str, Oracle], merged: dict[str, Oracle], case: Case
) -> None:
    of_ranks, batches = results[str(case)], batches_of(case.family)
    check_logits(of_ranks, merged[case.family], batches)
    check_logits(of_ranks, oracles[case.family], batches, kind="base")


@in_every_layout
def test_gradients_and_their_norm_are_those_of_the_formula(
    results: Results, expected: dict[str, Gradients], case: Case
) -> None:
    of_ranks, gradients = results[str(case)], expected[case.family]
    gradients.check(of_ranks[0]["gradients"])
    assert gradients.norm > 0.1
    for result in of_ranks:
        gradients.check_norm(result["step"].grad_norm)


NUM_KINDS = {"gpt_oss": 1, "qwen3_5_text": 3}
NUM_KINDS |= dict.fromkeys(("glm4_moe", "glm4_moe_lite", "deepseek_v3", "moonlight"), 3)
NUM_KINDS |= dict.fromkeys(("qwen3_next", "qwen3_5_moe_text", "nemotron_h"), 4)
"""Kinds of layers with adapters: attention, recurrence, MLP, experts; mostly two."""


def expected_metrics(model: Path, adapter: Path) -> dict[str, float]:
    """The norms of A, B and α/r · B A over that of W, by kind of layer, from whole matrices."""
    squares: dict[str, Tensor] = {}
    base = weights(model)
    for name, (a, b) in adapter_pairs(adapter).items():
        linear = name.split(".")[-2]
        mixer = "recurrence" if linear.startswith(("in_proj", "out_proj")) else "attention"
        is_mlp = linear in ("gate_proj", "up_proj", "down_proj")
        kind = "experts" if ".experts." in name else "mlp" if is_mlp else mixer
        a, b, w = (tensor.double() for tensor in (a, b, base[name]))
        norms = torch.stack([part.square().sum() for part in (a, b, SCALE * b @ a, w)])
        squares[kind] = squares.get(kind, torch.zeros(())) + norms
    return {
        f"lora/{kind}/{name}": float(value)
        for kind, (a, b, change, w) in squares.items()
        for name, value in (
            ("a_norm", a.sqrt()),
            ("b_norm", b.sqrt()),
            ("change_ratio", (change / w).sqrt()),
        )
    }


@in_every_layout
def test_metrics_are_the_norms_of_whole_matrices_on_every_rank(
    results: Results, deep_models: Models, adapters: dict[str, Path], case: Case
) -> None:
    expected = expected_metrics(deep_models[case.family], adapters[case.family])
    assert len(expected) == 3 * NUM_KINDS.get(case.family, 2)
    for result in results[str(case)]:
        assert result["metrics"] == pytest.approx(expected, rel=1e-12)  # float64


@in_every_layout
def test_exports_hold_merged_weights_and_the_trained_adapters_alone(
    results: Results,
    exports: Path,
    deep_models: Models,
    adapters: dict[str, Path],
    case: Case,
) -> None:
    (layout, family), root = case, exports / str(case)
    of_ranks, base = results[str(case)], weights(deep_models[family])
    whole, start = weights(root / "model"), adapter_pairs(adapters[family])
    for name, weight in base.items():
        expected = weight
        if name in start:
            a, b = start[name]
            expected = weight + SCALE * b @ a
        assert (whole[name] - expected).abs().max() <= (1e-6 if name in start else 0.0), name
    after = adapter_pairs(root / "adapter")
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
    assert sum(result["trained"] for result in of_ranks) >= sum(
        a.numel() + b.numel() for a, b in start.values()
    )
    hf = read_hf_config_file(deep_models[family] / "config.json")
    for rank, result in enumerate(of_ranks):
        stage = rank if "pipeline" in layout.sizes else 0
        planned = stage_adapters(hf, LoraConfig(**LORA), layout_of(layout.sizes), stage)
        assert result["trained"] == sum(planned)


def train_some(models: dict[str, Path], root: Path) -> dict[str, Any]:
    """Norms of three updates, and exported adapters, on two ranks."""
    overlapping = {"overlap_grad_reduce": True, "overlap_param_gather": True}
    runs: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
        "plain": ("qwen2", {}, {}),
        "overlap": ("qwen2", {}, {"megatron": overlapping}),
        "bfloat16": ("qwen2", {}, {"dtype": "bfloat16"}),
        # Only the last stage has attention, and so adapters.
        "a stage without": (
            "qwen3_5_text",
            {"pipeline": 2, "virtual_pipeline": 1},
            {"lora": LoraConfig(**LORA, targets=("q_proj",))},
        ),
        "parts of fused weights": (
            *("qwen2", {"tensor": 2}),
            {"lora": LoraConfig(**LORA, targets=("k_proj", "up_proj", "down_proj"))},
        ),
    }
    results: dict[str, Any] = {}
    for name, (family, sizes, options) in runs.items():
        with joined(**sizes) as groups:
            config = {"lora": LoraConfig(**LORA), "lr": 1e-2, **options}
            state = build(models[family], groups, **config)
            lora = state.model.lora
            assert lora is not None
            new = {("lora_B" in entry.megatron, bool(p.any())) for entry, p in lora.parameters()}
            norms = []
            for _ in range(3):
                forward_backward(state, problems_of(groups, BATCHES))
                norms.append(state.optimizer_step().grad_norm)
            state.model.export_adapter(root / name)
            results[name] = {
                "new": new,
                "norms": norms,
                "dtypes": {str(p.dtype) for _, p in lora.parameters()},
                "adapters": len(lora.adapters),
                "metrics": state.model.adapter_metrics(),
            }
    return results


@pytest.mark.exhaustive
def test_updates_reach_the_next_pass_in_every_kind_of_optimizer(
    deep_models: Models, tmp_path: Path
) -> None:
    # A gated delta net and attention, one on each stage.
    two_layers = make_model("qwen3_5_text", tmp_path / "model")
    first, second = run_ranks(
        train_some, 2, {"qwen2": deep_models["qwen2"], "qwen3_5_text": two_layers}, tmp_path
    )
    assert first["plain"]["new"] == {(False, True), (True, False)}  # B = 0: nothing is added
    plain = first["plain"]["norms"]
    assert len(set(plain)) == 3
    assert first["overlap"]["norms"] == pytest.approx(plain, rel=1e-5)
    assert first["bfloat16"]["norms"] == pytest.approx(plain, rel=0.1)
    assert first["bfloat16"]["dtypes"] == {"torch.float32"}
    assert [rank["a stage without"]["adapters"] for rank in (first, second)] == [0, 1]
    assert len(adapter_pairs(tmp_path / "a stage without")) == 1
    for name in ("a stage without", "parts of fused weights"):
        model = two_layers if name == "a stage without" else deep_models["qwen2"]
        expected = expected_metrics(model, tmp_path / name)
        for rank in (first, second):
            assert rank[name]["metrics"] == pytest.approx(expected, rel=1e-12)
    whole, rounded = adapter_pairs(tmp_path / "plain"), adapter_pairs(tmp_path / "bfloat16")
    for name, (_, b) in whole.items():
        assert torch.equal(adapter_pairs(tmp_path / "overlap")[name][1].sign(), b.sign())
        assert (rounded[name][1] - b).abs().mean() < 0.3 * b.abs().mean()


@pytest.mark.parametrize(
    ("family", "targets", "tensor", "message"),
    [
        ("qwen3_5_text", (), 1, ""),
        ("qwen3_5_text", ("q_proj", "out_proj"), 2, ""),
        ("qwen3_5_text", (), 2, "in_proj_qkv, in_proj_z, with parallel.tensor = 2; name"),
        ("qwen3_next", (), 2, "in_proj_ba, in_proj_qkvz, with parallel.tensor = 2"),
        ("qwen2", ("q_proj", "down_proj"), 2, ""),
        ("qwen2", ("qkv_proj",), 1, "down_proj, gate_proj, k_proj, .* got qkv_proj; choose"),
    ],
)
def test_targets_that_a_model_lacks_or_ranks_would_divide_by_parts_are_refused(
    deep_models: Models, family: str, targets: tuple[str, ...], tensor: int, message: str
) -> None:
    hf = read_hf_config_file(deep_models[family] / "config.json")
    refused = pytest.raises(ConfigError, match=rf"^model\.lora\.targets: .* {message}")
    with refused if message else nullcontext():
        check_targets(hf, LoraConfig(rank=1, targets=targets), tensor)
