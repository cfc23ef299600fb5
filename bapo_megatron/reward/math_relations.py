r"""Equations and inequalities: when one says the same as another, and when it says nothing.

math-verify compares the solutions that sympy finds, so that to it all equations without any are
the same, and all that hold everywhere. Here two relations are equal where

- they have the same left side, and right sides of equal value (``y=2x+1``);
- one is the other times a number, which for an inequality is positive;
- they are equations of the same letters, each of them has solutions, and those of each solve the
  other; with several letters these are the solutions for one of them.

A relation that holds nowhere or everywhere says nothing: it is equal to its own spelling alone, in
any order of sides and terms, and nowhere also to its multiples.
"""

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
    exact,
    is_real,
    letters_of,
    points,
    value_at,
)

SameValue = Callable[[Any, Any], bool]
"""Whether two expressions, sets or matrices have one value; the first is the response's."""

_TOLERANCE = 1e-40
_UNKNOWNS = ("x", "y")
_SWAPPED = {sympy.StrictLessThan: sympy.StrictGreaterThan, sympy.LessThan: sympy.GreaterThan}


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
        if len(gold) > 1 and not _letters_beside(gold) <= _letters_beside(pred):
            return False  # x=y=5 is more than x=5
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
    if pred.lhs == gold.lhs and not pred.lhs.is_number and same_value(pred.rhs, gold.rhs):
        return True
    sides = (side for part in (pred, gold) for side in part.args)
    return all(isinstance(side, sympy.Expr) for side in sides) and _say_the_same(
        type(pred), _difference(pred), _difference(gold)
    )


def _say_the_same(kind: type, pred: Any, gold: Any) -> bool:
    """Whether two expressions have this relation to 0 at the same points."""
    try:
        ratio = _ratio(pred, gold)
        if ratio is not None:
            return bool(ratio > 0 or kind in (sympy.Eq, sympy.Ne))
        return kind is sympy.Eq and _solve_each_other(pred, gold)
    except UnknownError:
        return False


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


def _difference(relation: Relational) -> Any:
    return exact(sympy.Add(relation.lhs, sympy.Mul(-1, relation.rhs, evaluate=False)))


def _ratio(one: Any, other: Any) -> Any:
    """What the first is times the second at every point, if that is one real number, not 0.

    None for constants: such relations hold nowhere or everywhere.
    """
    pairs = [
        (value_at(one, point), value_at(other, point)) for point in points(letters_of(one, other))
    ]
    pairs = [pair for pair in pairs if None not in pair and pair[1]]
    if not pairs or all(_are_close(left, pairs[0][0]) for left, _ in pairs):
        return None
    ratio = pairs[0][0] / pairs[0][1]
    is_ratio = (
        ratio and is_real(ratio) and all(_are_close(left / right, ratio) for left, right in pairs)
    )
    return ratio.real if is_ratio else None


def _are_close(one: Any, other: Any) -> bool:
    return bool(abs(one - other) <= _TOLERANCE * abs(other))


def _solve_each_other(one: Any, other: Any) -> bool:
    letters = letters_of(one)
    if not letters or letters != letters_of(other):
        return False
    letter = min(sorted(letters, key=str), key=lambda letter: other.as_poly(letter) is None)
    gold, pred = _solutions(other, letter), _solutions(one, letter)
    return (
        bool(gold and pred)
        and all(_vanishes(one, letter, solution) for solution in gold)
        and all(_vanishes(other, letter, solution) for solution in pred)
    )


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
    return tuple(solution for solution in solutions if _real_points(solution, frozenset()))


def _real_points(solution: Any, letters: frozenset[Any]) -> list[Any]:
    """The points at which a solution is real."""
    values = [(p, value_at(solution, p)) for p in points(letters | letters_of(solution))]
    return [point for point, value in values if value is not None and is_real(value)]


def _vanishes(expression: Any, letter: Any, solution: Any) -> bool:
    """Whether an expression is 0 with a solution of another one, wherever that is real."""
    values = [
        value_at(expression, point | {letter: solution.xreplace(point)})
        for point in _real_points(solution, letters_of(expression) - {letter})
    ]
    return all(value is not None and abs(value) < _TOLERANCE for value in values)
