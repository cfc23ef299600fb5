r"""Comparison by math-verify, with guards where it is more generous than mathematics.

math-verify's parser takes ``R`` for ``r``, ``y'`` for ``y``, ``2(3)`` for a sum, a list for a point
in any order; its comparison takes numbers below 10⁻¹⁵ for 0 and evaluates every power. Each guard
below answers one of these. Relations are compared by ``math_relations`` instead, and values that
``math_values`` finds to differ are not compared at all. What is left may still take forever: only
the worker's limits (``pool.RewardPool``) bound it.
"""

import itertools
import logging
import math
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import sympy
from latex2sympy2_extended.latex2sympy2 import (
    ConversionConfig,
    NormalizationConfig,
    latex2sympy,
    normalize_latex,
)
from math_verify import verify
from math_verify.grader import should_treat_as_complex
from math_verify.parser import get_last_eq
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational

from bapo_megatron.reward.math_relations import (
    are_equal_chains,
    are_matched,
    assigned,
    is_answer,
    relations_of,
)
from bapo_megatron.reward.math_structures import beside, cases, kind_of, nesting, spelled_out, split
from bapo_megatron.reward.math_text import OF_AN_ANGLE, as_number
from bapo_megatron.reward.math_values import (
    differ,
    evaluated,
    is_affordable,
    is_infinite,
    is_undefined,
)

# It warns that its own time limits are off, which is intended: the worker's limits apply.
logging.getLogger("math_verify").setLevel(logging.ERROR)

_MAX_PARSED = 12
"""Brackets within brackets of a formula, which the parser takes seconds to read beyond."""
_MAX_INTEGRALS = 4
_TOWER = re.compile(r"(?:\^\{[^{}]*){6}")
"""Exponents in exponents, which the parser takes seconds to read."""

