"""Makes transformers' model classes importable beside a CPU build of torch.

The package index has torchvision's wheel for CUDA only. Beside a CPU build of torch its operators
do not load, and its import, which transformers does, fails because it registers fake kernels for
two of them. Beside a CUDA build torchvision defines them itself, and a second time would abort.
"""

import torch

_OPERATORS = ("nms", "qnms")
_LIBRARIES: list[torch.library.Library] = []
"""Kept, since definitions end with their library."""


def declare_torchvision_operators() -> None:
    """Declare the two operators where torch has no CUDA; safe to call twice."""
    if torch.version.cuda is not None or _LIBRARIES:
        return
    library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for name in _OPERATORS:
        schema = f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        library.define(schema)  # type: ignore[no-untyped-call]
    _LIBRARIES.append(library)
