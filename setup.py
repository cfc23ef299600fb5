"""Builds the extension ``bapo_megatron._C``; everything else is in pyproject.toml.

The CPU code is always built, the CUDA code where nvcc is found (no GPU is needed to compile it).

| variable | meaning |
|---|---|
| ``BAPO_SKIP_CUDA_BUILD=1`` | leave the CUDA code out |
| ``BAPO_FORCE_CUDA_BUILD=1`` | fail where it cannot be built |
| ``BAPO_CUDA_ARCHS`` | compute capabilities, default ``80;90;100``; the last one as PTX too |
| ``BAPO_STRICT_BUILD=1`` | treat nvcc's warnings as errors, as ``.ci/run`` does |
| ``CUDA_HOME`` | where nvcc is, before PATH and /usr/local/cuda |
| ``MAX_JOBS`` | how many files are compiled at once |
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, SetupError

ROOT = Path(__file__).parent
CSRC = ROOT / "csrc"
FLAGS = ["-O3", "-ffp-contract=off", "-fno-trapping-math", "-Wall", "-Wextra", "-pthread"]
"""No contraction: bits must not depend on the compiler. No traps: loops vectorise; same bits."""
NVCC_FLAGS = [
    "-std=c++17",
    "-O3",
    "-fmad=false",  # as above: fused operations are written out
    "-Xcompiler",
    "-fPIC,-Wall,-Wextra",
]
DEFAULT_ARCHS = "80;90;100"
MIN_TORCH = (2, 10)
TORCH_TARGET_VERSION = "0x020a000000000000"
"""The stable ABI of torch 2.10: one binary runs beside every later torch."""


def flag_is_set(name: str) -> bool:
    """Whether an environment variable is 1; anything but 0, 1 and nothing is refused."""
    value = os.environ.get(name, "0") or "0"
    if value not in ("0", "1"):
        raise SetupError(f"{name} must be 0 or 1, got '{value}'")
    return value == "1"


def num_jobs() -> int:
    """How many files to compile at once."""
    value = os.environ.get("MAX_JOBS") or str(os.cpu_count() or 1)
    if not value.isdigit() or int(value) < 1:
        raise SetupError(f"MAX_JOBS must be a whole number >= 1, got '{value}'")
    return int(value)


def read_version() -> str:
    """Return ``bapo_megatron.__version__`` without importing the package."""
    text = (ROOT / "bapo_megatron" / "__init__.py").read_text()
    match = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    assert match is not None, "bapo_megatron/__init__.py has no __version__"
    return match.group(1)


def read_git_commit() -> str:
    """Return the commit that is checked out, or ``unknown`` outside a git checkout."""
    try:
        answer = subprocess.run(
            ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return answer.stdout.strip()


def find_torch() -> Path:
    """Return the folder of the torch to build against, without importing it.

    Raises:
        SetupError: There is none, or it is too old.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise SetupError(
            "building bapo_megatron needs torch, which is not installed; install it first, then "
            "run `pip install --no-build-isolation -e .`"
        )
    version = importlib.metadata.version("torch")
    major, minor = (int(part) for part in version.split(".")[:2])
    if (major, minor) < MIN_TORCH:
        raise SetupError(
            f"building bapo_megatron needs torch >= {MIN_TORCH[0]}.{MIN_TORCH[1]}, found "
            f"{version}; install a newer one"
        )
    return Path(spec.origin).parent


@dataclass(frozen=True)
class CudaToolkit:
    """The nvcc that compiles csrc/cuda, and the architectures."""

    nvcc: Path
    archs: tuple[str, ...]

    @classmethod
    def find(cls) -> CudaToolkit | None:
        """Return the toolkit to build with, or None where the CUDA code is left out.

        Raises:
            SetupError: The environment asks for what cannot be done.
        """
        skip, force = flag_is_set("BAPO_SKIP_CUDA_BUILD"), flag_is_set("BAPO_FORCE_CUDA_BUILD")
        if skip and force:
            raise SetupError(
                "BAPO_SKIP_CUDA_BUILD and BAPO_FORCE_CUDA_BUILD are both 1; unset one of them"
            )
        if skip:
            return None
        nvcc = cls._find_nvcc()
        if nvcc is None:
            if force:
                raise SetupError(
                    "BAPO_FORCE_CUDA_BUILD is 1 but nvcc was not found in CUDA_HOME, PATH or "
                    "/usr/local/cuda; install the CUDA toolkit or set CUDA_HOME"
                )
            return None
        return cls(nvcc, cls._check_archs(nvcc))

    @staticmethod
    def _find_nvcc() -> Path | None:
        folders = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
        in_home, default = (Path(f) / "bin" / "nvcc" if f else None for f in folders)
        on_path = shutil.which("nvcc")
        for candidate in (in_home, Path(on_path) if on_path else None, default):
            if candidate is not None and candidate.is_file():
                return candidate
        return None

    @staticmethod
    def _check_archs(nvcc: Path) -> tuple[str, ...]:
        text = os.environ.get("BAPO_CUDA_ARCHS") or DEFAULT_ARCHS
        archs = tuple(text.split(";"))
        if not all(re.fullmatch(r"\d{2,3}[af]?", arch) for arch in archs):
            raise SetupError(
                f"BAPO_CUDA_ARCHS must look like {DEFAULT_ARCHS} (compute capabilities without "
                f"the dot), got '{text}'"
            )
        known = subprocess.run(
            [str(nvcc), "--list-gpu-arch"], capture_output=True, text=True, check=True
        ).stdout.split()
        for arch in archs:
            if f"compute_{arch.rstrip('af')}" not in known:
                raise SetupError(
                    f"{nvcc} cannot compile for compute capability {arch}; it knows "
                    f"{', '.join(known)}. Set BAPO_CUDA_ARCHS (now '{text}'), or CUDA_HOME to "
                    "another CUDA"
                )
        return archs

    def compile_all(self, folder: Path, jobs: int) -> list[str]:
        """Return the object files of csrc/cuda/*.cu; compile those that are older than a source."""
        folder.mkdir(parents=True, exist_ok=True)
        newest = max(
            path.stat().st_mtime
            for pattern in ("common/*.h", "cuda/*")
            for path in CSRC.glob(pattern)
        )
        newest = max(newest, Path(__file__).stat().st_mtime)
        targets = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in self.archs]
        last = self.archs[-1]
        targets.append(f"-gencode=arch=compute_{last},code=compute_{last}")
        stamp = "_".join(self.archs)
        strict = ["--Werror", "all-warnings"] if flag_is_set("BAPO_STRICT_BUILD") else []

        def compile_one(source: Path) -> str:
            target = folder / f"{source.stem}.{stamp}.o"
            if not target.exists() or target.stat().st_mtime < newest:
                part = target.with_suffix(".part.o")
                command = [str(self.nvcc), *NVCC_FLAGS, *strict, *targets, f"-I{CSRC}"]
                command += ["-c", str(source), "-o", str(part)]
                print(" ".join(command), flush=True)  # noqa: T201  (as setuptools does)
                if subprocess.run(command, check=False).returncode != 0:
                    raise CompileError(
                        f"nvcc failed on {source.relative_to(ROOT)}; see above, or set "
                        "BAPO_SKIP_CUDA_BUILD=1 to build without CUDA"
                    )
                part.rename(target)
            return str(target)

        with ThreadPoolExecutor(jobs) as pool:
            return list(pool.map(compile_one, sorted(CSRC.glob("cuda/*.cu"))))

    @property
    def library_dir(self) -> Path:
        """Where libcudart_static.a is."""
        homes = [self.nvcc.resolve().parent.parent, Path("/usr/local/cuda")]
        for home in homes:
            for folder in ("lib64", "lib", "targets/x86_64-linux/lib"):
                if (home / folder / "libcudart_static.a").is_file():
                    return home / folder
        raise SetupError(
            f"libcudart_static.a was not found beside {self.nvcc}; install the CUDA runtime's "
            "development files, or set CUDA_HOME or BAPO_SKIP_CUDA_BUILD=1"
        )


