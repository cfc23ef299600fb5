"""The software of a process: the commit of this package's checkout, and installed versions.

No package is imported for this, because torch alone takes seconds.
"""

import ctypes
import functools
import importlib.metadata
import importlib.util
import os
import platform
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from bapo_megatron import __version__

_PACKAGES = ("torch", "megatron-core", "transformers", "sglang", "transformer-engine")
_ROOT = Path(__file__).parents[2]
_GIT_LIMIT_S = 10.0


@dataclass(frozen=True, slots=True)
class Software:
    """The software of a process."""

    commit: str | None
    """Twelve digits of the commit of this package's checkout, with ``-dirty`` if tracked files
    differ; None if it is not a git checkout."""
    versions: dict[str, str]
    """By name: this project, Python, the CUDA that torch was built with, and the installed packages
    that results depend on. External servers may have others."""

    def settings(self) -> dict[str, str]:
        """Return settings for trackers: ``commit``, ``versions.torch`` and so on."""
        versions = {f"versions.{name}": version for name, version in self.versions.items()}
        return {"commit": self.commit or "unknown", **versions}

    def lines(self) -> list[str]:
        """Return lines for people: the commit, then the versions."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return [f"commit {self.commit or 'unknown'}", versions]


@functools.cache
def own_software() -> Software:
    """Return the software of this process; cached."""
    versions = {
        "bapo-megatron": __version__,
        "python": platform.python_version(),
        "cuda": _torch_cuda(),
        **{name: installed_version(name) for name in _PACKAGES},
    }
    known = {name: version for name, version in versions.items() if version is not None}
    return Software(commit_of(_ROOT), known)


def nccl_version() -> str:
    """Return the version of the loaded library; torch knows the one that it was built with."""
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD).ncclGetVersion(ctypes.byref(version))
    except OSError:
        return "not loaded"
    number = version.value
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def installed_version(name: str) -> str | None:
    """Return the version of an installed distribution; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit_of(root: Path) -> str | None:
    """Return the commit of a checkout, as in ``Software``.

    ``root`` must be the root of the checkout: a virtual environment may be inside another one.
    """
    if not (root / ".git").exists():
        return None
    where = [f"--git-dir={root / '.git'}", f"--work-tree={root}"]
    # Without optional locks, it never conflicts with another git command in the checkout.
    command = ["git", "--no-optional-locks", *where, "describe", "--always", "--dirty"]
    try:
        answer = subprocess.run(
            [*command, "--exclude=*", "--abbrev=12"],
            capture_output=True,
            text=True,
            timeout=_GIT_LIMIT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()


def _torch_cuda() -> str | None:
    """Return the CUDA version that torch was built with, from torch's version.py."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return None
    text = (Path(torch.origin).parent / "version.py").read_text()
    match = re.search(r"^cuda\b.*= '(.+)'$", text, re.MULTILINE)
    return match and match[1]
