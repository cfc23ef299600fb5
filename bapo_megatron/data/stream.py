"""The order of training prompts, whose position is saved and resumed exactly.

It is a function of the sets, their weights, the seed and the number of draws: rank 0's collector
draws every prompt of the run.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from bapo_megatron.data.prompts import PromptSet
from bapo_megatron.types import Count, Prompt


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """A stream's position, and the prompts it counts in."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "allow_inf_nan": False}
    """For ``calls.decode_json``."""
    name: str
    weight: float
    epoch: Count
    position: Count
    seed: Count
    shuffle: bool
    digest: str
    """Hash of the prompts, their answers and the columns that reward functions get."""


@dataclass(frozen=True, slots=True)
class MixturePosition:
    """A mixture's position."""

    sets: tuple[StreamPosition, ...]


class PromptStream(Iterator[Prompt]):
    """Endless prompts of one set, epoch after epoch, each in an order that the seed decides."""

    def __init__(self, prompt_set: PromptSet, seed: int, shuffle: bool, *, number: int = 0) -> None:
        """Start at the first prompt of the first epoch.

        With ``shuffle`` each epoch has an order of its own, else the set's; ``number`` is the set's
        place in its mixture, so that no two sets share an order.
        """
        assert prompt_set.prompts, "a prompt stream needs at least one prompt"
        self.name = prompt_set.name
        self.weight = float(prompt_set.weight)
        self._prompts = prompt_set.prompts
        self._seed = seed
        self._shuffle = shuffle
        self._number = number
        self._start_at(epoch=0, position=0)

    def __next__(self) -> Prompt:
        """Draw the next prompt; the stream never ends."""
        if self._position == len(self._prompts):
            self._start_at(self._epoch + 1, 0)
        prompt: Prompt = self._prompts[self._order[self._position]]
        self._position += 1
        return prompt

    @property
    def num_drawn(self) -> int:
        """Prompts drawn so far."""
        return self._epoch * len(self._prompts) + self._position

    def state(self) -> StreamPosition:
        """Return the position, for a checkpoint."""
        return StreamPosition(
            name=self.name,
            weight=self.weight,
            epoch=self._epoch,
            position=self._position,
            seed=self._seed,
            shuffle=self._shuffle,
            digest=self._digest,
        )

    def restore(self, state: StreamPosition) -> None:
        """Continue from what ``state`` returned.

        Raises:
            ValueError: The state belongs to other prompts, another seed or another order.
        """
        problem = "cannot resume the data position: "
        for name, saved, current in (
            ("seed", state.seed, self._seed),
            ("data.shuffle", state.shuffle, self._shuffle),
        ):
            if saved != current:
                raise ValueError(
                    f"{problem}{name} was {saved} when it was saved and is {current} now; resume "
                    "with the same value"
                )
        if state.digest != self._digest or state.position > len(self._prompts):
            raise ValueError(
                f"{problem}the training prompts, or their columns for reward functions, differ "
                "from those it was saved with; restore the data file, chat template and data "
                "settings"
            )
        self._start_at(state.epoch, state.position)

    def _start_at(self, epoch: int, position: int) -> None:
        self._epoch = epoch
        self._position = position
        self._order = np.arange(len(self._prompts))
        if self._shuffle:
            # NumPy pads seeds with zeros, so set 0 has the order of a run without a mixture.
            rng = np.random.default_rng([self._seed, epoch, self._number])
            self._order = rng.permutation(len(self._prompts))

    @cached_property
    def _digest(self) -> str:
        """Hash of the prompts, which never change; a million take seconds."""
        digest = hashlib.sha256()
        for p in self._prompts:
            columns = json.dumps(p.row, sort_keys=True)
            digest.update(repr((p.prompt_id, p.token_ids, p.answer, columns)).encode())
        return digest.hexdigest()


class PromptMixture(Iterator[Prompt]):
    """Endless prompts of several sets, each with its share of the draws.

    Set i with weight wᵢ has the share pᵢ = wᵢ / Σ w. Of the first n draws, cᵢ(n) come from it, and

        |cᵢ(n) − n·pᵢ| < 1 for every set and every n.

    Random draws cannot guarantee that, so the position alone decides which set a draw comes from,
    and the seed decides the order within each set. The j-th prompt of set i (j = 1, 2, …) is
    drawn in the window ⌊(j − 1) / pᵢ⌋ ≤ t < ⌈j / pᵢ⌉ of draws t = 0, 1, …; of the sets whose window
    is open, the one whose window closes first is taken, the first of the list where several do.
    That such a schedule exists and that this rule finds it is the theorem behind Pfair scheduling
    on one processor (Baruah, Cohen, Plaxton and Varvel, 1996). Windows are computed in integers.
    """

    def __init__(self, sets: Sequence[PromptSet], seed: int, shuffle: bool) -> None:
        """Start at the first prompt of each set; there is at least one, and their names differ."""
        self._streams = [
            PromptStream(prompt_set, seed, shuffle, number=number)
            for number, prompt_set in enumerate(sets)
        ]
        self._units = _in_units([stream.weight for stream in self._streams])

    def __next__(self) -> Prompt:
        """Draw the next prompt; the stream never ends."""
        drawn_by_set = [stream.num_drawn for stream in self._streams]
        now, total = sum(drawn_by_set), sum(self._units)
        open_sets = [
            (-(-(drawn + 1) * total // units), number)
            for number, (drawn, units) in enumerate(zip(drawn_by_set, self._units, strict=True))
            if drawn * total // units <= now
        ]
        assert open_sets, "some set is not ahead of its share"
        return next(self._streams[min(open_sets)[1]])

    @property
    def shares(self) -> dict[str, float]:
        """Each set's share of the draws."""
        total = sum(self._units)
        streams = zip(self._streams, self._units, strict=True)
        return {stream.name: units / total for stream, units in streams}

    def state(self) -> MixturePosition:
        """Return the position in every set, for a checkpoint."""
        return MixturePosition(tuple(stream.state() for stream in self._streams))

    def restore(self, state: MixturePosition) -> None:
        """Continue from what ``state`` returned.

        Raises:
            ValueError: The state belongs to other sets, weights, prompts, or another seed or order.
        """
        current, saved = _described(self.state()), _described(state)
        if saved != current:
            raise ValueError(
                f"cannot resume the data position: data.train was {saved} when it was saved and is "
                f"{current} now; resume with the same sets and weights"
            )
        for stream, position in zip(self._streams, state.sets, strict=True):
            stream.restore(position)


def _described(mixture: MixturePosition) -> str:
    """Such as ``a:1, b:0.5``; name and weight of a lone set mean nothing."""
    if len(mixture.sets) == 1:
        return "one set"
    return ", ".join(f"{position.name}:{position.weight:g}" for position in mixture.sets)


def _in_units(weights: Sequence[float]) -> list[int]:
    """Weights as the smallest whole numbers in the same proportions.

    Decimals are exact: 0.1 is 1/10, not the nearest binary fraction.
    """
    exact = [Fraction(repr(weight)) for weight in weights]
    denominator = math.lcm(*(weight.denominator for weight in exact))
    units = [int(weight * denominator) for weight in exact]
    common = math.gcd(*units)
    return [unit // common for unit in units]
