"""How a server was started, as ``/server_info`` says."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from bapo_megatron.engine.base import Capabilities
from bapo_megatron.engine.sglang.kind import VERSION
from bapo_megatron.engine.sglang.questions import NCCL_HEADER


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """How a server was started; does not change while it runs."""

    version: str
    """SGLang's version."""
    model_path: str
    """Directory of the model that it was started with, as it sees it."""
    tensor_ranks: int
    """Ranks that share each layer, those of data-parallel attention included; these join a group
    for weights."""
    pipeline_ranks: int
    data_ranks: int
    """Independent copies of the model behind one address."""
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
            data_ranks=int(answer["dp_size"]),
            cache_tokens=int(answer["max_total_num_tokens"]),
            is_incremental=bool(answer["incremental_streaming_output"]),
            nccl_settings=json.loads(headers.get(NCCL_HEADER, "{}")),
        )

    @property
    def is_supported(self) -> bool:
        """Whether it may be used. A build from source without leading numbers counts as newest."""
        leading = re.match(r"\d+(\.\d+)*", self.version)
        return leading is None or _numbers(leading[0]) >= _numbers(VERSION)

    @property
    def capabilities(self) -> Capabilities:
        """What such a server can do."""
        methods = {"disk"}
        # SGLang numbers tensor-parallel ranks only in a group, and gives the others no weights.
        if self.pipeline_ranks == self.data_ranks == 1:
            methods |= {"broadcast", "tensor"}
        return Capabilities(
            num_ranks=self.tensor_ranks * self.pipeline_ranks * self.data_ranks,
            in_flight=frozenset({"abort", "retract", "in_place"}),
            methods=frozenset(methods),
            remedy="" if "tensor" in methods else "start it with --pp-size 1 and --dp-size 1",
            cache_tokens=self.cache_tokens * self.data_ranks,
            nccl_settings=self.nccl_settings,
        )


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]
