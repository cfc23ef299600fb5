"""Fields of config.json that change what a model computes, against transformers on two ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.distributed_launch import joined, run_ranks
from tests.policy.convert_models import assert_same, weights
from tests.policy.oracle import Oracle
from tests.policy.parity_ranks import build, forward_backward, gather_columns, hf_gradients
from tests.policy.tiny_models import (
    VOCAB_SIZE,
    Models,
    Problem,
    Ranks,
    make_model,
    make_problems,
    reference_logits,
)
from tests.tolerances import assert_within

pytestmark = pytest.mark.distributed

POSITIONS = 256
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
FIELDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "YaRN as transformers 4 writes it": (
        "qwen2",
        {},
        {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", **YARN}},
    ),
    "YaRN as transformers 5 writes it": (
        "llama",
        {},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, **YARN}},
    ),
    "YaRN with every field": (
        "qwen3",
        {},
        {
            "rope_theta": 1e4,
            "rope_scaling": {
                **{"rope_type": "yarn", "type": "yarn", "beta_fast": 8, "beta_slow": 0.5},
                **{"mscale": 2.0, "mscale_all_dim": 0.5, "truncate": False, **YARN},
            },
        },
    ),
    "Mistral without a base": ("mistral", {}, {"sliding_window": None}),
    "Qwen3 with attention biases": ("qwen3", {"attention_bias": True}, {"rope_theta": 1e6}),
}
"""Family, changes when the model is made, and what config.json says in place of its rope fields."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    models = {}
    for name, (family, changes, fields) in FIELDS.items():
        models[name] = make_model(
            family,
            tmp_path_factory.mktemp(family),
            max_position_embeddings=POSITIONS,
            **changes,
        )
        path = models[name] / "config.json"
        written = json.loads(path.read_text())
        del written["rope_parameters"]
        path.write_text(json.dumps(written | fields))
    return models


def long_problems() -> list[Problem]:
    """One micro-batch, whose longest sequence ends far beyond the original positions."""
    generator = torch.Generator().manual_seed(0)
    sequences = [
        torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist() for length in (250, 7)
    ]
    return make_problems(batches=[sequences])


def on_two_ranks(models: Models, exports: dict[str, Path]) -> dict[str, Any]:
    """Each model under tensor and sequence parallel, exported before its two updates."""
    results = {}
    with joined(tensor=2) as groups:
        for name, directory in models.items():
            state, problems = build(directory, groups), long_problems()
            state.model.export_hf(exports[name])
            [logits_NV] = state.model.forward_only(
                [problem.micro_batch for problem in problems],
                lambda logits_NV, _: gather_columns(logits_NV, groups),
            )
            forward_backward(state, problems)
            gradients = hf_gradients(state)
            state.optimizer_step()
            forward_backward(state, problems)
            state.optimizer_step()
            [report] = forward_backward(state, problems)
            results[name] = {"logits": logits_NV, "gradients": gradients, "loss": report["loss"]}
    return results


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: tmp_path_factory.mktemp("exports") / "hf" for name in FIELDS}


@pytest.fixture(scope="module")
def trained(models: Models, exports: dict[str, Path]) -> Ranks:
    return run_ranks(on_two_ranks, 2, models, exports)


def load(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


@pytest.mark.parametrize("name", FIELDS)
def test_logits_and_gradients_of_long_sequences_equal_those_of_transformers(
    models: Models, trained: Ranks, name: str
) -> None:
    oracle, [problem] = Oracle(AutoModelForCausalLM, models[name]), long_problems()
    (logits_NV, bound), results = oracle.logits(problem), trained[0][name]
    assert logits_NV.std() > 0.5
    assert_within((results["logits"] - logits_NV).abs().max(), bound, "logits")
    oracle.gradients([problem]).check(results["gradients"])


@pytest.mark.parametrize("name", FIELDS)
def test_two_updates_lead_to_the_loss_of_transformers_and_adam(
    models: Models, trained: Ranks, name: str
) -> None:
    model, [problem] = load(models[name]), long_problems()
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    losses = []
    for _ in range(3):
        model.zero_grad()
        loss = problem.loss(reference_logits(model, problem))
        loss.backward()
        losses.append(float(loss.detach()))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
    assert losses[2] < losses[0] - 0.1
    actual = sum(float(rank[name]["loss"]) for rank in trained)
    assert actual == pytest.approx(losses[2], abs=1e-3 * (losses[0] - losses[2]))


@pytest.mark.usefixtures("trained")
@pytest.mark.parametrize("name", FIELDS)
def test_an_export_has_the_bits_and_the_config_of_its_source(
    models: Models, exports: dict[str, Path], name: str
) -> None:
    assert_same(weights(exports[name]), weights(models[name]))
    source, exported = (
        json.loads((path / "config.json").read_text()) for path in (models[name], exports[name])
    )
    assert exported == source
