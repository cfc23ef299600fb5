"""Whether new weights reached the servers' models: log-probs beside the trainer's.

Shape legend: P = tokens of the probe.
"""

import asyncio
import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from bapo_megatron.config.rollout import WeightSyncConfig
from bapo_megatron.engine.pooled import EngineStates, PooledEngine
from bapo_megatron.errors import RolloutError, ServerError

_LOG = logging.getLogger(__name__)
_MAX_PROBE_TOKENS = 256
"""Tokens of a prompt whose log-probs are compared."""
_ROUNDING = 1e-5
"""Change of a log-prob that float32 can make without a change of the weights."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Log-probs of the probe's P tokens."""

    server: np.ndarray
    """[P]"""
    trainer: np.ndarray
    """[P]"""

    @property
    def difference(self) -> float:
        """Mean |server − trainer|."""
        return float(np.abs(self.server - self.trainer).mean())

    def shows_no_change_of(self, later: Self) -> bool:
        """Whether the server's log-probs stayed while the trainer's moved.

        They stayed if they moved by less than a tenth as much, root mean square. New weights move
        them by as much, in bfloat16 by other rounding at least. Kernels that do not repeat their
        results may hide that weights did not arrive.
        """
        moved = _rms(later.trainer - self.trainer)
        return moved > _ROUNDING and _rms(later.server - self.server) < moved / 10


def _rms(values: np.ndarray) -> float:
    return math.sqrt(float(values @ values) / len(values))


class Verifier:
    """Compares servers' log-probs with the trainer's (``weight_sync.verify``)."""

    def __init__(
        self,
        pool: EngineStates,
        config: WeightSyncConfig,
        prompts: Sequence[Sequence[int]],
        sampling_bits: int | None = None,
    ) -> None:
        self._pool, self._config, self._bits = pool, config, sampling_bits
        cut = (tuple(prompt[:_MAX_PROBE_TOKENS]) for prompt in prompts if len(prompt) > 1)
        self.probe = tuple(cut)
        """The sequences whose log-probs are compared."""
        self.num_syncs = 0
        self._compared: dict[PooledEngine, Comparison] = {}
        """The last one of each server, since it was (re)started."""

    def due(self, members: Iterable[PooledEngine]) -> list[PooledEngine]:
        """Return the members whose log-probs must be compared."""
        verify = self._config.verify
        if verify == "none":
            return []
        every = {"every": 1, "first": 0}[verify] if isinstance(verify, str) else verify
        is_due = every > 0 and self.num_syncs % every == 0
        return [e for e in members if not e.is_lost and (is_due or e.is_unproven)]

    async def compare(
        self, members: Sequence[PooledEngine], expected: Sequence[Sequence[float]], version: int
    ) -> float | None:
        """Return the largest difference of a member; one that differs too much is lost.

        If all do after the first weight sync, none is lost, so that ``locate`` finds out why.

        Raises:
            RolloutError: A member differs too much, and no other is left.
        """
        entries = self.due(members)
        outcomes = await asyncio.gather(
            *(self._compare(entry, expected, version) for entry in entries), return_exceptions=True
        )
        errors = [outcome for outcome in outcomes if isinstance(outcome, RolloutError)]
        refusals = [error for error in errors if not isinstance(error, ServerError)]
        if refusals and len(refusals) == len(members) and self.num_syncs == 0:
            raise refusals[0]
        differences: list[float] = []
        for entry, outcome in zip(entries, outcomes, strict=True):
            if isinstance(outcome, RolloutError):
                self._pool.mark_lost(entry, str(outcome))
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                differences.append(outcome)
        if refusals and all(entry.is_lost for entry in members):
            raise refusals[0]
        return max(differences, default=None)

    async def score(self, entry: PooledEngine) -> np.ndarray:
        """Return a server's log-probs of the probe, [P]."""
        try:
            rows = [
                (await entry.engine.score(token_ids, self._config.timeout_s)).logprobs
                for token_ids in self.probe
            ]
        except RolloutError as error:
            raise ServerError(f"it does not answer the probe: {error}") from error
        return np.concatenate(rows)

    async def _compare(
        self, entry: PooledEngine, expected: Sequence[Sequence[float]], version: int
    ) -> float:
        """Return the mean |log-prob of the server − expected|; raise if it is too large."""
        current = Comparison(await self.score(entry), np.concatenate(expected))
        difference = current.difference
        tolerance = math.inf if self._bits else self._config.verify_tolerance
        if not difference <= tolerance:  # NaN too
            raise RolloutError(
                f"{entry.address}: its log-probs differ from the trainer's by {difference:.3g} on "
                f"average, more than rollout.weight_sync.verify_tolerance ({tolerance:g}), but it "
                f"reports weights version {version}; check its dtype, quantization and model, or "
                "raise the tolerance"
            )
        if self._bits and not self._compared:
            text = "weights rounded to %d bits move log-probs by %.3g on average, which is no error"
            _LOG.warning(
                f"%s: {text} (rollout.local.sampling_bits)", entry.address, self._bits, difference
            )
        before = None if self._bits or entry.is_unproven else self._compared.get(entry)
        if before is not None and before.shows_no_change_of(current):
            raise RolloutError(
                f"{entry.address}: its log-probs did not follow the trainer's since the last "
                f"comparison, though it reports weights version {version}: new weights did not "
                "reach its model; check rollout.weight_sync.method and its adapters, and restart it"
            )
        self._compared[entry] = current
        entry.is_unproven = entry.is_lost
        return difference
