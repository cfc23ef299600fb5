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
from sympy import parse_expr

from bapo_megatron.reward.base import Score
from bapo_megatron.reward.extraction import extract_answer
from bapo_megatron.reward.math_text import with_braces
from bapo_megatron.reward.math_values import is_affordable
from bapo_megatron.reward.rows import check_gym

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
_NOTATION = [
    (re.compile(pattern), plain)
    for pattern, plain in (
        (r"\\(?:begin|end)\{\w+\*?\}(?:\{[clr|]+\})?", ""),
        (r"\\\\", "\n"),
        (r"\\[()\[\]!]|\\?\$|\^\{?\\circ(?!\w)\}?", ""),
        (r"(?<=\d)\\[,;: ](?=\d{3}(?!\d))", ","),
        (r"\\[,;: ]|~|(?<!\\)&|\\q?quad(?!\w)|(?<=\d)(?=\\frac)", " "),
        (r"\\(?:times|cdot)(?!\w)", " × "),
        (r"\\div(?!\w)", " ÷ "),
        (r"\\(?:to|(?:long)?rightarrow)(?!\w)", " → "),
        (r"\\text\{([^{}]*)\}", r"\1"),
        (r"\\frac\s*\{(\w+)\}\s*\{(\w+)\}", r"\1/\2"),
        (r"\\frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"(\1)/(\2)"),
        (r"\\sqrt\s*\{([^{}]*)\}", r"sqrt(\1)"),
        (r"([_^])\{(\d+|[A-Za-z])\}", r"\1\2"),
        (r"\^\{([^{}]*)\}", r"^(\1)"),
        (r"\\arc(?=sin|cos|tan)", "a"),
    )
]
"""LaTeX, and what it is in plain text; innermost braces first."""
_MAX_BRACES = 8
"""Nested ones that are read."""
_ESCAPED = re.compile(r"\\([A-Za-z]+|[{}%_#&])")
_VARIABLE = re.compile(r"[A-Za-z]\w*(?:\([^()]*\))?")
_FORMULA_SIGNS = str.maketrans({"×": "*", "÷": "/", "−": "-", "^": "**"})


def grade(response: str, answer: str, row: Mapping[str, Any]) -> Score:
    """Score the marked answer of a response, as it is or without its LaTeX, by its task.

    An answer on which the scorer fails is wrong, and counts in ``scorer_errors``.

    Raises:
        RowError: The row is not of a ``gym`` set.
    """
    check_gym(row)
    name, options, metadata = (row["gym"][key] for key in ("name", "options", "metadata"))
    wrong = Score(0.0, answer_found=False, reason="no_answer", metrics=_metrics(name))
    extracted = extract_answer(response)
    if extracted is None:
        return wrong
    text, allowed = extracted.text, _EVALUATED.get(name)
    wrong = replace(wrong, answer_found=True, extracted=text)
    forms = [text, *_plain_forms(text, is_formula=allowed is _FORMULA)]
    if allowed is not None:
        forms = [form for form in forms if allowed.fullmatch(form) or form == answer]
        if not forms:
            return replace(wrong, reason="not_evaluated")
    entry = {"answer": answer, "metadata": _with_tuples(metadata) if name in _TUPLES else metadata}
    task = _task(name, json.dumps(options))
    reward, has_failed = 0.0, False
    for form in dict.fromkeys(forms):
        try:
            if allowed is _FORMULA and not is_affordable(parse_expr(form, evaluate=False)):
                return replace(wrong, reason="too_large")
            reward = max(reward, float(task.score_answer(form, entry)))
        except Exception:  # noqa: BLE001 - the answer may be anything
            has_failed = True
        if reward >= 1:
            break
    if has_failed and not reward:
        return replace(wrong, reason="error", metrics=_metrics(name, errors=1.0))
    return Score(reward, extracted=text, metrics=_metrics(name, reward))


def _plain_forms(text: str, *, is_formula: bool) -> list[str]:
    """What an answer in LaTeX may be in plain text; the task's scorer decides."""
    before = ""
    for _ in range(_MAX_BRACES):
        if text == before:
            break
        before, text = text, with_braces(text)
        for notation, plain in _NOTATION:
            text = notation.sub(plain, text)
    lines = _ESCAPED.sub(r"\1", text).split("\n")
    text = "\n".join(filter(None, (" ".join(line.split()) for line in lines)))
    forms = [text]
    left, equals, right = (part.strip() for part in text.rpartition("="))
    if equals and (is_formula or _VARIABLE.fullmatch(left)):
        forms.append(right if _VARIABLE.fullmatch(left) else left)
    if is_formula:
        forms = [re.sub(r"\be(?=\^)", "E", form).translate(_FORMULA_SIGNS) for form in forms]
        forms = [re.sub(r"(?<=[\d)]) ?(?=[A-Za-z(])", "*", form) for form in forms]
    return [*forms, *(re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", form) for form in forms)]


def _metrics(name: str, reward: float = 0.0, errors: float = 0.0) -> dict[str, float]:
    return {name: reward, "scorer_errors": errors}


@lru_cache(maxsize=64)
def _task(name: str, options: str) -> Any:
    return create_dataset(name, **json.loads(options))


def _with_tuples(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _with_tuples(entry) for key, entry in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value
