"""Rows that the built-in reward functions cannot score, refused before a run starts."""

from collections.abc import Mapping
from typing import Any

from bapo_megatron.config.reward import RewardConfig
from bapo_megatron.reward.base import RowError
from bapo_megatron.reward.math_structures import MAX_ANSWER, MAX_NESTING
from bapo_megatron.reward.program import read_cases


def check_row(config: RewardConfig, answer: str, row: Mapping[str, Any]) -> None:
    """Raise ``RowError`` if a built-in function of the section can score no response to a row."""
    functions = {entry.function for entry in config.functions}
    may_be_refused = len(answer) > MAX_ANSWER or sum(map(answer.count, "{[(")) > MAX_NESTING
    if "math" in functions and may_be_refused:
        from bapo_megatron.reward.math_answer import has_reference  # loads the parser

        if not has_reference(answer):
            raise RowError(
                f"answer: math compares answers of up to {MAX_ANSWER} characters whose brackets "
                f"are not nested deeply, got {len(answer)} characters; leave the final answer only"
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
