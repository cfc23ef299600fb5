"""Every model in every layout against transformers: started ranks are shared by all checks."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from bapo_megatron.policy.weight_export import MAX_FILE_BYTES
from tests.policy.convert_models import assert_same, weights
from tests.policy.layouts import LR, SUITES, SuiteRun, check_logits
from tests.policy.tiny_models import load_reference, per_expert
from tests.tolerances import assert_within, sum_bound

pytestmark = pytest.mark.distributed

Runs = dict[str, SuiteRun]
CASES = [
    pytest.param(
        suite_name,
        layout.name,
        model,
        id=f"{suite_name}: {layout.name}, {model}",
        marks=[pytest.mark.exhaustive] if suite.is_exhaustive else [],
    )
    for suite_name, suite in SUITES.items()
    for layout in suite.layouts
    for model in layout.models or suite.families
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Of each suite; its ranks start where a test looks at their results."""
    return {name: SuiteRun(suite, tmp_path_factory.mktemp(name)) for name, suite in SUITES.items()}


@pytest.mark.parametrize(("suite", "layout", "model"), CASES)
def test_logits_are_those_of_transformers(runs: Runs, suite: str, layout: str, model: str) -> None:
    run = runs[suite]
    of_ranks = run.results[f"{layout}, {model}"]
    check_logits(of_ranks, run.oracles[model], run.suite.batches)


@pytest.mark.parametrize(("suite", "layout", "model"), CASES)
def test_gradients_of_every_tensor_and_their_norm_are_those_of_transformers(
    runs: Runs, suite: str, layout: str, model: str
) -> None:
    run = runs[suite]
    of_ranks, expected = run.results[f"{layout}, {model}"], run.gradients[model]
    for result in of_ranks:
        assert result["step"].applied
        expected.check_norm(result["step"].grad_norm)
    expected.check(of_ranks[0]["gradients"])
    if suite == "experts":
        router = [name for name in expected.exact if name.endswith(".gate.weight")][-1]
        assert expected.exact[router].norm() > 1e-3


@pytest.mark.parametrize(("suite", "layout", "model"), CASES)
def test_the_first_update_is_that_of_torch(runs: Runs, suite: str, layout: str, model: str) -> None:
    run = runs[suite]
    after = run.results[f"{layout}, {model}"][0]["weights"]
    start, expected = weights(run.models[model]), run.gradients[model].exact
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
    share = 0.9 if suite == "experts" else 0.5
    assert num_certain > share * sum(int((gradient != 0).sum()) for gradient in expected.values())


@pytest.mark.parametrize(("suite", "layout", "model"), CASES)
def test_export_gives_back_the_weights_bit_by_bit_in_files_that_transformers_loads(
    runs: Runs, suite: str, layout: str, model: str
) -> None:
    run = runs[suite]
    assert run.results[f"{layout}, {model}"]
    source, exported = run.models[model], run.exports / f"{layout}, {model}" / "model"
    expected = weights(source)
    assert_same(weights(exported), expected)
    max_file_bytes = next(x for x in run.suite.layouts if x.name == layout).max_file_bytes
    if max_file_bytes < MAX_FILE_BYTES:
        files = {path.name: path.stat().st_size for path in exported.glob("*.safetensors")}
        assert len(files) > 2
        assert max(files.values()) < max_file_bytes + 5_000  # names and places of tensors
        index = json.loads((exported / "model.safetensors.index.json").read_text())
        assert {*index["weight_map"].values()} == files.keys()
        num_bytes = sum(tensor.nbytes for tensor in expected.values())
        assert index["metadata"]["total_size"] == num_bytes
    for name in ("tokenizer_config.json", "generation_config.json"):
        assert (exported / name).read_bytes() == (source / name).read_bytes()
    fields, of_source = (
        json.loads((path / "config.json").read_text()) for path in (exported, source)
    )
    assert fields == of_source
    assert not list(exported.parent.glob(".*"))
    reloaded = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    assert type(reloaded) is type(load_reference(model, source))
    state = per_expert(reloaded.state_dict(), reloaded)
    assert_same({name: state[name] for name in expected}, expected)
