"""Loads the compiled extension, or says in one line how to get it."""

from __future__ import annotations

from bapo_megatron import __version__

REMEDY = "run `pip install -e .` in the repository to compile it"

try:
    from bapo_megatron._C import (
        Candidate,
        ClipGrid,
        ContributionTable,
        SearchResult,
        build_info,
        search,
    )
except ImportError as error:
    raise ImportError(f"bapo_megatron._C cannot be loaded ({error}); {REMEDY}") from error

__all__ = [
    "Candidate",
    "ClipGrid",
    "ContributionTable",
    "SearchResult",
    "build_info",
    "search",
]


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


check_build(build_info()["version"])
