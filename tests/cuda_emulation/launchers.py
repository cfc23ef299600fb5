"""The launchers of csrc/cuda/launch.h over the emulator, called like ``torch.ops.bapo``.

Shape legend: N = rows of logits, V = local columns, T = tokens, P = tensor-parallel ranks.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bapo_megatron.ops import extension

REPOSITORY = Path(__file__).parents[2]
HERE = Path(__file__).parent
MAX_CANDIDATES = 256
DIRECTIONS = ("reverse", "forward")
LOGIT_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
FLAGS = (
    "-std=c++17",
    "-O2",
    "-fPIC",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-unknown-pragmas",
    "-ffp-contract=off",
    "-fno-strict-aliasing",  # vectors of 16 bytes are read from arrays of elements
)


@functools.cache
def emulated_kernels() -> EmulatedKernels:
    """The kernels, compiled once for all processes; skips the test where no compiler is at hand."""
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"no C++ compiler {compiler[0]}: set CXX or install one")
    folder = REPOSITORY / "build" / "cuda_emulation"
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"{_digest(compiler)}.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # while one process compiles, the others wait
        if not library.exists():
            for outdated in folder.glob("*.so"):
                outdated.unlink()
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                build(Path(scratch), compiler).rename(library)
    return EmulatedKernels(library)


def _digest(compiler: list[str]) -> str:
    """Digest of all that decides what is compiled: the compiler, its flags, and the sources."""
    version = subprocess.run([*compiler, "--version"], capture_output=True, check=True).stdout
    content = hashlib.sha256(version + repr((compiler, FLAGS)).encode())
    for folder in (REPOSITORY / "csrc", HERE):
        for path in sorted(folder.rglob("*")):
            if path.suffix in {".h", ".cuh", ".cu", ".cpp"}:
                content.update(path.read_bytes())
    return content.hexdigest()[:16]


def build(folder: Path, compiler: list[str]) -> Path:
    """Compile the kernels and the emulator into one shared library."""
    includes = (f"-I{HERE / 'include'}", f"-I{REPOSITORY / 'csrc'}")
    sources = [*sorted((REPOSITORY / "csrc" / "cuda").glob("*.cu")), HERE / "probe.cu"]
    objects = []
    for source in [*sources, HERE / "emulator.cpp"]:
        objects.append(folder / f"{source.stem}.o")
        command = [*compiler, *FLAGS, *includes, "-c", "-x", "c++", str(source)]
        subprocess.run([*command, "-o", str(objects[-1])], check=True)
    library = folder / "libcuda_emulation.so"
    subprocess.run([*compiler, "-shared", *map(str, objects), "-o", str(library)], check=True)
    return library


class ClipGrid(ctypes.Structure):
    _fields_ = (
        ("num_upper", ctypes.c_int),
        ("num_lower", ctypes.c_int),
        ("has_dual_clip", ctypes.c_int),
        ("order", ctypes.c_int),
        ("upper", ctypes.c_float * MAX_CANDIDATES),
        ("lower", ctypes.c_float * (MAX_CANDIDATES + 1)),
    )


class Logits(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("type", ctypes.c_int),
        ("num_rows", ctypes.c_int64),
        ("num_columns", ctypes.c_int64),
        ("row_stride", ctypes.c_int64),
        ("vocab_start", ctypes.c_int64),
        ("vocab_size", ctypes.c_int64),
        ("temperature", ctypes.c_float),
    )


class LogprobPartialsParams(ctypes.Structure):
    _fields_ = (
        ("logits", Logits),
        ("rows", ctypes.c_void_p),
        ("target", ctypes.c_void_p),
        ("num_tokens", ctypes.c_int64),
        ("partials", ctypes.c_void_p),
    )


class LogprobCombineParams(ctypes.Structure):
    _fields_ = (
        ("partials", ctypes.c_void_p),
        ("num_ranks", ctypes.c_int64),
        ("num_tokens", ctypes.c_int64),
        ("temperature", ctypes.c_float),
        ("logprob", ctypes.c_void_p),
        ("entropy", ctypes.c_void_p),
        ("max", ctypes.c_void_p),
        ("log_sum", ctypes.c_void_p),
    )


class LogitsBackwardParams(ctypes.Structure):
    _fields_ = (
        ("logits", Logits),
        ("rows", ctypes.c_void_p),
        ("target", ctypes.c_void_p),
        ("num_tokens", ctypes.c_int64),
        ("max", ctypes.c_void_p),
        ("log_sum", ctypes.c_void_p),
        ("entropy", ctypes.c_void_p),
        ("grad_logprob", ctypes.c_void_p),
        ("grad_entropy", ctypes.c_void_p),
        ("token_of_row", ctypes.c_void_p),
    )


class KlPartialsParams(ctypes.Structure):
    _fields_ = (
        ("student", Logits),
        ("teacher", Logits),
        ("target", ctypes.c_void_p),
        ("num_tokens", ctypes.c_int64),
        ("direction", ctypes.c_int),
        ("partials", ctypes.c_void_p),
    )


class KlCombineParams(ctypes.Structure):
    _fields_ = (
        ("partials", ctypes.c_void_p),
        ("num_ranks", ctypes.c_int64),
        ("num_tokens", ctypes.c_int64),
        ("temperature", ctypes.c_float),
        ("direction", ctypes.c_int),
        ("logprob", ctypes.c_void_p),
        ("entropy", ctypes.c_void_p),
        ("max", ctypes.c_void_p),
        ("log_sum", ctypes.c_void_p),
        ("teacher_max", ctypes.c_void_p),
        ("teacher_log_sum", ctypes.c_void_p),
        ("kl", ctypes.c_void_p),
    )


class KlBackwardParams(ctypes.Structure):
    _fields_ = (
        ("student", Logits),
        ("teacher", Logits),
        ("target", ctypes.c_void_p),
        ("num_tokens", ctypes.c_int64),
        ("max", ctypes.c_void_p),
        ("log_sum", ctypes.c_void_p),
        ("entropy", ctypes.c_void_p),
        ("teacher_max", ctypes.c_void_p),
        ("teacher_log_sum", ctypes.c_void_p),
        ("kl", ctypes.c_void_p),
        ("grad_logprob", ctypes.c_void_p),
        ("grad_entropy", ctypes.c_void_p),
        ("grad_kl", ctypes.c_void_p),
        ("direction", ctypes.c_int),
    )


class ContributionsParams(ctypes.Structure):
    _fields_ = (
        ("logprob", ctypes.c_void_p),
        ("behaviour_logprob", ctypes.c_void_p),
        ("advantage", ctypes.c_void_p),
        ("mask", ctypes.c_void_p),
        ("num_tokens", ctypes.c_int64),
        ("grid", ClipGrid),
        ("weight", ctypes.c_int),
        ("table", ctypes.c_void_p),
    )


class SearchRule(ctypes.Structure):
    _fields_ = (
        ("target_units", ctypes.c_uint64),
        ("contribution", ctypes.c_int),
        ("measure", ctypes.c_int),
    )


class SearchBoundsParams(ctypes.Structure):
    _fields_ = (
        ("table", ctypes.c_void_p),
        ("grid", ClipGrid),
        ("rule", SearchRule),
        ("bounds", ctypes.c_void_p),
    )


class ImportanceRatioParams(ctypes.Structure):
    _fields_ = (
        ("logprob", ctypes.c_void_p),
        ("behaviour_logprob", ctypes.c_void_p),
        ("num_tokens", ctypes.c_int64),
        ("ratio", ctypes.c_void_p),
    )


def address(tensor: Tensor | None) -> int | None:
    """Where a tensor starts, null for none."""
    return None if tensor is None else tensor.data_ptr()


def plain_grid(grid: extension.ClipGrid) -> ClipGrid:
    """The grid as the struct of csrc/common/clip_grid.h."""
    return ClipGrid.from_buffer_copy(grid.to_bytes())


class EmulatedKernels:
    """The kernels of csrc/cuda on CPU tensors."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        self.library.emulator_last_failure.restype = ctypes.c_char_p
        self.library.bapo_cuda_error_string.restype = ctypes.c_char_p

    def set_order(self, order: int) -> None:
        """Run fibers in ascending (0), descending (1) or shuffled order from now on."""
        self.library.emulator_set_order(ctypes.c_uint64(order))

    def launch(self, name: str, params: ctypes.Structure) -> None:
        error = getattr(self.library, name)(ctypes.byref(params), None)
        if error != 0:
            message = self.library.emulator_last_failure().decode()
            raise RuntimeError(f"{name} returned {error}: {message}")

    def logprob_partials(
        self,
        logits_NV: Tensor,
        rows_T: Tensor | None,
        target_T: Tensor,
        vocab_start: int,
        vocab_size: int,
        temperature: float,
    ) -> Tensor:
        partials_T4 = torch.full((len(target_T), 4), -7.0)
        params = LogprobPartialsParams(
            logits=self.logits(logits_NV, vocab_start, vocab_size, temperature),
            rows=address(rows_T),
            target=address(target_T),
            num_tokens=len(target_T),
            partials=address(partials_T4),
        )
        self.launch("bapo_launch_logprob_partials", params)
        return partials_T4

    def logprob_combine(
        self, partials_PT4: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        num_ranks, num_tokens, _ = partials_PT4.shape
        results = torch.full((4, num_tokens), -7.0).unbind()
        params = LogprobCombineParams(
            address(partials_PT4), num_ranks, num_tokens, temperature, *map(address, results)
        )
        self.launch("bapo_launch_logprob_combine", params)
        return results

    def logits_backward_(
        self,
        logits_NV: Tensor,
        rows_T: Tensor | None,
        target_T: Tensor,
        max_T: Tensor,
        log_sum_T: Tensor,
        entropy_T: Tensor,
        grad_logprob_T: Tensor | None,
        grad_entropy_T: Tensor | None,
        vocab_start: int,
        vocab_size: int,
        temperature: float,
    ) -> None:
        token_of_row_N = torch.full((len(logits_NV),), 12345, dtype=torch.int32)
        params = LogitsBackwardParams(
            self.logits(logits_NV, vocab_start, vocab_size, temperature),
            address(rows_T),
            address(target_T),
            len(target_T),
            *map(address, (max_T, log_sum_T, entropy_T, grad_logprob_T, grad_entropy_T)),
            None if rows_T is None else address(token_of_row_N),
        )
        self.launch("bapo_launch_logits_backward", params)

    def kl_partials(
        self,
        student_TV: Tensor,
        teacher_TV: Tensor,
        target_T: Tensor,
        vocab_start: int,
        vocab_size: int,
        temperature: float,
        direction: str,
    ) -> Tensor:
        partials_T8 = torch.full((len(target_T), 8), -7.0)
        columns = (vocab_start, vocab_size, temperature)
        params = KlPartialsParams(
            self.logits(student_TV, *columns),
            self.logits(teacher_TV, *columns),
            address(target_T),
            len(target_T),
            DIRECTIONS.index(direction),
            address(partials_T8),
        )
        self.launch("bapo_launch_kl_partials", params)
        return partials_T8

    def kl_combine(
        self, partials_PT8: Tensor, temperature: float, direction: str
    ) -> tuple[Tensor, ...]:
        num_ranks, num_tokens, _ = partials_PT8.shape
        results = torch.full((7, num_tokens), -7.0).unbind()
        params = KlCombineParams(
            address(partials_PT8),
            num_ranks,
            num_tokens,
            temperature,
            DIRECTIONS.index(direction),
            *map(address, results),
        )
        self.launch("bapo_launch_kl_combine", params)
        return results

    def kl_backward_(
        self,
        student_TV: Tensor,
        teacher_TV: Tensor,
        target_T: Tensor,
        *arguments: object,
    ) -> None:
        """The arguments after the target: six results, three gradients, then the scalars."""
        *tensors, vocab_start, vocab_size, temperature, direction = arguments
        columns = (vocab_start, vocab_size, temperature)
        params = KlBackwardParams(
            self.logits(student_TV, *columns),  # type: ignore[arg-type]
            self.logits(teacher_TV, *columns),  # type: ignore[arg-type]
            address(target_T),
            len(target_T),
            *map(address, tensors),  # type: ignore[arg-type]
            DIRECTIONS.index(str(direction)),
        )
        self.launch("bapo_launch_kl_backward", params)

    def contributions_(
        self,
        table: Tensor,
        grid: extension.ClipGrid,
        logprob_T: Tensor,
        behaviour_logprob_T: Tensor,
        advantage_T: Tensor,
        mask_T: Tensor,
        weight: str,
    ) -> None:
        params = ContributionsParams(
            *map(address, (logprob_T, behaviour_logprob_T, advantage_T, mask_T)),
            len(logprob_T),
            plain_grid(grid),
            ("uniform", "behaviour_prob").index(weight),
            address(table),
        )
        self.launch("bapo_launch_contributions", params)

    def search_bounds(
        self,
        table: Tensor,
        grid: extension.ClipGrid,
        target: float,
        contribution: str,
        measure: str,
    ) -> Tensor:
        bounds = torch.full((8,), -7.0, dtype=torch.float64)
        params = SearchBoundsParams(
            address(table),
            plain_grid(grid),
            SearchRule(
                round(target * 2**24),
                ("surrogate", "gradient").index(contribution),
                ("share", "ratio").index(measure),
            ),
            address(bounds),
        )
        self.launch("bapo_launch_search_bounds", params)
        return bounds

    def importance_ratio(self, logprob_T: Tensor, behaviour_logprob_T: Tensor) -> Tensor:
        ratio_T = torch.full((len(logprob_T),), -7.0)
        tensors = (logprob_T, behaviour_logprob_T)
        params = ImportanceRatioParams(*map(address, tensors), len(logprob_T), address(ratio_T))
        self.launch("bapo_launch_importance_ratio", params)
        return ratio_T

    @staticmethod
    def logits(logits_NV: Tensor, vocab_start: int, vocab_size: int, temperature: float) -> Logits:
        return Logits(
            data=address(logits_NV),
            type=LOGIT_TYPES[logits_NV.dtype],
            num_rows=logits_NV.shape[0],
            num_columns=logits_NV.shape[1],
            row_stride=logits_NV.stride(0),
            vocab_start=vocab_start,
            vocab_size=vocab_size,
            temperature=temperature,
        )
