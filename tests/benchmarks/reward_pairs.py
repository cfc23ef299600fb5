r"""Answers that should earn nothing, in numbers: universal answers, pairs of different references.

Universal answers are graded against references of every form, half of them against each. Pairs of
different references, generated ones and those of data sets, are graded against each other; those
that are accepted are listed to be read. References are rewritten by sympy (expanded, factored, …),
and none of them may be refuted by values where math-verify alone accepts it.

    python -m tests.benchmarks.reward_pairs --universal \
        --out docs/benchmarks/reward_universal_202611
    python -m tests.benchmarks.reward_pairs --data ../shared/data \
        --out docs/benchmarks/reward_pairs_202611
"""

import json
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet
import sympy
from math_verify import verify

from bapo_megatron.data.rows import parse_answer
from bapo_megatron.reward.math_answer import grade_math_answer
from bapo_megatron.reward.math_symbolic import _parse
from bapo_megatron.reward.math_values import differ
from tests.benchmarks.harness import finish, machine, page, report_arguments, table
from tests.reward.answer_corpus import UNIVERSAL, pairs, references

_REWRITES: tuple[Callable[[Any], Any], ...] = (
    sympy.expand,
    sympy.factor,
    sympy.together,
    sympy.expand_trig,
    sympy.radsimp,
    sympy.powsimp,
    lambda value: value.evalf(12),
    lambda value: value.rewrite(sympy.exp),
    lambda value: value.rewrite(sympy.cos),
)
_NO_FORMULAS = (
    *("word", "phrase", "choice", "constant", "area", "length", "unevaluated", "undefined"),
)


@dataclass(frozen=True, slots=True)
class Graded:
    form: str
    answer: str
    reference: str
    reward: float
    reason: str


class Rewritten(NamedTuple):
    """What became of references in other spellings."""

    spellings: int
    accepted: int
    refuted: tuple[tuple[str, str], ...]
    """Refuted by values, though equal to math-verify alone."""


def grade(asked: list[tuple[str, str, str]]) -> list[Graded]:
    """Grade (form, answer, reference); no answer here needs the limits of a worker."""
    scores = [
        grade_math_answer(rf"\boxed{{{answer}}}", reference) for _, answer, reference in asked
    ]
    return [
        Graded(*one, score.reward, score.reason) for one, score in zip(asked, scores, strict=True)
    ]


def data_pairs(folder: Path, number: int) -> list[tuple[str, str, str]]:
    """Pairs of different answers of GSM8K and AIME, seeded; none without a folder."""
    generator = random.Random(0)
    drawn = []
    for name in ("gsm8k_test.jsonl", "aime24.parquet", "aime25.parquet"):
        path = folder / name
        if path.suffix == ".parquet":
            rows = pyarrow.parquet.read_table(path).to_pylist()
            texts = [row["reward_model"]["ground_truth"] for row in rows]
        else:
            lines = path.read_text().splitlines()
            texts = [parse_answer(json.loads(line)["answer"]) for line in lines]
        answers = sorted(set(texts))
        drawn += [(path.stem, *generator.sample(answers, 2)) for _ in range(number)]
    return list(dict.fromkeys(drawn))


def rewrite(per_form: int) -> Rewritten:
    """Grade rewritten references, and compare what values refute with math-verify alone."""
    asked = [
        (form, spelling, text)
        for form, texts in references(per_form).items()
        if not form.startswith(_NO_FORMULAS)
        for text in texts
        for spelling in _spellings(text)
    ]
    graded = grade(asked)
    refuted = [
        (one.answer, one.reference) for one in graded if not one.reward and _is_refuted_wrongly(one)
    ]
    return Rewritten(len(graded), sum(bool(one.reward) for one in graded), tuple(refuted))


def _spellings(text: str) -> list[str]:
    expression = _parse(text)
    if not isinstance(expression, sympy.Expr):
        return []
    spellings = [sympy.latex(rewriting(expression.doit())) for rewriting in _REWRITES]
    return list(dict.fromkeys(spellings))


def _is_refuted_wrongly(one: Graded) -> bool:
    answer, reference = _parse(one.answer), _parse(one.reference)
    return (
        answer is not None
        and differ(answer, reference)
        and bool(verify([reference], [answer], timeout_seconds=None))
    )


def _report_universal(graded: list[Graded], where: dict[str, Any]) -> str:
    accepted = [one for one in graded if one.reward]
    num_references, num_forms = len({g.reference for g in graded}), len({g.form for g in graded})
    return page(
        "Universal answers",
        where,
        f"{len(UNIVERSAL)} answers that say nothing (`0=0`, `x=x`, `i=2`, `\\{{\\{{\\}}\\}}`, "
        "`\\frac10`, empty boxes, …), half of them against each of "
        f"{num_references} references of {num_forms} forms, {len(graded):,} gradings: "
        f"{len(accepted)} were taken.",
        [f"- `{one.answer}` for `{one.reference}`" for one in accepted],
    )


def _report_pairs(graded: list[Graded], rewritten: Rewritten, where: dict[str, Any]) -> str:
    rows = [
        (one.form, f"`{_cell(one.answer)}`", f"`{_cell(one.reference)}`", f"`{one.reason}`")
        for one in graded
        if one.reward
    ]
    return page(
        "Pairs of different references",
        where,
        f"**Different references.** {len(graded):,} pairs, nine in ten of the generated ones of "
        f"one form: {len(rows)} were accepted, which stand below.",
        f"**Other spellings.** {rewritten.spellings:,} spellings of references by sympy "
        f"(expanded, factored, rewritten, as decimals): {rewritten.accepted:,} were accepted. "
        f"Values refuted {len(rewritten.refuted)} that math-verify alone accepts.",
        [f"- `{answer}` for `{reference}`" for answer, reference in rewritten.refuted],
        table(("form", "answer", "reference", "reason"), rows),
    )


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


def main() -> None:
    parser = report_arguments(__doc__ or "")
    parser.add_argument("--universal", action="store_true", help="grade universal answers")
    parser.add_argument("--data", type=Path, help="folder with AIME and GSM8K, for pairs")
    parser.add_argument("--pairs", type=int, default=10_000)
    parser.add_argument("--per-form", type=int, default=5, help="references of each form")
    options = parser.parse_args()
    where, rewritten = machine(), None
    if options.universal:
        graded = grade(
            [
                (form, answer, reference)
                for form, texts in references(options.per_form).items()
                for number, reference in enumerate(texts)
                for answer in UNIVERSAL[number % 2 :: 2]
            ]
        )
        report = _report_universal(graded, where)
    else:
        asked = sorted(pairs(options.pairs))  # each reference is parsed about once
        asked += data_pairs(options.data, 500) if options.data is not None else []
        graded = grade(asked)
        rewritten = rewrite(options.per_form)
        report = _report_pairs(graded, rewritten, where)
    values = {
        "machine": where,
        "graded": len(graded),
        "accepted": [asdict(answer) for answer in graded if answer.reward],
        "rewritten": rewritten and rewritten._asdict(),
    }
    finish(options.out, report, values)


if __name__ == "__main__":
    main()
