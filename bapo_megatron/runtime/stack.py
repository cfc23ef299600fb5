"""Whether torch, torchvision and transformers work together; run by set-up and by ``doctor``."""

import sys
from collections.abc import Callable

from bapo_megatron.errors import first_line

REMEDY = (
    "install the versions in requirements/install.sh, or on a GPU machine those in "
    "requirements/gpu.txt"
)


def stack_errors() -> dict[str, str]:
    """Return the broken packages, each with its error."""
    checks = {"torchvision": _call_operator, "transformers": _import_model_class}
    errors = {name: error_of(check) for name, check in checks.items()}
    return {name: error for name, error in errors.items() if error}


def error_of(check: Callable[[], object]) -> str:
    """Return the first line of the error that a call raises; empty if it raises none."""
    try:
        check()
    except Exception as error:  # noqa: BLE001  (a broken build may raise anything)
        return first_line(error)
    return ""


def _call_operator() -> None:
    import torch
    import torchvision

    torchvision.ops.nms(torch.tensor([[0.0, 0.0, 1.0, 1.0]]), torch.ones(1), 0.5)


def _import_model_class() -> None:
    from transformers import Qwen2ForCausalLM  # noqa: F401


if __name__ == "__main__":
    if errors := stack_errors():
        reasons = "; ".join(f"{name} does not work: {error}" for name, error in errors.items())
        sys.exit(f"{reasons}; {REMEDY}")
