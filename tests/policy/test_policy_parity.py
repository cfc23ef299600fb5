"""The policy against transformers: on one rank, and on two in every kind of parallelism."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.distributed_launch import run_ranks
from tests.policy import parity_ranks
from tests.policy.convert_models import assert_same, weights
from tests.policy.oracle import Gradients, Oracle
from tests.policy.tiny_models import (
    FAMILIES,
    VOCAB_SIZE,
    Models,
    Ranks,
    load_reference,
    make_problems,
    per_expert,
    reference_logits,
)
from tests.tolerances import assert_within

pytestmark = pytest.mark.distributed

LAYOUTS = ("single", "tensor", "pipeline", "context", "data")
Results = dict[str, Ranks]
"""Results of each layout, one entry per rank."""


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Models:
    root = tmp_path_factory.mktemp("exports")
    return {"single": root / "one", "tensor": root / "two", "pipeline": root / "two" / "pipeline"}


@pytest.fixture(scope="module")
def one_rank(models: Models, exports: Models) -> dict[str, Any]:
    return run_ranks(parity_ranks.single_rank, 1, models, exports["single"])[0]


@pytest.fixture(scope="module")
def two_ranks(models: Models, exports: Models) -> Ranks:
    return run_ranks(parity_ranks.two_ranks, 2, models, exports["tensor"])


@pytest.fixture(scope="module")
def results(one_rank: dict[str, Any], two_ranks: Ranks) -> Results:
    layouts = {layout: [rank[layout] for rank in two_ranks] for layout in LAYOUTS[1:]}
    return {"single": [one_rank], **layouts}


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float(((actual - expected).norm() / expected.norm()).detach())


@pytest.fixture(scope="module")
def oracles(models: Models) -> dict[str, Oracle]:
    return {family: Oracle.of(family, models[family]) for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_equal_those_of_transformers(
    results: Results, oracles: dict[str, Oracle], layout: str, family: str
) -> None:
    is_context = layout == "context"
    multiples = (4, 4) if is_context else (2, 1)
    problems = make_problems(0, *multiples)
    expected = [oracles[family].logits(problem) for problem in problems]
    for rank, result in enumerate(results[layout]):
        logits = result[family]["logits"]
        if layout == "pipeline" and rank == 0:
            assert logits == []
            continue
        local = slice(rank, None, 2) if layout == "data" else slice(None)
        assert len(logits) == len(problems[local])
        for actual_NV, problem, (whole_NV, bound) in zip(
            logits, problems[local], expected[local], strict=True
        ):
            # A context rank has some rows of the whole.
            rows = problem.part(rank, 2).micro_batch.target_T if is_context else slice(None)
            assert whole_NV.std() > 0.5
            assert_within((actual_NV - whole_NV[rows]).abs().max(), bound, "logits")


@pytest.fixture(scope="module")
def expected_gradients(oracles: dict[str, Oracle]) -> dict[str, Gradients]:
    """By family, of transformers."""
    return {family: oracle.gradients(make_problems()) for family, oracle in oracles.items()}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_and_their_norm_are_those_of_transformers_on_the_tokens_of_all_ranks(
    results: Results, expected_gradients: dict[str, Gradients], layout: str, family: str
) -> None:
    expected = expected_gradients[family]
    for result in results[layout]:
        assert result[family]["step"].applied
        expected.check_norm(result[family]["step"].grad_norm)
    expected.check(results[layout][0][family]["gradients"])


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_that_layers_add_up_themselves_are_those_of_transformers(
    one_rank: dict[str, Any],
    two_ranks: Ranks,
    expected_gradients: dict[str, Gradients],
    family: str,
) -> None:
    for rank in (one_rank, *two_ranks):
        products = rank["accumulated"][family]["products"]
        # Two micro-batches through two layers of four products each, and the output layer.
        has_experts = family.endswith(("_moe", "_next", "_v3"))
        assert products > 18 if has_experts else products == 18
    for rank_zero in (one_rank, two_ranks[0]):
        expected_gradients[family].check(rank_zero["accumulated"][family]["gradients"])


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        # 6 and 13 tokens, the second padded to 14; 4 + 4 + 4 and 12 + 4 on two context ranks.
        ("single", [[6, 14]]),
        ("tensor", [[6, 14]] * 2),
        ("pipeline", [[], [6, 14]]),
        ("context", [[6, 8]] * 2),
        ("data", [[6], [14]]),
    ],
)
def test_reports_come_back_for_each_micro_batch(
    results: Results, layout: str, expected: list[list[int]]
) -> None:
    tokens = [[int(s["tokens"]) for s in rank["qwen2"]["sums"]] for rank in results[layout]]
    assert tokens == expected


@pytest.mark.usefixtures("results")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", ["single", "tensor", "pipeline"])
@pytest.mark.parametrize("kind", ["", "_in_files"])
def test_export_gives_back_the_weights_bit_by_bit(
    models: Models, exports: Models, layout: str, family: str, kind: str
) -> None:
    exported, expected = exports[layout] / (family + kind), weights(models[family])
    assert_same(weights(exported), expected)
    for name in ("tokenizer_config.json", "generation_config.json"):
        assert (exported / name).read_bytes() == (models[family] / name).read_bytes()
    assert not list(exports[layout].glob(".*"))
    reloaded = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    assert type(reloaded) is type(load_reference(family, models[family]))
    state = per_expert(reloaded.state_dict())
    assert_same({name: state[name] for name in expected}, expected)


def test_large_exports_are_divided_over_files_with_an_index_and_load(
    one_rank: dict[str, Any], models: Models, exports: Models
) -> None:
    directory, expected = exports["single"] / "qwen2_in_files", weights(models["qwen2"])
    files = {path.name for path in directory.glob("*.safetensors")}
    assert len(files) > 2
    assert all((directory / name).stat().st_size < 22_000 for name in files)
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == files
    assert index["metadata"]["total_size"] == sum(t.numel() * 4 for t in expected.values())
    assert_same(one_rank["from_files"], expected)


def test_learning_rate_0_leaves_every_bit_of_the_weights(one_rank: dict[str, Any]) -> None:
    run = one_rank["lr_zero"]
    assert run["step"].applied
    assert run["step"].grad_norm > 0
    assert run["num_updates"] == 1
    assert_same(run["after"], run["before"])


def test_weight_decay_leaves_norms_and_biases_alone(one_rank: dict[str, Any]) -> None:
    before, after = one_rank["decay"]["before"], one_rank["decay"]["after"]
    for name, weight in before.items():
        # lr 0.1 · weight decay 0.5: a matrix keeps 95 %.
        expected = weight if weight.dim() == 1 else 0.95 * weight
        assert torch.allclose(after[name], expected, rtol=1e-6, atol=0), name


def test_a_gradient_that_is_not_finite_changes_nothing_and_the_next_update_is_a_first_one(
    one_rank: dict[str, Any],
) -> None:
    broken, good = one_rank["non_finite"], one_rank["after non_finite"]
    assert (broken["step"].applied, broken["num_updates"]) == (False, 0)
    assert math.isnan(broken["step"].grad_norm)
    assert_same(broken["after"], broken["before"])
    assert (good["step"].applied, good["num_updates"]) == (True, 1)
    # Adam's first update moves a weight by the learning rate (1e-3), whatever its gradient.
    moved = good["after"]["lm_head.weight"] - good["before"]["lm_head.weight"]
    assert moved.abs().max() == pytest.approx(1e-3, rel=1e-2)


def test_bfloat16_logits_are_near_those_in_float32_and_weights_move(
    one_rank: dict[str, Any], models: Models
) -> None:
    model, run = load_reference("qwen2", models["qwen2"]), one_rank["bfloat16"]
    for logits_NV, problem in zip(run["logits"], make_problems(), strict=True):
        assert logits_NV.dtype is torch.bfloat16
        expected_NV = reference_logits(model, problem)
        assert relative_error(logits_NV[:, :VOCAB_SIZE].float(), expected_NV) < 0.02
    assert run["step"].applied
    assert all(tensor.dtype is torch.bfloat16 for tensor in run["after"].values())
    changed = [
        not torch.equal(weight, run["after"][name]) for name, weight in run["before"].items()
    ]
    assert sum(changed) > len(changed) / 2


def test_what_cannot_be_computed_is_refused(one_rank: dict[str, Any], two_ranks: Ranks) -> None:
    assert "cu_seqlens ends at 5 but the micro-batch has 6 tokens" in one_rank["unpadded"]
    assert one_rank["no batch"].startswith("AssertionError: forward_backward needs a micro-batch")
    assert "ValueError: " in one_rank["other model"]
    assert "config.json asks for [64, 32]" in one_rank["other model"]
    odd = [rank["odd tokens"] for rank in two_ranks]
    assert odd == ["AssertionError: 13 tokens over 2 ranks"] * 2


def test_an_export_that_cannot_be_written_fails_on_every_rank(two_ranks: Ranks) -> None:
    assert two_ranks[0]["unwritable"].startswith("NotADirectoryError")
    assert two_ranks[1]["unwritable"].startswith("OSError")
    assert all("blocked" in rank["unwritable"] for rank in two_ranks)


def test_collectives_give_every_rank_the_same(two_ranks: Ranks) -> None:
    for rank in two_ranks:
        collectives = rank["collectives"]
        assert collectives["bytes"]
        assert collectives["empty"] == b""
        assert collectives["any"] == [True, True, False]
        assert collectives["first"] == ["0", "1", None]  # the lowest rank that has one
