"""Megatron-core without CUDA: shims, installed by the entry point of a trainer rank.

Megatron-core has no CPU switch. It asks ``torch.cuda`` for the current device and its random state,
and creates tensors with ``device="cuda"``; ``install`` answers with the CPU. Single functions are
replaced, because a ``TorchFunctionMode`` sees every call of torch and cost 9 % of a step.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


@functools.cache
def install() -> None:
    """Make Megatron-core run on the CPU; a ``RuntimeError`` where CUDA is available."""
    if torch.cuda.is_available():
        raise RuntimeError("cpu_compat.install is for machines without CUDA; do not call it here")
    # Buffers are allocated where device queries say.
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    # Work on the CPU is already done; there are no streams, and no cache to empty. One function per
    # name: torch.compile keys its handlers by function.
    for name in ("synchronize", "empty_cache", "current_stream"):
        setattr(torch.cuda, name, lambda *_: None)

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
