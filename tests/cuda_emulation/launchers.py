"""The launchers of csrc/cuda/launch.h over the emulator, called like ``torch.ops.bapo``.

Shape legend: N = rows of logits, V = local columns, T = tokens, P = tensor-parallel ranks.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bapo_megatron.ops import extension

REPOSITORY = Path(__file__).parents[2]
HERE = Path(__file__).parent
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


_HEADERS = ("clip_grid.h", "search.h", "params.h")
_CTYPES = {
    "int": ctypes.c_int,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "float": ctypes.c_float,
}
_CONSTANTS = {"kMaxCandidates": 256, "kNumKlResults": 7}
_MEMBER = re.compile(r"(?:const )?(\w+)(\*?) (\w+)(?:\[(\w+)(?: \+ (\d))?\])?;")
_CHOICES = (
    ("reverse", "forward"),
    ("uniform", "behaviour_prob"),
    ("surrogate", "gradient"),
    ("share", "ratio"),
)
"""Names of the enumerations' values in their order."""
_LOGIT_TYPES = (torch.float32, torch.bfloat16, torch.float16)
UNWRITTEN = -7.0
"""What outputs hold before a kernel writes them."""


@functools.cache
def structs() -> dict[str, type[ctypes.Structure]]:
    """The structs of csrc/common, as its headers say; unknown types are enumerations."""
    found: dict[str, type[ctypes.Structure]] = {}
    for header in _HEADERS:
        text = re.sub(r"//.*", "", (REPOSITORY / "csrc" / "common" / header).read_text())
        for name, body in re.findall(r"^struct (\w+) {\n(.*?)^}", text, re.DOTALL | re.MULTILINE):
            members = [_member(found, *parts) for parts in _MEMBER.findall(body)]
            found[name] = type(name, (ctypes.Structure,), {"_fields_": members})
    return found


def _member(
    known: dict[str, type[ctypes.Structure]],
    kind: str,
    pointer: str,
    name: str,
    size: str,
    more: str,
) -> tuple[str, Any]:
    ctype: Any = _CTYPES.get(kind) or known.get(kind) or ctypes.c_int
    if pointer:
        ctype = ctypes.c_void_p
    return name, ctype * (_CONSTANTS[size] + int(more or 0)) if size else ctype


def plain_grid(grid: extension.ClipGrid) -> Any:
    """The grid as the struct of csrc/common/clip_grid.h."""
    return structs()["ClipGrid"].from_buffer_copy(grid.to_bytes())


