import pytest
import sympy

from bapo_megatron.reward.math_values import (
    UnknownError,
    differ,
    is_undefined,
    letters_of,
    points,
    value_at,
)

x, y = sympy.symbols("x y", real=True)
f = sympy.Function("f")
half = sympy.Rational(1, 2)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        (sympy.Add(x, y, 1), 6),
        (sympy.Pow(x, 10), 1024),
        (sympy.Abs(-x), 2),
        (sympy.log(8, x, evaluate=False), 3),
        (sympy.factorial(y), 6),
        (sympy.sin(sympy.pi, evaluate=False), 0),
        (sympy.cosh(x - 2), 1),
        (sympy.exp(sympy.log(y, evaluate=False), evaluate=False), 3),
        (sympy.Float("0.1") * y, sympy.Rational(3, 10)),
        (sympy.Pow(-4, half, evaluate=False) ** 2, -4),
    ],
)
def test_an_expression_has_its_value(expression, value):
    evaluated = value_at(expression, {x: 2, y: 3})

    assert abs(evaluated - value) < 1e-60


@pytest.mark.parametrize(
    "expression",
    [
        1 / (x - 2),
        sympy.log(x - 2),
        sympy.log(3, x / 2),
        sympy.zoo,
        sympy.cot(x - 2),
    ],
)
def test_an_expression_without_a_value_has_none(expression):
    assert value_at(expression, {x: 2}) is None


@pytest.mark.parametrize(
    "expression",
    [
        sympy.oo,
        sympy.Integral(x**2, (x, 0, 1)),
    ],
)
def test_what_is_not_evaluated_is_unknown_and_refutes_nothing(expression):
    with pytest.raises(UnknownError):
        value_at(expression, {x: 2})
    assert not differ(expression, x + 5)
    assert not is_undefined(expression)


@pytest.mark.parametrize(
    ("one", "other", "is_different"),
    [
        (x, x + 1, True),
        (x, sympy.Abs(x), True),
        (sympy.sqrt(x) * sympy.sqrt(x), x, False),
        (sympy.log(x**2), 2 * sympy.log(x), False),
        (sympy.sqrt(3 + 2 * sympy.sqrt(2)), 1 + sympy.sqrt(2), False),
        (sympy.Rational(1, 10**20), sympy.Rational(2, 10**20), True),
        (sympy.Float("0.3333333"), sympy.Rational(1, 3), False),
        (sympy.Float("0.33333"), sympy.Rational(1, 3), True),
        (sympy.Integer(3) ** 2023, sympy.Integer(3) ** 2024, True),
        (f(x), f(x) + 1, True),
        (f(x), f(y), True),
        (f(x + 1), f(1 + x), False),
        (sympy.Tuple(1, x), sympy.Tuple(1, y), True),
        (sympy.Tuple(1, x), sympy.Tuple(1, x, 2), True),
        (sympy.FiniteSet(x, 1), sympy.FiniteSet(1, x), False),
        (sympy.FiniteSet(x), x, False),
        (sympy.Interval(0, 1), sympy.Interval(0, 2), True),
        (sympy.Interval(0, sympy.oo), sympy.Interval(0, sympy.oo), False),
        (sympy.Matrix([1, x]), sympy.Matrix([1, y]), True),
        (sympy.Matrix([1, x]), sympy.Matrix([[1, x]]), True),
        (sympy.Matrix([1, x]), sympy.Matrix([1, x]), False),
        (sympy.Eq(x, 1), sympy.Eq(x, 2), False),
    ],
)
def test_only_what_certainly_differs_is_said_to(one, other, is_different):
    assert differ(one, other) is is_different
    assert differ(other, one) is is_different


def test_points_depend_on_the_names_of_letters_alone_and_have_either_sign():
    both, alone = points([y, x]), points([sympy.Symbol("x")])

    assert [point[x] for point in both] == [next(iter(point.values())) for point in alone]
    assert {point[x] > 0 for point in both} == {point[y] > 0 for point in both} == {True, False}
    assert min(both[0].values()) > 0
    assert points([]) == [{}]


def test_unknown_functions_and_derivatives_are_letters():
    derivative = sympy.Derivative(f(x), x)

    assert letters_of(derivative + y) == {derivative, f(x), x, y}
    with pytest.raises(UnknownError):
        letters_of(sympy.Derivative(x**2, x))


def test_undefined_parts_make_a_whole_undefined():
    assert is_undefined(sympy.Tuple(0, sympy.zoo))
    assert is_undefined(sympy.Matrix([sympy.nan]))
    assert not is_undefined(sympy.FiniteSet(x, 1 / x))
    assert not is_undefined(sympy.Interval(0, 1))
