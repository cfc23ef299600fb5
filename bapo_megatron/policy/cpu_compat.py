"""Megatron-core without CUDA: shims, installed by the entry point of a trainer rank.

Megatron-core has no CPU switch. It asks ``torch.cuda`` for the current device and its random state,
and creates tensors with ``device="cuda"``; ``install`` answers with the CPU. Single functions are
replaced, because a ``TorchFunctionMode`` sees every call of torch and cost 9 % of a step.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@functools.cache
def install() -> None:
    """Make Megatron-core run on the CPU; a ``RuntimeError`` where CUDA is available."""
    if torch.cuda.is_available():
        raise RuntimeError("cpu_compat.install is for machines without CUDA; do not call it here")
    # Buffers are allocated where device queries say.
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    # Work on the CPU is already done, in one order, and there is no cache to empty. One function
    # per name: torch.compile keys its handlers by function.
    for name in ("synchronize", "empty_cache"):
        setattr(torch.cuda, name, lambda *_: None)
    torch.cuda.Stream = _Stream  # type: ignore[misc, assignment]
    torch.cuda.current_stream = lambda *_: _STREAM  # type: ignore[assignment]
    torch.cuda.stream = contextlib.nullcontext  # type: ignore[assignment]

    from megatron.core.tensor_parallel import random as megatron_random

    # Megatron's named random streams save and restore the CPU generator instead of CUDA's.
    torch.cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    # Not torch.manual_seed, which would seed CUDA as well and so call this function again.
    torch.cuda.manual_seed = torch.default_generator.manual_seed  # type: ignore[assignment]
    for name in ("get_rng_state", "manual_seed"):
        setattr(torch.cuda.random, name, getattr(torch.cuda, name))
    # Imported by name inside Megatron, so it is replaced there.
    megatron_random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor  # type: ignore[method-assign]
    torch.Tensor.type = _named_like_cuda(torch.Tensor.type)  # type: ignore[method-assign]
    _prepare_experts()


class _Stream:
    """The CPU's one order of work."""

    def wait_stream(self, other: Any) -> None:
        """Do nothing: the other one's work is done."""

    def record_event(self, event: Any = None) -> Any:
        """Return an event, which has happened."""
        return event or self

    def synchronize(self) -> None:
        """Do nothing, also as an event."""

    wait_event = wait_stream


_STREAM = _Stream()


def _prepare_experts() -> None:
    """Let experts exchange tokens over gloo."""
    from megatron.core.tensor_parallel import mappings
    from megatron.core.transformer.moe import token_dispatcher

    def as_numpy(tensor: Any, as_numpy: bool = False, **_: Any) -> Any:
        # Megatron's returns a tensor of the CPU as it is, which all_to_all refuses as split sizes.
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = as_numpy
    mappings._gather_along_first_dim = _gather_unequal(mappings._gather_along_first_dim)
    mappings._reduce_scatter_along_first_dim = _scatter_unequal(
        mappings._reduce_scatter_along_first_dim
    )


def _gather_unequal(gather: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Gather parts of different lengths, which gloo's all_gather cannot."""

    def gathered(
        part: Tensor, group: Any, output_split_sizes: Any = None, *args: Any, **options: Any
    ) -> Tensor:
        if output_split_sizes is None or group.size() == 1:
            return gather(part, group, output_split_sizes, *args, **options)
        parts = [part.new_empty((int(size), *part.shape[1:])) for size in output_split_sizes]
        parts[group.rank()].copy_(part)
        for rank, content in enumerate(parts):
            dist.broadcast(content, group=group, group_src=rank)
        return torch.cat(parts)

    return gathered


def _scatter_unequal(scatter: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Sum and scatter parts of different lengths, which gloo's reduce_scatter cannot."""

    def scattered(
        whole: Tensor, group: Any, input_split_sizes: Any = None, *args: Any, **options: Any
    ) -> Tensor:
        if input_split_sizes is None or group.size() == 1:
            return scatter(whole, group, input_split_sizes, *args, **options)
        total = whole.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total.split([int(size) for size in input_split_sizes])[group.rank()].contiguous()

    return scattered


_FACTORIES = ("empty", "empty_like", "ones", "randn", "tensor", "zeros")
"""Functions that Megatron asks for tensors on CUDA or in page-locked memory."""


def _on_cpu(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(factory)
    def create(*args: Any, **options: Any) -> Tensor:
        if str(options.get("device", "")).startswith("cuda"):
            options["device"] = "cpu"
        if options.get("pin_memory"):
            options["pin_memory"] = False  # page-locking needs a CUDA context
        return factory(*args, **options)

    return create


def _named_like_cuda(method: Callable[..., Any]) -> Callable[..., Any]:
    """Have ``type()`` say 'torch.cuda.FloatTensor', which gradient clipping asserts."""

    @functools.wraps(method)
    def type_of(tensor: Tensor, *args: Any, **options: Any) -> Any:
        result = method(tensor, *args, **options)
        return result.replace("torch.", "torch.cuda.", 1) if isinstance(result, str) else result

    return type_of
