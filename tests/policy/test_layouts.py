"""Every model in every layout against transformers: started ranks are shared by all checks."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from bapo_megatron.policy.weight_export import MAX_FILE_BYTES
from tests.policy.convert_models import COMPANIONS, assert_same, weights
from tests.policy.families import FAMILIES, WITH_EXPERTS
from tests.policy.layouts import (
    EXPERTS,
    LR,
    ROUTERS,
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
from tests.policy.tiny_models import Lazy, Models, load_reference, make_problems, per_expert
from tests.tolerances import assert_within, sum_bound

pytestmark = pytest.mark.distributed

CASES = [
    *cases_of(FAMILIES, "one rank, recomputed", "TP 2, ETP 1", "PP 2 × VPP 2", "CP 2", "DP 2"),
    *cases_of(WITH_EXPERTS, "EP 2", "TP 2 × EP 2, ETP 1"),
    *cases_of(EXPERTS, "one rank, attention recomputed", "PP 2, recomputed"),
    *cases_of(EXPERTS, "TP 2 × EP 2, ETP 2", "TP 2 × EP 4, ETP 1", "PP 2 × VPP 2 × CP 2 × EP 2"),
]


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exports")


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, deep_models: Models, exports: Path) -> Results:
    return by_rank(run_cases, chosen(request), deep_models, exports)


@pytest.fixture(scope="module")
def gradients(oracles: dict[str, Oracle]) -> dict[str, Gradients]:
    return Lazy(lambda name: oracles[name].gradients(make_problems(batches=batches_of(name))))


@in_every_case(CASES)
def test_logits_are_those_of_transformers(
    results: Results, oracles: dict[str, Oracle], case: Case
) -> None:
    check_logits(results[str(case)], oracles[case.family], batches_of(case.family))


@in_every_case(CASES)
def test_gradients_of_every_tensor_and_their_norm_are_those_of_transformers(
    results: Results, gradients: dict[str, Gradients], case: Case
) -> None:
    of_ranks, expected = results[str(case)], gradients[case.family]
    for result in of_ranks:
        assert result["step"].applied
        expected.check_norm(result["step"].grad_norm)
    expected.check(of_ranks[0]["gradients"])
    if case.family in WITH_EXPERTS:
        router = [name for name in expected.exact if name.endswith(ROUTERS)][-1]
        assert expected.exact[router].norm() > 1e-3


@in_every_case(CASES)
def test_the_first_update_is_that_of_torch(
    results: Results, gradients: dict[str, Gradients], deep_models: Models, case: Case
) -> None:
    after = results[str(case)][0]["weights"]
    start, expected = weights(deep_models[case.family]), gradients[case.family].exact
    trained = {name: torch.nn.Parameter(start[name].double()) for name in expected}
    for name, parameter in trained.items():
        parameter.grad = expected[name].clone()
    torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
    torch.optim.AdamW(trained.values(), lr=LR, weight_decay=0.0).step()
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
            assert_within(error, sum_bound(8, weight.abs().max().clamp(min=1.0)), name)
            assert difference.max() <= 2.001 * LR
            num_certain += int(is_certain.sum())
    assert num_certain > 0.5 * sum(int((gradient != 0).sum()) for gradient in expected.values())


@in_every_case(CASES)
def test_export_gives_back_the_weights_bit_by_bit_in_files_that_transformers_loads(
    results: Results, deep_models: Models, exports: Path, case: Case
) -> None:
    assert results[str(case)]
    source, exported = deep_models[case.family], exports / str(case) / "model"
    expected = weights(source)
    assert_same(weights(exported), expected)
    max_file_bytes = case.layout.max_file_bytes
    if max_file_bytes < MAX_FILE_BYTES:
        files = {path.name: path.stat().st_size for path in exported.glob("*.safetensors")}
        assert len(files) > 2
        assert max(files.values()) < max_file_bytes + 5_000  # names and places of tensors
        index = json.loads((exported / "model.safetensors.index.json").read_text())
        assert {*index["weight_map"].values()} == files.keys()
        num_bytes = sum(tensor.nbytes for tensor in expected.values())
        assert index["metadata"]["total_size"] == num_bytes
    for name in COMPANIONS:
        assert (exported / name).read_bytes() == (source / name).read_bytes()
    fields, of_source = (
        json.loads((path / "config.json").read_text()) for path in (exported, source)
    )
    assert fields == of_source
    assert not list(exported.parent.glob(".*"))
    reloaded = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    assert type(reloaded) is type(load_reference(case.family, source))
    state = per_expert(reloaded.state_dict(), reloaded)
    assert_same({name: state[name] for name in expected}, expected)
