"""What imports need beside a CPU build of torch; beside a CUDA build nothing here has an effect."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

_TORCHVISION_OPERATORS = ("nms", "qnms")
_LIBRARIES: list[torch.library.Library] = []
"""Kept, since definitions end with their library."""


def declare_torchvision_operators() -> None:
    """Make transformers' model classes importable; safe to call twice.

    The package index has torchvision's wheel for CUDA only. Beside a CPU build of torch its
    operators do not load, and its import, which transformers does, fails because it registers fake
    kernels for two of them. Beside a CUDA build torchvision defines them itself, and a second time
    would abort.
    """
    if torch.version.cuda is not None or _LIBRARIES:
        return
    library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for name in _TORCHVISION_OPERATORS:
        schema = f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        library.define(schema)  # type: ignore[no-untyped-call]
    _LIBRARIES.append(library)


@contextmanager
def uncompiled_imports() -> Iterator[None]:
    """Leave functions as they are that libraries decorate with ``torch.compile`` in the block.

    Megatron and SGLang do as they are imported, which loads the compiler: a third of a process's
    start.
    """
    if torch.version.cuda is not None:
        yield
        return
    with mock.patch.object(torch, "compile", _unchanged):
        yield


def _unchanged(function: Any = None, **_: Any) -> Any:
    """``torch.compile``, as a decorator with or without arguments."""
    return _unchanged if function is None else function
