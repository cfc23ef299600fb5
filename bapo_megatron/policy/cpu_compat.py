"""Megatron-core without CUDA: three shims, installed by the entry point of a trainer rank.

Megatron-core has no CPU switch. It asks ``torch.cuda`` for the current device and its random state,
and creates tensors with ``device="cuda"``. ``install`` answers these with the CPU, for the life of
the process; no import calls it, and it refuses to run where CUDA is available.
"""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_installed: list[TorchFunctionMode] = []


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

    def nothing() -> None:
        """Work on the CPU is already done, and there is no cache to empty."""

    torch.cuda.current_device = current_device  # type: ignore[assignment]
    torch.cuda.synchronize = nothing  # type: ignore[assignment]
    torch.cuda.empty_cache = nothing

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
    mode = _CudaMeansCpu()
    mode.__enter__()
    _installed.append(mode)


_WITHOUT_KEYWORDS = (torch.Tensor.cuda, torch.Tensor.type, torch.Tensor.to)
"""Functions that say CUDA, or ask for it, without a keyword."""


class _CudaMeansCpu(TorchFunctionMode):
    """Replaces the CUDA devices that Megatron hard-codes in calls of torch functions."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not kwargs and func not in _WITHOUT_KEYWORDS:
            return func(*args)  # nearly every call of a step comes here
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Gradient clipping asserts the type name 'torch.cuda.FloatTensor'.
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False  # page-locking needs a CUDA context
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], "cpu", *args[2:])
        return func(*args, **kwargs)


def _is_cuda(device: Any) -> bool:
    return isinstance(device, str | torch.device) and str(device).startswith("cuda")
