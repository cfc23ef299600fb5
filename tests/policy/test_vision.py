"""Models with a vision tower: the language model trains, and the rest is exported as it was."""

from pathlib import Path

import pytest
import torch

from tests.distributed_launch import run_ranks
from tests.policy.convert_models import assert_same, run_convert, weights
from tests.policy.layouts import BATCHES, Case, by_rank, cases_of, check_logits, run_cases
from tests.policy.oracle import Gradients, Oracle
from tests.policy.parity_ranks import export
from tests.policy.tiny_models import VISION, load_reference, make_problems, make_vision_model

pytestmark = [pytest.mark.distributed, pytest.mark.exhaustive]


@pytest.fixture(params=VISION)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return make_vision_model(request.param, tmp_path / request.param)


def test_the_language_model_trains_and_the_rest_is_exported_as_it_was(
    model: Path, tmp_path: Path
) -> None:
    family = model.name
    case = Case(cases_of(("qwen3",), "one rank")[0].layout, family)
    (result,) = by_rank(run_cases, [case], {family: model}, tmp_path / "trained")[str(case)]
    oracle, prefix = Oracle.of(family, model), "model.language_model."
    in_files = "language_model.model." if family == "gemma3" else prefix
    check_logits([result], oracle)
    exact, float32 = (
        {
            name.replace(prefix, in_files): gradient
            for name, gradient in whole.items()
            if name.startswith((prefix, "lm_head."))
        }
        for whole in oracle.both_gradients(make_problems(batches=BATCHES))
    )
    Gradients.of(exact, float32).check(result["gradients"])
    run_ranks(export, 1, model, tmp_path / "export")
    before, after = weights(model), result["weights"]
    assert_same(weights(tmp_path / "export"), before)
    kept = before.keys() - after.keys()
    assert kept == {name for name in before if not name.startswith((in_files, "lm_head."))}
    assert len(kept) > 10
    assert not any(torch.equal(after[n], before[n]) for n in after if n.endswith("q_proj.weight"))
    reloaded = load_reference(family, tmp_path / "export")
    assert type(reloaded) is type(oracle.float32)


def test_conversion_keeps_what_is_not_trained(model: Path, tmp_path: Path) -> None:
    run_convert(model, tmp_path / "megatron")
    run_convert(tmp_path / "megatron", tmp_path / "back")
    assert_same(weights(tmp_path / "back"), weights(model))
