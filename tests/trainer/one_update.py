"""A trainer of a tiny model in any layout, what one update gives, and how two are compared."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
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
from bapo_megatron.policy.frozen import FrozenModel
from bapo_megatron.policy.model import Model, PolicyOutput
from bapo_megatron.runtime.distributed import ProcessGroups
from bapo_megatron.trainer.scorers import FrozenScorer
from bapo_megatron.trainer.split import ZeroAdvantage, split_shape
from bapo_megatron.trainer.step import BatchTrainer
from tests.distributed_launch import joined
from tests.policy.build import build_state
from tests.policy.parity_ranks import hf_gradients
from tests.tolerances import EPS, HEADROOM, assert_within

TEMPERATURE = 0.7
ENTROPY_COEFFICIENT = 0.01

Updates = dict[Any, dict[str, Any]]
"""Sums, bounds and whole gradients of an update, by the name of its case."""


@dataclass(frozen=True)
class Case:
    """How an update is made."""

    algorithm: dict[str, Any] = field(default_factory=dict)
    staleness: dict[str, Any] = field(default_factory=dict)
    ops: dict[str, Any] = field(default_factory=dict)
    budget: int = 64
    """Tokens of a micro-batch."""
    dtype: str = "float32"
    teacher: Path | None = None
    """Model whose hidden states a scorer keeps, for a loss over the vocabulary."""
    zero_advantage: ZeroAdvantage | None = None
    """What becomes of responses with A = 0; None: what the objective declares."""


def build_trainer(
    model_dir: Path,
    groups: ProcessGroups,
    case: Case,
    *,
    sizes: Mapping[str, Any],
    optimizer: Mapping[str, float],
    megatron: Mapping[str, Any] | None = None,
    **options: Any,
) -> BatchTrainer:
    """A trainer of the case; ``sizes`` are those of ``ParallelConfig``."""
    ops, parallel = OpsConfig.model_validate(case.ops), ParallelConfig.model_validate(sizes)
    layout = MegatronConfig.model_validate(megatron or {})
    state = build_state(
        ModelConfig(path=model_dir, dtype=case.dtype),
        groups,
        parallel=parallel,
        optimizer=OptimizerConfig.model_validate(optimizer),
        megatron=layout,
        total_updates=100,
        hidden=ops.logits_chunk_tokens > 0,
    )
    if case.teacher is not None:
        options["scorers"] = (_teacher_scorer(case.teacher, ops, parallel, groups),)
    train = TrainConfig(max_tokens_per_micro_batch=case.budget)
    trainer = BatchTrainer(
        state=state,
        config=AlgorithmConfig.model_validate(
            {"entropy_coefficient": ENTROPY_COEFFICIENT, **case.algorithm}
        ),
        ops=ops,
        temperature=TEMPERATURE,
        staleness=StalenessConfig.model_validate(case.staleness),
        shape=split_shape(state.model, parallel, layout, train),
        **options,
    )
    if case.zero_advantage is not None:
        trainer._stage.zero_advantage = case.zero_advantage
    return trainer


def _teacher_scorer(
    path: Path, ops: OpsConfig, parallel: ParallelConfig, groups: ProcessGroups
) -> FrozenScorer:
    def build() -> FrozenModel:
        config = ModelConfig(path=path, dtype="float32")
        model = Model.build(config, parallel, MegatronConfig(), groups, returns_hidden_states=True)
        return FrozenModel.freeze(model, on_host=True, keeps_head=True)

    def output_of(model: Model) -> PolicyOutput:
        return PolicyOutput.of(model, ops, TEMPERATURE)

    return FrozenScorer("teacher_logprob", build, output_of, keeps_hidden=True)


def make_updates(
    model_dir: Path, dump: Path, sizes: dict[str, Any], cases: Mapping[Any, Case]
) -> Updates:
    """Make one update of each case, on every rank of a layout."""
    with joined(**sizes) as groups:
        return {
            name: _make_update(model_dir, dump, groups, sizes, case) for name, case in cases.items()
        }


def make_updates_in_layouts(
    model_dir: Path, dump: Path, layouts: Mapping[str, tuple[dict[str, Any], Mapping[Any, Case]]]
) -> dict[str, Updates]:
    """``make_updates`` in one layout after the other, by the layout's name: sizes and cases."""
    return {name: make_updates(model_dir, dump, *layout) for name, layout in layouts.items()}


def _make_update(
    model_dir: Path, dump: Path, groups: ProcessGroups, sizes: dict[str, Any], case: Case
) -> dict[str, Any]:
    algorithm = {"token_sum_norm_constant": 20.0, "bapo": {"target": 0.38}, **case.algorithm}
    trainer = build_trainer(
        model_dir,
        groups,
        Case(**{**vars(case), "algorithm": algorithm}),
        sizes=sizes,
        # Nothing scales the gradients before they are compared.
        optimizer={"lr": 0.0, "clip_grad": 1e9},
    )
    result, *further = trainer.train(read_batch(dump))
    chosen = result.decisions[0] if result.decisions else {}  # none of a skipped update
    bounds = [chosen.get(f"clip/{n}") for n in ("low", "high")]
    return {
        "loss": result.sums.get("policy_loss", 0.0),
        "sums": result.sums,
        "maxima": result.maxima,
        "bounds": tuple(bound for bound in bounds if bound is not None),
        "decisions": result.decisions,
        "skipped": [update.skipped for update in (result, *further)],
        "optimizer_steps": trainer.state.num_updates,
        "gradients": hf_gradients(trainer.state),
    }


def assert_same_gradients(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """No entry differs by more than 32 ε times the norm of all gradients, if that is above 1.

    Float32 gradients are some ε of their norm off in all entries together.
    """
    assert actual.keys() == expected.keys()
    norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in expected.values()))
    for name, gradient in expected.items():
        difference = float((actual[name] - gradient).abs().max())
        assert_within(difference, HEADROOM * EPS * max(1.0, norm), name)
