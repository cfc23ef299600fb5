"""Transformer Engine without its compiled parts, and a GPU that is not there.

Its modules name and shape their parameters in Python; the compiled parts import and compute. For a
process of its own, since both replace what other tests use.
"""

from __future__ import annotations

import os
import sys
import warnings
from contextlib import ExitStack, contextmanager
from enum import IntEnum
from importlib.machinery import ModuleSpec
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock, patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from bapo_megatron.runtime.cpu_torch import uncompiled_imports

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HOPPER = SimpleNamespace(major=9, minor=0, name="no GPU")
CUDNN_VERSION = 91300
"""9.13.0, as cuDNN encodes it."""
ENUMERATIONS = {
    "DType": "kByte kInt32 kFloat32 kFloat16 kBFloat16 kFloat8E4M3 kFloat8E5M2 kFloat4E2M1",
    "NVTE_Fused_Attn_Backend": "NVTE_No_Backend NVTE_F16_arbitrary_seqlen NVTE_FP8",
}
"""Those of the compiled parts that the Python sources mirror; on import they compare the names."""


def import_transformer_engine(folder: Path) -> None:
    """Import it from ``folder``; Megatron, imported afterwards, finds it installed."""
    sys.path.insert(0, str(folder))
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # else its import loads libraries of CUDA
    for name in ("transformer_engine_torch", "onnx", "onnxscript"):
        sys.modules[name] = MagicMock(__spec__=ModuleSpec(name, None))
    compiled: Any = sys.modules["transformer_engine_torch"]
    compiled.get_cudnn_version = lambda: CUDNN_VERSION
    vars(compiled).update({name: IntEnum(name, names) for name, names in ENUMERATIONS.items()})
    with uncompiled_imports(), warnings.catch_warnings(action="ignore"):
        import transformer_engine  # without its PyTorch part, whose library it does not find

        transformer_engine.common.load_framework_extension = lambda framework: None
        import transformer_engine.pytorch


@contextmanager
def imaginary_gpu() -> Iterator[torch.device]:
    """A device on which modules can be built: their tensors are on the meta device."""
    answers = {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "get_device_properties": lambda device=None: HOPPER,
    }
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(patch.object(torch.cuda, name, answer))
        stack.enter_context(_OnMeta())
        yield torch.device("cuda", 0)


class _OnMeta(TorchFunctionMode):
    """Makes new tensors meta tensors, whatever device is named, and leaves them there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.Tensor.to, torch.Tensor.cuda):
            return args[0]
        if func is torch.device and isinstance(args[0], int):
            return func("cuda", *args)  # without a GPU a number alone names no device
        if "device" in kwargs or func in _device_constructors():
            kwargs["device"] = "meta"
        return func(*args, **kwargs)
