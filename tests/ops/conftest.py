"""Instruction sets of the CPU kernels, and the CUDA kernels as the emulation compiles them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.cuda_emulation import launchers
from tests.ops.kernel_calls import ISAS, instruction_set

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cuda_emulation.launchers import EmulatedKernels


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the CPU ops with each instruction set that this machine has."""
    with instruction_set(request.param):
        yield request.param


@pytest.fixture
def kernels() -> EmulatedKernels:
    emulated = launchers.emulated_kernels()
    emulated.set_order(0)
    return emulated
