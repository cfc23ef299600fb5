"""What Megatron's checkpoints assume of optimizer states, and torch's AdamW does otherwise.

Megatron knows Transformer Engine's and apex's Adam, which count steps once per group; torch's
counts them in the state of every parameter. ``prepare`` makes up for it when the optimizer is
built, ``load_state`` when it is loaded, whichever of Megatron's optimizers is around it.
"""

from __future__ import annotations

from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer

CONFIGURED = ("betas", "eps", "weight_decay", "wd_mult")
"""Entries of a parameter group that follow from the configuration."""


def prepare(optimizer: MegatronOptimizer) -> None:
    """Make an optimizer's state such that it can be saved and loaded at any time.

    1. Saving and loading assume that states exist, but Adam makes them in its first step (which may
       be long in coming, where updates without a gradient are skipped): make them here.
    2. ``DistributedOptimizer`` copies every entry of a state from the checkpoint, which holds no
       ``step`` (it is stored once, with the parameter groups): hand it the current one.

    The others are in ``load_state``.
    """
    for inner in optimizer.chained_optimizers:
        if inner.init_state_fn is None:  # none but the optimizer that steps in host memory
            continue
        inner.init_state_fn(inner.optimizer, inner.config)
        if not _is_torch(inner):
            continue
        for state in inner.optimizer.state.values():
            state["step"] = torch.tensor(0.0)
        if isinstance(inner, DistributedOptimizer):
            inner._set_main_param_and_optimizer_states = MethodType(_set_states_with_step, inner)


def sharded_state(
    optimizer: MegatronOptimizer,
    model_state: dict[str, Any],
    *,
    is_loading: bool,
    metadata: dict[str, Any],
) -> dict[str, Any]:
    """Return Megatron's sharded state dict; a collective over all ranks."""
    state: dict[str, Any] = optimizer.sharded_state_dict(
        model_state, is_loading=is_loading, metadata=metadata
    )
    for _, part in _parts(optimizer, state):
        if part.get("param_state", {}) is None:  # it is another rank's to write
            del part["param_state"]
    return state


def load_state(optimizer: MegatronOptimizer, state: dict[str, Any]) -> None:
    """Load what ``dist_checkpointing.load`` has made of ``sharded_state``.

    What the configuration says of decay and the like holds, not what the checkpoint was saved with.

    3. Loading puts one shared ``step`` tensor into all states, so that AdamW counts one update as
       many as there are parameters. The first update after a load would look right, the second not:
       give each its own.
    4. The optimizers that are not distributed do not save a ``step`` of 0, without which AdamW
       refuses the state: add it.
    """
    for inner, part in _parts(optimizer, state):
        if not isinstance(inner, DistributedOptimizer) and _is_torch(inner):
            part.get("optimizer", part)["state"].setdefault("common_step", torch.tensor(0.0))
    configured = [
        {name: group[name] for name in CONFIGURED if name in group}
        for group in optimizer.param_groups
    ]
    optimizer.load_state_dict(state)
    for group, values in zip(optimizer.param_groups, configured, strict=True):
        group.update(values)
    for inner in filter(_is_torch, optimizer.chained_optimizers):
        for entries in inner.optimizer.state.values():
            entries["step"] = entries["step"].clone()


def _parts(
    optimizer: MegatronOptimizer, state: dict[Any, Any]
) -> list[tuple[MegatronOptimizer, dict[str, Any]]]:
    """Pair Megatron's optimizers, mostly one, with their states."""
    inner = optimizer.chained_optimizers
    return [(inner[0], state)] if len(inner) == 1 else [(o, state[n]) for n, o in enumerate(inner)]


def _is_torch(inner: MegatronOptimizer) -> bool:
    return isinstance(inner.optimizer, torch.optim.Adam)  # AdamW is one


def _set_states_with_step(
    self: DistributedOptimizer, model_param: torch.nn.Parameter, tensors: dict[str, torch.Tensor]
) -> None:
    group_index, index = self.model_param_group_index_map[model_param]
    main_param = self.optimizer.param_groups[group_index]["params"][index]
    step = self.optimizer.state[main_param]["step"]
    type(self)._set_main_param_and_optimizer_states(self, model_param, {"step": step, **tensors})