_SAME_VALUE = 1e-9
_NORMALIZATION = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none"
)
_CONVERSION = ConversionConfig(lowercase_symbols=False)
_VARIABLES = frozenset("abcxyzmnpqrk")
"""Letters that stand side by side as a product; other words are words."""
_MAX_PRODUCT = 3
_MAX_BASE = 36
_ASSIGNMENT = re.compile(r"\s*([A-Za-z](?:_\{?\w+\}?)?)\s*=\s*(?!=)([^=]+)")
_NUMBERS_SIDE_BY_SIDE = re.compile(r"(?<![_^\d])\d+(?:\.\d+)? \d")
_FACTOR = re.compile(r"((?<![_^.\w\\}])\d+\s*(?=\()|(?<![\w}])\(-?\d+\)\s*(?=[\d(\\]))")
"""A number before a bracket; to the parser, ``2(3)`` and ``2(\\frac53)`` were sums."""
_MIXED = re.compile(r"(?<![_^.\d])(\d{1,9})\s*\\frac\{(\d{1,9})\}\{(\d{1,9})\}")
_PRIMED = re.compile(r"(?:\\([A-Za-z]+)|([A-Za-z]))('+)(?!\s*\()")
_PRIMED_FUNCTION = re.compile(r"([A-Za-z])('*)\s*\(")
_PRIME = re.compile(r"\^\{?((?:\\prime\s*)+)\}?")
_CAPITAL = re.compile(
    r"\\(Gamma|Delta|Theta|Lambda|Xi|Pi|Sigma|Upsilon|Phi|Psi|Omega)(?![A-Za-z]|\s*[(_])"
)
_NESTED_SETS = re.compile(r"\\\{[^}]*\\\{")
_BASE = re.compile(r"(\()?([0-9A-Za-z]+)(?(1)\))_\{?(?:\\text\{)?(\d+)(?:\})?\}?")
_MISREAD = re.compile(
    r"(?:(?<![\d.])\d+|[^\d\s}])\s*\\ldots|(?<![\w.])0[xXbBoO][\dA-Fa-f]"
    r"|\\binom\{-\d+\}\{-"
)
"""What the parser gives a value that it has not: an ellipsis that does not continue decimals, a
hexadecimal number, a binomial of negative numbers.
"""
_DEGREES = re.compile(r"(\d+(?:\.\d+)?)\s*\^\{?\s*\\(?:circ|degree)\s*\}?")
_TRANSPOSED = re.compile(r"(?<![A-Za-z\\])([A-Z])\^(?:T|\{\s*(?:T|\\top)\s*\}|\\top(?![A-Za-z]))")
_PRIMED_NUMBER = re.compile(r"(?<![\w{.,])\d[\d.,]*'+")
_THOUSANDS = re.compile(r"(?<==)\s*[1-9]\d{0,2}(?:,\d{3})+$")
_CLOCK = re.compile(r"([01]?\d|2[0-4]):([0-5]\d)")
_ARITHMETIC = re.compile(
    r"(?:[\d\s+\-*/^().,{}!]|\\(?:frac|sqrt|binom|cdot|times|div|pi)(?![A-Za-z]))+"
)
_OR, _AND = (
    re.compile(
        rf",?\s*(?:\\text\{{,?\s*(?:{word}|[{chinese}])\s*\}}|\\(?:{signs})(?![A-Za-z])"
        rf"|(?<![A-Za-z\\]){word}(?![A-Za-z])|[{chinese}])\s*"
    )
    for word, chinese, signs in (("or", "或", "lor|vee"), ("and", "且和", "land|wedge"))
)
_JOINED = re.compile(f"{_OR.pattern}|{_AND.pattern}")
_INEQUALITY = re.compile(r"[<>]|\\(?:infty|[lg]eq?(?:slant)?|[lg]t|neq?)(?![A-Za-z])")
_OTHERWISE = re.compile(r"(?:\\text\{\s*)?(?:otherwise|else|elsewhere|其他)\s*\}?")
_SAYS_NOTHING = (sympy.S.EmptySet, sympy.S.Reals, sympy.S.UniversalSet)
_SIGN = re.compile(r"\\(pm|mp)(?![A-Za-z])")
_MAX_SIGNS = 3
_BUILDER = re.compile(
    r"\\\{([A-Za-z])(?:\\in\s*\\mathbb\{R\})?\s*(?:\\mid|[|:])\s*(.*(?<![A-Za-z])\1(?![A-Za-z]).*)\\\}"
)
"""A set by its condition, which is compared as such: ``\\{x\\mid x>2\\}``."""
_CONGRUENCE = re.compile(r"([^,=]+?)\\equiv\s*([-+]?\d+(?:,[-+]?\d+)*)\\pmod\{(\d+)\}")


class TooLargeError(ValueError):
    """Evaluating the answer would take longer than any answer is worth."""


def is_equal_symbolically(pred: str, gold: str) -> bool:
    """Return whether two canonical answers without units have the same value.

    The reference, ``gold``, decides whether an equation or a set was asked for.

    Raises:
        TooLargeError: One of them cannot be evaluated in reasonable time.
    """
    if pred == gold or pred.casefold() == gold.casefold():
        return pred == gold  # capital letters are others, though not to the parser
    if any(_NUMBERS_SIDE_BY_SIDE.search(t) or _MISREAD.search(t) for t in (pred, gold)):
        return False
    pred, gold = spelled_out(pred), spelled_out(gold)
    pred, gold = beside(pred, gold), beside(gold, pred)
    is_equal = _compare_structures(pred, gold)
    return _is_equal_formula(pred, gold) if is_equal is None else is_equal


