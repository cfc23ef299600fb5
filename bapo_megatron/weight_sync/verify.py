"""Whether servers sample as the trainer computes, with the weights that they have just got.

A server is unproven until it has passed these checks after a weight sync: its log-probs of the
probe are the trainer's, and it may be used with the run's settings. The latter is checked again
after weights because those that a server starts with may be flat, or no real ones.
"""

import asyncio
from collections.abc import Iterable, Sequence

from bapo_megatron.config.rollout import RolloutConfig
from bapo_megatron.engine.pooled import EngineStates, PooledEngine
from bapo_megatron.errors import RolloutError, ServerError

_MAX_TOKENS = 256
"""Tokens of a prompt that are compared."""


class ServerCheck:
    """Checks the servers of a weight sync, and takes out those that fail."""

    def __init__(
        self, pool: EngineStates, config: RolloutConfig, prompts: Sequence[Sequence[int]]
    ) -> None:
        """Send nothing yet; log-probs of ``prompts`` are compared."""
        self._pool, self._config, self._prompts = pool, config, prompts
        cut = (tuple(prompt[:_MAX_TOKENS]) for prompt in prompts if len(prompt) > 1)
        self._sequences = tuple(cut)

    def probe(self, members: Iterable[PooledEngine]) -> tuple[tuple[int, ...], ...]:
        """Return the tokens that ``check`` compares; none where no server must be compared."""
        is_due = self._config.weight_sync.verify != "none" and self._due(members)
        return self._sequences if is_due else ()

    async def check(
        self, members: Sequence[PooledEngine], expected: Sequence[Sequence[float]], version: int
    ) -> float | None:
        """Check new servers; compare their log-probs with the trainer's, or those of all.

        Args:
            members: The servers of the weight sync.
            expected: The trainer's log-probs of the probe: of all tokens of each sequence but the
                first, at temperature 1. Empty: nothing is compared.
            version: Weights version that the servers report.

        Returns:
            The largest mean absolute difference, in nats, of the servers that stay; None where none
            was compared, or none answered: they may come back, and need the weights.

        Raises:
            RolloutError: A server computes otherwise or may not be used, and no other is left.
        """
        due = [entry for entry in self._due(members) if expected or entry.is_unproven]
        outcomes = await asyncio.gather(
            *(self._check(entry, expected, version) for entry in due), return_exceptions=True
        )
        differences: list[float] = []
        refusals: list[RolloutError] = []
        for entry, outcome in zip(due, outcomes, strict=True):
            if isinstance(outcome, RolloutError):
                self._pool.mark_lost(entry, str(outcome))
                if not isinstance(outcome, ServerError):
                    refusals.append(outcome)
            elif isinstance(outcome, BaseException):
                raise outcome
            elif outcome is not None:
                differences.append(outcome)
        if refusals and all(entry.is_lost for entry in members):
            raise refusals[0]
        return max(differences, default=None)

    def _due(self, members: Iterable[PooledEngine]) -> list[PooledEngine]:
        """Return the servers that are new, or all that are there."""
        is_every = self._config.weight_sync.verify == "every"
        return [e for e in members if not e.is_lost and (is_every or e.is_unproven)]

    async def _check(
        self, entry: PooledEngine, expected: Sequence[Sequence[float]], version: int
    ) -> float | None:
        """Return the mean difference, if it is compared; raise a ``RolloutError`` if it fails."""
        difference = await self._difference(entry, expected) if expected else None
        tolerance = self._config.weight_sync.verify_tolerance
        if difference is not None and not difference <= tolerance:  # NaN too
            raise RolloutError(
                f"{entry.address}: its log-probs differ from the trainer's by {difference:.3g} on "
                f"average, more than rollout.weight_sync.verify_tolerance ({tolerance:g}), "
                f"although it reports weights version {version}; check its dtype, quantization and "
                "model, or raise the tolerance"
            )
        if entry.is_unproven:
            limit_s = self._config.health.stuck_timeout_s
            try:
                async with asyncio.timeout(limit_s):
                    await entry.engine.check(self._config.temperature, self._prompts)
            except TimeoutError:
                raise ServerError(
                    f"{entry.address}: its check took longer than {limit_s:g} s "
                    "(rollout.health.stuck_timeout_s)"
                ) from None
            entry.is_unproven = entry.is_lost
        return difference

    async def _difference(self, entry: PooledEngine, expected: Sequence[Sequence[float]]) -> float:
        """Return the mean |log-prob of the server − expected| over all tokens."""
        differences: list[float] = []
        limit_s = self._config.weight_sync.timeout_s
        try:
            for token_ids, expected_row in zip(self._sequences, expected, strict=True):
                scored = await entry.engine.score(token_ids, limit_s)
                differences += [abs(a - b) for a, b in zip(scored, expected_row, strict=True)]
        except RolloutError as error:
            raise ServerError(f"it does not answer the probe: {error}") from error
        return sum(differences) / len(differences)
