"""What the extension refuses when it is loaded and before a run."""

import runpy

import pytest
import torch

from bapo_megatron.ops import extension


def test_an_extension_of_another_version_is_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("bapo_megatron.__version__", "0.0.9")
    with pytest.raises(ImportError, match=r"the package is 0\.0\.9; run `pip install"):
        runpy.run_path(extension.__file__)


def test_a_gpu_without_kernels_is_refused_and_the_cpu_always_has_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No device is needed to name one."""
    extension.check_kernels(torch.device("cpu"))
    monkeypatch.setattr(extension, "build_info", lambda: {"cuda": True})
    extension.check_kernels(torch.device("cuda", 3))
    monkeypatch.setattr(extension, "build_info", lambda: {"cuda": False})
    with pytest.raises(ValueError, match=r"cuda:3: .* built without CUDA; install nvcc"):
        extension.check_kernels(torch.device("cuda", 3))


def test_build_info_names_version_compiler_flags_and_instruction_set() -> None:
    info = extension.build_info()
    assert info["version"] == "0.3.0"
    assert "-ffp-contract=off" in info["flags"]
    assert "-march" not in info["flags"]
    assert info["isa"] == info["available_isas"][-1]
    assert info["available_isas"][0] == "portable"
    assert info["compiler"]
    assert info["git_commit"]
