"""Yoked BAPO: the bounds of another run's search, in a random order.

The control that separates how wide BAPO's bounds are from when they are wide. The bounds are those
of a run on the same task with another sampling seed, shuffled over all updates: their distribution
is BAPO's, but they do not depend on the update at hand. BAPO's gain over it is due to adaptivity.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bapo_megatron.algorithm.objectives.bapo import Bapo, BapoConfig
from bapo_megatron.algorithm.objectives.clip import Clip

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
    """The same for ``algorithm.objective``, with bounds that ``RecordedBapo`` wrote.

    ``{partner}`` in ``file`` stands for the seed after ``seed``, of ``seeds`` in a cycle.
    """

    def __init__(
        self, file: str, seed: int, seeds: int = 1, dual_clip: float | None = None
    ) -> None:
        path = Path(file.replace("{partner}", str((seed + 1) % seeds)))
        by_update: dict[int, tuple[float, float]] = {}
        for update, low, high in map(json.loads, path.read_text().splitlines()):
            # The check of an objective at the start of a run is an update 0, too. It comes before
            # the real one, and again when the run is resumed, after update 1 or later.
            if update > 0 or by_update.keys() <= {0}:
                by_update[update] = (low, high)
        super().__init__(list(by_update.values()), seed, dual_clip)


class RecordedBapo(Bapo):
    """BAPO with its defaults that appends the bounds of every update to ``file``."""

    def __init__(self, file: str) -> None:
        super().__init__(BapoConfig(), None)
        self._file = Path(file)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._written: tuple[int, float, float] | None = None

    def loss(self, tokens: TokenBatch) -> Tensor:
        """Return BAPO's loss."""
        low, high = (float(limit) for limit in self.bounds(tokens))
        line = (tokens.update, low, high)
        if line != self._written:  # once per update, of its micro-batches
            with self._file.open("a") as lines:
                lines.write(json.dumps(line) + "\n")
            self._written = line
        return super().loss(tokens)
