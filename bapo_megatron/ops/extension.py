"""Loads the compiled extension, or says in one line how to get it.

Importing this module registers ``torch.ops.bapo``.
"""

from __future__ import annotations

import sys

import torch

from bapo_megatron import __version__

REMEDY = "run `pip install --no-build-isolation -e .` in the repository to compile it"

MIN_TORCH = (2, 10)
"""The stable ABI that the extension is compiled for; every later torch can load it."""


def check_torch(version: str) -> None:
    """Raise unless this torch has the stable ABI that the extension uses.

    Args:
        version: ``torch.__version__``.

    Raises:
        ImportError: If torch is too old.
    """
    major, minor = (int(part) for part in version.split(".")[:2])
    if (major, minor) < MIN_TORCH:
        raise ImportError(
            f"bapo_megatron._C needs torch >= {MIN_TORCH[0]}.{MIN_TORCH[1]}, this is {version}; "
            "install a newer torch"
        )


def check_build(built_version: str) -> None:
    """Raise unless the extension was compiled from this version of the package.

    Args:
        built_version: ``build_info()["version"]``.

    Raises:
        ImportError: If it was compiled from another version.
    """
    if built_version != __version__:
        raise ImportError(
            f"bapo_megatron._C was compiled from version {built_version}, the package is "
            f"{__version__}; {REMEDY}"
        )


def check_first_copy() -> None:
    """Raise if another file has registered the operations: a second time would abort the process.

    Raises:
        ImportError: Names the remedy.
    """
    if "bapo_megatron._C" not in sys.modules and hasattr(torch.ops.bapo, "logprob_partials"):
        raise ImportError(
            "torch.ops.bapo is registered already, by another copy of bapo_megatron._C in this "
            "process; keep one copy on sys.path"
        )


check_torch(torch.__version__)
check_first_copy()

try:
    from bapo_megatron._C import (
        Candidate,
        ClipGrid,
        SearchResult,
        build_info,
        search,
        use_isa,
    )
except ImportError as error:
    raise ImportError(f"bapo_megatron._C cannot be loaded ({error}); {REMEDY}") from error

check_build(build_info()["version"])

from bapo_megatron.ops import fake  # noqa: E402, F401  (needs the operations)

__all__ = [
    "Candidate",
    "ClipGrid",
    "SearchResult",
    "build_info",
    "search",
    "use_isa",
]
