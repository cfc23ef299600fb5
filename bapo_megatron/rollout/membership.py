"""Servers that join and leave while the run goes on: follows ``rollout.servers_file``."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from bapo_megatron.config.load import ConfigError
from bapo_megatron.engine.base import Backend
from bapo_megatron.engine.pooled import PooledEngine
from bapo_megatron.rollout.pool import EnginePool
from bapo_megatron.weight_sync.receive import WeightReceiver

_LOG = logging.getLogger(__name__)


@dataclass(eq=False)
class Membership:
    """Makes the pool's engines follow the backend's addresses."""

    backend: Backend
    pool: EnginePool
    weights: WeightReceiver
    interval_s: float
    """Time between two looks."""

    async def follow(self) -> None:
        """Look for other addresses until cancelled; where they cannot be read, nothing changes.

        A change counts once it is read twice in a row: then nobody is writing the file.
        """
        before = settled = tuple[str, ...]()
        while True:
            await asyncio.sleep(self.interval_s)
            problem, wanted = "", tuple[str, ...]()
            try:
                wanted = tuple(await asyncio.to_thread(self.backend.addresses))
            except ConfigError as error:
                problem = str(error)
            found = (problem, *wanted)
            if found == before != settled:
                settled = found
                if problem:
                    _LOG.warning("%s; the servers stay as they were", problem)
                else:
                    await self._change(wanted)
            before = found

    async def _change(self, wanted: Sequence[str]) -> None:
        """Let engines join first: requests of those that leave may go on there."""
        present = {pooled.address: pooled for pooled in self.pool.states.engines}
        for address in wanted:
            if address not in present:
                _LOG.warning("%s is added to the servers", address)
                self.pool.states.add(await self.backend.connect(address))
        leaving = (pooled for address, pooled in present.items() if address not in wanted)
        await asyncio.gather(*map(self._take_away, leaving))

    async def _take_away(self, pooled: PooledEngine) -> None:
        """Have a server leave between two pushes, when no one needs it any more."""
        await self.weights.wait_idle()
        await self.pool.take_away(pooled)
        await self.weights.forget(pooled)
        await self.pool.states.remove(pooled)
        _LOG.warning("%s has left the servers; it may be stopped", pooled.address)
