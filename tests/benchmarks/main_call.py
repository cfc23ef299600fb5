"""Calls a benchmark's ``main`` as a test does: what it imports has been imported already."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Callable


def _uncompiled(function: Callable[..., Any] | None = None, **_: Any) -> Callable[..., Any]:
    return function or _uncompiled  # which may be used as a decorator


def run_main(name: str, *arguments: str) -> None:
    """Be ``python -m tests.benchmarks.<name>``, but compile nothing, which would take a minute."""
    module = importlib.import_module(f"tests.benchmarks.{name}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", _uncompiled)
        patch.setattr(sys, "argv", [str(module.__file__), *arguments])
        module.main()
