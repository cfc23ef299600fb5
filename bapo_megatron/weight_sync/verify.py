"""Whether servers compute as the trainer does, with the weights that they have just got.

A server is unproven until its log-probs of the probe were the trainer's after a weight sync.
"""

import asyncio
from collections.abc import Iterable, Sequence

from bapo_megatron.config.rollout import WeightSyncConfig
from bapo_megatron.engine.pooled import EngineStates, PooledEngine
from bapo_megatron.errors import RolloutError, ServerError

_MAX_TOKENS = 256
"""Tokens of a prompt that are compared."""


class ServerCheck:
    """Checks the servers of a weight sync, and takes out those that fail."""

    def __init__(
        self, pool: EngineStates, config: WeightSyncConfig, prompts: Sequence[Sequence[int]]
    ) -> None:
        """Send nothing yet; log-probs of ``prompts`` are compared."""
        self._pool, self._config = pool, config
        cut = (tuple(prompt[:_MAX_TOKENS]) for prompt in prompts if len(prompt) > 1)
        self._sequences = tuple(cut)

    def probe(self, members: Iterable[PooledEngine]) -> tuple[tuple[int, ...], ...]:
        """Return the tokens that ``check`` compares; none where no server must be compared."""
        is_due = self._config.verify != "none" and self._due(members)
        return self._sequences if is_due else ()

    async def check(
        self, members: Sequence[PooledEngine], expected: Sequence[Sequence[float]], version: int
    ) -> float | None:
        """Compare the log-probs of new servers, or of all, with the trainer's.

        Args:
            members: The servers of the weight sync.
            expected: The trainer's log-probs of the probe: of all tokens of each sequence but the
                first, at temperature 1. Empty: nothing is compared.
            version: Weights version that the servers report.

        Returns:
            The largest mean absolute difference, in nats, of the servers that stay; None where none
            was compared, or none answered: they may come back, and need the weights.

        Raises:
            RolloutError: A server computes otherwise, and no other is left.
        """
        due = self._due(members) if expected else []
        outcomes = await asyncio.gather(
            *(self._compare(entry, expected, version) for entry in due), return_exceptions=True
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
            else:
                differences.append(outcome)
        if refusals and all(entry.is_lost for entry in members):
            raise refusals[0]
        return max(differences, default=None)

    def _due(self, members: Iterable[PooledEngine]) -> list[PooledEngine]:
        """Return the servers that are new, or all that are there."""
        is_every = self._config.verify == "every"
        return [e for e in members if not e.is_lost and (is_every or e.is_unproven)]

    async def _compare(
        self, entry: PooledEngine, expected: Sequence[Sequence[float]], version: int
    ) -> float:
        """Return the mean |log-prob of the server − expected|; raise if it is too large."""
        differences: list[float] = []
        try:
            for token_ids, expected_row in zip(self._sequences, expected, strict=True):
                scored = await entry.engine.score(token_ids, self._config.timeout_s)
                differences += [abs(a - b) for a, b in zip(scored, expected_row, strict=True)]
        except RolloutError as error:
            raise ServerError(f"it does not answer the probe: {error}") from error
        difference = sum(differences) / len(differences)
        tolerance = self._config.verify_tolerance
        if not difference <= tolerance:  # NaN too
            raise RolloutError(
                f"{entry.address}: its log-probs differ from the trainer's by {difference:.3g} on "
                f"average, more than rollout.weight_sync.verify_tolerance ({tolerance:g}), "
                f"although it reports weights version {version}; check its dtype, quantization and "
                "model, or raise the tolerance"
            )
        entry.is_unproven = entry.is_lost
        return difference
