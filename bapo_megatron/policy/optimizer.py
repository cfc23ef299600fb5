"""Gradients over data-parallel ranks, AdamW in Megatron's distributed optimizer, the schedule.

Megatron expects Transformer Engine's or apex's Adam, which counts steps once per group; torch's
counts them in the state of every parameter. ``_prepare`` makes up for it when the optimizer is
built, ``load_state`` when it is loaded.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, product
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import MegatronOptimizer, clip_grads, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.utils import get_model_config, local_multi_tensor_l2_norm
from torch import Tensor, nn

from bapo_megatron.config.megatron import MegatronConfig, OptimizerConfig


def wrap_for_data_parallel(
    modules: Sequence[nn.Module], megatron: MegatronConfig
) -> list[DistributedDataParallel]:
    """Wrap the model so that gradients are summed over data-parallel ranks, in float32."""
    config = get_model_config(modules[0])
    wrapped = [
        DistributedDataParallel(
            config,
            DistributedDataParallelConfig(
                use_distributed_optimizer=True,
                overlap_grad_reduce=megatron.overlap_grad_reduce,
                overlap_param_gather=megatron.overlap_param_gather,
                grad_reduce_in_fp32=True,
            ),
            module,
            # The other chunks' communication overlaps with the first one's compute anyway.
            disable_bucketing=number > 0,
        )
        for number, module in enumerate(modules)
    ]
    no_sync = [ddp.no_sync for ddp in wrapped]
    config.no_sync_func = no_sync if len(wrapped) > 1 else no_sync[0]
    config.finalize_model_grads_func = _finalize_without_dividing
    return wrapped


def _finalize_without_dividing(
    model: list[DistributedDataParallel], num_tokens: Tensor | None = None, **options: Any
) -> None:
    """Reduce gradients and divide by nothing: losses hold their denominators already."""
    finalize_model_grads(model, None, **options)


def build_optimizer(
    wrapped: list[DistributedDataParallel], config: OptimizerConfig, megatron: MegatronConfig
) -> MegatronOptimizer:
    """Build AdamW; biases and norms are not decayed (Megatron's rule)."""
    if clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:  # neither Transformer Engine nor apex
        use_torch_kernels()
    transformer, offload = wrapped[0].config, dict[str, Any]()
    if megatron.optimizer_offload_share > 0:
        if not torch.cuda.is_available():
            raise ValueError(
                f"megatron.optimizer_offload_share: {megatron.optimizer_offload_share} needs a "
                "GPU; without one the state is in host memory already, so set it to 0"
            )
        offload = {
            "optimizer_cpu_offload": True,
            "optimizer_offload_fraction": megatron.optimizer_offload_share,
            "overlap_cpu_optimizer_d2h_h2d": True,
            # This flag puts gradients where the host's optimizer reads them.
            "use_precision_aware_optimizer": True,
        }
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
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
            overlap_param_gather=megatron.overlap_param_gather,
            **offload,
        ),
        wrapped,
    )
    # Of adapters of experts alone the other optimizer has no parameters, nor could it be saved.
    parts = optimizer.chained_optimizers
    optimizer.chained_optimizers = [part for part in parts if not part.is_stub_optimizer]
    for group in optimizer.param_groups:
        # Megatron leaves that to its own scheduler, and decays everything without it.
        group["weight_decay"] = config.weight_decay * group["wd_mult"]
        # Loading matches groups by all that Megatron's scheduler reads from them, and would refuse
        # to resume with another learning rate; ours reads none of it.
        del group["max_lr"], group["min_lr"]
    _prepare(optimizer)
    return optimizer


def use_torch_kernels() -> None:
    """Clip with torch's multi-tensor kernels, in place of Megatron's own substitutes for apex.

    Those read every gradient's norm on the host, and scale a copy that they copy back.
    """

    def norm_of(_: int, __: Tensor, lists: list[list[Tensor]], *___: Any) -> tuple[Tensor, None]:
        return nn.utils.get_total_norm(lists[0])[None], None

    def scale(_: int, __: Tensor, lists: list[list[Tensor]], factor: float) -> None:
        if lists[0]:  # a stage may train nothing
            torch._foreach_mul_(lists[0], factor)

    clip_grads.l2_norm_impl, clip_grads.multi_tensor_scale_impl = norm_of, scale


