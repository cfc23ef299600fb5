"""An advantage of a user whose module keeps rank 1 waiting while it is imported."""

import os
import time
from collections.abc import Sequence

from torch import Tensor

from bapo_megatron.types import Sample

if os.environ.get("RANK") == "1":
    time.sleep(600)


def centred(rewards: Tensor, samples: Sequence[Sample]) -> Tensor:
    return rewards - rewards.mean()
