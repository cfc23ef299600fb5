"""What the ranks of test_invariance.py do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bapo_megatron.config.schema import (
    AlgorithmConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
)
from bapo_megatron.data.dump import read_batch
from bapo_megatron.distributed import ProcessGroups
from bapo_megatron.policy.megatron_policy import MegatronPolicy
from bapo_megatron.trainer.step import BatchTrainer
from tests.distributed_launch import joined
from tests.policy.parity_ranks import hf_gradients

AGGREGATIONS = ("token_mean", "sequence_mean", "token_sum_norm")


def gradients_of_each_aggregation(
    model_dir: Path, dump: Path, tensor: int, budgets: tuple[int, ...]
) -> dict[tuple[str, int], dict[str, Any]]:
    """Loss, bounds and whole gradients of one update, by aggregation and token budget."""
    with joined(tensor) as groups:
        return {
            (aggregation, budget): _one_update(model_dir, dump, groups, aggregation, budget)
            for aggregation in AGGREGATIONS
            for budget in budgets
        }


def _one_update(
    model_dir: Path, dump: Path, groups: ProcessGroups, aggregation: str, budget: int
) -> dict[str, Any]:
    policy = MegatronPolicy.build(
        ModelConfig(path=model_dir, dtype="float32"),
        ParallelConfig(tensor=groups.tensor_size),
        # Nothing scales the gradients before they are compared.
        OptimizerConfig(lr=0.0, clip_grad=1e9),
        total_updates=1,
        seed=0,
        groups=groups,
    )
    config = AlgorithmConfig.model_validate(
        {
            "loss_aggregation": aggregation,
            "token_sum_norm_constant": 20.0,
            "entropy_coefficient": 0.01,
            "bapo": {"target": 0.38},
        }
    )
    trainer = BatchTrainer(
        policy,
        config,
        temperature=0.7,
        max_tokens_per_micro_batch=budget,
        pad_to_multiple=1,
    )
    (result,) = trainer.train(read_batch(dump))
    return {
        "loss": result.sums["loss/policy"],
        "slots": result.sums["packing/slots"],
        "bounds": (result.bounds[0].low, result.bounds[0].high),
        "gradients": hf_gradients(policy),
    }