def _is_equal_formula(pred: str, gold: str) -> bool:
    pred, gold = (_signed(_JOINED.sub(",", text)) for text in (pred, gold))
    if r"\equiv" in pred + gold:
        return (classes := _residues(pred)) is not None and classes == _residues(gold)
    builders = _BUILDER.fullmatch(pred), _BUILDER.fullmatch(gold)
    if any(builders):
        pred, gold = (b[2] if b else text for b, text in zip(builders, (pred, gold), strict=True))
        # A condition stands for the set, so the other one may be what it gives.
        pred, gold = (gold, pred) if builders[1] is None else (pred, gold)
    pred, gold = (_PRIME.sub(lambda match: "'" * match[1].count("p"), t) for t in (pred, gold))
    if _differ_in_primes(pred, gold) or _is_time(pred, gold):
        return False
    pred, gold = _without_degrees(pred, gold), _without_degrees(gold, pred)
    pred, gold = (_with_all_letters(text) for text in (pred, gold))
    if any(
        nesting(t) > _MAX_PARSED or t.count(r"\int") > _MAX_INTEGRALS or _TOWER.search(t)
        for t in (pred, gold)
    ):
        raise TooLargeError("brackets, exponents or integrals are nested too deeply")
    aligned = _aligned(pred, gold)
    if aligned is None:
        return False
    left, right = (_parse(text) for text in aligned)
    if left is None or right is None:
        return False
    if not (is_affordable(left) and is_affordable(right)):
        raise TooLargeError("the numbers are too large")
    if any(
        len(split(text)) > 1 and isinstance(other, sympy.Expr)
        for text, other in ((pred, right), (gold, left))
    ):
        return False  # several values are not one, as 5,5 would be
    return _is_same(left, right)


def _compare_structures(pred: str, gold: str) -> bool | None:
    """Compare cases and joined inequalities; None where the answers are neither."""
    pred_cases, gold_cases = cases(pred), cases(gold)
    if pred_cases is not None and gold_cases is not None:
        names = {pred_cases[0], gold_cases[0]} - {""}
        return len(names) < 2 and _are_equal_cases(pred_cases[1], gold_cases[1])
    if any(_INEQUALITY.search(text) and _JOINED.search(text) for text in (pred, gold)):
        pred_region, gold_region = _region(pred), _region(gold)
        if pred_region is not None and gold_region is not None:
            (numbers, letters), (gold_numbers, gold_letters) = pred_region, gold_region
            is_same_letter = letters == gold_letters or not (letters and gold_letters)
            return is_same_letter and _is_same(numbers, gold_numbers)
    if any(
        _OR.search(one) and kind_of(two) == "tuple" for one, two in ((pred, gold), (gold, pred))
    ):
        return False  # "1 or 2" is no point
    return None


def _are_equal_cases(pred: Sequence[tuple[str, str]], gold: Sequence[tuple[str, str]]) -> bool:
    """Whether the same values stand under the same conditions, in any order."""

    def is_same(*pair: tuple[str, str]) -> bool:
        (value, condition), (other_value, other_condition) = pair
        if _OTHERWISE.fullmatch(condition) is None is _OTHERWISE.fullmatch(other_condition):
            is_same_condition = is_equal_symbolically(condition, other_condition)
        else:
            is_same_condition = condition == other_condition or any(
                map(_cover_the_line, (pred, gold))
            )
        return is_same_condition and is_equal_symbolically(value, other_value)

    return are_matched(pred, gold, is_same)


def _cover_the_line(pairs: Sequence[tuple[str, str]]) -> bool:
    regions = [_real_numbers(_parse(condition)) for _, condition in pairs]
    return None not in regions and sympy.Union(*regions) == sympy.S.Reals


def _region(text: str) -> tuple[sympy.Set, set[Any]] | None:
    """The numbers that inequalities joined by words allow, and their letter; else None."""
    text = builder[2] if (builder := _BUILDER.fullmatch(text)) else text
    ways = [_AND.split(way) for way in _OR.split(text)]
    parsed = [[_parse(part) for part in way] for way in ways]
    sets = [[_real_numbers(part) for part in way] for way in parsed]
    if any(None in way for way in sets):
        return None
    letters = {letter for way in parsed for part in way for letter in part.free_symbols}
    region = sympy.Union(*(sympy.Intersection(*way) for way in sets))
    return None if len(letters) > 1 or region in _SAYS_NOTHING else (region, letters)


def _real_numbers(expression: Any) -> Any:
    """The set that an inequality or an element of a set describes, or the set itself; else None."""
    if isinstance(expression, sympy.Eq) and isinstance(expression.rhs, sympy.Set):
        return expression.rhs
    if isinstance(expression, sympy.Set) or relations_of(expression) is None:
        return expression if isinstance(expression, sympy.Set) else None
    names = {call: sympy.Symbol(str(call), real=True) for call in expression.atoms(AppliedUndef)}
    try:
        return expression.xreplace(names).as_set()
    except (NotImplementedError, TypeError, ValueError, AttributeError):
        return None


