"""Builds the extension ``bapo_megatron._C``; everything else is in pyproject.toml.

``MAX_JOBS`` limits how many files are compiled at once.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ROOT = Path(__file__).parent
FLAGS = ["-O3", "-ffp-contract=off", "-fno-trapping-math", "-Wall", "-Wextra", "-pthread"]
"""No contraction: bits must not depend on the compiler. No traps: loops vectorise; same bits."""


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


class BuildExtension(build_ext):
    """Compiles with the flags above, after checking that the compiler can do C++17."""

    def build_extensions(self) -> None:
        """Check the compiler, then build."""
        self.check_compiler()
        super().build_extensions()

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
                    "bapo_megatron needs a C++17 compiler (GCC >= 9 or Clang >= 10) and found none "
                    f"that works: {error}; install one (Debian: apt-get install g++) or set CXX"
                ) from None


extension = Pybind11Extension(
    "bapo_megatron._C",
    sources=sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.cpp")),
    depends=sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.h")),
    include_dirs=["csrc"],
    cxx_std=17,
    extra_compile_args=FLAGS,
    extra_link_args=["-pthread"],
    define_macros=[
        ("BAPO_VERSION", f'"{read_version()}"'),
        ("BAPO_GIT_COMMIT", f'"{read_git_commit()}"'),
        ("BAPO_COMPILE_FLAGS", f'"-std=c++17 {" ".join(FLAGS)}"'),
    ],
)

ParallelCompile("MAX_JOBS").install()

setup(ext_modules=[extension], cmdclass={"build_ext": BuildExtension})
