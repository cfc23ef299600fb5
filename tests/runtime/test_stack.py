"""The installed packages work together, or one line says which do not; imports compile nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bapo_megatron.runtime.cpu_torch import uncompiled_imports
from bapo_megatron.runtime.stack import stack_errors


def check(folder: Path) -> tuple[int, str]:
    """Exit status and errors, with the modules in a folder before those that are installed."""
    result = subprocess.run(
        [sys.executable, "-m", "bapo_megatron.runtime.stack"],
        env={**os.environ, "PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.stdout == ""
    return result.returncode, result.stderr


@pytest.mark.slow
def test_the_installed_packages_work_together() -> None:
    assert stack_errors() == {}


def test_packages_that_do_not_work_are_named_in_one_line(tmp_path: Path) -> None:
    for name, body in {
        "torch": "tensor = ones = lambda *_: None",
        "torchvision": "class ops: nms = lambda *_: None",
        "transformers": "Qwen2ForCausalLM = None",
    }.items():
        (tmp_path / f"{name}.py").write_text(body)
    assert check(tmp_path) == (0, "")

    nms = "operator torchvision::nms does not exist"
    (tmp_path / "torchvision.py").write_text(f"raise RuntimeError({nms!r} + chr(10) + 'details')")
    (tmp_path / "transformers.py").write_text("raise ValueError")
    status, message = check(tmp_path)
    assert (status, message.count("\n")) == (1, 1)
    assert f"torchvision does not work: {nms}; transformers does not work: ValueError;" in message


@pytest.mark.parametrize("has_gpu", [False, True])
def test_torch_compile_is_left_alone_only_with_a_gpu(
    monkeypatch: pytest.MonkeyPatch, has_gpu: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    before = torch.compile
    with uncompiled_imports():
        assert (torch.compile is before) == has_gpu
        if not has_gpu:
            assert torch.compile(len) is len
            assert torch.compile(dynamic=True)(len) is len
    assert torch.compile is before
