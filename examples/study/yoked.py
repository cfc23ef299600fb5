"""Yoked BAPO: the bounds that another run's search has found, in a random order.

The control that separates how wide BAPO's bounds are from when they are wide. With the bounds of a
run on the same task with another sampling seed, shuffled over all updates, their distribution is
BAPO's, but they say nothing of the update at hand. A gain of BAPO over it is one of adaptivity.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bapo_megatron.algorithm.bapo import Bapo
from bapo_megatron.algorithm.clip import Clip
from bapo_megatron.config.schema import BapoConfig
from bapo_megatron.files import atomic_write_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from bapo_megatron.algorithm.objective import TokenBatch


class Yoked(Clip):
    """Fixed bounds that change from update to update."""

    def __init__(
        self, bounds: Sequence[tuple[float, float]], seed: int, dual_clip: float | None = None
    ) -> None:
        """``bounds``: (c_low, c_high) of every update of the other run, in its order."""
        order = np.random.default_rng(seed).permutation(len(bounds))
        self._bounds = [bounds[number] for number in order]
        self.dual_clip = dual_clip

    def bounds(self, tokens: TokenBatch) -> tuple[Tensor, Tensor]:
        """Return those of the update."""
        low, high = self._bounds[tokens.update % len(self._bounds)]
        return tokens.ratio.new_full((), low), tokens.ratio.new_full((), high)


class YokedToFile(Yoked):
    """The same for ``algorithm.objective``, with bounds that ``RecordedBapo`` has written."""

    def __init__(self, file: str, seed: int, dual_clip: float | None = None) -> None:
        super().__init__(json.loads(Path(file).read_text()), seed, dual_clip)


class RecordedBapo(Bapo):
    """BAPO with its defaults that writes the bounds of all updates so far to ``file``."""

    def __init__(self, file: str) -> None:
        super().__init__(BapoConfig.model_validate({}), None)
        self._file = Path(file)
        self._by_update: dict[int, tuple[float, float]] = {}

    def loss(self, tokens: TokenBatch) -> Tensor:
        """Return BAPO's loss."""
        low, high = (float(limit) for limit in self.bounds(tokens))
        if self._by_update.get(tokens.update) != (low, high):
            self._by_update[tokens.update] = (low, high)  # also of the trial before the first one
            atomic_write_text(self._file, json.dumps(list(self._by_update.values())))
        return super().loss(tokens)
