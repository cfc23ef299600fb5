r"""References of every form that mathematical questions have, and answers to all questions.

``references`` writes each form with seeded numbers and letters, so that a pair of one form differs
in little: the ordinary wrong answer. ``UNIVERSAL`` are answers that say nothing, or the same of
every question; none of them is the value of any reference.
"""

import random
from collections.abc import Callable

Draw = Callable[[random.Random], str]


def references(per_form: int, seed: int = 0) -> dict[str, list[str]]:
    """``per_form`` different references of each form; fewer where the form has no more."""
    return {form: _distinct(draw, per_form, f"{seed} {form}") for form, draw in FORMS.items()}


def pairs(number: int, per_form: int = 40, seed: int = 0) -> list[tuple[str, str, str]]:
    """``number`` different pairs (form, pred, gold); nine in ten have one form."""
    generator = random.Random(seed)
    corpus = references(per_form, seed)
    everything = [text for texts in corpus.values() for text in texts]
    forms = [form for form, texts in corpus.items() if len(texts) > 1]
    forms_of: dict[tuple[str, str], str] = {}
    while len(forms_of) < number:
        form = generator.choice(forms) if generator.random() < 0.9 else "two forms"
        pred, gold = generator.sample(corpus.get(form, everything), 2)
        forms_of.setdefault((pred, gold), form)
    return [(form, pred, gold) for (pred, gold), form in forms_of.items()]


def _distinct(draw: Draw, number: int, seed: str) -> list[str]:
    generator = random.Random(seed)
    texts = dict.fromkeys(draw(generator) for _ in range(4 * number))
    return list(texts)[:number]


def _template(text: str) -> Draw:
    r"""Draw numbers and letters into a text.

    ``<A>``, ``<B>`` and ``<C>`` are integers from 2 to 9, ``<L>`` is one from 10 to 99; every
    ``<N>`` is another from -9 to 9 with its sign and without 0. ``<?>`` and ``<!>`` are letters.
    """

    def draw(generator: random.Random) -> str:
        letters = generator.sample("ntx", 2)
        filled = text.replace("<?>", letters[0]).replace("<!>", letters[1])
        filled = filled.replace("<L>", str(generator.randint(10, 99)))
        for mark in "ABC":
            filled = filled.replace(f"<{mark}>", str(generator.randint(2, 9)))
        while "<N>" in filled:
            number = generator.choice([-1, 1]) * generator.randint(1, 9)
            filled = filled.replace("<N>", f"{number:+d}", 1)
        return filled

    return draw