def _prepare(optimizer: MegatronOptimizer) -> None:
    """Prepare an optimizer's state to be saved and loaded at any time.

    1. Saving and loading assume that states exist, but Adam makes them in its first step (which may
       be long in coming, where updates without a gradient are skipped): make them here.
    2. ``DistributedOptimizer`` copies every entry of a state from the checkpoint, which holds no
       ``step`` (it is stored once, with the parameter groups): hand it the current one.

    Point 3 is in ``load_state``.
    """
    for inner in optimizer.chained_optimizers:
        inner.get_parameter_state_dp_zero = MethodType(_states_of_owners, inner)
        if inner.init_state_fn is not None:  # else it steps in host memory
            inner.init_state_fn(inner.optimizer, inner.config)
        if _is_torch(inner):
            for state in inner.optimizer.state.values():
                state["step"] = torch.tensor(0.0)
            inner._set_main_param_and_optimizer_states = MethodType(_set_with_step, inner)


def _set_with_step(
    self: DistributedOptimizer, model_param: torch.nn.Parameter, tensors: dict[str, Tensor]
) -> None:
    group_index, index = self.model_param_group_index_map[model_param]
    main_param = self.optimizer.param_groups[group_index]["params"][index]
    step = self.optimizer.state[main_param]["step"]
    type(self)._set_main_param_and_optimizer_states(self, model_param, {"step": step, **tensors})


def _is_torch(inner: MegatronOptimizer) -> bool:
    return isinstance(inner.optimizer, torch.optim.Adam)  # AdamW is one


def learning_rate(config: OptimizerConfig, update: int, total_updates: int) -> float:
    """Return the learning rate of an update, counted from 0.

    The warm-up rises linearly to ``lr`` at update ``warmup_updates − 1`` (the first update does not
    have a rate of 0). A decay starts one update later and reaches ``min_lr`` at ``total_updates``.
    """
    if update < config.warmup_updates:
        return config.lr * (update + 1) / config.warmup_updates
    if config.schedule == "constant":
        return config.lr
    decay_updates = max(total_updates - config.warmup_updates, 1)
    progress = min((update - config.warmup_updates) / decay_updates, 1.0)
    share = 1.0 - progress
    if config.schedule == "cosine":
        share = 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.min_lr + (config.lr - config.min_lr) * share


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """Outcome of one optimizer step, equal on every rank."""

    applied: bool
    """False if the gradient norm was not finite or a fault was counted: weights and optimizer
    are untouched."""
    grad_norm: float
    """Global gradient norm before clipping."""
    verdict: tuple[float, ...] = ()
    """The caller's, read from the device."""


def sharded_state(
    optimizer: MegatronOptimizer,
    model_state: dict[str, Any],
    num_updates: int,
    *,
    is_loading: bool,
    **options: Any,
) -> dict[str, Any]:
    """Return Megatron's sharded state dict; to save, of owned states only. A collective."""
    for inner in filter(_is_torch, optimizer.chained_optimizers):
        if not any(group["params"] for group in inner.optimizer.param_groups):
            # A stage without experts, say: Megatron reads the steps from a state.
            inner.optimizer.state["no parameters"] = {"step": torch.tensor(float(num_updates))}
    state: dict[Any, Any] = optimizer.sharded_state_dict(
        model_state, is_loading=is_loading, **options
    )
    if is_loading:
        return state
    several = optimizer.chained_optimizers  # usually one
    for number, inner in enumerate(several):
        part = state if len(several) == 1 else state[number]
        rank = inner.data_parallel_group_gloo.rank()
        for index, owner in enumerate(_owners(inner).values()):
            if owner != rank:
                del part["param_state"][index]
                continue
            for sharded in part["param_state"][index].values():
                sharded.replica_id = (*sharded.replica_id[:2], 0)  # as if it were the first rank
    return state


