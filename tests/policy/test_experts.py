"""Models with experts against transformers, in layouts that divide experts, layers and tokens."""

from __future__ import annotations

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
from tests.policy.oracle import Gradients, Oracle
from tests.policy.tiny_models import make_problems
from tests.tolerances import assert_within, sum_bound

if TYPE_CHECKING:
    from pathlib import Path

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
def oracles(models: dict[str, Path]) -> dict[str, Oracle]:
    return {family: Oracle.of(family, path) for family, path in models.items()}


@pytest.fixture(scope="module")
def gradients(oracles: dict[str, Oracle]) -> dict[str, Gradients]:
    problems = make_problems(batches=BATCHES)
    return {family: oracle.gradients(problems) for family, oracle in oracles.items()}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", TESTED, ids=lambda layout: layout.name)
def test_logits_are_those_of_transformers(
    results: dict[str, Any], oracles: dict[str, Oracle], layout: Any, family: str
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
            whole_NV, bound = oracles[family].logits(problem)
            rows = slice(None)
            if context_size > 1:
                rows = problem.part(context_rank, context_size).micro_batch.target_T
            assert whole_NV.std() > 0.5
            assert_within((actual_NV - whole_NV[rows]).abs().max(), bound, "logits")
    assert has_logits == layout.ranks // layout.sizes.get("pipeline", 1)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", TESTED, ids=lambda layout: layout.name)
def test_gradients_of_every_tensor_and_their_norm_are_those_of_transformers(
    results: dict[str, Any], gradients: dict[str, Gradients], layout: Any, family: str
) -> None:
    expected = gradients[family]
    of_ranks = results[f"{layout.name}, {family}"]
    for result in of_ranks:
        assert result["step"].applied
        expected.check_norm(result["step"].grad_norm)
    expected.check(of_ranks[0]["gradients"])
    router = next(name for name in expected.exact if name.endswith("3.mlp.gate.weight"))
    assert expected.exact[router].norm() > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", TESTED, ids=lambda layout: layout.name)
def test_the_first_update_is_that_of_torch(
    results: dict[str, Any],
    models: dict[str, Path],
    gradients: dict[str, Gradients],
    layout: Any,
    family: str,
) -> None:
    start, expected = weights(models[family]), gradients[family].exact
    trained = {name: torch.nn.Parameter(start[name].double()) for name in expected}
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
            # A weight below 1 and its step are rounded a few times.
            error = difference[is_certain | (expected[name] == 0)].max()
            assert_within(error, sum_bound(8), name)
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