def _signed(text: str) -> str:
    r"""Each value with ``\pm`` as those that it stands for; both signs change with ``\mp``."""
    if _SIGN.search(text) is None:
        return text
    head, equals, last = "", "", text
    if len(split(text)) == 1 and r"\equiv" not in text:
        head, equals, last = text.rpartition("=")
    values = ",".join(
        value
        for part in split(last.removeprefix(r"\{").removesuffix(r"\}"))
        for value in _both(part)
    )
    return values if last is text else rf"{head}{equals}\{{{values}\}}"


def _both(part: str) -> list[str]:
    first, *rest = _SIGN.split(part)
    signs, texts = rest[::2], rest[1::2]
    if len(signs) > _MAX_SIGNS or (
        kind_of(part) == "tuple" and len(signs) > 1 and "mp" not in signs
    ):
        return [part]  # whether a point's signs are tied is not known
    choices = list(itertools.product("+-", repeat=len(signs)))
    if "mp" in signs:
        choices = [tuple(pair[sign == "mp"] for sign in signs) for pair in ("+-", "-+")]
    return [first + "".join(map(str.__add__, choice, texts)) for choice in choices]


def _residues(text: str) -> frozenset[tuple[str, int, int]] | None:
    """Congruences as name, residue and modulus; None for anything else."""
    if _CONGRUENCE.sub("", text).strip(",") or not text:
        return None
    return frozenset(
        (name, int(residue) % int(modulus), int(modulus))
        for name, residues, modulus in _CONGRUENCE.findall(text)
        for residue in residues.split(",")
    )


def _is_time(text: str, other: str) -> bool:
    """Whether a text is a time of day, rather than a ratio in lowest terms, and the other none."""
    clock = _CLOCK.fullmatch(text)
    if clock is None or ":" in other:
        return False
    return clock[2].startswith("0") or math.gcd(int(clock[1]), int(clock[2])) > 1


def _without_degrees(text: str, other: str) -> str:
    r"""As ``\sin 30`` where the other one, a sine too, leaves out the sign of degrees."""
    is_left_out = OF_AN_ANGLE.search(other) is not None and _DEGREES.search(other) is None
    return _DEGREES.sub(r"\1", text) if is_left_out and OF_AN_ANGLE.search(text) else text


def _is_same(pred: Any, gold: Any) -> bool:
    """Whether two parsed answers say the same, and something."""
    pred_chain, gold_chain = relations_of(pred), relations_of(gold)
    if pred_chain and gold_chain:
        if (are_members := _are_solutions(pred, gold, gold_chain)) is not None:
            return are_members
        return are_equal_chains(pred_chain, gold_chain, _is_same)
    if pred_chain:  # the value that an equation ends with
        is_equation = all(isinstance(part, sympy.Eq) for part in pred_chain)
        return is_equation and is_answer(pred_chain) and _is_same(pred_chain[-1].rhs, gold)
    if gold_chain:
        return _is_solution(pred, gold, gold_chain)
    are_sets = [isinstance(part, sympy.FiniteSet) for part in (pred, gold)]
    if are_sets[0] != are_sets[1] and any(
        isinstance(part, sympy.Interval | sympy.Tuple) for part in (pred, gold)
    ):
        return False  # the members of a set are no ends
    if all(are_sets) and any(
        relations_of(part) or isinstance(part, sympy.MatrixBase)
        for part in (*pred.args, *gold.args)
    ):
        return are_matched(pred.args, gold.args, _is_same)
    if not all(isinstance(part, sympy.Basic | sympy.MatrixBase) for part in (pred, gold)):
        return False
    if is_undefined(pred) or is_infinite(pred) != is_infinite(gold):
        return False
    return not differ(pred, gold) and _are_proved_equal(pred, gold)


