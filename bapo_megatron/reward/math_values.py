r"""Values of expressions: at a few points, where they prove that two answers differ; their size.

Most answers are wrong, and simplifying a difference that is not 0 costs a hundred times as much as
evaluating it. Letters get fixed real values, from their names alone, and all arithmetic has 130
digits. Values that clearly differ refute equality; ``differ`` never proves it.
"""

import math
import random
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import mpmath
import sympy
from sympy.core.function import AppliedUndef, Derivative

_CONTEXT = mpmath.MPContext()
_CONTEXT.dps = 130
_MAX_DIGITS = 20_000
"""Digits of the longest integer that the comparison may write out."""
_MAX_BITS = 60_000
"""A value beyond 2 to this power is not evaluated."""
_LOST = mpmath.mpf(2) ** -200
"""A sum this much smaller than its terms is 0; what is left has more than 69 digits."""
_CLEARLY = 1e-50
_CLEARLY_ROUNDED = 2e-6
"""The same for decimals, of which math-verify compares six."""
_RELATIVE_TOLERANCE = 1e-4
"""The same for decimals near 0, all of which would be 0 in six decimals."""
_NUM_POINTS = 6

_CONSTANTS = {
    sympy.pi: _CONTEXT.pi,
    sympy.E: _CONTEXT.e,
    sympy.GoldenRatio: _CONTEXT.phi,
    sympy.EulerGamma: _CONTEXT.euler,
    sympy.I: _CONTEXT.j,
}
_TRIGONOMETRIC = ("sin", "cos", "tan", "cot", "sec", "csc")
_FUNCTIONS = {
    prefix + name + suffix: getattr(_CONTEXT, prefix + name + suffix)
    for name in _TRIGONOMETRIC
    for prefix in ("", "a")
    for suffix in ("", "h")
} | {"exp": _CONTEXT.exp, "factorial": _CONTEXT.factorial}


class UnknownError(ValueError):
    """The value is not computed here: a limit, an integral, a number beyond any use."""


class _UndefinedError(ValueError):
    """There is no value: division by 0, the logarithm of 0."""


def points(letters: Iterable[Any]) -> list[dict[Any, Any]]:
    """Where letters are evaluated: six points of either sign, and a single one without letters."""
    ordered = sorted(letters, key=str)
    return [
        {letter: _coordinate(str(letter), index) for letter in ordered}
        for index in range(_NUM_POINTS if ordered else 1)
    ]


def value_at(expression: Any, point: Mapping[Any, Any]) -> Any:
    """The value of an expression, evaluated as it is written; None where it has none.

    Raises:
        UnknownError: It is not one that is evaluated here.
    """
    try:
        return _value(expression, point)
    except _UndefinedError:
        return None


def differ(one: Any, other: Any) -> bool:
    """Return whether two values, sets, points or matrices of values certainly differ."""
    one, other = sympy.sympify(one), sympy.sympify(other)  # matrices with their parts as args
    if isinstance(one, sympy.MatrixBase | sympy.Tuple | sympy.Interval) and one.func is other.func:
        return len(one.args) != len(other.args) or any(map(differ, one.args, other.args))
    if isinstance(one, sympy.FiniteSet) or isinstance(other, sympy.FiniteSet):
        one, other = (
            sympy.FiniteSet(part) if isinstance(part, sympy.Expr) else part for part in (one, other)
        )
    if isinstance(one, sympy.FiniteSet) and isinstance(other, sympy.FiniteSet):
        return any(
            all(differ(element, candidate) for candidate in candidates)
            for elements, candidates in ((one, other), (other, one))
            for element in elements.args
        )
    are_formulas = isinstance(one, sympy.Expr) and isinstance(other, sympy.Expr)
    return are_formulas and _values_differ(one, other)


def _values_differ(one: sympy.Expr, other: sympy.Expr) -> bool:
    is_rounded = one.has(sympy.Float) or other.has(sympy.Float)
    is_number = not one.free_symbols | other.free_symbols
    try:
        for left, right in _common_values(one, other):
            gap, size = abs(left - right), max(abs(left), abs(right))
            allowed = _CLEARLY * size
            if is_rounded:
                scale = 1 if is_number else max(1, size)
                allowed = min(_CLEARLY_ROUNDED * scale, _RELATIVE_TOLERANCE * size)
            if gap > allowed:
                return True
    except UnknownError:
        pass
    return False


def is_undefined(expression: Any) -> bool:
    r"""Return whether a value, or a part of a set, point or matrix, exists nowhere: ``\frac10``."""
    if isinstance(expression, sympy.MatrixBase | sympy.Tuple | sympy.FiniteSet):
        return any(map(is_undefined, expression))
    try:
        return all(value_at(expression, point) is None for point in points(letters_of(expression)))
    except UnknownError:
        return False


def is_infinite(expression: Any) -> bool:
    r"""Whether a formula, which is not evaluated, or a set holds an infinity: ``3\infty-2``."""
    if isinstance(expression, sympy.Add | sympy.Mul | sympy.Pow | sympy.exp | sympy.FiniteSet):
        return any(map(is_infinite, expression.args))
    return expression in (sympy.oo, -sympy.oo)


def letters_of(*expressions: Any) -> frozenset[Any]:
    """Symbols, and what is as good as one: unknown functions and derivatives, ``f(x)``, ``dy/dx``.

    Raises:
        UnknownError: A function of an expression, ``f(x+1)``, has several spellings.
    """
    letters = frozenset().union(*(expression.free_symbols for expression in expressions))
    calls = {
        call for expression in expressions for call in expression.atoms(AppliedUndef, Derivative)
    }
    for call in calls:
        is_simple = all(argument.is_Atom for argument in call.args)
        if not is_simple and not (isinstance(call, Derivative) and call.expr in calls | letters):
            raise UnknownError(str(call))
    return letters | calls


