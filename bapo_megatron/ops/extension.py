"""Loads the compiled extension, or says in one line how to build it.

Importing this module registers ``torch.ops.bapo``, and what its operations return for tensors
without data, which torch.compile, export and ``opcheck`` ask for.
"""

from collections.abc import Callable
from typing import Any

import torch

from bapo_megatron import __version__

REMEDY = "run `pip install --no-build-isolation -e .` in the repository to compile it"


try:
    from bapo_megatron._C import ClipGrid, SearchResult, build_info, search, use_isa
except ImportError as error:
    raise ImportError(f"bapo_megatron._C cannot be loaded ({error}); {REMEDY}") from error
if (built := build_info()["version"]) != __version__:
    raise ImportError(
        f"bapo_megatron._C was compiled from version {built}, the package is {__version__}; "
        f"{REMEDY}"
    )

__all__ = ["ClipGrid", "SearchResult", "build_info", "search", "use_isa"]

BOUNDS_FIELDS = (
    "low",
    "high",
    "positive_share_start",
    "positive_share",
    "exit",
    "nonfinite_tokens",
    "out_of_range_tokens",
    "tokens",
)
"""What a tensor of bounds holds, in order (csrc/common/params.h); float64."""

_FAKES: dict[str, Callable[..., Any]] = {
    "logprob_partials": lambda logits, _rows, target, *_: logits.new_empty(
        (target.shape[0], 4), dtype=torch.float32
    ),
    "logprob_combine": lambda partials, _: tuple(
        partials.new_empty(partials.shape[1]) for _ in range(4)
    ),
    "logits_backward_": lambda *_: None,
    "kl_partials": lambda student, *_: student.new_empty(
        (student.shape[0], 8), dtype=torch.float32
    ),
    "kl_combine": lambda partials, *_: tuple(
        partials.new_empty(partials.shape[1]) for _ in range(7)
    ),
    "kl_backward_": lambda *_: None,
    "contributions_": lambda *_: None,
    "search_bounds": lambda table, *_: table.new_empty(len(BOUNDS_FIELDS), dtype=torch.float64),
    "importance_ratio": lambda logprob, _: torch.empty_like(logprob),
}
for _name, _fake in _FAKES.items():
    torch.library.register_fake(f"bapo::{_name}", _fake)


def check_kernels(device: torch.device) -> None:
    """Raise a ``ValueError`` if no kernels were built for a device."""
    if device.type == "cuda" and not build_info()["cuda"]:
        raise ValueError(
            f"{device}: the kernels were built without CUDA; install nvcc (or set CUDA_HOME) and "
            "run `pip install --no-build-isolation -e .` again"
        )