class BuildExtension(build_ext):
    """Compiles with the flags above, after checking that the compiler can do C++17."""

    def build_extensions(self) -> None:
        """Check the requirements, compile csrc/cuda with nvcc, then build the rest."""
        jobs = num_jobs()
        self.add_torch(find_torch())
        self.check_compiler()
        # setuptools would compare sources and headers only: not csrc/cuda, architectures or torch.
        self.force = True
        toolkit = CudaToolkit.find()
        if toolkit is not None:
            self.add_cuda(toolkit, jobs)
        super().build_extensions()

    def add_torch(self, torch: Path) -> None:
        """Compile and link against this torch."""
        (extension,) = self.extensions
        extension.extra_compile_args += ["-isystem", str(torch / "include")]
        # No symbol of libtorch is used here, but it loads libtorch_cuda where there is one:
        # without it the weak symbol of the current CUDA stream would stay null.
        extension.extra_link_args += [f"-L{torch / 'lib'}", "-Wl,--no-as-needed"]
        extension.extra_link_args += ["-ltorch", "-ltorch_cpu", "-lc10"]

    def add_cuda(self, toolkit: CudaToolkit, jobs: int) -> None:
        """Compile csrc/cuda and link it with the static CUDA runtime."""
        (extension,) = self.extensions
        extension.extra_objects += toolkit.compile_all(Path(self.build_temp) / "cuda", jobs)
        extension.define_macros += [
            ("BAPO_WITH_CUDA", "1"),
            ("BAPO_CUDA_ARCHS", f'"{";".join(toolkit.archs)}"'),
        ]
        extension.library_dirs.append(str(toolkit.library_dir))
        extension.libraries += ["cudart_static", "rt", "dl", "pthread"]

    def check_compiler(self) -> None:
        """Raise a one-line error unless the compiler builds C++17 with 128-bit integers."""
        program = "#include <optional>\nstd::optional<unsigned __int128> x;\nint main() {}\n"
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "probe.cpp"
            source.write_text(program)
            try:
                self.compiler.compile(
                    [str(source)], output_dir=folder, extra_postargs=["-std=c++17"]
                )
            except CompileError as error:
                raise CompileError(
                    "bapo_megatron needs a C++17 compiler (GCC >= 9 or Clang >= 11) and found none "
                    f"that works: {error}; install one (Debian: apt-get install g++) or set CXX"
                ) from None


def make_extension() -> Pybind11Extension:
    """The extension without torch and CUDA, which are found when it is built."""
    return Pybind11Extension(
        "bapo_megatron._C",
        sources=sorted(str(path.relative_to(ROOT)) for path in CSRC.rglob("*.cpp")),
        depends=sorted(str(path.relative_to(ROOT)) for path in CSRC.rglob("*.h")),
        include_dirs=["csrc"],
        cxx_std=17,
        extra_compile_args=FLAGS.copy(),
        extra_link_args=["-pthread"],
        define_macros=[
            ("BAPO_VERSION", f'"{read_version()}"'),
            ("BAPO_GIT_COMMIT", f'"{read_git_commit()}"'),
            ("BAPO_COMPILE_FLAGS", f'"-std=c++17 {" ".join(FLAGS)}"'),
            ("TORCH_TARGET_VERSION", TORCH_TARGET_VERSION),
        ],
    )


ParallelCompile("MAX_JOBS").install()

setup(ext_modules=[make_extension()], cmdclass={"build_ext": BuildExtension})
