"""Control calls that give a server new weights; each is sent once, with a time limit.

A call of a weight update must not be repeated after a lost connection, as other control calls are:
the server may be waiting in the collective of the first one.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from bapo_megatron.errors import RolloutError, ServerGoneError
from bapo_megatron.engine.sglang.dialect import has_update_session

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from bapo_megatron.engine.sglang.client import SglangClient
    from bapo_megatron.engine.sglang.dialect import ServerInfo
    from bapo_megatron.weight_sync.servers import BucketLayout, GroupPlace

_INPUT_TEMPERATURE = 1.0


class SglangWeightControl:
    """A ``weight_sync.servers.WeightControl`` of SGLang."""

    def __init__(self, client: SglangClient, facts: ServerInfo) -> None:
        """Keep both; ``SglangClient.ask_info`` asks for the second."""
        self._client = client
        self._facts = facts

    @property
    def tensor_ranks(self) -> int:
        """Ranks that join a group."""
        return self._facts.tensor_ranks

    def require_tensor_ranks_only(self) -> None:
        """See ``ServerInfo.require_tensor_ranks_only``."""
        self._facts.require_tensor_ranks_only(self._client.address)

    async def open_session(self, timeout_s: float) -> None:
        """Make the server ready for ``receive`` or ``take``.

        A session that an earlier trainer left open is closed first.
        """
        if not has_update_session(self._facts.version):
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
        if has_update_session(self._facts.version):
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
        """Receive one flat tensor, broadcast by rank 0 of the group, and load what it holds.

        Args:
            bucket: What it holds.
            group_name: The group.
            version: Version of the weights, with their last part only: a server that has a part of
                them keeps its old label and is not used.
            flush_cache: Forget keys and values of the old weights. **The server crashes** if a
                request is running, also one that is paused in place.
            timeout_s: Longest time until it has answered.
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
        """Load tensors that lie in memory that the server can map.

        Args:
            payloads: One for each tensor-parallel rank, see
                ``weight_sync.carriers.shared_memory_payload``.
            version: As in ``receive``.
            flush_cache: As in ``receive``.
            timeout_s: Longest time until it has answered.
        """
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
        except ServerGoneError:
            raise
        except RolloutError:
            return  # it has requests, and keeps what belongs to them

    async def reported_version(self, timeout_s: float) -> str:
        """The weights version that the server reports."""
        return await self._client.version(timeout_s)

    async def input_logprobs(self, token_ids: Sequence[int], timeout_s: float) -> list[float]:
        """Log-probs of all tokens but the first, each after those before it, at temperature 1.

        Those of input tokens are log_softmax(logits), whatever temperature a request has. None of
        them comes from cached keys and values.
        """
        answer = await self._call(
            "/generate",
            {
                "input_ids": list(token_ids),
                "sampling_params": {"max_new_tokens": 1, "temperature": _INPUT_TEMPERATURE},
                "return_logprob": True,
                "logprob_start_len": 0,
            },
            timeout_s,
            admin=False,
        )
        with self._client.checked("probe of its log-probs"):
            rows = answer["meta_info"]["input_token_logprobs"]
            if [row[1] for row in rows] != list(token_ids):
                raise ValueError(
                    f"log-probs of {len(rows)} input tokens do not belong to the "
                    f"{len(token_ids)} that were sent"
                )
            return [math.nan if row[0] is None else float(row[0]) for row in rows[1:]]

    async def _call(
        self, path: str, body: dict[str, Any], timeout_s: float, *, admin: bool = True
    ) -> Any:
        return await self._client.call_once("POST", path, body, admin=admin, timeout_s=timeout_s)


def _ending(version: int | None, flush_cache: bool) -> dict[str, Any]:
    label = {} if version is None else {"weight_version": str(version)}
    return {"flush_cache": flush_cache, "abort_all_requests": False, **label}
