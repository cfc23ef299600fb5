"""The dump of a step, and what follows from it under the run's settings; for page and terminal.

Shape legend: P = groups, G = responses per group, Q = tokens of a response that the policy sampled.
"""

import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import ValidationError

from bapo_megatron.config.rollout import StalenessConfig
from bapo_megatron.config.schema import ADVANTAGES
from bapo_megatron.config.settings import masked_reasons
from bapo_megatron.data.dump import read_batch, texts_by_sample
from bapo_megatron.data.staleness import trainable_mask
from bapo_megatron.types import RolloutBatch, Sample, SampleText

Key = tuple[int, int]
"""Group and index."""
Settings = Mapping[str, Any]
"""config.yaml by dotted key."""
Order = Literal["reward", "length", "age", "advantage"]


@dataclass(frozen=True, slots=True)
class Step:
    """A batch with its texts and advantages."""

    batch: RolloutBatch
    texts: Mapping[Key, SampleText]
    """Empty where the dump has none beside it."""
    estimator: str
    """What computed the advantages; empty where they are not known."""
    _advantages: Mapping[Key, float]
    _staleness: StalenessConfig
    _settings: Settings

    def text(self, sample: Sample) -> SampleText | None:
        """Return what people read of a sample; None where nothing was kept."""
        return self.texts.get((sample.group_id, sample.index))

    def advantage(self, sample: Sample) -> float | None:
        """Return A of all its tokens; None where no estimator is known, or A is not finite."""
        return self._advantages.get((sample.group_id, sample.index))

    def age(self, sample: Sample) -> int:
        """Count the updates from the weights of its oldest token to those of the batch."""
        oldest = min((span.version for span in sample.versions), default=self.batch.version)
        return self.batch.version - oldest

    def trains(self, sample: Sample) -> np.ndarray:
        """Return which of its tokens are in the loss, [Q] bool."""
        if sample.finish_reason in masked_reasons(self._settings):
            return np.zeros(sample.num_sampled, dtype=bool)
        return trainable_mask(sample.versions, self.batch.version, self._staleness)


ORDERS: dict[Order, Callable[[Step, Sample], float]] = {
    "reward": lambda step, sample: sample.reward,
    "length": lambda step, sample: len(sample.response_token_ids),
    "age": lambda step, sample: step.age(sample),
    "advantage": lambda step, sample: step.advantage(sample) or 0.0,
}
"""Keys by which people sort samples."""


def dump_files(run_dir: Path) -> dict[int, Path]:
    """Return the dumps of a run by step, ascending; ``rollout.keep_dumps`` removes early ones."""
    found = {}
    for path in (run_dir / "rollouts").glob("step_*.parquet"):
        if match := re.fullmatch(r"step_(\d+)\.parquet", path.name):
            found[int(match[1])] = path
    return dict(sorted(found.items()))


def read_step(path: Path, settings: Settings, estimator: str | None = None) -> Step:
    """Read a dump, and compute its advantages.

    A dump has no advantages: they follow from its rewards and the estimator, which a replay may
    change. The code that trains computes them here, from the same numbers, so they are the same.

    Args:
        path: The dump.
        settings: Those of the run; empty where they are not known.
        estimator: As ``algorithm.advantage``. By default the run's own; if that is a function of
            the user's, it is not called, and the advantages are not known.

    Raises:
        DumpError: A file is damaged, or of another version's format.
        ValueError: The configuration of staleness is another version's, or the estimator cannot be
            used.
        OSError: A file cannot be read.
    """
    batch = read_batch(path)
    given = {
        key.removeprefix("rollout.staleness."): value
        for key, value in settings.items()
        if key.startswith("rollout.staleness.")
    }
    try:
        staleness = StalenessConfig(**given)
    except ValidationError as error:
        raise ValueError(
            f"{path.parent.parent / 'config.yaml'}: rollout.staleness is not of this version; read "
            "the run with the version that wrote it"
        ) from error
    own = settings.get("algorithm.advantage")
    kind = estimator or own
    shift = settings.get("algorithm.baseline_shift", 0.0) if kind == own else 0.0
    # Settings of a file that this version cannot use may be anything.
    is_sound = type(shift) in (int, float) and abs(shift) <= sys.float_info.max
    is_named = estimator is not None or (own in ADVANTAGES and len(batch.groups[0].samples) > 1)
    is_known = is_named and is_sound
    return Step(
        batch=batch,
        texts=texts_by_sample(path) or {},
        estimator=str(kind) if is_known else "",
        _advantages=_advantages(batch, str(kind), float(shift)) if is_known else {},
        _staleness=staleness,
        _settings=settings,
    )


def _advantages(batch: RolloutBatch, kind: str, shift: float) -> dict[Key, float]:
    from bapo_megatron.algorithm.advantage import Advantages  # torch takes seconds

    values_PG = Advantages(kind, shift).compute(batch.groups).tolist()
    return {
        (sample.group_id, sample.index): value
        for group, values_G in zip(batch.groups, values_PG, strict=True)
        for sample, value in zip(group.samples, values_G, strict=True)
        if math.isfinite(value)
    }
