"""Imports compile nothing without a GPU, whatever CUDA torch was built with."""

from __future__ import annotations

import pytest
import torch

from bapo_megatron.cpu_torch import uncompiled_imports


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
