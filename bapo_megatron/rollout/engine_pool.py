"""All servers of a run as one engine: spreads requests, checks versions, updates weights."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from bapo_megatron.rollout.base import RolloutError
from bapo_megatron.rollout.probe import check_temperature_convention
from bapo_megatron.rollout.sglang_client import SglangClient
from bapo_megatron.types import FinishReason

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from bapo_megatron.config.schema import RolloutConfig
    from bapo_megatron.rollout.completion import Completion, SamplingSettings
    from bapo_megatron.rollout.sglang_client import ApiKeys

_ABORT_INTERVAL_S = 0.05


class EnginePool:
    """Servers that hold the same weights version."""

    def __init__(
        self,
        addresses: Sequence[str],
        keys: ApiKeys,
        config: RolloutConfig,
        version: int | None,
    ) -> None:
        """Prepare the clients; nothing is sent.

        Args:
            addresses: At least one ``http://host:port``.
            keys: Keys of all servers.
            config: Connections and time limits.
            version: Weights version that the servers hold; none if it is not known.
        """
        self.version = version
        self._clients = [
            SglangClient(
                address,
                keys,
                request_timeout_s=config.request_timeout_s,
                max_connections=config.max_connections,
            )
            for address in addresses
        ]
        self._slots = asyncio.Semaphore(config.max_connections)
        self._client_by_affinity: dict[int, SglangClient] = {}
        self._num_active = 0
        self._is_draining = False

    async def close(self) -> None:
        """Close every connection."""
        for client in self._clients:
            await client.close()

    async def check(self, temperature: float, prompts: Sequence[Sequence[int]]) -> None:
        """Make sure that every server answers, and by the trainer's temperature convention.

        Raises:
            RolloutError: One does not.
        """
        for client in self._clients:
            await client.version()
            await check_temperature_convention(client, temperature, prompts)

    async def sync_weights(self, model_dir: Path, version: int) -> None:
        """Load ``model_dir`` into every server as ``version``; none may have work in progress.

        Raises:
            RolloutError: A server could not load it, or reports another version.
        """
        self.version = None
        async with asyncio.TaskGroup() as tasks:
            for client in self._clients:
                tasks.create_task(client.update_weights(model_dir, version))
        self.version = version

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling: SamplingSettings,
        *,
        label: str,
        affinity: int | None = None,
        return_logprobs: bool = True,
    ) -> Completion | None:
        """Sample one completion as soon as a connection is free.

        Args:
            input_ids: Prompt, and what was sampled before.
            sampling: How to sample.
            label: Names the request in errors.
            affinity: Requests with the same number go to the same server until ``reopen``, where
                the prompt that they share is cached.
            return_logprobs: Whether log-probs are wanted.

        Returns:
            The completion, or none where ``drain`` came before the request was sent.

        Raises:
            RolloutError: A server failed, answered from other weights, or gave up without being
                asked to.
        """
        async with self._slots:
            if self._is_draining:
                return None
            self._num_active += 1
            try:
                client = self._pick(affinity)
                completion = await client.generate(
                    input_ids, sampling, label=label, return_logprobs=return_logprobs
                )
            finally:
                self._num_active -= 1
        self._check_answer(completion, client, label)
        return completion

    async def drain(self) -> None:
        """Abort everything; returns when every request has been answered with what there was."""
        self._is_draining = True
        # Repeated, because a server forgets the abort of a request that is still on its way.
        while self._num_active:
            await asyncio.gather(*(client.abort() for client in self._clients))
            await asyncio.sleep(_ABORT_INTERVAL_S)

    def reopen(self) -> None:
        """Take requests again after ``drain``."""
        self._is_draining = False
        self._client_by_affinity.clear()

    def _pick(self, affinity: int | None) -> SglangClient:
        """The server of ``affinity``, else the one with the fewest requests in flight."""
        least_busy = min(self._clients, key=lambda client: client.num_in_flight)
        if affinity is None:
            return least_busy
        return self._client_by_affinity.setdefault(affinity, least_busy)

    def _check_answer(self, completion: Completion, client: SglangClient, label: str) -> None:
        foreign = completion.versions[completion.versions != self.version]
        if len(foreign):
            raise RolloutError(
                f"{client.address}: sampled with weights version {foreign[0]}, not {self.version} "
                f"({label}); it restarted, or another trainer uses it: give each run its own"
            )
        if completion.finish_reason is FinishReason.ABORT and not self._is_draining:
            raise RolloutError(
                f"{client.address}: gave up after {len(completion.token_ids)} tokens ({label}); "
                "somebody else aborts its requests, or its log says why"
            )
