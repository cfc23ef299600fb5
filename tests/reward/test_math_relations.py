"""Equations and inequalities that say the same, and those that say nothing."""

from __future__ import annotations

import pytest

from bapo_megatron.reward.math_answer import grade_math_answer


def reward(pred, reference):
    return grade_math_answer(rf"\boxed{{{pred}}}", reference).reward


@pytest.mark.parametrize(
    "reference",
    [
        r"4 x^{2}+8 x+19=0",
        "x^2+1=0",
        "e^{x}=-6",
        "x^2+y^2=-1",
        r"7^{\log_7 3}=3",
        r"\sin^2 x+\cos^2 x=1",
        "(x+4)^2-x^2=8x+16",
        r"\int x\,dx=\int x\,dx",
        "x^2+4>0",
        "x^2<-4",
        "x^2=-4, y=15",
        "x=x+1",
        r"x\ge x",
    ],
)
@pytest.mark.parametrize(
    "pred",
    [r"\varnothing", r"\mathbb{R}", r"(-\infty,\infty)", "0=0", "x=x", "y=y", "i=2", "I=-e^{t}",
     "0=1", "x=x+2", r"\sin x=2", "y^2+3=0", "x<x+1", r"y\ge y", "x^2=-9, y=15", "t^2+9>0"],
)  # fmt: skip
def test_a_relation_that_says_nothing_is_not_another_one(pred, reference):
    assert reward(pred, reference) == 0.0


@pytest.mark.parametrize(
    ("pred", "reference"),
    [
        ("8x^2+16x+38=0", "4x^2+8x+19=0"),
        ("x^2=-1", "x^2+1=0"),
        (r"3=7^{\log_7 3}", r"7^{\log_7 3}=3"),
        (r"\cos^2 x+\sin^2 x=1", r"\sin^2 x+\cos^2 x=1"),
        ("0.5x+y=1", "x+2y=2"),
        ("y=2x+1", "4x=2y-2"),
        ("xy=1", r"y=\frac{1}{x}"),
        (r"\ln y=x", "y=e^x"),
        (r"\log_2 x=3", "x=8"),
        ("|x|=2", "x^2=4"),
        ("x=2", "x=4-x"),
        ("-2,2", "x^2=4"),
        (r"\frac{x-1}{2}=\frac{y-2}{3}", "3x-2y+1=0"),
        ("x^2+y^2-2x=0", "(x-1)^2+y^2=1"),
        (r"f(2)=\frac{6}{2}", "f(2)=3"),
        ("3", "f(2)=3"),
        (r"S=\frac{n^2+n}{2}", r"S=\frac{n(n+1)}{2}"),
        ("x-3y=2, 2x+y=7", "2x+y=7, x-3y=2"),
        ("y'-y=0", "y'=y"),
        (r"y^{\prime}=2y", "y'=2y"),
        (r"\frac{dy}{dx}=5\cdot x", r"\frac{dy}{dx}=5x"),
        ("2x>2", "x>1"),
        ("2>x>1", "1<x<2"),
        (r"-x+2\ge 0", r"x\le 2"),
        (r"2x\ne 6", r"x\ne 3"),
        (r"x\in[0,\frac42]", r"x\in[0,2]"),
        (r"x\in[-2,7]", r"-2\le x\le 7"),
        ("(3,2)", "(p,q)=(3,2)"),
        ("(0,1)", "0<f(x)<1"),
        ("1", "|AB|=1"),
        ("33", "m+n=33"),
        ("e", r"\text{e}"),
        ("5", "x=y=5"),
        ("1,2", "x=1,y=2"),
        ("2x+1=y+3=5", "1+2x=3+y=5"),
    ],
)
def test_relations_that_say_the_same_score_one(pred, reference):
    assert reward(pred, reference) == 1.0


@pytest.mark.parametrize(
    ("pred", "reference"),
    [
        ("y=x", "y^2=x^2"),
        ("x=2", "x^2=4"),
        ("x^5-x-1=0", "x^5-x-2=0"),
        (r"\cos x=x", r"\sin x=x+1"),
        (r"x(x-\pi)=0", r"\sin x=0"),
        ("x=8", "y=8"),
        ("-2x>-2", "x>1"),
        (r"x\ge 1", "x>1"),
        ("x>1", "x=1"),
        ("1<x<2<y", "1<x<2"),
        ("x=5", "x=y=5"),
        ("2,1", "x=1,y=2"),
        ("x^2+1=0, y=2", "i=2, y=2"),
        ("f(x)=x+1", "g(x)=x+1"),
        ("f'(x)=2x", "f(x)=2x"),
        (r"f''(2)=5", "f'(2)=5"),
        ("y'=2y", "y=2y"),
        ("y''+y=0", "y'+y=0"),
        ("y'", "y"),
        (r"\alpha'", r"\alpha"),
        (r"\frac{dy}{dx}=5x", r"\frac{dy}{dt}=5x"),
        (r"\frac{dy}{dx}", "0"),
        ("0=0", "0"),
        ("x=x", "x"),
        ("0=x+1", "x+1"),
        (r"x\in[2,3]", r"x\in[0,1]"),
        (r"y\in[-2,7]", r"-2\le x\le 7"),
        (r"x\in\mathbb{R}", r"x^2\ge 0"),
        (r"M=\begin{pmatrix}1&2\end{pmatrix}", r"M=\begin{pmatrix}1&3\end{pmatrix}"),
    ],
)
def test_relations_that_say_something_else_score_zero(pred, reference):
    assert reward(pred, reference) == 0.0