FORMS: dict[str, Draw] = {
    name: _template(text)
    for name, text in {
        "integer": r"<L><A>",
        "negative": r"-<L>",
        "thousands": r"<A>,<L><B>",
        "decimal": r"<A>.<L>",
        "fraction": r"\frac{<L>1}{<A>}",
        "slashed fraction": r"<A>/<L>",
        "mixed number": r"<L>\frac{1}{<A>}",
        "repeating decimal": r"0.<A>\overline{<B>}",
        "percentage": r"<L>\%",
        "money": r"\$<L>.<A>0",
        "length": r"<L>\text{ cm}",
        "area": r"<L>\text{ m}^2",
        "angle": r"<L>^\circ",
        "radians": r"\frac{<A>\pi}{<B>}",
        "base": r"<L>_{<A>}",
        "scientific": r"<A>.<B>\times 10^{<C>}",
        "tiny": r"<A>\cdot 10^{-<L>}",
        "power": r"<A>^{<L>}",
        "factorial": r"1<A>!",
        "binomial": r"\binom{<L>}{<A>}",
        "root": r"<A>\sqrt{<L>}",
        "sum with a root": r"<N>+<A>\sqrt{<B>3}",
        "fraction with a root": r"\frac{<A><N>\sqrt{<B>3}}{<C>}",
        "cube root": r"\sqrt[3]{<L>}",
        "nested root": r"\sqrt{<L>+<A>\sqrt{<B>}}",
        "logarithm": r"\log_{<A>} <L>1",
        "natural logarithm": r"<A>\ln <B>",
        "exponential": r"<A>e^{<B>}",
        "sine": r"\sin <L>^\circ",
        "inverse tangent": r"\arctan\frac{<A>}{<B>}",
        "multiple of pi": r"<A>\pi<N>",
        "complex": r"<A><N>i",
        "root of unity": r"e^{\frac{<A>\pi i}{<B>}}",
        "line": r"<A><?><N>",
        "quadratic": r"<A><?>^2<N><?><N>",
        "factored": r"(<?><N>)(<A><?><N>)",
        "cubic": r"<?>^3<N><?>^2<N>",
        "two letters": r"<A><?>^2<!><N><!>",
        "product of letters": r"<A><?><!>^{<B>}",
        "rational function": r"\frac{<?><N>}{<?>^2+<A>}",
        "partial fractions": r"\frac{<A>}{<?><N>}-\frac{<B>}{<?><N>}",
        "root of a letter": r"\sqrt{<?>^2+<A>}<N>",
        "power of a letter": r"<A>^{<?><N>}",
        "general term": r"\frac{<?>(<?><N>)}{<A>}",
        "alternating": r"(-1)^{<?>}\cdot <A>^{<?>}",
        "trigonometric": r"<A>\sin <?><N>\cos <B><?>",
        "squares of sines": r"<A>\sin^2 <?>-\cos^2 <?>",
        "logarithm of a letter": r"<A>\ln(<?><N>)",
        "exponential of a letter": r"<A>e^{-<B><?>}<N>",
        "absolute value": r"|<?><N>|<N>",
        "antiderivative": r"\frac{<?>^{<A>}}{<A>}<N><?>+C",
        "small Greek": r"<A>\theta<N>\alpha",
        "index": r"<A><?>_{1}<N><?>_{2}",
        "unevaluated integral": r"\int_0^{<A>} <?>^{<B>} d<?>",
        "unevaluated sum": r"\sum_{k=1}^{<L>} k^<A>",
        "assignment": r"<?>=<L>",
        "assigned fraction": r"<?>=\frac{<A>}{<L>}",
        "chain of values": r"<?>=<!>=<L>",
        "solved line": r"y=<A>x<N>",
        "implicit line": r"<A>x<N>y=<L>",
        "line equal to 0": r"<A>x<N>y<N>=0",
        "plane": r"<A>x<N>y<N>z<N>=0",
        "circle": r"(x<N>)^2+(y<N>)^2=<L>",
        "ellipse": r"\frac{x^2}{<L>}+\frac{y^2}{<A>}=1",
        "parabola": r"y=<A>(x<N>)^2<N>",
        "hyperbola": r"xy=<L>",
        "definition of a function": r"f(<?>)=<A><?>^2<N>",
        "equation with two solutions": r"<?>^2<N><?>-<L>=0",
        "equation without real solutions": r"<A><?>^2+<?>+<L>=0",
        "sum of squares": r"x^2+y^2=-<A>",
        "exponential equation": r"e^{<?>}=-<A>",
        "identity": r"<A>^{\log_{<A>} <L>}=<L>",
        "trigonometric identity": r"<A>\sin^2 <?>+<A>\cos^2 <?>=<A>",
        "expanded identity": r"(<?>+<A>)^2-<?>^2=2\cdot<A><?>+<A>^2",
        "closed equation": r"<A>+<L>=<L>+<A>",
        "contradiction": r"<?>=<?>+<A>",
        "differential equation": r"y'=<A>y<N>x",
        "recurrence": r"a_{n+1}=<A>a_n<N>",
        "inequality": r"<?> > <L>",
        "weak inequality": r"<A><?><N> \le <L>",
        "true inequality": r"<?>^2+<A>>0",
        "false inequality": r"<?>^2<-<A>",
        "chain of inequalities": r"-<A><<?>\le <B>",
        "unequal": r"<?>\ne <L>",
        "half line": r"(<N>,\infty)",
        "interval": r"[-<A>,<B>)",
        "union": r"(-\infty,-<A>)\cup(<B>,<L>]",
        "without a point": r"\mathbb{R}\setminus\{<L>\}",
        "membership": r"<?>\in[-<A>,<B>]",
        "set": r"\{<A>,<L>,<N>\}",
        "set of roots": r"\{<A>-\sqrt{<B>},<A>+\sqrt{<B>}\}",
        "set of sets": r"\{\{<A>\},\{<L>\}\}",
        "list": r"<A>,<L>",
        "symbolic list": r"<?><N>,<?>^2<N>",
        "plus or minus": r"<A>\pm\sqrt{<B>}",
        "point": r"(<N>,<A>)",
        "point in space": r"(<A>,<N>,\frac{<B>}{<C>})",
        "symbolic point": r"(<?><N>,<!>)",
        "list of points": r"(<A>,<N>),(<B>,<N>)",
        "system": r"x=<A>,y=<N>",
        "open system": r"<A>x+y=<L>, x<N>y=<B>",
        "system without solutions": r"x^2=-<A>, y=<L>",
        "vector": r"\begin{pmatrix}<A>\\<N>\end{pmatrix}",
        "matrix": r"\begin{pmatrix}<A>&<N>\\0&<L>\end{pmatrix}",
        "matrix equation": r"M=\begin{pmatrix}<A>&0\\0&<L>\end{pmatrix}",
        "ratio": r"<A>:<L>",
        "time": r"<A>:<L>\text{ PM}",
        "congruence": r"<?>\equiv <A>\pmod{<L>}",
        "undefined": r"\frac{<L>}{0}",
        "divergent": r"<A>\infty<N>",
    }.items()
}
FORMS |= {
    "word": lambda generator: generator.choice(
        ["even", "odd", "yes", "no", "Monday", "red", "Evelyn", "square", "north"]
    ),
    "phrase": lambda generator: generator.choice(
        ["no solution", r"\text{no real roots}", r"\text{not possible}", r"\text{all real numbers}"]
    ),
    "choice": lambda generator: generator.choice([rf"\text{{({letter})}}" for letter in "ABCDE"]),
    "constant": lambda generator: generator.choice(
        [r"\emptyset", r"\mathbb{R}", r"\infty", r"-\infty", r"\mathbb{Z}", r"\mathbb{N}", "i",
         "e", r"\pi", r"(-\infty,\infty)", r"\frac{0}{0}", "C"]
    ),
}  # fmt: skip