def _owners(inner: DistributedOptimizer) -> dict[torch.nn.Parameter, int]:
    """Return which rank of the data-parallel group writes a parameter's states, in their order.

    The largest parameter goes to the rank with the fewest elements so far, on all ranks alike.
    """
    parameters = [parameter for buffer in inner.buffers for parameter in buffer.param_index_map]
    owners, num_elements = {}, [0] * inner.data_parallel_group_gloo.size()
    for parameter in sorted(parameters, key=lambda parameter: -parameter.numel()):
        owners[parameter] = num_elements.index(min(num_elements))
        num_elements[owners[parameter]] += parameter.numel()
    return {parameter: owners[parameter] for parameter in parameters}


def _states_of_owners(
    self: DistributedOptimizer, *, empty_data: bool = False, **_: Any
) -> dict[int, Any]:
    """Gather the states of each parameter on its owner, through gloo and host memory.

    ``get_parameter_state_dp_zero`` would gather all of them on the first rank, or on the GPU.
    One tensor per buffer and kind of state uses memory only where something is written.
    """
    states: dict[int, Any] = {}
    views: dict[torch.nn.Parameter, dict[str, Tensor]] = {}
    for number, buffer in enumerate(self.buffers):
        whole = {name: torch.empty(buffer.numel) for name in ("param", "exp_avg", "exp_avg_sq")}
        states[number] = dict.fromkeys(self.gbuf_ranges[number], whole)
        for parameter, (start, end, _) in buffer.param_index_map.items():
            views[parameter] = {name: tensor[start:end] for name, tensor in whole.items()}
    if not empty_data:
        _gather_to_owners(self, views)
    return states


def _gather_to_owners(
    inner: DistributedOptimizer, views: dict[torch.nn.Parameter, dict[str, Tensor]]
) -> None:
    group, owners = inner.data_parallel_group_gloo, _owners(inner)
    ranks, rank = dist.get_process_group_ranks(group), group.rank()
    numbers = {parameter: number for number, parameter in enumerate(views)}
    local_ranges = {
        numbers[parameter]: (place["param"].start, place["param"].end)
        for buffer in inner.gbuf_ranges
        for bucket in chain.from_iterable(buffer.values())
        for parameter, place in bucket["param_map"].items()
    }
    ranges: list[Any] = [None] * len(ranks)
    dist.all_gather_object(ranges, local_ranges, group=group)
    transfers: list[tuple[Any, Tensor]] = []
    pieces = product(range(len(ranks)), ((p, name) for p in views for name in views[p]))
    for tag, (sender, (parameter, name)) in enumerate(pieces):
        owner = owners[parameter]
        start, end = ranges[sender].get(numbers[parameter], (0, 0))
        if start == end or rank not in (sender, owner):
            continue
        part = views[parameter][name][start:end]
        if rank != sender:
            transfers.append((dist.irecv(part, ranks[sender], group, tag), part))
            continue
        value = inner._get_main_param_and_optimizer_states(parameter)[name]
        value = value.detach().to("cpu", torch.float32)
        if rank == owner:
            part.copy_(value)
        else:
            transfers.append((dist.isend(value, ranks[owner], group, tag), value))
    for work, _ in transfers:
        work.wait()


def load_state(optimizer: MegatronOptimizer, state: dict[str, Any]) -> None:
    """Load the ``sharded_state`` that ``dist_checkpointing.load`` has filled.

    Betas, eps and weight decay are those of the configuration, not those of the checkpoint.

    3. Loading puts one shared ``step`` tensor into all states, so that AdamW would count an update
       once per parameter, which shows only in the second update after a load: give each its own.
    """
    names = ("betas", "eps", "weight_decay", "wd_mult")
    groups = optimizer.param_groups
    configured = [{name: group[name] for name in names if name in group} for group in groups]
    optimizer.load_state_dict(state)
    for group, values in zip(optimizer.param_groups, configured, strict=True):
        group.update(values)
    for inner in filter(_is_torch, optimizer.chained_optimizers):
        for entries in inner.optimizer.state.values():
            entries["step"] = entries["step"].clone()
