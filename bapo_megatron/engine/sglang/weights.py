"""Control calls that give a server new weights; each is sent once, with a time limit.

A call of a weight update must not be repeated after a lost connection, as other control calls are:
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
        """Prepare; nothing is sent.

        Args:
            http: Calls the server.
            info: How it was started.
        """
        self._http = http
        self._info = info

    @property
    def tensor_ranks(self) -> int:
        """Ranks that join a group."""
        return self._info.tensor_ranks

    def require_tensor_ranks_only(self) -> None:
        """See ``ServerInfo.require_tensor_ranks_only``."""
        self._info.require_tensor_ranks_only(self._http.address)

    async def open_session(self, timeout_s: float) -> None:
        """Make the server ready for ``receive`` or ``take``.

        A session that an earlier trainer left open is closed first.
        """
        if not has_update_session(self._info.version):
            return
        try:
            await self._call("/begin_weight_update", {}, timeout_s)
        except ServerGoneError:
            raise
        except RolloutError:
            await self._call("/end_weight_update", {}, timeout_s)
            await self._call("/begin_weight_update", {}, timeout_s)

    async def close_session(self, timeout_s: float) -> None:
        """Let the server finish what it does after the last weights."""
        if has_update_session(self._info.version):
            await self._call("/end_weight_update", {}, timeout_s)

    async def join_group(self, place: GroupPlace, timeout_s: float) -> None:
        """Have the server's ranks join a collective group; answers when all members have."""
        await self._call(
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
        """Have the server's ranks forget a group."""
        await self._call("/destroy_weights_update_group", {"group_name": name}, timeout_s)

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

        With ``flush_cache`` **the server crashes** if a request is running, also one that is paused
        in place.
        """
        await self._call(
            "/update_weights_from_distributed",
            {
                "names": list(bucket.names),
                "dtypes": list(bucket.dtypes),
                "shapes": [list(shape) for shape in bucket.shapes],
                "group_name": group_name,
                "load_format": "flattened_bucket",
                **_ending(version, flush_cache),
            },
            timeout_s,
        )

    async def take(
        self,
        payloads: Sequence[str],
        *,
        version: int | None,
        flush_cache: bool,
        timeout_s: float,
    ) -> None:
        """See ``WeightControl``; ``flush_cache`` as in ``receive``."""
        await self._call(
            "/update_weights_from_tensor",
            {"serialized_named_tensors": list(payloads), **_ending(version, flush_cache)},
            timeout_s,
        )

    async def load(
        self, model_dir: Path, *, version: int, flush_cache: bool, timeout_s: float
    ) -> None:
        """Load a Hugging Face directory."""
        await self._call(
            "/update_weights_from_disk",
            {"model_path": str(model_dir.absolute()), **_ending(version, flush_cache)},
            timeout_s,
        )

    async def flush_idle(self, timeout_s: float) -> None:
        """Forget keys and values of old weights, unless requests are running, paused or not."""
        try:
            await self._call("/flush_cache", {}, timeout_s)
        except ServerError:
            raise
        except RolloutError:
            return  # it has requests, and keeps what belongs to them

    async def _call(self, path: str, body: dict[str, Any], timeout_s: float) -> None:
        await self._http.send_once("POST", path, body, admin=True, timeout_s=timeout_s)


def _ending(version: int | None, flush_cache: bool) -> dict[str, Any]:
    label = {} if version is None else {"weight_version": str(version)}
    return {"flush_cache": flush_cache, "abort_all_requests": False, **label}
