"""Right or wrong: the final answer of a response against the reference answer.

``extraction`` finds the answer. Equal text, plain numbers, units, percentages and words are decided
here, in microseconds; everything else is compared symbolically by math-verify (``math_symbolic``).
"""

import json
import re
from enum import StrEnum
from fractions import Fraction
from functools import lru_cache

from bapo_megatron.reward.base import Score
from bapo_megatron.reward.extraction import ExtractedAnswer, extract_answer
from bapo_megatron.reward.math_symbolic import (
    MAX_NESTING,
    TooLargeError,
    are_letters,
    contradicts_itself,
    is_equal_symbolically,
    nesting,
)
from bapo_megatron.reward.math_text import (
    Quantity,
    as_number,
    canonical,
    choice_letter,
    option_letter,
    quantity,
    without_option,
    words,
)

_SENTENCE_END = re.compile(r"[.!?][*_)\"']*\s+(?=[A-Z])")
_MATH = re.compile(r"\$\$(.+?)\$\$|(?<!\\)\$(.+?)(?<!\\)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]")
_LEADING = re.compile(r"(?:\\?[$£€¥₹])?[\d(+.,/^*\s)%-]*\d[\d(+.,/^*\s)%-]*")
_HEDGE = re.compile(
    r"(?:[A-Za-z]+[\s,]+)?[\s,;(]*(?:\\text\{\s*)?(?:"
    r"(?:or|if|when|whenever|unless|otherwise|depending|maybe|perhaps|but|vs|versus)\b"
    r"|(?:and|to)\b[\s}]*(?:[-+\d$\\(]|\w+\s*=)|(?<=;)\s*[-+\d$\\])",
    re.IGNORECASE,
)
"""What follows a number that is not the whole answer: "5 or 6", "5 if x > 0"."""
_FILLERS = re.compile(
    r"^(?:(?:therefore|thus|hence|so|now|simply|just|exactly|about|approximately|equal to|given by"
    r"|:|=)\s*,?\s*)+",
    re.IGNORECASE,
)
_MAX_ANSWER = 1000
"""Characters; nobody's answer is longer, and symbolic comparison grows faster than its input."""
_MAX_REPORTED = 200
_DECIMALS = 6
_RELATIVE_TOLERANCE = Fraction(1, 10_000)


class Reason(StrEnum):
    """Why a math answer is right or wrong: ``Score.reason``."""

    EQUAL_TEXT = "equal_text"
    """The same spelling, after what typesetting allows to vary."""
    EQUAL_NUMBER = "equal_number"
    """Plain numbers of equal value."""
    EQUAL_VALUE = "equal_value"
    """math-verify finds them equal."""
    DIFFERENT = "different"
    """None of these."""
    UNIT_DIFFERS = "unit_differs"
    """Both have a unit, and not the same one; units are not converted."""
    NO_ANSWER = "no_answer"
    """Nothing in the response is marked as its answer."""
    TOO_LONG = "too_long"
    """The answer has more than 1,000 characters."""
    TOO_LARGE = "too_large"
    """Its numbers, powers or brackets are too large to be evaluated."""

    @property
    def is_right(self) -> bool:
        """Whether it scores 1."""
        return self in (Reason.EQUAL_TEXT, Reason.EQUAL_NUMBER, Reason.EQUAL_VALUE)


_REPORTED_FIRST = (Reason.UNIT_DIFFERS, Reason.TOO_LARGE, Reason.DIFFERENT)
"""Which reason is reported if several accepted answers are all missed."""


def grade_math_answer(response: str, answer: str) -> Score:
    """Score 1 if the response's final answer equals the reference, else 0; with a ``Reason``.

    The reference may be a JSON list of texts of which any is accepted.
    """
    extracted = extract_answer(response)
    if extracted is None:
        return Score(reward=0.0, answer_found=False, reason=Reason.NO_ANSWER.value)
    reason = _judge(extracted, answer)
    return Score(
        reward=float(reason.is_right),
        extracted=extracted.text[:_MAX_REPORTED],
        reason=reason.value,
    )


def _accepted(answer: str) -> list[str]:
    """The alternatives of a JSON list of texts, else the answer itself."""
    if answer.startswith('["'):
        try:
            values = json.loads(answer)
        except json.JSONDecodeError:
            return [answer]
        if all(isinstance(value, str) for value in values):
            return list(values)
    return [answer]


def _judge(extracted: ExtractedAnswer, answer: str) -> Reason:
    if len(extracted.text) > _MAX_ANSWER:
        return Reason.TOO_LONG
    candidates = [extracted.text] if extracted.boxed else _sentence_answers(extracted.text)
    reasons = []
    for candidate in candidates:
        for accepted in _accepted(answer):
            reason = _compare(candidate, accepted)
            if reason.is_right:
                return reason
            reasons.append(reason)
    return min(reasons, key=_REPORTED_FIRST.index)


