"""A user's code that rank 1 imports for ten minutes, while rank 0 waits for it."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from bapo_megatron.types import Sample

if os.environ.get("RANK") == "1":
    time.sleep(600)


def advantage(rewards: Tensor, samples: Sequence[Sample]) -> Tensor:
    return rewards - rewards.mean()
