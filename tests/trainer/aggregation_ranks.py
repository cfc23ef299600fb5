"""What the ranks of tests that compare the gradients of one update do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from bapo_megatron.config.megatron import (
    MegatronConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
)
from bapo_megatron.config.rollout import StalenessConfig
from bapo_megatron.config.schema import AlgorithmConfig, OpsConfig, TrainConfig
from bapo_megatron.data.dump import read_batch
from bapo_megatron.policy.megatron_policy import MegatronPolicy
from bapo_megatron.runtime.distributed import ProcessGroups
from bapo_megatron.trainer.split import ZeroAdvantage, split_shape
from bapo_megatron.trainer.step import BatchTrainer
from bapo_megatron.types import MicroBatch
from tests.distributed_launch import joined
from tests.policy.parity_ranks import hf_gradients

NO_LIMIT = StalenessConfig()
AGGREGATIONS = ("token_mean", "sequence_mean", "token_sum_norm")


def gradients_of_each_aggregation(
    model_dir: Path, dump: Path, sizes: dict[str, int], budgets: tuple[int, ...]
) -> dict[tuple[str, int], dict[str, Any]]:
    """Loss, bounds and whole gradients of one update, by aggregation and token budget."""
    with joined(**sizes) as groups:
        return {
            (aggregation, budget): _one_update(
                model_dir, dump, groups, {"loss_aggregation": aggregation}, budget, OpsConfig()
            )
            for aggregation in AGGREGATIONS
            for budget in budgets
        }


def gradients_in_each_layout(
    model_dir: Path, dump: Path, layouts: dict[str, dict[str, int]], budgets: tuple[int, ...]
) -> dict[str, dict[tuple[str, int], dict[str, Any]]]:
    """``gradients_of_each_aggregation`` in one layout after the other, by the layout's name."""
    return {
        name: gradients_of_each_aggregation(model_dir, dump, sizes, budgets)
        for name, sizes in layouts.items()
    }


def gradients_of_each_path(
    model_dir: Path,
    dump: Path,
    tensor: int,
    sequence: bool,
    paths: dict[str, dict[str, Any]],
    algorithms: dict[str, dict[str, Any]],
) -> dict[tuple[str, str], dict[str, Any]]:
    """Loss, bounds and whole gradients of one update, by names of (algorithm, ``ops`` section)."""
    with joined(tensor, sequence) as groups:
        return {
            (name, path): _one_update(
                model_dir,
                dump,
                groups,
                algorithm,
                128,
                OpsConfig(**section),
                sequence=sequence,
            )
            for name, algorithm in algorithms.items()
            for path, section in paths.items()
        }


def gradients_of_each_setting(
    model_dir: Path,
    dump: Path,
    sizes: dict[str, int],
    settings: dict[str, tuple[dict[str, Any], dict[str, Any]]],
    zero_advantage: ZeroAdvantage | None = None,
) -> dict[str, dict[str, Any]]:
    """Sums, bounds and whole gradients of one update, by name of (algorithm, staleness).

    ``zero_advantage``: what becomes of responses with A = 0; None: what the objective declares.
    """
    with joined(**sizes) as groups:
        return {
            name: _one_update(
                model_dir,
                dump,
                groups,
                algorithm,
                64,
                OpsConfig(),
                staleness=StalenessConfig(**staleness),
                zero_advantage=zero_advantage,
            )
            for name, (algorithm, staleness) in settings.items()
        }


def gradients_of_each_objective(
    model_dir: Path,
    dump: Path,
    sizes: dict[str, int],
    algorithms: dict[str, dict[str, Any]],
    budget: int,
    chunk_tokens: int,
) -> dict[str, dict[str, Any]]:
    """Sums and whole gradients of one update, by name of the ``algorithm`` section."""
    with joined(**sizes) as groups:
        ops = OpsConfig(logits_chunk_tokens=chunk_tokens)
        return {
            name: _one_update(
                model_dir, dump, groups, {"entropy_coefficient": 0.0, **algorithm}, budget, ops
            )
            for name, algorithm in algorithms.items()
        }


