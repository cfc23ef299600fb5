"""Advantages and objectives of a user that end the process of a rank, in the second step."""

from __future__ import annotations

import ctypes
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from bapo_megatron.types import Sample

GROUPS_OF_A_STEP = 4
_calls = 0


def _is_second_step() -> bool:
    global _calls
    _calls += 1
    return _calls > GROUPS_OF_A_STEP


def exits(rewards: Tensor, samples: Sequence[Sample]) -> Tensor:
    """Call ``sys.exit``."""
    if _is_second_step():
        sys.exit(0)
    return rewards - rewards.mean()


def exits_at_once(rewards: Tensor, samples: Sequence[Sample]) -> Tensor:
    """Call ``os._exit``."""
    if _is_second_step():
        os._exit(0)
    return rewards - rewards.mean()


def changes_directory(rewards: Tensor, samples: Sequence[Sample]) -> Tensor:
    """Leave the directory in which the run was started."""
    os.chdir("/")
    return rewards - rewards.mean()


def exits_in_c(rewards: Tensor, samples: Sequence[Sample]) -> Tensor:
    """End the process without Python's knowledge."""
    if _is_second_step() and os.environ["RANK"] in os.environ["EXITING_RANKS"]:
        ctypes.CDLL(None)._exit(0)
    return rewards - rewards.mean()
