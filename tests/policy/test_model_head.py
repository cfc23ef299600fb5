"""A model that returns hidden states trains like one that returns logits.

Shape legend: N = packed tokens, H = hidden size, V = local vocabulary columns, T = response tokens.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from bapo_megatron.config.megatron import ModelConfig, ParallelConfig
from bapo_megatron.config.schema import AlgorithmConfig, OpsConfig
from bapo_megatron.policy.train_state import TrainState
from bapo_megatron.runtime.distributed import ProcessGroups
from bapo_megatron.trainer.loss import LossStage, UpdateContext
from bapo_megatron.trainer.policy_output import PolicyOutput
from bapo_megatron.types import MicroBatch
from tests.distributed_launch import joined, run_ranks
from tests.policy.build import build_state
from tests.policy.parity_ranks import hf_gradients
from tests.policy.tiny_models import VOCAB_SIZE, Models, Ranks, make_problems
from tests.tolerances import assert_within

pytestmark = pytest.mark.distributed

FAMILIES = ("qwen2", "qwen3")
"""Families with a head of its own and with a tied one."""
CASES = [
    *((layout, family) for layout in ("single", "tensor", "sequence") for family in FAMILIES),
    *((layout, "qwen3_5_text") for layout in ("single", "sequence")),
]
"""Hybrids need sequence parallel."""
CHUNK_TOKENS = 3
ALGORITHM = AlgorithmConfig.model_validate(
    {"objective": "clip", "fixed": {"low": 0.5, "high": 4.0}, "entropy_coefficient": 0.03}
)


def run_layout(models: Models, tensor: int, sequence: bool) -> dict[str, Any]:
    """Each model with logits and with hidden states, on the same tokens and weights."""
    kinds = {"logits": False, "hidden": True}
    with joined(tensor) as groups:
        return {
            name: {
                kind: _train(_build(models[name], groups, sequence, hidden=hidden))
                for kind, hidden in kinds.items()
            }
            for layout, name in CASES
            if layout == ("single" if tensor == 1 else "sequence" if sequence else "tensor")
        }


def on_two_ranks(models: Models) -> dict[str, Any]:
    """Tensor parallel without and with sequence parallel."""
    return {name: run_layout(models, 2, name == "sequence") for name in ("tensor", "sequence")}


def on_one_rank(models: Models) -> dict[str, Any]:
    """A single rank, and the logits that it holds."""
    results: dict[str, Any] = {"single": run_layout(models, 1, sequence=False)}
    with joined() as groups:
        state = _build(models["qwen2"], groups, sequence=False, hidden=False)
        results["held logits"] = _count_held_logits(state)
    return results


def _build(directory: Path, groups: ProcessGroups, sequence: bool, *, hidden: bool) -> TrainState:
    return build_state(
        ModelConfig(path=directory, dtype="float32"),
        groups,
        parallel=ParallelConfig(tensor=groups.tensor.size(), sequence=sequence),
        hidden=hidden,
    )


def _train(state: TrainState) -> dict[str, Any]:
    """Log-probs, then the gradients of two micro-batches, through Megatron's schedule."""
    batches = [_with_responses(p.micro_batch) for p in make_problems()]
    ops = OpsConfig.model_validate({"logits_chunk_tokens": CHUNK_TOKENS if state.model.head else 0})
    policy_output = PolicyOutput(ops, VOCAB_SIZE, 1.0, state.model.groups, state.model.head)
    logprobs = state.model.forward_only(batches, lambda o, b: policy_output.read(o, b).logprob_T)
    stage = LossStage(ALGORITHM, policy_output, state.model.groups)

    def loss_fn(output: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        context = UpdateContext(num_updates=0, rollout_version=None, num_samples=16)
        loss, report = stage.loss(output, batch, decision=None, context=context)
        return loss, report.sums

    sums = state.forward_backward(batches, loss_fn)
    return {
        "logprobs": logprobs,
        "sums": sums,
        "gradients": hf_gradients(state),
        "grad_norm": state.optimizer_step().grad_norm,
        "parameters": sorted(name for name, _ in state.model.chunks[-1].named_parameters()),
    }


def _count_held_logits(state: TrainState) -> list[int]:
    """How many micro-batches have logits in memory when those of one come, without gradients."""
    storages: list[StorageWeakRef] = []

    def count(logits_NV: Tensor, _: MicroBatch) -> int:
        storages.append(StorageWeakRef(logits_NV.untyped_storage()))
        return sum(not storage.expired() for storage in storages)

    return state.model.forward_only([p.micro_batch for p in make_problems()], count)


def _with_responses(batch: MicroBatch) -> MicroBatch:
    """Every second token of the batch is a response token; the values are arbitrary."""
    rows_T = torch.arange(0, batch.num_tokens - 1, 2)
    num_rows, generator = len(rows_T), torch.Generator().manual_seed(batch.num_tokens)
    sign_T = 1.0 - 2.0 * (torch.arange(num_rows) % 2)
    zero, one = torch.zeros(num_rows), torch.ones(num_rows)
    return MicroBatch(
        token_ids_N=batch.token_ids_N,
        position_ids_N=batch.position_ids_N,
        cu_seqlens=batch.cu_seqlens,
        rows_T=rows_T,
        target_T=batch.token_ids_N[rows_T + 1],
        behaviour_logprob_T=-4.5 * one,
        rollout_logprob_T=zero,
        advantage_T=sign_T * (0.5 + torch.rand(num_rows, generator=generator)),
        reward_T=zero,
        mask_T=one,
        importance_T=one,
        loss_weight_T=0.1 * one,
        sample_T=zero.long(),
        response_tokens_T=num_rows * one,
        position_T=zero.long(),
        version_T=zero.long(),
    )


@pytest.fixture(scope="module")
def one_rank(models: Models) -> dict[str, Any]:
    return run_ranks(on_one_rank, 1, models)[0]


@pytest.fixture(scope="module")
def layouts(models: Models, one_rank: dict[str, Any]) -> dict[str, Ranks]:
    """Results of the ranks, by layout."""
    ranks = run_ranks(on_two_ranks, 2, models)
    two = {layout: [rank[layout] for rank in ranks] for layout in ("tensor", "sequence")}
    return {"single": [one_rank["single"]], **two}


@pytest.mark.parametrize(("layout", "family"), CASES)
def test_log_probs_sums_and_all_gradients_are_those_of_logits(
    layouts: dict[str, Ranks], layout: str, family: str
) -> None:
    for rank in layouts[layout]:
        expected, actual = rank[family]["logits"], rank[family]["hidden"]
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


def test_without_gradients_one_micro_batch_has_logits_at_a_time(one_rank: dict[str, Any]) -> None:
    assert one_rank["held logits"] == [1, 1]
