"""What Megatron's checkpoints assume of optimizer states, and torch's AdamW does otherwise.

Megatron knows Transformer Engine's and apex's Adam, which count steps once per group; torch's counts
them in the state of every parameter. ``prepare`` when the optimizer is built and ``finish_load``
after every load make up for it, whichever of Megatron's optimizers is around it.
"""

from __future__ import annotations

from types import MethodType
from typing import TYPE_CHECKING

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer


def prepare(optimizer: MegatronOptimizer) -> None:
    """Make an optimizer's state such that it can be saved and loaded at any time.

    1. Saving and loading assume that states exist, but Adam makes them in its first step (which may
       be long in coming, where updates without a gradient are skipped): make them here.
    2. ``DistributedOptimizer`` copies every entry of a state from the checkpoint, which holds no
       ``step`` (it is stored once, with the parameter groups): hand it the current one.

    The third is in ``finish_load``.
    """
    for inner in optimizer.chained_optimizers:
        if inner.init_state_fn is None:  # none but the optimizer that steps in host memory
            continue
        inner.init_state_fn(inner.optimizer, inner.config)
        if not isinstance(inner.optimizer, torch.optim.Adam):  # AdamW is one
            continue
        for state in inner.optimizer.state.values():
            state["step"] = torch.tensor(0.0)
        if isinstance(inner, DistributedOptimizer):
            inner._set_main_param_and_optimizer_states = MethodType(_set_states_with_step, inner)


def finish_load(optimizer: MegatronOptimizer) -> None:
    """Give each parameter its own step count.

    3. Loading puts one shared ``step`` tensor into all states, so that AdamW counts one update as
       many as there are parameters. The first update after a load would look right, the second not.
       The optimizers that are not distributed put none where no step had been made.
    """
    for inner in optimizer.chained_optimizers:
        if isinstance(inner.optimizer, torch.optim.Adam):
            for state in inner.optimizer.state.values():
                state["step"] = state["step"].clone() if "step" in state else torch.tensor(0.0)


def _set_states_with_step(
    self: DistributedOptimizer, model_param: torch.nn.Parameter, tensors: dict[str, torch.Tensor]
) -> None:
    group_index, index = self.model_param_group_index_map[model_param]
    main_param = self.optimizer.param_groups[group_index]["params"][index]
    step = self.optimizer.state[main_param]["step"]
    type(self)._set_main_param_and_optimizer_states(self, model_param, {"step": step, **tensors})
