"""Models with experts against transformers, in layouts that divide experts, layers and tokens."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.policy.convert_models import assert_same, weights
from tests.policy.expert_layouts import (
    BATCHES,
    COVERING,
    FAMILIES,
    LAYOUTS,
    LR,
    Results,
    by_rank,
    make_models,
    multiples_of,
    run_layouts,
)
from tests.policy.test_policy_parity import assert_gradients
from tests.policy.tiny_models import (
    load_reference,
    make_problems,
    reference_gradients,
    reference_logits,
)

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

pytestmark = pytest.mark.distributed

TESTED = [layout for layout in LAYOUTS if layout.name in COVERING]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exports")


@pytest.fixture(scope="module")
def results(models: dict[str, Path], exports: Path) -> Results:
    return by_rank(run_layouts, TESTED, models, exports)


@pytest.fixture(scope="module")
def references(models: dict[str, Path]) -> dict[str, Any]:
    return {family: load_reference(family, path) for family, path in models.items()}


@pytest.fixture(scope="module")
def gradients(references: dict[str, Any]) -> dict[str, dict[str, Tensor]]:
    problems = make_problems(batches=BATCHES)
    return {name: reference_gradients(model, problems) for name, model in references.items()}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", TESTED, ids=lambda layout: layout.name)
def test_logits_are_those_of_transformers(
    results: dict[str, Any], references: dict[str, Any], layout: Any, family: str
) -> None:
    has_logits = 0
    for result in results[f"{layout.name}, {family}"]:
        data_rank, data_size, context_rank, context_size = result["place"]
        problems = make_problems(0, *multiples_of(context_size), batches=BATCHES)[
            data_rank::data_size
        ]
        if not result["logits"]:
            continue  # not the last stage
        has_logits += 1
        for actual_NV, problem in zip(result["logits"], problems, strict=True):
            whole_NV = reference_logits(references[family], problem)
            rows = slice(None)
            if context_size > 1:
                rows = problem.part(context_rank, context_size).micro_batch.target_T
            assert whole_NV.std() > 0.5
            assert (actual_NV - whole_NV[rows]).abs().max() < 1e-5
    assert has_logits == layout.ranks // layout.sizes.get("pipeline", 1)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", TESTED, ids=lambda layout: layout.name)
def test_gradients_of_every_tensor_and_their_norm_are_those_of_transformers(
    results: dict[str, Any], gradients: dict[str, dict[str, Tensor]], layout: Any, family: str
) -> None:
    expected = gradients[family]
    norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in expected.values()))
    of_ranks = results[f"{layout.name}, {family}"]
    for result in of_ranks:
        assert result["step"].applied
        assert result["step"].grad_norm == pytest.approx(norm, rel=1e-5)
    assert_gradients(of_ranks[0]["gradients"], expected)
    router = next(name for name in expected if name.endswith("3.mlp.gate.weight"))
    assert expected[router].norm() > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", TESTED, ids=lambda layout: layout.name)
def test_the_first_update_is_that_of_torch(
    results: dict[str, Any],
    models: dict[str, Path],
    gradients: dict[str, dict[str, Tensor]],
    layout: Any,
    family: str,
) -> None:
    start, expected = weights(models[family]), gradients[family]
    trained = {name: torch.nn.Parameter(start[name].clone()) for name in expected}
    for name, parameter in trained.items():
        parameter.grad = expected[name].clone()
    torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
    torch.optim.AdamW(trained.values(), lr=LR, weight_decay=0.0).step()
    after = results[f"{layout.name}, {family}"][0]["weights"]
    assert after.keys() == start.keys()
    num_certain = 0
    with torch.no_grad():
        for name, weight in after.items():
            if name not in trained:
                assert torch.equal(weight, start[name]), name  # the bias of the router
                continue
            difference = (weight - trained[name]).abs()
            # Adam makes a step of the sign of a gradient, however small, up to its ε.
            is_certain = expected[name].abs() > 1e-4
            assert difference[is_certain | (expected[name] == 0)].max() < 1e-6, name
            assert difference.max() <= 2.001 * LR
            num_certain += int(is_certain.sum())
    assert num_certain > 0.9 * sum(int((gradient != 0).sum()) for gradient in expected.values())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", TESTED, ids=lambda layout: layout.name)
@pytest.mark.usefixtures("results")
def test_export_gives_back_the_weights_bit_by_bit(
    models: dict[str, Path], exports: Path, layout: Any, family: str
) -> None:
    assert_same(weights(exports / f"{layout.name}, {family}"), weights(models[family]))