UNIVERSAL = [
    "", " ", r"\,", ".", "=", "?", r"\ldots", r"{}", r"()", r"\text{}", r"\text{ }",
    "0=0", "1=1", "x=x", "y=y", "a=a", "n=n", "0=1", "1=2", "x=x+1", "x-x=0", "0x=0",
    "i=2", "I=-e^{t}", "e^x=0", "x^2=-1", r"x^2+y^2=-1", r"\sin x=2", r"|x|=-1", r"\sqrt{x}=-1",
    "x=x, y=y", "0=0, 1=1", "x=x=x", "1=1=1",
    "0<1", "1>0", "x<x+1", "x>x", "x\\ge x", "x^2\\ge 0", "x^2<0", "0\\ne 1", r"x\ne x",
    r"x\in\mathbb{C}", r"x\in\emptyset", r"\{x\}", r"\{x\mid x=x\}", r"\{\{\}\}",
    r"(-\infty,-\infty)", r"[\infty,-\infty]", r"\{-\infty,\infty\}", r"\mathbb{C}", r"\mathbb{Q}",
    r"\mathbb{R}\setminus\mathbb{R}", r"\emptyset\cup\emptyset",
    r"\text{nan}", "nan", "NaN", "zoo", "None", "null", r"\frac{1}{0}", r"\frac{x}{0}", "0^{-1}",
    r"\log 0", r"\infty-\infty", r"0\cdot\infty", r"\frac{\infty}{\infty}", r"\tan 90^\circ",
    r"\text{true}", "True", "False", r"\{1\}\subset\{1,2\}", r"1\in\{1\}", r"\top", r"\bot",
    r"\text{the answer}", r"\text{answer}", "correct", "any", r"\text{any real number}",
    r"\pm", r"\infty\pm\infty", r"\boxed{}", r"\int", r"\int 0\,dx", r"\sum", r"\forall x",
    "*", "_", "%", r"\%", r"\$", r"^\circ", "[]", r"\begin{pmatrix}\end{pmatrix}", "f(x)=f(x)",
]  # fmt: skip
"""Answers to every question; each is a wrong answer to every reference of the corpus."""
