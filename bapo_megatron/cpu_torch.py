"""What imports need with a CPU build of torch; with a CUDA build nothing here has an effect."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

_TORCHVISION_OPERATORS = ("nms", "qnms")
_LIBRARIES: list[torch.library.Library] = []
"""Kept, since definitions end with their library."""


def declare_torchvision_operators() -> None:
    """Make transformers' classes of models and their configurations importable; safe to call twice.

    The package index has torchvision's wheel for CUDA only. With a CPU build of torch its operators
    do not load, and its import, which transformers needs, fails because it registers fake kernels
    for two of them. With a CUDA build it defines them itself, and defining them twice would abort.
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
    """Make ``torch.compile`` return functions unchanged inside the block.

    Megatron and SGLang decorate functions with it on import, which loads the compiler: a third of
    a process's start-up time.
    """
    if torch.version.cuda is not None:
        yield
        return
    with mock.patch.object(torch, "compile", _unchanged):
        yield


def _unchanged(function: Any = None, **_: Any) -> Any:
    """``torch.compile``, as a decorator with or without arguments."""
    return _unchanged if function is None else function