class EmulatedKernels:
    """The kernels of csrc/cuda on CPU tensors, called like ``torch.ops.bapo``."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        self.library.emulator_last_failure.restype = ctypes.c_char_p
        self.library.bapo_cuda_error_string.restype = ctypes.c_char_p

    def set_order(self, order: int) -> None:
        """Run fibers in ascending (0), descending (1) or shuffled order from now on."""
        self.library.emulator_set_order(ctypes.c_uint64(order))

    def logprob_partials(
        self, logits_NV: Tensor, rows_T: Tensor | None, target_T: Tensor, *columns: float
    ) -> Tensor:
        partials_T4 = torch.full((len(target_T), 4), UNWRITTEN)
        logits = _logits(logits_NV, *columns)
        self._launch("LogprobPartials", logits, rows_T, target_T, len(target_T), partials_T4)
        return partials_T4

    def logprob_combine(self, partials_PT4: Tensor, temperature: float) -> tuple[Tensor, ...]:
        num_ranks, num_tokens, _ = partials_PT4.shape
        results = torch.full((4, num_tokens), UNWRITTEN).unbind()
        self._launch("LogprobCombine", partials_PT4, num_ranks, num_tokens, temperature, *results)
        return results

    def logits_backward_(
        self, logits_NV: Tensor, rows_T: Tensor | None, target_T: Tensor, *arguments: Any
    ) -> None:
        """The arguments after the target: three results, two gradients, then the columns."""
        tensors, logits = arguments[:5], _logits(logits_NV, *arguments[5:])
        scratch_N = torch.full((len(logits_NV),), 12345, dtype=torch.int32)
        token_of_row_N = None if rows_T is None else scratch_N
        self._launch(
            "LogitsBackward", logits, rows_T, target_T, len(target_T), *tensors, token_of_row_N
        )

    def kl_partials(
        self, student_TV: Tensor, teacher_TV: Tensor, target_T: Tensor, *arguments: Any
    ) -> Tensor:
        *columns, direction = arguments
        partials_T8 = torch.full((len(target_T), 8), UNWRITTEN)
        rows = (_logits(student_TV, *columns), _logits(teacher_TV, *columns))
        self._launch("KlPartials", *rows, target_T, len(target_T), direction, partials_T8)
        return partials_T8

    def kl_combine(
        self, partials_PT8: Tensor, temperature: float, direction: str
    ) -> tuple[Tensor, ...]:
        num_ranks, num_tokens, _ = partials_PT8.shape
        results = torch.full((7, num_tokens), UNWRITTEN).unbind()
        pointers = (ctypes.c_void_p * 7)(*(result_T.data_ptr() for result_T in results))
        scalars = (num_ranks, num_tokens, temperature, direction)
        self._launch("KlCombine", partials_PT8, *scalars, pointers)
        return results

    def kl_backward_(
        self, student_TV: Tensor, teacher_TV: Tensor, target_T: Tensor, *arguments: Any
    ) -> None:
        """The arguments after the target: six results, three gradients, columns, direction."""
        tensors, columns, direction = arguments[:9], arguments[9:12], arguments[12]
        rows = (_logits(student_TV, *columns), _logits(teacher_TV, *columns))
        self._launch("KlBackward", *rows, target_T, len(target_T), *tensors, direction)

    def contributions_(self, table: Tensor, grid: Tensor, *arguments: Any) -> None:
        *tokens, weight = arguments
        self._launch("Contributions", *tokens, len(tokens[0]), _grid(grid), weight, table)

    def search_bounds(
        self, table: Tensor, grid: Tensor, target: float, contribution: str, measure: str
    ) -> Tensor:
        bounds = torch.full((8,), UNWRITTEN, dtype=torch.float64)
        rule = _struct("SearchRule", round(target * 2**24), contribution, measure)
        self._launch("SearchBounds", table, _grid(grid), rule, bounds)
        return bounds

    def importance_ratio(self, logprob_T: Tensor, behaviour_logprob_T: Tensor) -> Tensor:
        ratio_T = torch.full((len(logprob_T),), UNWRITTEN)
        self._launch("ImportanceRatio", logprob_T, behaviour_logprob_T, len(logprob_T), ratio_T)
        return ratio_T

    def _launch(self, name: str, *members: Any) -> None:
        launcher = "bapo_launch" + re.sub("[A-Z]", lambda capital: f"_{capital[0].lower()}", name)
        error = getattr(self.library, launcher)(
            ctypes.byref(_struct(f"{name}Params", *members)), None
        )
        if error != 0:
            message = self.library.emulator_last_failure().decode()
            raise RuntimeError(f"{launcher} returned {error}: {message}")


def _struct(name: str, *members: Any) -> ctypes.Structure:
    """Of tensors, numbers, names of choices and structs; of all members, in order."""
    kind = structs()[name]
    assert len(members) == len(kind._fields_), name
    return kind(*map(_plain, members))


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.data_ptr()
    if isinstance(value, str):
        (names,) = (names for names in _CHOICES if value in names)
        return names.index(value)
    return value


def _logits(
    logits_NV: Tensor, vocab_start: float, vocab_size: float, temperature: float
) -> ctypes.Structure:
    kind, (num_rows, num_columns) = _LOGIT_TYPES.index(logits_NV.dtype), logits_NV.shape
    shape = (num_rows, num_columns, logits_NV.stride(0))
    return _struct("Logits", logits_NV, kind, *shape, vocab_start, vocab_size, temperature)


def _grid(content: Tensor) -> Any:
    return structs()["ClipGrid"].from_buffer_copy(bytes(content.tolist()))