def _are_proved_equal(pred: Any, gold: Any) -> bool:
    if verify([gold], [pred], timeout_seconds=None):
        return True
    # math-verify compares a lone letter by its spelling.
    are_formulas = all(isinstance(p, sympy.Expr) and p.is_commutative for p in (pred, gold))
    has_one_letter = are_formulas and pred.is_Symbol != gold.is_Symbol
    return has_one_letter and bool(verify([gold + 1], [pred + 1], timeout_seconds=None))


def _are_solutions(pred: Any, gold: Any, gold_chain: Sequence[Relational]) -> bool | None:
    r"""Whether one, ``x\in[1,2]`` or ``x=\pm1``, gives what solves the other; else None."""
    pred_set, gold_set = (
        part.rhs if isinstance(part, sympy.Eq) and isinstance(part.rhs, sympy.Set) else None
        for part in (pred, gold)
    )
    if pred_set is not None and gold_set is None:
        return pred.lhs in gold.free_symbols and _is_solution(pred_set, gold, gold_chain)
    if isinstance(gold_set, sympy.FiniteSet) and pred_set is None:
        return _is_same(gold, pred)
    return None


def _is_solution(pred: Any, gold: Any, chain: Sequence[Relational]) -> bool:
    """Whether a value or set is what the reference's equation or inequality gives."""
    if (equation := assigned(chain)) is not None and _is_same(pred, equation.rhs):
        return True
    if not isinstance(pred, sympy.Set) or not all(part.free_symbols for part in chain):
        return False
    solutions = _real_numbers(gold)
    says_nothing = solutions is None or solutions in _SAYS_NOTHING
    return not says_nothing and _is_same(pred, solutions)


def contradicts_itself(answer: str) -> bool:
    """Return whether a chain like ``x = 2 = 3``, whose end the parser takes, has two values.

    Only plain arithmetic is evaluated; decimals are taken as rounded to their last place.
    """
    for part in split(answer):
        sides = split(part, "=")
        if len(sides) < 3:
            continue
        values = [value for side in sides if (value := _arithmetic_value(side)) is not None]
        for (one, one_place), (other, other_place) in itertools.pairwise(values):
            allowed = max(one_place, other_place, _SAME_VALUE * max(1, abs(one)))
            if abs(one - other) > allowed:
                return True
    return False


def _arithmetic_value(text: str) -> tuple[Any, Any] | None:
    """The value of plain arithmetic and the unit of its last decimal; None for anything else."""
    if _ARITHMETIC.fullmatch(text) is None:
        return None
    number = as_number(text.strip())
    expression = _parse(text) if number is None else sympy.Rational(number)
    if not isinstance(expression, sympy.Expr) or not is_affordable(expression):
        return None
    value = expression.doit().evalf(30)
    if not value.is_real or not value.is_finite:
        return None
    decimals = re.search(r"\.(\d*)", text)
    return value, sympy.Float(10) ** -len(decimals[1]) if decimals else sympy.Float(0)


def _with_all_letters(text: str) -> str:
    """Names for letters that the parser does not tell apart: capital Greek, primed, transposed."""
    text = _TRANSPOSED.sub(r"{X_{turned\1}}", _CAPITAL.sub(r"{X_{capital\1}}", text))
    return _PRIMED.sub(lambda name: f"{{X_{{prime{len(name[3])}{name[1] or name[2]}}}}}", text)


def _differ_in_primes(pred: str, gold: str) -> bool:
    """Whether one has a function where the other has its derivative; both are f to the parser.

    Or a number with primes where the other has none: feet or minutes of arc.
    """
    if sorted(_PRIMED_NUMBER.findall(pred)) != sorted(_PRIMED_NUMBER.findall(gold)):
        return True
    one, other = (set(_PRIMED_FUNCTION.findall(text)) for text in (pred, gold))
    both = {letter for letter, _ in one} & {letter for letter, _ in other}
    return any(letter in both for letter, _ in one ^ other)


