"""Rows that the built-in reward functions cannot score, refused before a run starts."""

from collections.abc import Callable, Mapping
from typing import Any

from bapo_megatron.config.reward import RewardConfig
from bapo_megatron.reward.base import RowError
from bapo_megatron.reward.program import check_reference


def row_check(config: RewardConfig) -> Callable[[str, Mapping[str, Any]], None]:
    """Return a function of a reference answer and the row's other columns.

    It raises ``RowError`` if a built-in function of the section can score no response to them.
    """
    functions = {entry.function for entry in config.functions}
    python = config.program.sandbox.python

    def check(answer: str, row: Mapping[str, Any]) -> None:
        if "program" in functions:
            check_reference(answer, python)
        if "gym" in functions:
            check_gym(row)

    return check


def check_gym(row: Mapping[str, Any]) -> None:
    """Raise ``RowError`` for the columns of a row that is not of a ``gym`` set."""
    if "gym" not in row:
        raise RowError(
            "gym: it scores rows of sets with gym only; give other sets a function of theirs"
        )
