r"""Equations and inequalities: when one says the same as another, and when it says nothing.

math-verify compares the solutions that sympy finds, so that to it all equations without any are
the same, and all that hold everywhere. Here two relations are equal where

- they have the same left side, and right sides of equal value (``y=2x+1``);
- one is the other times a number, which for an inequality is positive;
- they are equations of the same letters, each of them has solutions, and those of each solve the
  other; with several letters these are the solutions for one of them.

A relation that holds nowhere or everywhere says nothing. Nowhere, it is equal to its multiples;
everywhere, to its own spelling alone, in any order of sides and terms.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import sympy
from sympy.core.function import AppliedUndef, Derivative
from sympy.core.relational import Relational
from sympy.functions.elementary.trigonometric import TrigonometricFunction
from sympy.logic.boolalg import BooleanAtom

from bapo_megatron.reward.math_values import (
    UnknownError,
    differ,
    is_real,
    letters_of,
    points,
    value_at,
)

SameValue = Callable[[Any, Any], bool]
"""Whether two expressions, sets or matrices have one value; the first is the response's."""

_TOLERANCE = 1e-40
_UNKNOWNS = ("x", "y")
_SWAPPED = {
    sympy.StrictLessThan: sympy.StrictGreaterThan,
    sympy.LessThan: sympy.GreaterThan,
}


def relations_of(expression: Any) -> tuple[Relational, ...] | None:
    """The relations of a chain such as ``1<x<2`` in their order, or a single one; else None."""
    if isinstance(expression, Relational):
        return (expression,)
    if isinstance(expression, sympy.And):
        parts = tuple(getattr(expression, "_unsorted_args", expression.args))
        return parts if all(isinstance(part, Relational) for part in parts) else None
    return None


def assigned(chain: Sequence[Relational]) -> Relational | None:
    """The equation ``x=5`` of a chain like ``x=2+3=5``, which begins with a name; else None."""
    is_chain = all(isinstance(part, sympy.Eq) for part in chain)
    if not is_chain or not _is_name(chain[0].lhs):
        return None
    return sympy.Eq(chain[0].lhs, chain[-1].rhs, evaluate=False)


def is_answer(chain: Sequence[Relational]) -> bool:
    """Return whether the last side of an equation may be what was asked for.

    It may be where the first side names a value (``f(2)=3``, ``2x+y=3``) or has the same one. It is
    not in ``5=5``, which says nothing, ``3=5``, which is false, ``0=x+1``, and ``2x=5``, which
    gives ``x`` another value.
    """
    first, last = chain[0].lhs, chain[-1].rhs
    if len(chain) == 1 and first == last:
        return False
    if not all(isinstance(side, sympy.Expr) for side in (first, last)):
        return True
    if first.is_number:
        return last.is_number and not differ(first, last)
    return _names_a_value(first, last) or not differ(first, last)


def _names_a_value(first: sympy.Expr, last: sympy.Expr) -> bool:
    """Whether a question may ask for the first side, rather than for its letter.

    It may if the side has several letters, or one in a form that is no common equation for it.
    """
    if first.is_Atom or len(first.free_symbols) != 1:
        return True
    if first.has(AppliedUndef, Derivative, sympy.pi):  # f(x), dy/dx, the area of a circle
        return True
    if first.has(TrigonometricFunction):
        is_bounded = isinstance(first, sympy.sin | sympy.cos) and last.is_real
        return not is_bounded or bool(abs(last) <= 1)
    [letter] = first.free_symbols
    if isinstance(first, sympy.Abs) and str(letter) not in _UNKNOWNS:
        return True  # |z|, but not |x|
    return not first.is_polynomial(letter) and first.count(letter) > 1  # x+1/x


def are_equal_chains(
    pred: Sequence[Relational], gold: Sequence[Relational], same_value: SameValue
) -> bool:
    """Return whether two chains say the same; a chain that assigns is its first and last side."""
    pred_one, gold_one = assigned(pred), assigned(gold)
    if pred_one is not None and gold_one is not None:
        letters = _letters_beside(pred)
        if len(gold) > 1 and not _letters_beside(gold) <= letters:
            return False  # x=y=5 is more than x=5
        if gold_one.lhs in letters:  # of y=x=5, x=5
            pred_one = sympy.Eq(gold_one.lhs, pred_one.rhs, evaluate=False)
        pred, gold = [pred_one], [gold_one]
    return len(pred) == len(gold) and are_matched(
        pred, gold, lambda one, other: are_equal(one, other, same_value)
    )


def _letters_beside(chain: Sequence[Relational]) -> frozenset[Any]:
    """The sides that are single letters."""
    return frozenset(side for part in chain for side in part.args if side.is_Symbol)


def are_matched(pred: Sequence[Any], gold: Sequence[Any], is_same: SameValue) -> bool:
    """Return whether each part is the same as one of the other parts, and each of those used."""
    left = list(pred)
    for part in gold:
        match = next((one for one in left if is_same(one, part)), None)
        if match is None:
            return False
        left.remove(match)
    return not left


def are_equal(pred: Relational, gold: Relational, same_value: SameValue) -> bool:
    """Return whether two relations say the same, and something; or are spelled alike."""
    pred, gold = _turned(pred), _turned(gold)
    if type(pred) is not type(gold):
        return False
    if _spelling(pred) == _spelling(gold):
        return True
    if any(part.lhs == part.rhs for part in (pred, gold)):
        return False
    if pred.lhs == gold.lhs and not pred.lhs.is_number:
        if same_value(pred.rhs, gold.rhs):
            return True
        if _is_solved(pred) and _is_solved(gold):
            return False
    sides = (side for part in (pred, gold) for side in part.args)
    return all(isinstance(side, sympy.Expr) for side in sides) and _say_the_same(
        type(pred), _difference(pred), _difference(gold), same_value
    )


