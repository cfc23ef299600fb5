"""The CUDA kernels as the emulation compiles them."""

from __future__ import annotations

import pytest

from tests.cuda_emulation import launchers
from tests.cuda_emulation.launchers import EmulatedKernels


@pytest.fixture
def kernels() -> EmulatedKernels:
    emulated = launchers.emulated_kernels()
    emulated.set_order(0)
    return emulated
