"""The kernels: of each instruction set, of CUDA as the emulation compiles them, and of a device."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from bapo_megatron.ops import extension
from tests.cuda_emulation import launchers
from tests.cuda_emulation.launchers import EmulatedKernels
from tests.ops.kernel_calls import ISAS, DeviceKernels, instruction_set

DEVICE = pytest.param("device", marks=pytest.mark.gpu)


def _kernels(kind: str) -> Iterator[Any]:
    if kind in ISAS:
        with instruction_set(kind):
            yield torch.ops.bapo
    elif kind == "emulated":
        emulated = launchers.emulated_kernels()
        emulated.set_order(0)
        yield emulated
    else:
        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
        # On a machine with a device these tests must run, not pass for want of the kernels.
        assert extension.build_info()["cuda"], "rebuild with nvcc: BAPO_FORCE_CUDA_BUILD=1"
        yield DeviceKernels()


@pytest.fixture(params=[*ISAS, "emulated", DEVICE])
def kernels(request: pytest.FixtureRequest) -> Iterator[Any]:
    """All of them, called like ``torch.ops.bapo`` with tensors on the CPU."""
    yield from _kernels(request.param)


@pytest.fixture(params=["emulated", DEVICE])
def cuda_kernels(request: pytest.FixtureRequest) -> Iterator[Any]:
    yield from _kernels(request.param)


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[Any]:
    """``torch.ops.bapo`` on the CPU with each instruction set that this machine has."""
    yield from _kernels(request.param)


@pytest.fixture
def emulated() -> Iterator[EmulatedKernels]:
    yield from _kernels("emulated")
