r"""Values of expressions: at a few points, where they prove that two answers differ; their size.

Most answers are wrong, and simplifying a difference that is not 0 costs a hundred times as much as
evaluating it. Letters get fixed real values, from their names alone, and sympy evaluates 100
digits. Values that clearly differ refute equality; ``differ`` never proves it.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache, partial, reduce
from math import comb
from operator import add, mul
from typing import Any

import mpmath
import sympy
from sympy.concrete.expr_with_limits import ExprWithLimits
from sympy.core.function import AppliedUndef, Derivative

_DIGITS = 100
_CONTEXT = mpmath.MPContext()
_CONTEXT.dps = _DIGITS
_MAX_SIZE = sympy.Float("1e20000")
"""Largest number, or denominator, that the comparison may write out."""
_MAX_TERMS = 2000
"""Of a sum, or of a sum's expanded power."""
_MAX_TOWER = 3
"""Height of a tower of exponents with letters; the values of higher ones cannot be computed."""
_LOST = mpmath.mpf(2) ** -200
"""An imaginary part this much smaller than its number is rounding."""
_CLEARLY = 1e-50
_CLEARLY_ROUNDED = 2e-6
"""The same for decimals, of which math-verify compares six."""
_RELATIVE_TOLERANCE = 1e-4
"""The same for decimals near 0, all of which would be 0 in six decimals."""
_NUM_POINTS = 6


class UnknownError(ValueError):
    """The value is not computed here: a limit, an integral, a number beyond any use."""


def points(letters: Iterable[Any]) -> list[dict[Any, Any]]:
    """Where letters are evaluated: six points of either sign, and a single one without letters."""
    ordered = sorted(letters, key=str)
    return [
        {letter: _coordinate(str(letter), index) for letter in ordered}
        for index in range(_NUM_POINTS if ordered else 1)
    ]


def value_at(expression: Any, point: Mapping[Any, Any]) -> Any:
    """The value of an expression as an ``mpmath`` number; None where it has none, as 1/0.

    Raises:
        UnknownError: It is not one that is evaluated here: a limit, an integral, an infinity.
    """
    if not isinstance(expression, sympy.Expr) or expression.has(ExprWithLimits, sympy.Limit):
        raise UnknownError(str(expression))
    value = exact(expression).xreplace(point).evalf(_DIGITS)
    if value in (sympy.nan, sympy.zoo):
        return None
    try:
        number = _CONTEXT.mpmathify(value)
    except TypeError as error:  # symbols are left, or a function that sympy does not evaluate
        raise UnknownError(str(expression)) from error
    if not _CONTEXT.isfinite(number):
        raise UnknownError(str(expression))
    return number


def exact(expression: Any) -> Any:
    """Return an expression with its decimals as what they say: 0.1 is 1/10."""
    numbers = {number: sympy.Rational(str(number)) for number in expression.atoms(sympy.Float)}
    return expression.xreplace(numbers)


def evaluated(tree: Any) -> Any:
    """Return an expression with its sums, products and powers of matrices computed.

    Raises:
        KeyError: It has another function of a matrix.
        ValueError, TypeError: Shapes do not fit, there is no inverse, or a power is no number.
    """
    if isinstance(tree, sympy.MatrixBase) or not isinstance(tree, sympy.Basic):
        return tree
    parts = list(map(evaluated, tree.args))
    if isinstance(tree, sympy.Eq) and parts[0] == parts[1]:
        return parts[1]  # the rank or determinant of a matrix and its value
    is_collection = isinstance(tree, sympy.Set | sympy.Tuple)
    if not is_collection and any(isinstance(part, sympy.MatrixBase) for part in parts):
        tree = _OPERATIONS[tree.func](*parts)
    elif parts != list(tree.args):
        tree = tree.func(*parts)
    return tree[0] if getattr(tree, "shape", None) == (1, 1) else sympy.sympify(tree)


def _product(first: Any, *others: Any) -> Any:
    function = _OF_MATRICES.get(str(first))
    return function(reduce(mul, others)) if function else reduce(mul, others, first)


def _power(base: Any, exponent: Any) -> Any:
    if abs(exponent) > (_MAX_POWER_OF_LETTERS if base.free_symbols else _MAX_POWER):
        raise UnknownError(f"power {exponent}")
    return base**exponent


_MAX_POWER, _MAX_POWER_OF_LETTERS = 1000, 20
"""Of a matrix; formulas in it grow with each multiplication."""
_OF_MATRICES = {"rank": sympy.Matrix.rank, "tr": sympy.Matrix.trace, "det": sympy.Matrix.det}
_OPERATIONS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((sympy.Add, sympy.MatAdd), lambda *parts: reduce(add, parts)),
    **dict.fromkeys((sympy.Mul, sympy.MatMul), _product),
    **dict.fromkeys((sympy.Pow, sympy.MatPow), _power),
    **{sympy.Abs: sympy.Matrix.det, sympy.Eq: partial(sympy.Eq, evaluate=False)},
}


def differ(one: Any, other: Any) -> bool:
    """Return whether two values, sets, points or matrices of values certainly differ."""
    one, other = sympy.sympify(one), sympy.sympify(other)  # matrices with their parts as args
    if isinstance(one, sympy.MatrixBase | sympy.Tuple | sympy.Interval) and one.func is other.func:
        return len(one.args) != len(other.args) or any(map(differ, one.args, other.args))
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
        return sympy.E
    sign = -1 if index % 2 and index // 2 % 2 != len(name) % 2 else 1
    return sympy.Float(sign * random.Random(f"{name} {index}").uniform(0.2, 3.0), _DIGITS)


def is_affordable(expression: Any) -> bool:
    """Return whether evaluating an answer writes no number beyond use, from the inside out."""
    expression = sympy.sympify(expression)
    if _has_tower(expression, _MAX_TOWER):
        return False
    for node in sympy.postorder_traversal(expression):
        if isinstance(node, sympy.Product) and node.has(sympy.oo):
            return False
        if isinstance(node, sympy.Sum | sympy.Product) and not node.function.is_polynomial():
            lengths = [high - low for _, low, high in node.limits]
            if any(_MAX_TERMS < size < sympy.oo for size in lengths if size.is_number):
                return False
        if isinstance(node, sympy.Pow) and isinstance(node.base, sympy.Add) and node.free_symbols:
            parts, power = len(node.base.args), node.exp
            if power.is_Integer and comb(abs(power) + parts - 1, parts - 1) > _MAX_TERMS:
                return False
        if isinstance(node, sympy.Pow | sympy.factorial | sympy.binomial) and node.is_number:
            size = sympy.Abs(node.evalf(5))
            is_nonzero = size.is_Float and size
            if node.args[-1].is_infinite or (is_nonzero and not 1 / _MAX_SIZE <= size <= _MAX_SIZE):
                return False
    return True


def _has_tower(expression: Any, height: int) -> bool:
    """Whether more than ``height`` exponents with letters stand in one another."""
    powers = (power for power in expression.atoms(sympy.Pow, sympy.exp) if power.free_symbols)
    return any(not height or _has_tower(power.exp, height - 1) for power in powers)
