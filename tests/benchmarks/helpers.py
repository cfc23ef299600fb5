"""What the tests of benchmarks share."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bapo_megatron.runtime.cpu_torch import _unchanged
from tests.benchmarks.harness import interleave

MACHINE: dict[str, Any] = {
    **dict.fromkeys(("date", "commit", "processor", "device", "threads", "instruction_set"), "x"),
    **dict.fromkeys(("python", "compiler", "command", "cpus"), "x"),
    "packages": {"torch": "2"},
    "load": 1.0,
}
"""What ``harness.machine`` returns, as far as pages show it."""


def run_main(name: str, out: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """Be ``python -m tests.benchmarks.<name>``; return its JSON and its page.

    What it imports has been imported already. Nothing is compiled, which would take a minute, nor
    warmed up.
    """
    module = importlib.import_module(f"tests.benchmarks.{name}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", _unchanged)
        patch.setitem(interleave.__kwdefaults__, "warmup", 0)
        patch.setattr(sys, "argv", [str(module.__file__), *arguments, f"--out={out}"])
        module.main()
    return json.loads(out.with_suffix(".json").read_text()), out.with_suffix(".md").read_text()
