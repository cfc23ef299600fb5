"""Answers that nobody writes, through every built-in grader in its worker.

Strings are random bytes, decoded; expressions are deep or huge. Each is graded as the response and
as the reference; ``program``, which starts a sandbox for each, gets one in ``PROGRAM_EVERY``.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random

from bapo_megatron.config.reward import ProgramConfig
from bapo_megatron.reward.base import FunctionFailedError, Response
from bapo_megatron.reward.functions import BUILT_IN, PROGRAM
from bapo_megatron.reward.pool import RewardPool
from tests.reward.test_gym import COUNTDOWN, GRIDS, INTEGRAL, SUM

_CODECS = ("utf-8", "latin-1", "utf-16", "cp1251", "gb18030")
_PIECES = (
    *("\\frac", "\\sqrt", "\\begin{pmatrix}", "\\end{pmatrix}", "\\begin{cases}", "\\end{cases}"),
    *("{", "}", "(", ")", "[", "]", "\\{", "\\}", "\\left", "\\right", "\\\\", "&", ",", ";", "^"),
    *("_", "+", "-", "=", "<", "\\le", "\\pm", "\\cup", "\\in", "\\text{", "or", "and", "\\infty"),
    *("0", "1", "12", "3.5", "x", "y", "i", "\\pi", "!", "%", "\\cdot", "\\times", " ", "'", ":"),
    *("\\langle", "\\rangle", "\\hat{i}", "\\mathbf{j}", "\\int", "\\sum", "\\lim", "^T", "|", "π"),
)
_MATRIX = r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"
_EXPRESSIONS: tuple[Callable[[int], str], ...] = (
    lambda n: r"\frac{1}{1+" * n + "x" + "}" * n,
    lambda n: r"\frac" * n + "1" * n,
    lambda n: "{" * n + "1" + "}" * n,
    lambda n: "(" * n + "1" + ")" * n,
    lambda n: "\\left(" * n + "1" + "\\right)" * n,
    lambda n: r"\sqrt{2+" * n + "2" + "}" * n,
    lambda n: "2^{" * n + "2" + "}" * n,
    lambda n: "^".join("9" * n),
    lambda n: "10^{10^{" + str(n) + "}}",
    lambda n: f"(x+y+z)^{{{n}}}",
    lambda n: f"{n * 997}!",
    lambda n: "5" + "!" * n,
    lambda n: rf"\binom{{10^{n}}}{{10^{n // 2}}}",
    lambda n: "-" * n + "1",
    lambda n: "+-" * n + "x",
    lambda n: r"1\pm" * n + "1",
    lambda n: r"\pm" * n + "1",
    lambda n: ",".join([r"\pm1"] * n),
    lambda n: r"\cdot".join(["(x+1)"] * n),
    lambda n: "+".join(f"x^{{{power}}}" for power in range(n)),
    lambda n: "x" * n,
    lambda n: "9" * (10 * n),
    lambda n: "0." + "3" * n + r"\overline{" + "142857" * n + "}",
    lambda n: r"\begin{pmatrix}" * n + "1" + r"\end{pmatrix}" * n,
    lambda n: _MATRIX * n,
    lambda n: "+".join([_MATRIX] * n),
    lambda n: _MATRIX + "^{" + str(n * 997) + "}",
    lambda n: r"\begin{pmatrix}a&b\\c&x\end{pmatrix}" + f"^{{{n}}}",
    lambda n: r"\begin{pmatrix}" + r"\\".join(["&".join("x" * n)] * n) + r"\end{pmatrix}^{-1}",
    lambda n: r"\operatorname{rank}" * n + _MATRIX,
    lambda n: "(1,2)" + "+t(3,4)" * n,
    lambda n: "(" * n + "1,2" + ")^T" * n,
    lambda n: r"\begin{cases}" + r"\\".join(["x&x>0"] * n) + r"\end{cases}",
    lambda n: r"\text{ or }".join(f"x>{number}" for number in range(n)),
    lambda n: r"\cup".join(f"[{2 * k},{2 * k + 1}[" for k in range(n)),
    lambda n: "=".join(["1+1"] * n),
    lambda n: "<".join("x" * n),
    lambda n: r"\{" * n + "1,2" + r"\}" * n,
    lambda n: r"\int" * n + "x" + "dx" * n,
    lambda n: r"\sum_{k=1}^{" + "9" * n + r"}\frac{1}{k}",
    lambda n: f"{'7^' * 3}{n}" + r"\bmod{10}",
    lambda n: r"\sin " * n + "x",
    lambda n: "|" * n + "x" + "|" * n,
    lambda n: "f'" + "'" * n + "(x)",
    lambda n: "½" * n + "²" * n,
    lambda n: "\u0301" * n + "１" * n + "\u202e",
    lambda n: "[" * n + "]" * n,
    lambda n: "lambda: " * n + "1",
    lambda n: "{'a': " * n + "1" + "}" * n,
    lambda n: "x**" * n + "2",
)
_SIZES = (1, 2, 3, 5, 8, 20, 50, 120, 300, 2000, 50_000)
"""Of expressions; the large ones are rare, being ended by their length."""
_WEIGHTS = (4, 4, 4, 4, 4, 4, 4, 3, 2, 1, 1)
PROGRAM_EVERY = 30
_ROWS = (SUM, COUNTDOWN, INTEGRAL, GRIDS)


@dataclass
class Totals:
    """What the graders made of the texts."""

    reasons: Counter[str] = field(default_factory=Counter)
    """How often each grader gave a reason, ``math: different``."""
    faults: list[str] = field(default_factory=list)
    """Errors, crashes, and rewards that are no number from 0 to 1."""
    limits: list[str] = field(default_factory=list)
    """Texts that exceeded the limit of time or memory, which score 0."""


def strings(number: int, seed: int) -> list[str]:
    """Random bytes in some encoding, or pieces of LaTeX; half of them in a box."""
    rng, texts = Random(seed), []
    for _ in range(number):
        size = rng.choice((3, 10, 40, 200))
        if rng.random() < 0.5:
            text = rng.randbytes(size).decode(rng.choice(_CODECS), "replace")
        else:
            text = "".join(rng.choices(_PIECES, k=size // 2 + 1))
        texts.append(rf"\boxed{{{text}}}" if rng.random() < 0.5 else f"The answer is {text}")
    return texts


def expressions(number: int, seed: int) -> list[str]:
    """Deep or huge expressions in boxes."""
    rng, texts = Random(seed), []
    for _ in range(number):
        [size] = rng.choices(_SIZES, _WEIGHTS)
        text = rng.choice(_EXPRESSIONS)(max(1, size + rng.randrange(-2, 3)))[:200_000]
        texts.append(rf"\boxed{{{text}}}")
    return texts


async def grade(texts: Iterable[str]) -> Totals:
    """Grade every text as response and as reference by every built-in function."""
    totals = Totals()
    program = ProgramConfig.model_validate({"sandbox": {"timeout_s": 2}})
    async with (
        RewardPool(1, 5.0, (*BUILT_IN, "gym")) as pool,
        RewardPool(1, 60, (PROGRAM,), program=program) as programs,
    ):
        for number, text in enumerate(texts):
            inner = text.removeprefix(r"\boxed{").removesuffix("}")[:2000]
            row = _ROWS[number % len(_ROWS)]
            for function in BUILT_IN:
                await _grade(totals, pool, function, Response(text, "42"))
                await _grade(totals, pool, function, Response(r"\boxed{(1,2)}", inner))
            await _grade(totals, pool, "gym", Response(text, "42", row=row))
            if number % PROGRAM_EVERY == 0:
                fenced = f"```python\n{inner}\n```"
                await _grade(totals, programs, PROGRAM, Response(fenced, "42"))
    return totals


async def _grade(totals: Totals, pool: RewardPool, function: str, response: Response) -> None:
    label = f"{function}: {response.text[:120]!r} against {response.answer[:120]!r}"
    try:
        score = await pool.score(response, function=function)
    except FunctionFailedError as error:
        totals.faults.append(f"{label}: {error}")
        return
    totals.reasons[f"{function}: {score.reason}"] += 1
    if score.failed or not 0 <= score.reward <= 1:
        totals.faults.append(f"{label}: {score.reason} {score.reward}")
    elif score.timed_out:
        totals.limits.append(f"{label}: {score.reason}")
