"""Gradients over data-parallel ranks, AdamW in Megatron's distributed optimizer, the schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.transformer.module import Float16Module

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.optimizer import MegatronOptimizer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from torch import Tensor

    from bapo_megatron.config.schema import OptimizerConfig


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """Outcome of one optimizer step, equal on every rank."""

    applied: bool
    """False where the gradient norm was not finite or a fault was counted: weights and optimizer
    are untouched."""
    grad_norm: float
    """Global gradient norm before clipping."""
    faults: tuple[float, ...] = ()
    """The caller's faults, read from the device."""


def learning_rate(config: OptimizerConfig, update: int, total_updates: int) -> float:
    """Return the learning rate of an update, counted from 0.

    The warm-up rises linearly and reaches ``lr`` at update ``warmup_updates − 1`` (its first update
    is not wasted on a rate of 0). A decay starts there and reaches ``min_lr`` at ``total_updates``.
    """
    if update < config.warmup_updates:
        return config.lr * (update + 1) / config.warmup_updates
    if config.schedule == "constant":
        return config.lr
    decay_updates = max(total_updates - config.warmup_updates, 1)
    progress = min((update - config.warmup_updates) / decay_updates, 1.0)
    if config.schedule == "linear":
        share = 1.0 - progress
    else:
        share = 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.min_lr + (config.lr - config.min_lr) * share


def wrap_for_data_parallel(gpt: GPTModel) -> DistributedDataParallel:
    """Wrap the model so that gradients are summed over data-parallel ranks, in float32."""
    config = gpt.config
    module = Float16Module(config, gpt) if config.bf16 else gpt
    ddp = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True),
        module,
    )
    config.no_sync_func = ddp.no_sync
    config.finalize_model_grads_func = _finalize_without_dividing
    return ddp


def build_optimizer(ddp: DistributedDataParallel, config: OptimizerConfig) -> MegatronOptimizer:
    """Build AdamW; biases and norms are not decayed (Megatron's rule)."""
    transformer = ddp.config
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            min_lr=config.min_lr,
            adam_beta1=config.beta1,
            adam_beta2=config.beta2,
            adam_eps=config.eps,
            weight_decay=config.weight_decay,
            clip_grad=config.clip_grad,
            bf16=transformer.bf16,
            params_dtype=transformer.params_dtype,
            use_distributed_optimizer=True,
        ),
        [ddp],
    )
    _adapt_to_checkpoints(optimizer)
    return optimizer


@torch.no_grad()
def step_optimizer(
    optimizer: MegatronOptimizer, *, lr: float, clip_grad: float, faults: Tensor | None = None
) -> OptimizerStep:
    """Clip by the global norm and step, unless the norm is not finite or there is a fault.

    Megatron's own ``step`` clips by whatever norm it finds, and would write a NaN into all weights.
    This is where the host waits for the device: for the norm, with the faults ready beside it.

    Args:
        optimizer: Holds the reduced gradients.
        lr: Learning rate.
        clip_grad: Largest global norm.
        faults: [F] counts on the device, equal on all ranks; any above 0 forbids the step.
    """
    optimizer.prepare_grads()  # its return value is about loss scaling, which bfloat16 does not use
    grad_norm = float(optimizer.get_grad_norm())
    counted = () if faults is None else tuple(faults.tolist())
    if not math.isfinite(grad_norm) or any(count != 0 for count in counted):
        return OptimizerStep(applied=False, grad_norm=grad_norm, faults=counted)
    clip_grad_by_total_norm_fp32(optimizer.get_parameters(), clip_grad, grad_norm)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step_with_ready_grads()
    return OptimizerStep(applied=True, grad_norm=grad_norm, faults=counted)


def _torch_optimizers(optimizer: MegatronOptimizer) -> list[DistributedOptimizer]:
    """Return the optimizers around torch's own AdamW; fused ones need none of the fixes below."""
    return [
        inner
        for inner in optimizer.chained_optimizers
        if isinstance(inner.optimizer, torch.optim.Adam)  # AdamW is one
    ]


def _adapt_to_checkpoints(optimizer: MegatronOptimizer) -> None:
    """Get around what Megatron's checkpoints assume of states and torch's AdamW does otherwise.

    1. Saving and loading assert that states exist, but AdamW makes them in its first step (which
       may be long in coming, where updates without a gradient are skipped): make them here.
    2. ``_set_main_param_and_optimizer_states`` copies every entry of a state from the checkpoint,
       which holds no ``step`` (it is stored once, with the parameter groups): hand it the current
       one.

    The third is in ``finish_load``.
    """
    for inner in _torch_optimizers(optimizer):
        for group in inner.optimizer.param_groups:
            for parameter in group["params"]:
                inner.optimizer.state[parameter] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
        inner._set_main_param_and_optimizer_states = MethodType(_set_states_with_step, inner)


def finish_load(optimizer: MegatronOptimizer) -> None:
    """Give each parameter its own step count.

    3. Loading puts one shared ``step`` tensor into all states, so that AdamW counts one update as
       many as there are parameters. The first update after a load would look right, the second not.
    """
    for inner in _torch_optimizers(optimizer):
        for state in inner.optimizer.state.values():
            state["step"] = state["step"].clone()


def _set_states_with_step(
    self: DistributedOptimizer, model_param: torch.nn.Parameter, tensors: dict[str, torch.Tensor]
) -> None:
    group_index, index = self.model_param_group_index_map[model_param]
    main_param = self.optimizer.param_groups[group_index]["params"][index]
    step = self.optimizer.state[main_param]["step"]
    type(self)._set_main_param_and_optimizer_states(self, model_param, {"step": step, **tensors})


def _finalize_without_dividing(
    model: list[DistributedDataParallel], num_tokens: torch.Tensor | None = None, **options: Any
) -> None:
    """Reduce gradients and divide by nothing: losses hold their denominators already."""
    del num_tokens
    finalize_model_grads(model, None, **options)
