"""A model with its training state, as a run builds them."""

from bapo_megatron.config.megatron import (
    MegatronConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
)
from bapo_megatron.policy.megatron_setup import seed_everything
from bapo_megatron.policy.model import Model
from bapo_megatron.policy.train_state import TrainState
from bapo_megatron.runtime.distributed import ProcessGroups


def build_state(
    model: ModelConfig,
    groups: ProcessGroups,
    *,
    parallel: ParallelConfig | None = None,
    optimizer: OptimizerConfig | None = None,
    megatron: MegatronConfig | None = None,
    total_updates: int = 10,
    hidden: bool = False,
) -> TrainState:
    """Seed, build and wrap; ``hidden``: the model returns hidden states."""
    megatron = megatron or MegatronConfig()
    seed_everything(0, groups)
    built = Model.build(
        model, parallel or layout_of(groups), megatron, groups, returns_hidden_states=hidden
    )
    return TrainState.build(built, optimizer or OptimizerConfig(lr=1e-3), megatron, total_updates)


def layout_of(groups: ProcessGroups, *, sequence: bool = False) -> ParallelConfig:
    """The layout of the groups."""
    is_default = groups.expert_tensor.size() == groups.tensor.size()
    return ParallelConfig(
        tensor=groups.tensor.size(),
        sequence=sequence,
        pipeline=groups.pipeline.size(),
        virtual_pipeline=groups.virtual_size,
        context=groups.context.size(),
        expert=groups.expert.size(),
        expert_tensor=None if is_default else groups.expert_tensor.size(),
    )
