"""Advantages of a user that end the process of a rank in the second step, or keep it waiting."""

import os
import sys
import time
from collections.abc import Callable, Sequence

from torch import Tensor

from bapo_megatron.types import Sample

GROUPS_OF_A_STEP = 4
_calls = 0

if os.environ.get("RANK") == os.environ.get("LATE_RANK", "none"):
    time.sleep(600)  # while it is imported


def _in_second_step(end: Callable[[], object]) -> Callable[[Tensor, Sequence[Sample]], Tensor]:
    def advantage(rewards: Tensor, samples: Sequence[Sample]) -> Tensor:
        global _calls
        _calls += 1
        if _calls > GROUPS_OF_A_STEP:
            end()
        return rewards - rewards.mean()

    return advantage


exits = _in_second_step(lambda: sys.exit(0))
exits_at_once = _in_second_step(lambda: os._exit(0))
changes_directory = _in_second_step(lambda: os.chdir("/"))
"""Leave the directory in which the run was started."""