def _common_values(one: sympy.Expr, other: sympy.Expr) -> Iterator[tuple[Any, Any]]:
    """Values at the same points; with letters only those where both are real.

    Roots and logarithms of negative numbers have several values, of which each writer means
    another.
    """
    letters = letters_of(one, other)
    for point in points(letters):
        pair = value_at(one, point), value_at(other, point)
        if None not in pair and (not letters or all(map(is_real, pair))):
            yield pair


def is_real(value: Any) -> bool:
    """Return whether a value has no imaginary part, but for rounding."""
    return bool(abs(_CONTEXT.im(value)) <= _LOST * abs(value))


@lru_cache(maxsize=4096)
def _coordinate(name: str, index: int) -> Any:
    if name == "e":  # upright, it is a letter to the parser
        return +_CONTEXT.e
    sign = -1 if index % 2 and index // 2 % 2 != len(name) % 2 else 1
    return sign * _CONTEXT.mpf(random.Random(f"{name} {index}").uniform(0.2, 3.0))


def _value(node: Any, point: Mapping[Any, Any]) -> Any:
    value = _evaluate(node, point)
    if _CONTEXT.mag(value) > _MAX_BITS:
        raise UnknownError("too large, or infinite")
    return value


def _evaluate(node: Any, point: Mapping[Any, Any]) -> Any:
    if node in point:
        return point[node]
    if not node.args:
        return _constant(node)
    arguments = [_value(argument, point) for argument in node.args]
    if isinstance(node, sympy.Add):
        return _without_noise(_CONTEXT.fsum(arguments), max(map(abs, arguments)))
    if isinstance(node, sympy.Mul):
        return _CONTEXT.fprod(arguments)
    if isinstance(node, sympy.Pow):
        return _power(*arguments)
    if isinstance(node, sympy.Abs):
        return abs(arguments[0])
    if isinstance(node, sympy.log):
        return _logarithm(arguments)
    return _function(type(node).__name__, arguments)


def _constant(node: Any) -> Any:
    if isinstance(node, sympy.Float):
        node = sympy.Rational(str(node))
    if isinstance(node, sympy.Rational):
        return _CONTEXT.mpf(node.p) / node.q
    if node in (sympy.nan, sympy.zoo):
        raise _UndefinedError(str(node))
    if node not in _CONSTANTS:
        raise UnknownError(str(node))
    return +_CONSTANTS[node]


def _function(name: str, arguments: list[Any]) -> Any:
    if name not in _FUNCTIONS or len(arguments) != 1:
        raise UnknownError(name)
    try:
        return _without_noise(_FUNCTIONS[name](*arguments), abs(arguments[0]))
    except (ValueError, ZeroDivisionError) as error:  # a pole
        raise _UndefinedError(name) from error


def _without_noise(value: Any, size: Any) -> Any:
    return _CONTEXT.zero if abs(value) < _LOST * size else value


def _logarithm(arguments: list[Any]) -> Any:
    if not all(arguments):
        raise _UndefinedError("log 0")
    for argument in arguments:
        _check_cut(argument)
    logarithm, base = (*map(_CONTEXT.log, arguments), _CONTEXT.one)[:2]
    if not base:
        raise _UndefinedError("log to the base 1")
    return logarithm / base


def _power(base: Any, exponent: Any) -> Any:
    if not base:
        if exponent and _CONTEXT.re(exponent) <= 0:
            raise _UndefinedError("1/0")
        return base if exponent else _CONTEXT.one
    if abs(_CONTEXT.mag(base)) * abs(exponent) > _MAX_BITS:
        raise UnknownError("too large")
    if not _CONTEXT.isint(exponent):
        _check_cut(base)
    return _CONTEXT.power(base, exponent)


def _check_cut(value: Any) -> None:
    """Beside the negative axis, rounding decides which of two values a root has."""
    imaginary = _CONTEXT.im(value)
    if imaginary and _CONTEXT.re(value) < 0 and is_real(value):
        raise UnknownError("on a branch cut")


def is_affordable(expression: Any) -> bool:
    """Return whether evaluating an answer writes no number beyond use."""
    return _digits(sympy.sympify(expression)) <= _MAX_DIGITS


def _digits(node: Any) -> float:
    """An upper estimate of the decimal digits that evaluating a tree may write."""
    if isinstance(node, sympy.Integer):
        return int(node).bit_length() * math.log10(2) + 1
    if not node.args:
        return 17
    parts = [_digits(part) for part in node.args]
    if max(parts) > _MAX_DIGITS:
        return math.inf
    if isinstance(node, sympy.Product) and node.has(sympy.oo):
        return math.inf
    if isinstance(node, sympy.Pow):
        return parts[0] if node.base.free_symbols else parts[0] * max(_magnitude(node.exp), 1.0)
    if isinstance(node, sympy.factorial):
        size = _magnitude(node.args[0])
        return size * max(1.0, math.log10(max(size, 1.0)))
    if isinstance(node, sympy.binomial):
        return _magnitude(node.args[0])
    return sum(parts)


def _magnitude(node: Any) -> float:
    """An upper estimate of the absolute value; 1 for symbols, infinite beyond any use."""
    if node.free_symbols:
        return 1.0
    if _digits(node) > 300:
        return math.inf
    try:
        value = abs(complex(node.doit().evalf(5)))
    except (TypeError, ValueError, OverflowError):
        return math.inf
    return value if math.isfinite(value) else math.inf
