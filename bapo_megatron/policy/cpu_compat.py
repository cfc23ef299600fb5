"""Megatron-core without CUDA: three shims, installed by the entry point of a trainer rank.

Megatron-core has no CPU switch. It asks ``torch.cuda`` for the current device and its random state,
and creates tensors with ``device="cuda"``. ``install`` answers these with the CPU, for the life of
the process; no import calls it, and it refuses to run where CUDA is available. Single functions are
replaced: a ``TorchFunctionMode`` sees every call of torch, 36,000 in a step of the demo, and cost
it 9 % of its time.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_installed: list[bool] = []


def install() -> None:
    """Make Megatron-core run on the CPU; a second call does nothing.

    Raises:
        RuntimeError: CUDA is available, and the shims would hide it from the whole process.
    """
    if torch.cuda.is_available():
        raise RuntimeError("cpu_compat.install is for machines without CUDA; do not call it here")
    if _installed:
        return

    # Device queries raise without CUDA, and buffers are allocated where they say.
    def current_device() -> str:
        return "cpu"

    torch.cuda.current_device = current_device  # type: ignore[assignment]
    # Work on the CPU is already done; there are no streams, and no cache to empty. One function per
    # name: torch.compile keys its handlers by function.
    for name in ("synchronize", "empty_cache", "current_stream"):
        setattr(torch.cuda, name, lambda *_: None)

    from megatron.core.tensor_parallel import random as megatron_random

    # Megatron's named random streams save and restore the CPU generator instead of CUDA's.
    def get_rng_state(device: Any = "cuda") -> torch.Tensor:
        del device
        return torch.get_rng_state()

    def manual_seed(seed: int) -> None:
        # Not torch.manual_seed, which would seed CUDA as well and so call this function again.
        torch.default_generator.manual_seed(seed)

    def set_rng_state(new_state: torch.Tensor, device: int = -1, graph_safe: bool = False) -> None:
        del device, graph_safe
        torch.set_rng_state(new_state)

    torch.cuda.get_rng_state = torch.cuda.random.get_rng_state = get_rng_state
    torch.cuda.manual_seed = torch.cuda.random.manual_seed = manual_seed
    # Imported by name inside Megatron, so it is replaced there.
    megatron_random._set_cuda_rng_state = set_rng_state
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.cuda = _cuda  # type: ignore[method-assign, assignment]
    torch.Tensor.type = _named_like_cuda(torch.Tensor.type)  # type: ignore[method-assign]
    _installed.append(True)


_FACTORIES = ("empty", "empty_like", "ones", "randn", "tensor", "zeros")
"""Functions that Megatron asks for tensors on CUDA or in page-locked memory."""


def _on_cpu(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(factory)
    def made(*args: Any, **options: Any) -> Tensor:
        if str(options.get("device", "")).startswith("cuda"):
            options["device"] = "cpu"
        if options.get("pin_memory"):
            options["pin_memory"] = False  # page-locking needs a CUDA context
        return factory(*args, **options)

    return made


def _cuda(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
    """Return the tensor where it is."""
    del args, options
    return tensor


def _named_like_cuda(method: Callable[..., Any]) -> Callable[..., Any]:
    """Have ``type()`` say 'torch.cuda.FloatTensor', which gradient clipping asserts."""

    @functools.wraps(method)
    def type_of(tensor: Tensor, *args: Any, **options: Any) -> Any:
        found = method(tensor, *args, **options)
        return found.replace("torch.", "torch.cuda.", 1) if isinstance(found, str) else found

    return type_of
