r"""Right or wrong: the final answer of a response against the reference answer.

The answer is the last ``\boxed{…}`` of the response, or, where there is none, what follows the last
``####`` or "answer is" / "answer:". Equal text and equal plain numbers are decided here, in
microseconds; everything else is compared symbolically by math-verify, which may take for ever on
hostile input: only the worker's limits (``pool.RewardPool``) bound it.
"""

from __future__ import annotations

import json
import logging
import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

from math_verify import parse, verify

from bapo_megatron.reward.base import Score

# It warns that its own time limits are off, which is meant: the worker's stand above them.
logging.getLogger("math_verify").setLevel(logging.ERROR)

_BRACE = re.compile(r"(?P<boxed>\\{1,2}boxed[ \t]*\{)|\\.|(?P<open>\{)|(?P<close>\})", re.DOTALL)
_FINAL_ANSWER = re.compile(r"####|\banswer[ \t]+is\b|\banswer[ \t]*[:=]", re.IGNORECASE)
_NUMBER = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|[+-]?\.\d+")
_LATEX_SPACE = re.compile(r"\\[,;:! ]|~")
_NEEDLESS_SPACE = re.compile(r"(?<!\w) | (?!\w)")
_SIZING = re.compile(r"\\(?:left|right)(?![A-Za-z])")
_FRACTION = re.compile(r"\\[dt]frac(?![A-Za-z])")
_LONGEST_ANSWER = 1000
"""Characters; nobody's answer is longer, and symbolic comparison grows faster than its input."""
_LONGEST_REPORTED = 200


@dataclass(frozen=True, slots=True)
class ExtractedAnswer:
    """The final answer of a response."""

    text: str
    boxed: bool
    r"""Whether it stood in ``\boxed{}``, so that all of it is the answer."""


def grade_math_answer(response_text: str, answer: str) -> Score:
    """Score 1 if the response's final answer equals the reference, else 0.

    Args:
        response_text: The decoded response.
        answer: The reference, or a JSON list of texts of which any is accepted.
    """
    extracted = extract_answer(response_text)
    if extracted is None:
        return Score(reward=0.0, answer_found=False)
    is_right = len(extracted.text) <= _LONGEST_ANSWER and any(
        _is_equal(extracted, accepted) for accepted in _accepted_answers(answer)
    )
    return Score(
        reward=float(is_right), answer_found=True, extracted=extracted.text[:_LONGEST_REPORTED]
    )


def extract_answer(response_text: str) -> ExtractedAnswer | None:
    r"""The final answer of a response, or none; linear in the response's length.

    The last ``\boxed{`` whose braces close counts; an empty one is no answer.
    """
    boxed = _last_boxed(response_text)
    if boxed is not None:
        return ExtractedAnswer(boxed.strip(), boxed=True) if boxed.strip() else None
    end = None
    for match in _FINAL_ANSWER.finditer(response_text):
        end = match.end()
    if end is None:
        return None
    line = response_text[end:].lstrip(" \t\r\n:*").partition("\n")[0]
    # Markdown and sentence marks around the answer are not part of it.
    text = line.strip().strip("*").rstrip(".").strip()
    return ExtractedAnswer(text, boxed=False) if text else None


def _last_boxed(text: str) -> str | None:
    r"""Content of the last ``\boxed{`` that closes; ``\{`` and ``\}`` are no braces."""
    last_start, last_content = -1, None
    open_braces: list[tuple[int, bool]] = []
    for match in _BRACE.finditer(text):
        if match["boxed"] or match["open"]:
            open_braces.append((match.end(), match["boxed"] is not None))
        elif match["close"] and open_braces:
            start, is_boxed = open_braces.pop()
            if is_boxed and start > last_start:
                last_start, last_content = start, (start, match.start())
    return None if last_content is None else text[slice(*last_content)]


def _accepted_answers(answer: str) -> list[str]:
    """The alternatives of a JSON list of texts, else the answer itself."""
    if answer.startswith('["'):
        try:
            values = json.loads(answer)
        except json.JSONDecodeError:
            return [answer]
        if all(isinstance(value, str) for value in values):
            return list(values)
    return [answer]


def _is_equal(extracted: ExtractedAnswer, reference: str) -> bool:
    given, wanted = _normalised(extracted.text), _normalised(reference)
    if given == wanted:
        return True
    if _NUMBER.fullmatch(given) and _NUMBER.fullmatch(wanted):
        return _number(given) == _number(wanted)
    return _is_equal_symbolically(extracted, reference)


def _normalised(answer: str) -> str:
    """One spelling of what typesetting allows to vary; never changes the value."""
    text = answer.strip().removesuffix(".")
    text = text.replace(r"\$", "").replace("$", "")
    text = _FRACTION.sub(r"\\frac", _SIZING.sub("", _LATEX_SPACE.sub("", text)))
    return _NEEDLESS_SPACE.sub("", " ".join(text.split()))


def _number(text: str) -> Fraction:
    return Fraction(text.replace(",", ""))


def _is_equal_symbolically(extracted: ExtractedAnswer, reference: str) -> bool:
    given = rf"\boxed{{{extracted.text}}}" if extracted.boxed else extracted.text
    return bool(verify(_parse(rf"\boxed{{{reference}}}"), _parse(given), timeout_seconds=None))


@lru_cache(maxsize=256)
def _parse(text: str) -> list[Any]:
    """Parsed by math-verify; cached, since all responses of a group share the reference."""
    parsed: list[Any] = parse(text, parsing_timeout=None)
    return parsed
