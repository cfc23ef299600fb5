"""Calls a benchmark's ``main`` as a test does: what it imports has been imported already."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch

from bapo_megatron.runtime.cpu_torch import _unchanged


def run_main(name: str, *arguments: str) -> None:
    """Be ``python -m tests.benchmarks.<name>``, but compile nothing, which would take a minute."""
    module = importlib.import_module(f"tests.benchmarks.{name}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", _unchanged)
        patch.setattr(sys, "argv", [str(module.__file__), *arguments])
        module.main()