def output_gradients_of_each_objective(
    model_dir: Path, dump: Path, algorithms: dict[str, dict[str, Any]], chunk_tokens: int
) -> dict[str, dict[str, Any]]:
    """As ``gradients_of_each_objective`` on one rank, in micro-batches of 64 tokens.

    ``outputs`` has every micro-batch of the loss pass with the gradient of the model's output, [N,
    V], or of its hidden states, [N, H], with chunks.
    """
    with joined() as groups:
        ops = OpsConfig(logits_chunk_tokens=chunk_tokens)
        return {
            name: _one_update(model_dir, dump, groups, algorithm, 64, ops, watches_output=True)
            for name, algorithm in algorithms.items()
        }


def _one_update(
    model_dir: Path,
    dump: Path,
    groups: ProcessGroups,
    algorithm: dict[str, Any],
    budget: int,
    ops: OpsConfig,
    *,
    sequence: bool = False,
    staleness: StalenessConfig = NO_LIMIT,
    watches_output: bool = False,
    zero_advantage: ZeroAdvantage | None = None,
) -> dict[str, Any]:
    parallel = ParallelConfig(
        tensor=groups.tensor_size,
        sequence=sequence,
        pipeline=groups.pipeline_size,
        context=groups.context_size,
    )
    policy = MegatronPolicy.build(
        ModelConfig(path=model_dir, dtype="float32"),
        parallel,
        # Nothing scales the gradients before they are compared.
        OptimizerConfig(lr=0.0, clip_grad=1e9),
        total_updates=1,
        seed=0,
        groups=groups,
        returns_hidden_states=ops.logits_chunk_tokens > 0,
    )
    config = AlgorithmConfig.model_validate(
        {
            "token_sum_norm_constant": 20.0,
            "entropy_coefficient": 0.01,
            "bapo": {"target": 0.38},
            **algorithm,
        }
    )
    trainer = BatchTrainer(
        policy=policy,
        config=config,
        ops=ops,
        temperature=0.7,
        staleness=staleness,
        shape=split_shape(
            policy, parallel, MegatronConfig(), TrainConfig(max_tokens_per_micro_batch=budget)
        ),
    )
    if zero_advantage is not None:
        trainer._stage.zero_advantage = zero_advantage
    outputs = _watch_output(policy) if watches_output else []
    result, *further = trainer.train(read_batch(dump))
    return {
        "outputs": outputs,
        "loss": result.sums["policy_loss"],
        "entropy": result.sums["entropy"],
        "slots": result.sums["packing_slots"],
        "sums": result.sums,
        "maxima": result.maxima,
        "bounds": tuple(
            decision[f"bapo/clip_{name}"]
            for decision in result.decisions[:1]
            for name in ("low", "high")
            if f"bapo/clip_{name}" in decision
        ),
        "decisions": result.decisions,
        "skipped": result.skipped,
        "further_skipped": [each.skipped for each in further],
        "optimizer_steps": policy.num_updates,
        "gradients": hf_gradients(policy),
    }


def _watch_output(policy: MegatronPolicy) -> list[tuple[MicroBatch, Tensor]]:
    """Collects the gradients of the output in the passes to come."""
    seen: list[tuple[MicroBatch, Tensor]] = []
    forward_backward = policy.forward_backward

    def watched(micro_batches: Any, loss_fn: Any) -> Any:
        def watching(output: Tensor, micro_batch: MicroBatch) -> Any:
            output.register_hook(lambda gradient: seen.append((micro_batch, gradient.clone())))
            return loss_fn(output, micro_batch)

        return forward_backward(micro_batches, watching)

    policy.forward_backward = watched  # type: ignore[method-assign]
    return seen
