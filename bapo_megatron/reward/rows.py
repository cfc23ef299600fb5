"""Rows that the built-in reward functions cannot score, refused before a run starts."""

from collections.abc import Mapping
from typing import Any

from bapo_megatron.config.reward import RewardConfig
from bapo_megatron.reward.base import RowError
from bapo_megatron.reward.program import read_cases

_MAX_PLAIN, _MAX_BRACKETS = 1000, 24
"""Characters and brackets of a reference that ``math`` can read in any case."""


def check_row(config: RewardConfig, answer: str, row: Mapping[str, Any]) -> None:
    """Raise ``RowError`` if a built-in function of the section can score no response to a row."""
    functions = {entry.function for entry in config.functions}
    is_long = len(answer) > _MAX_PLAIN or sum(map(answer.count, "{[(")) > _MAX_BRACKETS
    if "math" in functions and is_long:
        from bapo_megatron.reward.math_answer import has_reference  # loads the parser

        if not has_reference(answer):
            raise RowError(
                "answer: math compares answers of up to 1000 characters whose brackets are not "
                f"nested deeply, got {len(answer)} characters; leave the final answer only"
            )
    if "program" in functions:
        read_cases(answer, config.program.sandbox.python)
    if "gym" in functions:
        check_gym(row)


def check_gym(row: Mapping[str, Any]) -> None:
    """Raise ``RowError`` for the columns of a row that is not of a ``gym`` set."""
    if "gym" not in row:
        raise RowError(
            "gym: it scores rows of sets with gym only; give other sets a function of theirs"
        )
