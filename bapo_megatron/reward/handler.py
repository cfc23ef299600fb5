"""What a worker of ``pool.RewardPool`` does: runs reward functions and searches patterns."""

from __future__ import annotations

import asyncio
import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from bapo_megatron.names import LoadError
from bapo_megatron.reward.base import Response, SampleFacts
from bapo_megatron.reward.functions import load

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bapo_megatron.reward.functions import LoadedFunction


def build(*names: str) -> RewardHandler:
    """Load the functions.

    Raises:
        LoadError: One cannot be loaded.
    """
    functions = {}
    for name in names:
        try:
            functions[name] = load(name)
        except MemoryError as error:
            raise LoadError(
                f"'{name}' needs more memory than it may have; raise reward.memory_limit_mb"
            ) from error
        except LoadError as error:
            raise LoadError(f"'{name}' {error}") from error
    return RewardHandler(functions)


class RewardHandler:
    """Answers the requests of a ``RewardPool``."""

    def __init__(self, functions: Mapping[str, LoadedFunction]) -> None:
        """Keep the functions, by their names."""
        self._functions = functions
        self._loop = asyncio.new_event_loop()

    @property
    def facts(self) -> list[str]:
        """The functions that see whole groups."""
        return [name for name, function in self._functions.items() if function.sees_groups]

    def answer(self, request: Mapping[str, Any]) -> Any:
        """A score, a list of scores for a group, or whether a pattern was found."""
        if "pattern" in request:
            return _matches(request["pattern"], request["text"])
        function = self._functions[request["function"]]
        answer, row = request["answer"], request["row"]
        responses = [
            Response(
                given["text"],
                answer,
                SampleFacts(**given["sample"]),
                row,
                tuple(given["turns"]),
                given["state"],
            )
            for given in request["responses"]
        ]
        if "rewards" not in request:
            return asdict(function.score(self._loop, responses[0]))
        scores = function.score_group(self._loop, responses, request["rewards"])
        return [asdict(score) for score in scores]


def _matches(pattern: str | None, text: str) -> bool:
    if pattern is not None:
        return re.search(pattern, text) is not None
    from bapo_megatron.reward.extraction import has_closed_box

    return has_closed_box(text)
