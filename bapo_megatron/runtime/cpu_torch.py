"""Faster imports without a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch


@contextmanager
def uncompiled_imports() -> Iterator[None]:
    """Make ``torch.compile`` return functions unchanged inside the block; with a GPU, do nothing.

    Megatron and SGLang decorate functions with it on import, which loads the compiler: 1.3 of the
    4.5 s of a rank's imports.
    """
    if torch.cuda.is_available():
        yield
        return
    with mock.patch.object(torch, "compile", _unchanged):
        yield


def _unchanged(function: Any = None, **_: Any) -> Any:
    """``torch.compile``, as a decorator with or without arguments."""
    return _unchanged if function is None else function
