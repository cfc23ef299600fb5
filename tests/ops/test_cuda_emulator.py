"""The emulator of CUDA blocks, and the index arithmetic that kernels share with it."""

import ctypes

import pytest
import torch

from tests.cuda_emulation.launchers import EmulatedKernels


class TestEmulator:
    """The emulator must be able to fail: else the tests below would show nothing."""

    def probe(self, emulated: EmulatedKernels, which: int) -> tuple[int, str, list[int]]:
        out = torch.zeros(68, dtype=torch.int32)
        error = emulated.library.probe_launch(which, ctypes.c_void_p(out.data_ptr()))
        return error, emulated.library.emulator_last_failure().decode(), out[:64].tolist()

    @pytest.mark.parametrize(
        ("which", "reason"), [(0, "never reach"), (1, "all 32 lanes"), (2, "misaligned")]
    )
    def test_reports_a_barrier_a_shuffle_and_a_vector_that_hardware_would_not_take(
        self, emulated: EmulatedKernels, which: int, reason: str
    ) -> None:
        error, message, _ = self.probe(emulated, which)
        assert error == 719
        assert reason in message

    def test_shows_a_race_as_a_result_that_depends_on_the_order(
        self, emulated: EmulatedKernels
    ) -> None:
        ascending = self.probe(emulated, 3)
        emulated.set_order(1)
        descending = self.probe(emulated, 3)
        assert ascending[:2] == descending[:2] == (0, "")
        assert ascending[2] != descending[2]


class TestRowLayout:
    @pytest.mark.parametrize("element_bytes", [2, 4])
    @pytest.mark.parametrize("columns", [0, 1, 7, 8, 15, 16, 17, 31, 33, 4097, 19008, 33000])
    def test_every_column_is_read_once_by_aligned_vectors_within_the_registers(
        self, emulated: EmulatedKernels, columns: int, element_bytes: int
    ) -> None:
        for address in range(4096, 4096 + 32, element_bytes):
            counts = torch.zeros(columns + 8, dtype=torch.int32)
            row = (ctypes.c_uint64(address), columns, element_bytes)
            pointer = ctypes.c_void_p(counts.data_ptr())
            emulated.library.probe_row_layout(*row, 256, 2560, pointer)
            assert counts.tolist() == [1] * columns + [0] * 8
            assert emulated.library.probe_vectors_aligned(*row) == 1
            assert emulated.library.probe_max_vectors(*row, 256, 2560) <= 10