def _say_the_same(kind: type, pred: Any, gold: Any, same_value: SameValue) -> bool:
    """Whether two expressions of the same letters have this relation to 0 at the same points."""
    letters = _letters(pred)
    if not letters or letters != _letters(gold):
        return False
    is_signed = kind not in (sympy.Eq, sympy.Ne)
    try:
        ratio = _ratio(pred, gold)
        if ratio is not None:
            return bool(ratio > 0) or not is_signed
        return kind is sympy.Eq and _solve_each_other(pred, gold, letters)
    except UnknownError:
        return same_value(pred, gold) or (not is_signed and same_value(-pred, gold))


def _turned(relation: Relational) -> Relational:
    turned = _SWAPPED.get(type(relation))
    return turned(relation.rhs, relation.lhs, evaluate=False) if turned else relation


def _spelling(relation: Relational) -> Any:
    sides = [_in_order(side) for side in relation.args]
    return frozenset(sides) if isinstance(relation, sympy.Eq | sympy.Ne) else tuple(sides)


def _in_order(node: Any) -> Any:
    """A tree that keeps its parts, those of sums and products in one order."""
    if not isinstance(node, sympy.Basic) or not node.args:
        return node
    parts = [_in_order(part) for part in node.args]
    if isinstance(node, sympy.Add | sympy.Mul):
        parts.sort(key=str)
    return (type(node).__name__, *parts)


def _is_name(expression: Any) -> bool:
    """Whether it names a value, being of letters alone: ``x``, ``f(2)``, ``|AB|``, ``(p,q)``."""
    if isinstance(expression, sympy.Symbol | AppliedUndef):
        return True
    if isinstance(expression, sympy.Pow):
        return expression.exp == -1 and _is_name(expression.base)
    parts = [part for part in expression.args if not isinstance(part, BooleanAtom)]
    return bool(parts) and all(map(_is_name, parts))


def _is_solved(relation: Relational) -> bool:
    """Whether it gives a letter, or ``f(x)``, by others alone."""
    name = relation.lhs
    return (name.is_Symbol or isinstance(name, AppliedUndef)) and not relation.rhs.has(name)


def _difference(relation: Relational) -> Any:
    """The left side minus the right one, with decimals as what they say."""
    difference = sympy.Add(relation.lhs, sympy.Mul(-1, relation.rhs, evaluate=False))
    exact = {number: sympy.Rational(str(number)) for number in difference.atoms(sympy.Float)}
    return difference.xreplace(exact) if exact else difference


def _letters(expression: Any) -> frozenset[Any]:
    """The letters that it depends on: none where a relation holds everywhere or nowhere."""
    try:
        letters = letters_of(expression)
        return frozenset(letter for letter in letters if _depends(expression, letter, letters))
    except UnknownError:
        constant = sympy.simplify(expression).is_number
        return frozenset() if constant else frozenset(expression.free_symbols)


def _depends(expression: Any, letter: Any, letters: frozenset[Any]) -> bool:
    for point in points(letters):
        one = value_at(expression, point)
        other = value_at(expression, point | {letter: point[letter] / 3})
        if None not in (one, other) and abs(one - other) > _TOLERANCE * max(abs(one), abs(other)):
            return True
    return False


def _ratio(one: Any, other: Any) -> Any:
    """What the first is times the second at every point, if that is one real number, not 0."""
    pairs = [
        (value_at(one, point), value_at(other, point)) for point in points(letters_of(one, other))
    ]
    ratios = [left / right if right else 0 for left, right in pairs if None not in (left, right)]
    if not ratios or not all(ratios):
        return None
    is_constant = all(abs(ratio - ratios[0]) <= _TOLERANCE * abs(ratio) for ratio in ratios)
    return ratios[0].real if is_constant and is_real(ratios[0]) else None


def _solve_each_other(one: Any, other: Any, letters: frozenset[Any]) -> bool:
    letter = min(sorted(letters, key=str), key=lambda letter: _degree(other, letter))
    rest = letters - {letter}
    gold = _solutions(other, letter)
    if not gold or not all(_is_solution(one, letter, value, rest) for value in gold):
        return False
    pred = _solutions(one, letter)
    return bool(pred) and all(_is_solution(other, letter, value, rest) for value in pred)


def _degree(expression: Any, letter: Any) -> float:
    polynomial = expression.as_poly(letter)
    return math.inf if polynomial is None else polynomial.degree()


@lru_cache(maxsize=256)
def _solutions(expression: Any, letter: Any) -> tuple[Any, ...]:
    """Where the expression is 0 at real letters; cached, since a group shares its reference.

    Of periodic functions sympy has some of the solutions only, which are then not counted.
    """
    periodic = expression.atoms(TrigonometricFunction)
    if any(letter in function.free_symbols for function in periodic):
        return ()
    try:
        solutions = sympy.solve(expression, letter)
    except NotImplementedError:
        return ()
    return tuple(solution for solution in solutions if _real_points(solution))


def _real_points(solution: Any, rest: frozenset[Any] = frozenset()) -> list[Any]:
    """The points of the other letters at which a solution is real, with its value there."""
    letters = {*rest, *letters_of(solution)}
    values = [(point, value_at(solution, point)) for point in points(letters)]
    return [(point, value) for point, value in values if value is not None and is_real(value)]


def _is_solution(expression: Any, letter: Any, solution: Any, rest: frozenset[Any]) -> bool:
    """Whether a solution of another equation solves this one, wherever it is real."""
    inserted = [
        value_at(expression, point | {letter: value})
        for point, value in _real_points(solution, rest)
    ]
    return all(value is not None and abs(value) < _TOLERANCE for value in inserted)
