"""The reward function ``gym``: the scorers of reasoning-gym's tasks.

A row's column ``gym`` names the task and its options, and has what its scorer needs. Some scorers
evaluate an answer as Python, which a policy could use to run anything: they only get answers whose
characters can call nothing but the functions of a formula.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from reasoning_gym import create_dataset

from bapo_megatron.reward.base import RowError, Score
from bapo_megatron.reward.extraction import extract_answer

_LIST = re.compile(r"[\w\s\[\],'\"+-]*")
"""No call and no attribute."""
_FORMULA = re.compile(
    r"(?:[\d\s()+*/^,-]|\.(?!\s*[A-Za-z_])|"
    r"(?<![\w.])(?:[A-Za-z]|sin|cos|tan|a?sinh?|a?cosh?|a?tanh?|exp|log|ln|sqrt|Abs|pi)(?!\w))*",
    re.ASCII,
)
"""No attribute, and no names but single letters and functions."""
_EVALUATED = {
    **dict.fromkeys(("binary_matrix", "n_queens", "spiral_matrix", "string_insertion"), _LIST),
    **dict.fromkeys(
        (
            *("countdown", "intermediate_integration", "polynomial_multiplication"),
            *("puzzle24", "simple_integration"),
        ),
        _FORMULA,
    ),
}
"""Tasks whose scorer evaluates an answer, and the answers that it gets."""
_TUPLES = ("arc_agi", "rearc")
"""Tasks that compare with tuples, which JSON has not."""


def grade(response: str, answer: str, row: Mapping[str, Any]) -> Score:
    """Score the marked answer of a response by its task.

    An answer on which the scorer fails is wrong, and counts in ``scorer_errors``.

    Raises:
        RowError: The row is not of a ``gym`` set.
    """
    if "gym" not in row:
        raise RowError("it scores rows of sets with gym only; give other sets a function of theirs")
    name, options, metadata = (row["gym"][key] for key in ("name", "options", "metadata"))
    wrong = Score(0.0, answer_found=False, reason="no_answer", metrics=_metrics(name))
    extracted = extract_answer(response)
    if extracted is None:
        return wrong
    text, allowed = extracted.text, _EVALUATED.get(name)
    wrong = replace(wrong, answer_found=True, extracted=text)
    if allowed is not None and not allowed.fullmatch(text) and text != answer:
        return replace(wrong, reason="not_evaluated")
    entry = {
        "answer": answer,
        "metadata": _with_tuples(metadata) if name in _TUPLES else metadata,
    }
    task = _task(name, json.dumps(options))
    try:
        reward = float(task.score_answer(text, entry))
    except Exception:  # noqa: BLE001 - the answer may be anything
        return replace(wrong, reason="error", metrics=_metrics(name, errors=1.0))
    return Score(reward, extracted=text, metrics=_metrics(name, reward))


def _metrics(name: str, reward: float = 0.0, errors: float = 0.0) -> dict[str, float]:
    return {name: reward, "scorer_errors": errors}


@lru_cache(maxsize=64)
def _task(name: str, options: str) -> Any:
    return create_dataset(name, **json.loads(options))


def _with_tuples(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _with_tuples(entry) for key, entry in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value
