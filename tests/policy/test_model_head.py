"""A model that returns hidden states trains like one that returns logits.

Tests of whole updates compare untied heads with transformers (tests/trainer/test_updates.py).
Shape legend: N = packed tokens, H = hidden size, V = local vocabulary columns, T = response tokens.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from bapo_megatron.config.megatron import ModelConfig, ParallelConfig
from bapo_megatron.config.schema import AlgorithmConfig, OpsConfig
from bapo_megatron.policy.model import PolicyOutput
from bapo_megatron.policy.train_state import TrainState
from bapo_megatron.trainer.loss import LossStage
from bapo_megatron.types import MicroBatch
from tests.fakes.given_tokens import CONTEXT, make_micro_batch
from tests.policy.build import build_state
from tests.policy.families import VOCAB_SIZE
from tests.policy.layouts import Case, Results, built, by_rank, cases_of, in_every_case
from tests.policy.parity_ranks import hf_gradients
from tests.policy.tiny_models import Models, make_problems
from tests.tolerances import assert_within

pytestmark = pytest.mark.distributed

# A tied head, and one of its own after a norm around 0, which needs sequence parallel.
CASES = [
    *cases_of(("qwen3", "qwen3_5_text"), "one rank", "TP 2"),
    *cases_of(("qwen3",), "TP 2 without SP"),
]
CHUNK_TOKENS = 3
ALGORITHM = AlgorithmConfig.model_validate(
    {"objective": "clip", "fixed": {"low": 0.5, "high": 4.0}, "entropy_coefficient": 0.03}
)


def train_both(cases: Sequence[Case], models: Models) -> dict[str, Any]:
    """Each model with logits and with hidden states, on the same tokens and weights."""
    results: dict[str, Any] = {}
    for case, groups, state in built(cases, models):
        config = ModelConfig(path=models[case.family], dtype="float32")
        parallel = ParallelConfig.model_validate(case.layout.sizes)
        hidden = build_state(config, groups, parallel=parallel, hidden=True)
        results[str(case)] = {"logits": _train(state), "hidden": _train(hidden)}
    return results


def _train(state: TrainState) -> dict[str, Any]:
    """Log-probs, then the gradients of two micro-batches, through Megatron's schedule."""
    batches = [_with_responses(p.micro_batch) for p in make_problems()]
    ops = OpsConfig.model_validate({"logits_chunk_tokens": CHUNK_TOKENS if state.model.head else 0})
    policy_output = PolicyOutput(ops, VOCAB_SIZE, 1.0, state.model.groups, state.model.head)
    logprobs = state.model.forward_only(batches, lambda o, b: policy_output.read(o, b).logprob_T)
    stage = LossStage(ALGORITHM, policy_output, state.model.groups)

    def loss_fn(output: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        loss, report = stage.loss(output, batch, decision=None, context=CONTEXT)
        return loss, report.sums

    sums = state.forward_backward(batches, loss_fn)
    return {
        "logprobs": logprobs,
        "sums": sums,
        "gradients": hf_gradients(state),
        "grad_norm": state.optimizer_step().grad_norm,
        "parameters": sorted(name for name, _ in state.model.chunks[-1].named_parameters()),
    }


def _with_responses(batch: MicroBatch) -> MicroBatch:
    """Every second token of the batch is a response token; the values are arbitrary."""
    rows_T = torch.arange(0, batch.num_tokens - 1, 2)
    generator = torch.Generator().manual_seed(batch.num_tokens)
    sign_T = 1.0 - 2.0 * (torch.arange(len(rows_T)) % 2)
    return make_micro_batch(
        token_ids_N=batch.token_ids_N,
        position_ids_N=batch.position_ids_N,
        cu_seqlens=batch.cu_seqlens,
        rows_T=rows_T,
        target_T=batch.token_ids_N[rows_T + 1],
        behaviour_logprob_T=torch.full((len(rows_T),), -4.5),
        advantage_T=sign_T * (0.5 + torch.rand(len(rows_T), generator=generator)),
        loss_weight_T=torch.full((len(rows_T),), 0.1),
    )


@pytest.fixture(scope="module")
def results(models: Models) -> Results:
    return by_rank(train_both, CASES, models)


@in_every_case(CASES)
def test_log_probs_sums_and_all_gradients_are_those_of_logits(results: Results, case: Case) -> None:
    for rank in results[str(case)]:
        expected, actual = rank["logits"], rank["hidden"]
        assert actual["parameters"] == expected["parameters"]
        for name in ("logprobs", "sums"):
            for ours, theirs in zip(actual[name], expected[name], strict=True):
                assert ours.numel() > 0
                torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-6)
        assert actual["gradients"].keys() == expected["gradients"].keys()
        for name, gradient in expected["gradients"].items():
            assert bool(gradient.any()), name
            error = (actual["gradients"][name] - gradient).norm() / gradient.norm()
            assert_within(error, 1e-5, name)
        assert actual["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