def _sentence_answers(line: str) -> list[str]:
    """What the rest of a sentence may mean: all of it, or what it begins with.

    Nothing further on counts: "7, not 5" is not 5, and "5 or 6" is neither.
    """
    sentence = _SENTENCE_END.split(line, maxsplit=1)[0].strip().strip("*").rstrip(".").strip()
    sentence = _FILLERS.sub("", sentence)
    candidates = [sentence]
    math = _MATH.search(sentence)
    leading = _LEADING.match(sentence, 0, math.start() if math is not None else len(sentence))
    if leading is not None:
        first, end = leading[0].strip().rstrip(" ,.+-*/^("), leading.end()
        is_whole = math is None or math.start() > end  # else they may be a product
    elif math is not None:
        first, end = next(group for group in math.groups() if group), math.end()
        is_whole = True
    else:
        return candidates
    if is_whole and not _HEDGE.match(sentence, end):
        candidates.append(first)
    return candidates


def _compare(given_text: str, wanted_text: str) -> Reason:
    given, (wanted, wanted_parts) = canonical(given_text), _reference(wanted_text)
    if not given:
        return Reason.DIFFERENT  # not even where the reference is missing
    if given == wanted:
        return Reason.EQUAL_TEXT
    if len(wanted) > _MAX_ANSWER:
        return Reason.DIFFERENT
    if max(nesting(given), nesting(wanted)) > MAX_NESTING:
        return Reason.TOO_LARGE
    if (reason := _compare_letters(given, wanted)) is not None:
        return reason
    given_parts = quantity(without_option(given))
    try:
        if contradicts_itself(given):
            return Reason.DIFFERENT
        return _compare_quantities(given_parts, wanted_parts)
    except TooLargeError:
        return Reason.TOO_LARGE


@lru_cache(maxsize=256)
def _reference(text: str) -> tuple[str, Quantity]:
    """A reference's canonical text and its parts; all responses of a group share it."""
    wanted = canonical(text)
    if len(wanted) > _MAX_ANSWER:
        return wanted, Quantity(wanted)
    return wanted, quantity(without_option(wanted))


def _compare_letters(given: str, wanted: str) -> Reason | None:
    """Compare choices and words; None where the answers are neither."""
    wanted_letter = choice_letter(wanted)
    given_letter = choice_letter(given) or option_letter(given)
    if wanted_letter and given_letter:
        return Reason.EQUAL_TEXT if wanted_letter == given_letter else Reason.DIFFERENT
    if len(wanted) == len(given) == 1 and (wanted + given).isalpha():
        return Reason.DIFFERENT  # math-verify takes E for e
    wanted_words, given_words = words(wanted), words(given)
    if wanted_words is None or given_words is None:
        return None
    if wanted_words == given_words and (len(wanted_words) > 2 or wanted_words == "no"):
        return Reason.EQUAL_TEXT
    if are_letters(wanted) or are_letters(given) or " " in wanted_words + given_words:
        # Letters side by side would be a product to the parser, in which "on" is "no".
        return Reason.DIFFERENT
    return None


def _compare_quantities(given: Quantity, wanted: Quantity) -> Reason:
    if given.unit and wanted.unit and given.unit != wanted.unit:
        if {given.unit, wanted.unit} == {"degree", "radian"}:
            return _compare_values(_in_radians(given), _in_radians(wanted))
        return Reason.UNIT_DIFFERS
    if "%" in (given.unit, wanted.unit) and given.unit != wanted.unit:
        return _compare_percentages(given, wanted)
    reason = _compare_values(given.value, wanted.value)
    if reason.is_right or given.unit == wanted.unit:
        return reason
    if "degree" in (given.unit, wanted.unit) and r"\pi" in given.value + wanted.value:
        return _compare_values(_in_radians(given), _in_radians(wanted))
    return reason


def _compare_percentages(given: Quantity, wanted: Quantity) -> Reason:
    """A percentage and a number: 28% is 0.28, and 28 where the question asks for percents.

    Numbers up to 1 are shares: 0.5% is not 0.5.
    """
    reason = _compare_values(_in_parts(given), _in_parts(wanted))
    number = as_number(wanted.value)
    if reason.is_right or (number is not None and abs(number) <= 1):
        return reason
    return _compare_values(given.value, wanted.value)


def _in_parts(amount: Quantity) -> str:
    return rf"\frac{{{amount.value}}}{{100}}" if amount.unit == "%" else amount.value


def _in_radians(angle: Quantity) -> str:
    return rf"\frac{{{angle.value}}}{{180}}\pi" if angle.unit == "degree" else angle.value


def _compare_values(given: str, wanted: str) -> Reason:
    if given == wanted:
        return Reason.EQUAL_TEXT
    given_number, wanted_number = as_number(given), as_number(wanted)
    if given_number is not None and wanted_number is not None:
        is_equal = given_number == wanted_number or (
            ("." in given) != ("." in wanted) and _is_rounded(given_number, wanted_number)
        )
        return Reason.EQUAL_NUMBER if is_equal else Reason.DIFFERENT
    is_equal = is_equal_symbolically(_evaluated(given), _evaluated(wanted))
    return Reason.EQUAL_VALUE if is_equal else Reason.DIFFERENT


def _is_rounded(one: Fraction, other: Fraction) -> bool:
    """A fraction and a decimal that agree in six decimals, as math-verify compares them."""
    is_near = abs(one - other) <= _RELATIVE_TOLERANCE * max(abs(one), abs(other))
    return is_near and round(one, _DECIMALS) == round(other, _DECIMALS)


def _evaluated(value: str) -> str:
    """A number in the parser's spelling: thousands and powers of ten written out."""
    number = as_number(value)
    if number is None or "." in value:
        return value
    return str(number) if number.denominator == 1 else f"{number.numerator}/{number.denominator}"
