"""Right or wrong: the final answer of a response against the reference answer.

``extraction`` finds the answer. Equal text, plain numbers, units, percentages and words are decided
here, in microseconds; everything else is compared symbolically by math-verify (``math_symbolic``).
"""

import ast
import contextlib
import re
from enum import StrEnum
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from bapo_megatron.reward.base import Score
from bapo_megatron.reward.extraction import ExtractedAnswer, extract_answer
from bapo_megatron.reward.math_structures import MAX_ANSWER, MAX_NESTING, nesting
from bapo_megatron.reward.math_symbolic import (
    TooLargeError,
    are_letters,
    contradicts_itself,
    is_equal_symbolically,
)
from bapo_megatron.reward.math_text import (
    Quantity,
    are_same_choices,
    are_same_units,
    as_number,
    canonical,
    choice,
    flips,
    quantity,
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
_MAX_REPORTED = 200
_SINGLE_BACKSLASH = re.compile(r"(?<!\\)\\(?=[A-Za-z])")
_SAME_IN_WORDS = re.compile(r"(?<=\d) \([a-z][a-z -]+\)$")
_MARKED = re.compile(r"boxed\s*\{|</answer>|####")
_DECIMALS = 6
_RELATIVE_TOLERANCE = Fraction(1, 10_000)


_APPROXIMATE = re.compile(r"(.*(?<!\\not))\\approx(.*)")
_NAME = re.compile(r"[A-Za-z]\w*(?:\([A-Za-z]\))?")
_ALL = re.compile(
    r"\\text\{(?:for )?(?:all|any|every)(?: (?P<kind>real|integer)s?(?: numbers?)?)? ?\}"
    r"(?P<value>[A-Za-z](?:\\[gl]e|\\in|\\ne|[<>=]).*)",
    re.IGNORECASE,
)
_FOR_ALL = re.compile(
    r"(?P<value>.+?)(?:[, (]|\\text\{,? ?(?:(?:for|where|with) ?)?"
    r"(?P<all>(?:all|any|every|each) ?)?(?:(?P<kind>real|integer)s?(?: numbers?)? ?)?\}"
    r"|(?P<sign>\\forall) ?)*"
    r"(?P<letter>[A-Za-z])(?:\\in ?(?:\\mathbb\{)?(?P<set>[RZ])\}?)?\)?"
)
"""What says only that a letter is any number of a kind."""


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


def accepted_answers(answer: str) -> list[str]:
    """Return the texts of a list, as JSON or Python spells it, else the answer itself."""
    if not answer.startswith(("[", "(")):
        return [answer]
    try:
        values = ast.literal_eval(_SINGLE_BACKSLASH.sub(r"\\\\", answer))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return [answer]
    is_list = isinstance(values, list | tuple) and all(isinstance(value, str) for value in values)
    return list(values) if is_list and values else [answer]


def has_reference(answer: str) -> bool:
    """Whether any accepted answer can be read, so that a response may equal it."""
    for accepted in accepted_answers(answer):
        with contextlib.suppress(TooLargeError):
            _reference(accepted)
            return True
    return False


def _judge(extracted: ExtractedAnswer, answer: str) -> Reason:
    if len(extracted.text) > MAX_ANSWER:
        return Reason.TOO_LONG
    candidates = [extracted.text] if extracted.boxed else _sentence_answers(extracted.text)
    reasons = []
    for candidate in candidates:
        for accepted in accepted_answers(answer):
            try:
                reason = _compare(candidate, accepted)
            except (TooLargeError, OverflowError, RecursionError):
                reason = Reason.TOO_LARGE
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


def _compare(pred_text: str, gold_text: str) -> Reason:
    pred, gold = _read(pred_text), _reference(gold_text)
    if not pred.text:
        return Reason.DIFFERENT  # not even where the reference is missing
    if pred.numbers and gold.numbers and pred.numbers != gold.numbers:
        return Reason.DIFFERENT
    if pred.text == gold.text:
        return Reason.EQUAL_TEXT
    if (reason := _compare_letters(pred, gold)) is not None:
        return reason
    if flips(pred.text) != flips(gold.text) or contradicts_itself(pred.text):
        return Reason.DIFFERENT
    return _compare_quantities(pred.parts, gold.parts)


class _Answer(NamedTuple):
    text: str
    """Its canonical text, without what says that a letter is any number."""
    parts: Quantity
    numbers: str = ""
    """``r`` or ``i`` where a letter is said to be any real number or integer."""
    letter: str = ""
    """Of a choice, whose text may follow."""
    rest: str = ""
    """What follows the letter, or all of the text."""


def _read(text: str) -> _Answer:
    text = canonical(text)
    if len(text) > MAX_ANSWER or nesting(text) > MAX_NESTING:
        raise TooLargeError("the answer is too long, or its brackets are nested too deeply")
    text, numbers = _without_qualifier(text)
    if (approximate := _APPROXIMATE.fullmatch(text)) is not None:
        exact, rounded = approximate.groups()
        is_value = _NAME.fullmatch(exact) is None and not contradicts_itself(f"x={exact}={rounded}")
        text = exact if is_value else f"{exact}={rounded}"
    letter, rest = choice(text)
    return _Answer(text, quantity(rest or text), numbers, letter, rest)


@lru_cache(maxsize=256)
def _reference(text: str) -> _Answer:
    """Read a reference; all responses of a group share it."""
    if len(_MARKED.findall(text)) == 1 and (marked := extract_answer(text)) is not None:
        text = marked.text
    return _read(_SAME_IN_WORDS.sub("", text))


def _without_qualifier(text: str) -> tuple[str, str]:
    r"""An answer without ``\text{ for all real }x`` or ``k\in\mathbb{Z}``, and which numbers."""
    if not any(sign in text for sign in (r"\text{", r"\forall", r"\in")):
        return text, ""
    if (match := _ALL.fullmatch(text)) is not None:
        return match["value"], (match["kind"] or "")[:1].lower()
    match = _FOR_ALL.fullmatch(text)
    if match is None or not (match["all"] or match["sign"] or match["set"]):
        return text, ""
    if not re.search(rf"(?<![A-Za-z]){match['letter']}(?![A-Za-z])", match["value"]):
        return text, ""
    return match["value"], {"R": "r", "Z": "i"}.get(match["set"] or "", (match["kind"] or "")[:1])


def _compare_letters(pred: _Answer, gold: _Answer) -> Reason | None:
    """Compare choices and words; None where the answers are neither."""
    if gold.letter and pred.letter:
        if gold.letter != pred.letter:
            return Reason.DIFFERENT
        if not (gold.rest and pred.rest):
            return Reason.EQUAL_TEXT
    if len(gold.text) == len(pred.text) == 1 and (gold.text + pred.text).isalpha():
        return Reason.DIFFERENT  # math-verify takes E for e
    if are_same_choices(pred.text, gold.text):
        return Reason.EQUAL_TEXT
    pred_text, gold_text = pred.rest or pred.text, gold.rest or gold.text
    if (gold_words := words(gold_text)) is None or (pred_words := words(pred_text)) is None:
        return None
    if gold_words == pred_words and (len(gold_words) > 2 or gold_words == "no"):
        return Reason.EQUAL_TEXT
    if are_letters(gold_text) or are_letters(pred_text) or " " in gold_words + pred_words:
        # Letters side by side would be a product to the parser, in which "on" is "no".
        return Reason.DIFFERENT
    return None


def _compare_quantities(pred: Quantity, gold: Quantity) -> Reason:
    if pred.words and gold.words and pred.words != gold.words:
        return Reason.DIFFERENT
    units = {pred.unit, gold.unit}
    if units == {"degree", "radian"}:
        return _compare_values(_in_radians(pred), _in_radians(gold))
    sayings = {(bool(part.unit), bool(part.words)) for part in (pred, gold)}
    if sayings == {(True, False), (False, True)} or not are_same_units(pred.unit, gold.unit):
        return Reason.UNIT_DIFFERS
    if len(units) == 2 and "%" in units:
        return _compare_percentages(pred, gold)
    reason = _compare_values(pred.value, gold.value)
    if reason.is_right or units != {"degree", ""} or r"\pi" not in pred.value + gold.value:
        return reason
    return _compare_values(_in_radians(pred), _in_radians(gold))


def _compare_percentages(pred: Quantity, gold: Quantity) -> Reason:
    """A percentage and a number: 28% is 0.28, and 28 where the question asks for percents.

    Numbers up to 1 are shares: 0.5% is not 0.5.
    """
    reason = _compare_values(_in_parts(pred), _in_parts(gold))
    number = as_number(gold.value)
    if reason.is_right or (number is not None and abs(number) <= 1):
        return reason
    return _compare_values(pred.value, gold.value)


def _in_parts(amount: Quantity) -> str:
    return rf"\frac{{{amount.value}}}{{100}}" if amount.unit == "%" else amount.value


def _in_radians(angle: Quantity) -> str:
    return rf"\frac{{{angle.value}}}{{180}}\pi" if angle.unit == "degree" else angle.value


def _compare_values(pred: str, gold: str) -> Reason:
    if pred == gold:
        return Reason.EQUAL_TEXT
    pred_number, gold_number = as_number(pred), as_number(gold)
    if pred_number is not None and gold_number is not None:
        is_equal = pred_number == gold_number or (
            ("." in pred) != ("." in gold) and _is_rounded(pred_number, gold_number)
        )
        return Reason.EQUAL_NUMBER if is_equal else Reason.DIFFERENT
    # Thousands and mixed numbers in the parser's spelling.
    pred, gold = (
        text if number is None or "." in text else str(number)
        for text, number in ((pred, pred_number), (gold, gold_number))
    )
    is_equal = is_equal_symbolically(pred, gold)
    return Reason.EQUAL_VALUE if is_equal else Reason.DIFFERENT


def _is_rounded(one: Fraction, other: Fraction) -> bool:
    """A fraction and a decimal that agree in six decimals, as math-verify compares them."""
    is_near = abs(one - other) <= _RELATIVE_TOLERANCE * max(abs(one), abs(other))
    return is_near and round(one, _DECIMALS) == round(other, _DECIMALS)