def _aligned(pred: str, gold: str) -> tuple[str, str] | None:
    """Both in the same form of collection; None where these cannot be equal."""
    if (bases := _in_bases(pred, gold)) is not None:
        return bases
    pred_kind, gold_kind = kind_of(pred), kind_of(gold)
    kinds = {pred_kind, gold_kind}
    nested = [_NESTED_SETS.search(text) is not None for text in (pred, gold)]
    if kinds == {"set", "tuple"} or nested[0] != nested[1]:
        return None
    if kinds == {"list"} and len(split(pred)) != len(split(gold)):
        return None
    if kinds == {"list"} and _assigns_several(pred) != _assigns_several(gold):
        return _bracketed(pred, "tuple"), _bracketed(gold, "tuple")
    if "list" in kinds and kinds & {"set", "tuple"}:
        if pred_kind == "list":
            return _bracketed(pred, gold_kind), gold
        return pred, _bracketed(gold, pred_kind)
    return pred, gold


def _in_bases(pred: str, gold: str) -> tuple[str, str] | None:
    """Numerals such as ``204_5``: with two bases by value, with one the digits alone."""
    left, right = _BASE.fullmatch(pred), _BASE.fullmatch(gold)
    if left is not None and right is not None:
        return _in_base(left), _in_base(right)
    numeral, other = (left, gold) if left is not None else (right, pred)
    if numeral is None or not other.isdigit():
        return None
    return numeral[2] if 2 <= int(numeral[3]) <= _MAX_BASE else _in_base(numeral), other


def _in_base(numeral: re.Match[str]) -> str:
    """Its value; a name where the base lacks a digit, and for a letter with an index."""
    digits, base = numeral.group(2, 3)
    try:
        if digits[0].isdigit() or len(digits) > 1:
            return str(int(digits, max(int(base), 1)))
    except ValueError:
        pass
    return rf"X_{{{digits}in{base}}}"


def _assigns_several(text: str) -> bool:
    """Whether a list names each value, as in ``x=1,y=2``, so that its order matters."""
    names = [match[1] for part in split(text) if (match := _ASSIGNMENT.fullmatch(part))]
    return len(set(names)) == len(split(text))


def _bracketed(text: str, kind: str) -> str:
    """A list as the set or point that it is compared with."""
    parts = split(text)
    assignments = [_ASSIGNMENT.fullmatch(part) for part in parts]
    if all(assignments):
        pairs = [(match[1], match[2]) for match in assignments if match]
        if {name for name, _ in pairs} <= set("xyz"):
            pairs.sort(key=lambda pair: pair[0])
        parts = [value for _, value in pairs]
    joined = ",".join(parts)
    return rf"\{{{joined}\}}" if kind == "set" else f"({joined})"


def are_letters(text: str) -> bool:
    """Return whether bare letters are a word or a name, not a product of variables."""
    plain = re.fullmatch(r"[A-Za-z]{2,}", text)
    return plain is not None and not (len(text) <= _MAX_PRODUCT and set(text) <= _VARIABLES)


@lru_cache(maxsize=256)
def _parse(text: str) -> Any:
    """The expression, or None; cached, since all responses of a group share the reference."""
    mixed = _MIXED.findall(text)
    if any(int(top) >= int(bottom) for _, top, bottom in mixed):
        return None  # neither a mixed number nor clearly a product
    text = _FACTOR.sub(r"\1\\cdot ", _MIXED.sub(_improper, text))
    text = _THOUSANDS.sub(lambda match: match[0].replace(",", ""), text)
    if OF_AN_ANGLE.search(text):
        text = _DEGREES.sub(r"{\\frac{\1\\pi}{180}}", text)
    text = text.replace(r"\bmod", r"\mod")
    try:
        latex = normalize_latex(text, _NORMALIZATION)
        try:
            return _convert(latex)
        except Exception:  # noqa: BLE001 - the parser raises many kinds
            last = get_last_eq(latex)
            return None if last == latex else _convert(last)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - not mathematics that the parser knows
        return None


def _improper(mixed: re.Match[str]) -> str:
    whole, top, bottom = map(int, mixed.groups())
    return rf"\frac{{{whole * bottom + top}}}{{{bottom}}}"


def _convert(latex: str) -> Any:
    expression = latex2sympy(
        latex,
        is_real=not should_treat_as_complex(latex),
        convert_degrees=False,
        normalization_config=None,
        conversion_config=_CONVERSION,
    )
    return evaluated(expression) if "matrix}" in latex else expression
