"""What differs between the supported SGLang versions, in one place.

The differences (``tests/engine/sglang/test_dialect.py`` runs both versions):

| | 0.5.20 | 0.5.21 |
|---|---|---|
| ``/update_weights_from_distributed``, ``…_from_tensor`` | at any time | only between ``/begin_weight_update`` and ``/end_weight_update``, which 0.5.20 does not have |
| new weights with ``flush_cache`` while requests are retracted (``in_flight: retract``) | the scheduler fails an assertion and the server ends | works |
| which model of a server with a draft model gets weights | ``disable_draft_model`` | ``selector`` |

The stream of ``/generate``, abort, pause, ``/model_info`` and ``/server_info`` are the same, as far
as this project uses them.
"""  # noqa: E501 (a table)

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from bapo_megatron.engine.base import Capabilities
from bapo_megatron.engine.sglang.questions import NCCL_HEADER

OLDEST_VERSION = "0.5.20"
"""The oldest SGLang that the contract tests hold."""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """How a server was started; does not change while it runs."""

    version: str
    """SGLang's version."""
    model_path: str
    """Directory of the model that it was started with, as it sees it."""
    tensor_ranks: int
    """Ranks that share each layer; these join a group for weights."""
    pipeline_ranks: int
    data_ranks: int
    """Independent copies of the model behind one address; the ranks of data-parallel attention
    count as tensor ranks instead."""
    cache_tokens: int
    """Tokens that fit into the cache of each copy of the model."""
    is_incremental: bool
    """Whether events of a stream hold new tokens only."""
    nccl_settings: Mapping[str, str]
    """See ``Capabilities``."""

    @classmethod
    def parse(cls, answer: dict[str, Any], headers: Mapping[str, str]) -> Self:
        """Read the answer of ``/server_info``; only the project's launcher adds settings of NCCL.

        Raises:
            KeyError: It comes from another program.
        """
        return cls(
            version=str(answer["version"]),
            model_path=str(answer["model_path"]),
            tensor_ranks=int(answer["tp_size"]),
            pipeline_ranks=int(answer["pp_size"]),
            data_ranks=1 if answer["enable_dp_attention"] else int(answer["dp_size"]),
            cache_tokens=int(answer["max_total_num_tokens"]),
            is_incremental=bool(answer["incremental_streaming_output"]),
            nccl_settings=json.loads(headers.get(NCCL_HEADER, "{}")),
        )

    @property
    def is_supported(self) -> bool:
        """Whether it may be used."""
        return self._is_at_least(OLDEST_VERSION)

    @property
    def has_update_session(self) -> bool:
        """Whether weights are accepted only between ``/begin_weight_update`` and its end."""
        return self._is_at_least("0.5.21")

    @property
    def capabilities(self) -> Capabilities:
        """What such a server can do."""
        in_flight, methods = {"abort", "in_place"}, {"disk"}
        if self._is_at_least("0.5.21"):
            in_flight.add("retract")
        # SGLang numbers tensor-parallel ranks only in a group, and gives the others no weights.
        if self.pipeline_ranks == self.data_ranks == 1:
            methods |= {"broadcast", "tensor"}
        return Capabilities(
            num_ranks=self.tensor_ranks * self.pipeline_ranks * self.data_ranks,
            in_flight=frozenset(in_flight),
            methods=frozenset(methods),
            remedy="" if "tensor" in methods else "start it with --pp-size 1 and --dp-size 1",
            cache_tokens=self.cache_tokens * self.data_ranks,
            nccl_settings=self.nccl_settings,
        )

    def _is_at_least(self, version: str) -> bool:
        """A build from source, whose version has no leading numbers, counts as the newest."""
        found = re.match(r"\d+(\.\d+)*", self.version)
        own = [int(part) for part in found[0].split(".")] if found else [1 << 30]
        return own >= [int(part) for part in version.split(".")]
