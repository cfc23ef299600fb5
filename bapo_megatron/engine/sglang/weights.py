"""Control calls that give a server new weights; each is sent once, with a time limit.

Unlike other control calls, those of a weight update must not be repeated after a lost connection:
the server may be waiting in the collective of the first one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bapo_megatron.engine.sglang.dialect import has_update_session
from bapo_megatron.errors import RolloutError, ServerError, ServerGoneError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from bapo_megatron.engine.base import BucketLayout, GroupPlace
    from bapo_megatron.engine.sglang.dialect import ServerInfo
    from bapo_megatron.engine.sglang.http import SglangHttp


class SglangWeightControl:
    """``WeightControl`` of one server."""

    def __init__(self, http: SglangHttp, info: ServerInfo) -> None:
        """Take what calls the server, and how it was started; nothing is sent."""
        self._http = http
        self._has_session = has_update_session(info.version)
        self.tensor_ranks = info.tensor_ranks

    async def open_session(self, timeout_s: float) -> None:
        """See ``WeightControl``; a session that an earlier trainer left open is closed first."""
        if not self._has_session:
            return
        try:
            await self._http.control("/begin_weight_update", {}, timeout_s)
        except ServerGoneError:
            raise
        except RolloutError:
            await self._http.control("/end_weight_update", {}, timeout_s)
            await self._http.control("/begin_weight_update", {}, timeout_s)

    async def close_session(self, timeout_s: float) -> None:
        """See ``WeightControl``."""
        if self._has_session:
            await self._http.control("/end_weight_update", {}, timeout_s)

    async def join_group(self, place: GroupPlace, timeout_s: float) -> None:
        """See ``WeightControl``."""
        await self._http.control(
            "/init_weights_update_group",
            {
                "master_address": place.master_address,
                "master_port": place.master_port,
                "rank_offset": place.first_rank,
                "world_size": place.world_size,
                "group_name": place.name,
                "backend": place.backend,
            },
            timeout_s,
        )

    async def leave_group(self, name: str, timeout_s: float) -> None:
        """See ``WeightControl``."""
        await self._http.control("/destroy_weights_update_group", {"group_name": name}, timeout_s)

    async def receive(
        self,
        bucket: BucketLayout,
        group_name: str,
        *,
        version: int | None,
        flush_cache: bool,
        timeout_s: float,
    ) -> None:
        """See ``WeightControl``.

        With ``flush_cache`` **the server crashes** if a request is running, even one that is paused
        in place.
        """
        body = {
            "names": list(bucket.names),
            "dtypes": list(bucket.dtypes),
            "shapes": [list(shape) for shape in bucket.shapes],
            "group_name": group_name,
            "load_format": "flattened_bucket",
            **_ending(version, flush_cache),
        }
        await self._http.control("/update_weights_from_distributed", body, timeout_s)

    async def take(
        self, payloads: Sequence[str], *, version: int | None, flush_cache: bool, timeout_s: float
    ) -> None:
        """See ``WeightControl``; ``flush_cache`` as in ``receive``."""
        body = {"serialized_named_tensors": list(payloads), **_ending(version, flush_cache)}
        await self._http.control("/update_weights_from_tensor", body, timeout_s)

    async def load(
        self, model_dir: Path, *, version: int, flush_cache: bool, timeout_s: float
    ) -> None:
        """See ``WeightControl``; ``flush_cache`` as in ``receive``."""
        body = {"model_path": str(model_dir.absolute()), **_ending(version, flush_cache)}
        await self._http.control("/update_weights_from_disk", body, timeout_s)

    async def flush_idle(self, timeout_s: float) -> None:
        """See ``WeightControl``."""
        try:
            await self._http.control("/flush_cache", {}, timeout_s)
        except ServerError:
            raise
        except RolloutError:
            return  # it has requests, and keeps what belongs to them


def _ending(version: int | None, flush_cache: bool) -> dict[str, Any]:
    label = {} if version is None else {"weight_version": str(version)}
    return {"flush_cache": flush_cache, "abort_all_requests": False, **label}
