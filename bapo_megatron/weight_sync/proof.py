"""Whether servers sample as the trainer computes, with the weights that they have just got.

A server is unproven until it has passed both checks here after a push: its log-probs are those of
the trainer (``verify`` computes these), and it may be used with the run's settings. The second one
comes after weights because those that a server starts with may be flat, or no real ones.
"""

import asyncio
import math
from collections.abc import Iterable, Sequence

from bapo_megatron.config.rollout import RolloutConfig
from bapo_megatron.engine.pooled import EngineStates, PooledEngine
from bapo_megatron.errors import RolloutError, ServerError

_MAX_TOKENS = 256
"""Tokens of a prompt that are compared."""


class Proof:
    """Checks servers that take part in a push; takes out those that fail."""

    def __init__(
        self, pool: EngineStates, config: RolloutConfig, prompts: Sequence[Sequence[int]]
    ) -> None:
        """Send nothing yet; log-probs of ``prompts`` are compared."""
        self._pool, self._config, self._prompts = pool, config, prompts
        cut = (tuple(prompt[:_MAX_TOKENS]) for prompt in prompts if len(prompt) > 1)
        self._sequences = tuple(cut)

    def probe(self, members: Iterable[PooledEngine]) -> tuple[tuple[int, ...], ...]:
        """Return the tokens that ``compare`` needs; none where no server must be compared."""
        return self._sequences if self._due(members) else ()

    async def compare(
        self, members: Sequence[PooledEngine], expected: Sequence[Sequence[float]], version: int
    ) -> float | None:
        """Compare servers' log-probs of the probe with the trainer's: new servers', or all.

        A server that differs is taken out, and so is one that does not answer in time.

        Raises:
            RolloutError: Servers answered and differ, and no other is left.
        """
        due, tolerance = self._due(members), self._config.weight_sync.verify_tolerance
        found = await asyncio.gather(*(self._difference(e, expected) for e in due))
        differences = {e: d for e, d in zip(due, found, strict=True) if d is not None}
        bad = {entry: found for entry, found in differences.items() if not found <= tolerance}
        for entry, difference in bad.items():
            self._pool.mark_lost(
                entry,
                f"its log-probs differ from the trainer's by {difference:.3g} on average, more "
                f"than rollout.weight_sync.verify_tolerance ({tolerance:g}), although it reports "
                f"weights version {version}",
            )
        if bad and all(entry.is_lost for entry in members):
            described = ", ".join(f"{entry.address}: {found:.3g}" for entry, found in bad.items())
            raise RolloutError(
                f"no server computes as the trainer does with weights version {version} "
                f"(mean differences of log-probs: {described}; allowed: {tolerance:g}); check the "
                "dtype, quantization and model of the servers, or raise "
                "rollout.weight_sync.verify_tolerance"
            )
        kept = (found for entry, found in differences.items() if entry not in bad)
        return max(kept, default=None)

    async def check(self, members: Sequence[PooledEngine]) -> None:
        """Check unproven servers as they were at their start, now that they have weights.

        Raises:
            RolloutError: No server may be used as it is.
        """
        new = [entry for entry in members if entry.is_unproven and not entry.is_lost]
        await asyncio.gather(*(self._check(entry, members) for entry in new))

    async def _check(self, entry: PooledEngine, members: Sequence[PooledEngine]) -> None:
        config, limit_s = self._config, self._config.health.stuck_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await entry.engine.check(config.temperature, self._prompts)
            entry.is_unproven = entry.is_lost
        except (TimeoutError, RolloutError) as error:
            hangs = f"its check took longer than {limit_s:g} s (rollout.health.stuck_timeout_s)"
            self._pool.mark_lost(entry, str(error) or hangs)
            is_refused = isinstance(error, RolloutError) and not isinstance(error, ServerError)
            if is_refused and all(member.is_lost for member in members):
                raise

    def _due(self, members: Iterable[PooledEngine]) -> list[PooledEngine]:
        """The servers to compare."""
        is_every = self._config.weight_sync.verify == "every"
        return [e for e in members if not e.is_lost and (is_every or e.is_unproven)]

    async def _difference(
        self, entry: PooledEngine, expected: Sequence[Sequence[float]]
    ) -> float | None:
        """Mean |log-prob of the server − expected| over all tokens, infinite if not finite.

        None if the server does not answer, or not as documented: then it is taken out.
        """
        differences: list[float] = []
        limit_s = self._config.weight_sync.timeout_s
        try:
            for token_ids, expected_row in zip(self._sequences, expected, strict=True):
                found = await entry.engine.score(token_ids, limit_s)
                differences += [abs(a - b) for a, b in zip(found, expected_row, strict=True)]
        except RolloutError as error:
            self._pool.mark_lost(entry, f"it does not answer the probe: {error}")
            return None
        mean = sum(differences) / len(differences) if differences else 0.0
        return mean if math.isfinite(mean) else math.inf
