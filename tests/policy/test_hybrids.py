"""Models with gated delta nets against transformers, on sequences of 1 to 300 tokens."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bapo_megatron.config.load import ConfigError
from bapo_megatron.config.megatron import ParallelConfig
from bapo_megatron.policy.hf_config import check_division, read_hf_config_file
from bapo_megatron.policy.hf_weights import find_tensors, reading_shards
from bapo_megatron.policy.weight_table import weight_table
from tests.distributed_launch import joined, run_ranks
from tests.policy import checkpoint_ranks
from tests.policy.convert_models import assert_same, copy_with, run_convert, weights
from tests.policy.expert_layouts import (
    Layout,
    Results,
    by_rank,
    multiples_of,
    problems_of,
    run_layouts,
)
from tests.policy.oracle import Gradients, Oracle
from tests.policy.parity_ranks import build, forward_backward, hf_gradients, snapshot
from tests.policy.tiny_models import (
    load_reference,
    make_model,
    make_problems,
    make_vision_model,
)
from tests.tolerances import assert_within

pytestmark = [pytest.mark.distributed, pytest.mark.exhaustive]

FAMILIES = ("qwen3_5_text", "qwen3_next", "qwen3_5_moe_text")
"""A dense one, then those with experts."""


def _tokens(length: int) -> tuple[int, ...]:
    return tuple((7 * length + 5 * n * n + n) % 97 for n in range(length))


BATCHES = tuple(
    tuple(map(_tokens, lengths)) for lengths in ((1, 64, 65), (300,), (2, 63, 1, 3), (128, 129, 1))
)
"""Around the borders of the delta rule's chunks."""
LAYOUTS = (
    Layout("one rank", 1),
    Layout("one rank, recomputed", 1, {}, {"recompute": "full"}),
    Layout("TP 2", 2, {"tensor": 2, "sequence": True}),
    Layout("PP 2 × VPP 2", 2, {"pipeline": 2, "virtual_pipeline": 2}),
    Layout("CP 2", 2, {"context": 2}),
    Layout("DP 2", 2),
)
EXPERT_LAYOUTS = (
    Layout("EP 2", 2, {"expert": 2}),
    Layout("TP 2 × EP 2", 2, {"tensor": 2, "sequence": True, "expert_tensor": 1, "expert": 2}),
)
CASES = [
    *((layout, family) for layout in LAYOUTS for family in FAMILIES),
    *((layout, family) for layout in EXPERT_LAYOUTS for family in FAMILIES[1:]),
]
CHECKPOINTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"one rank": {}},
    2: {
        "TP 2": {"tensor": 2},
        "PP 2 × VPP 2": {"pipeline": 2, "virtual_pipeline": 2},
        "CP 2": {"context": 2},
    },
}
SOURCES = {"one rank": [], "TP 2": ["one rank"], "PP 2 × VPP 2": ["TP 2"], "CP 2": ["PP 2 × VPP 2"]}
"""Whose checkpoints a layout continues from, beside its own."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root, sizes = tmp_path_factory.mktemp("models"), {"max_position_embeddings": 512}
    return {f: make_model(f, root / f, num_hidden_layers=4, **sizes) for f in FAMILIES}


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exports")


@pytest.fixture(scope="module")
def results(models: dict[str, Path], exports: Path) -> Results:
    results = by_rank(run_layouts, [*LAYOUTS], models, exports, BATCHES)
    experts = {family: models[family] for family in FAMILIES[1:]}
    return results | by_rank(run_layouts, [*EXPERT_LAYOUTS], experts, exports, BATCHES)


@pytest.fixture(scope="module")
def oracles(models: dict[str, Path]) -> dict[str, Oracle]:
    return {family: Oracle.of(family, path) for family, path in models.items()}


@pytest.fixture(scope="module")
def gradients(oracles: dict[str, Oracle]) -> dict[str, Gradients]:
    problems = make_problems(batches=BATCHES)
    return {family: oracle.gradients(problems) for family, oracle in oracles.items()}


@pytest.mark.parametrize(("layout", "family"), CASES, ids=str)
def test_logits_are_those_of_transformers(
    results: Results, oracles: dict[str, Oracle], layout: Layout, family: str
) -> None:
    compared = 0
    for result in results[f"{layout.name}, {family}"]:
        data_rank, data_size, context_rank, context_size = result["place"]
        multiples = multiples_of(context_size)
        problems = make_problems(0, *multiples, batches=BATCHES)[data_rank::data_size]
        for actual_NV, problem in zip(result["logits"], problems, strict=bool(result["logits"])):
            whole_NV, bound = oracles[family].logits(problem)
            rows = problem.part(context_rank, context_size).micro_batch.target_T
            assert whole_NV.std() > 0.5
            error_NV = actual_NV - whole_NV[rows if context_size > 1 else ...]
            assert_within(error_NV.abs().max(), bound, "logits")
            compared += 1
    assert compared >= len(BATCHES)


@pytest.mark.parametrize(("layout", "family"), CASES, ids=str)
def test_gradients_of_every_tensor_and_their_norm_are_those_of_transformers(
    results: Results, gradients: dict[str, Gradients], layout: Layout, family: str
) -> None:
    ranks = results[f"{layout.name}, {family}"]
    for result in ranks:
        gradients[family].check_norm(result["step"].grad_norm)
    gradients[family].check(ranks[0]["gradients"])


@pytest.mark.parametrize(("layout", "family"), CASES, ids=str)
@pytest.mark.usefixtures("results")
def test_export_gives_back_the_weights_bit_by_bit(
    models: dict[str, Path], exports: Path, layout: Layout, family: str
) -> None:
    assert_same(weights(exports / f"{layout.name}, {family}"), weights(models[family]))


def test_checkpoints_continue_in_any_layout(models: dict[str, Path], tmp_path: Path) -> None:
    results: dict[str, Any] = {}
    for num_ranks, layouts in CHECKPOINTS.items():
        args = (models[FAMILIES[0]], tmp_path, layouts, SOURCES)
        results |= run_ranks(checkpoint_ranks.run_layouts, num_ranks, *args)[0]
    expected = results["one rank"]["weights"]
    runs = [f"{layout} from {source}" for layout, sources in SOURCES.items() for source in sources]
    for run in (*runs, *(f"{name} from {name}" for name in SOURCES)):
        assert len(results[run]["weights"]) == checkpoint_ranks.NUM_UPDATES
        for after, reference in zip(results[run]["weights"], expected, strict=True):
            assert after.keys() == reference.keys()
            for name, weight in reference.items():
                error = (after[name] - weight).abs().max()
                assert_within(error, checkpoint_ranks.TOLERANCE, f"{run}, {name}")
    before, after = expected
    for name in ("A_log", "dt_bias", "conv1d.weight", "in_proj_qkv.weight", "norm.weight"):
        name = f"model.layers.0.linear_attn.{name}"
        assert (after[name] - before[name]).abs().max() > 1e-4, name


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        (
            {"context": 4},
            r"^parallel.context: tensor × context must divide the 2 key heads .* got 4 ",
        ),
        (
            {"tensor": 2, "sequence": True, "context": 2},
            r"^parallel.context: tensor × context must divide the 2 key heads .* = 4;",
        ),
        ({"tensor": 2}, r"^parallel.sequence: must be true for a model with gated delta nets"),
    ],
)
def test_layouts_that_do_not_fit_delta_nets_are_refused(
    models: dict[str, Path], parallel: dict[str, Any], message: str
) -> None:
    hf = read_hf_config_file(models["qwen3_5_text"] / "config.json")
    with pytest.raises(ConfigError, match=message):
        check_division(hf, ParallelConfig(**parallel))


def train_and_export(model: Path, target: Path) -> dict[str, Any]:
    """Logits and gradients, then an export of the weights after an update."""
    with joined() as groups:
        state = build(model, groups)
        problems = problems_of(groups, BATCHES)
        batches = [problem.micro_batch for problem in problems]
        logits = state.model.forward_only(batches, lambda logits_NV, _: logits_NV[:, :97].clone())
        forward_backward(state, problems)
        gradients = hf_gradients(state)
        state.optimizer_step()
        state.model.export_hf(target)
        return {"logits": logits, "gradients": gradients, "weights": snapshot(state)}


def test_the_language_model_of_a_vision_model_trains_and_the_rest_is_exported_as_it_was(
    tmp_path: Path,
) -> None:
    model = make_vision_model(tmp_path / "model")
    trained = run_ranks(train_and_export, 1, model, tmp_path / "export")[0]
    oracle = Oracle.of("qwen3_5", model)
    problems = make_problems(batches=BATCHES)
    for actual_NV, problem in zip(trained["logits"], problems, strict=True):
        expected_NV, bound = oracle.logits(problem)
        assert_within((actual_NV - expected_NV).abs().max(), bound, "logits")
    exact, float32 = (
        {name: gradient for name, gradient in whole.items() if not name.startswith("model.visual.")}
        for whole in oracle.both_gradients(problems)
    )
    Gradients.of(exact, float32).check(trained["gradients"])
    before, after = weights(model), weights(tmp_path / "export")
    kept = {n: t for n, t in before.items() if n.startswith(("mtp.", "model.visual."))}
    assert len(kept) == 22
    assert_same(after, trained["weights"] | kept)
    name = "model.language_model.layers.0.linear_attn.in_proj_qkv.weight"
    assert not torch.equal(after[name], before[name])
    assert type(load_reference("qwen3_5", tmp_path / "export")) is type(oracle.float32)


def test_conversion_keeps_what_is_not_trained(tmp_path: Path) -> None:
    model = make_vision_model(tmp_path / "model")
    run_convert(model, tmp_path / "megatron")
    run_convert(tmp_path / "megatron", tmp_path / "back")
    assert_same(weights(tmp_path / "back"), weights(model))


@pytest.mark.parametrize("size", [1, 2])
def test_experts_that_a_file_has_in_two_tensors_are_read_one_by_one(
    models: dict[str, Path], tmp_path: Path, size: int
) -> None:
    """As published checkpoints of Qwen3.5 with experts have them."""
    model, fused = models["qwen3_5_moe_text"], tmp_path / "fused"

    def fuse(tensors: dict[str, Tensor]) -> None:
        for layer in (f"model.layers.{number}.mlp.experts" for number in range(4)):
            gate, up, down = (
                torch.stack([tensors.pop(f"{layer}.{e}.{kind}_proj.weight") for e in range(8)])
                for kind in ("gate", "up", "down")
            )
            tensors[f"{layer}.gate_up_proj"] = torch.cat((gate, up), dim=1)
            tensors[f"{layer}.down_proj"] = down

    copy_with(model, fused, fuse)
    hf = read_hf_config_file(model / "config.json")
    (files, dtypes), (fused_files, fused_dtypes) = find_tensors(hf, model), find_tensors(hf, fused)
    assert dtypes == fused_dtypes
    with reading_shards(files, hf) as read, reading_shards(fused_files, hf) as read_fused:
        for weight, rank in product(weight_table(hf), range(size)):
            assert torch.equal(read_fused(weight, rank, size), read(weight, rank, size))
