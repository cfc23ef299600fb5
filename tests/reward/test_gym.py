"""Scorers of reasoning-gym: right answers, wrong ones, and answers that are programs."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.reward.base import RowError, Score

SUM = {"gym": {"name": "chain_sum", "options": {}, "metadata": {}}}
COUNTDOWN = {
    "gym": {
        "name": "countdown",
        "options": {},
        "metadata": {"numbers": [6, 7, 2], "target": 84},
    }
}
INTEGRAL = {
    "gym": {
        "name": "simple_integration",
        "options": {},
        "metadata": {"variable": "x", "integrand": "exp(2*x) + 3*x**2/2"},
    }
}
GRIDS = {"gym": {"name": "arc_agi", "options": {}, "metadata": {"output": [[1, 2], [3, 4]]}}}
OPEN = r"""
import json, sys
from bapo_megatron.config.data import UNSCORED_TASKS
from bapo_megatron.data.gym import rows
from bapo_megatron.reward.gym import grade
from reasoning_gym.factory import DATASETS

slow = {"knight_swap", "sokoban", "futoshiki"}
names = sorted(DATASETS.keys() - {"composite", *UNSCORED_TASKS, *slow})
wrong = []
for name in names:
    tasks = [{"name": name, "options": {}, "weight": 1}]
    [row] = json.loads(json.dumps(list(rows(tasks, 1, 0, is_held_out=False)), default=str))
    score = grade(f"<answer>{row['answer']}</answer>", row["answer"], {"gym": row["gym"]})
    wrong += [] if score.reward == 1 else [(name, row["answer"], score.reward)]
    for program in sys.argv[1:]:
        grade(f"<answer>{program}</answer>", row["answer"], {"gym": row["gym"]})
sys.stdout.write("\n" + json.dumps([len(names), wrong]))
"""


def score(response: str, answer: str, row: dict[str, Any]) -> Score:
    from bapo_megatron.reward.gym import grade  # it imports reasoning-gym, which takes seconds

    return grade(response, answer, row)


@pytest.mark.parametrize(
    ("response", "answer", "row", "reward", "reason"),
    [
        (r"It is \boxed{12}.", "12", SUM, 1.0, ""),
        ("<answer>12</answer>", "12", SUM, 1.0, ""),
        (r"\boxed{13}", "12", SUM, 0.0, ""),
        ("12", "12", SUM, 0.0, "no_answer"),
        (r"\boxed{2*(6*7)}", "6*7*2", COUNTDOWN, 1.0, ""),
        (r"\boxed{6*7*2+0}", "6*7*2", COUNTDOWN, 0.05, ""),
        (r"\boxed{int('84')}", "6*7*2", COUNTDOWN, 0.0, "not_evaluated"),
        (r"\boxed{9^{9^{9}}}", "6*7*2", COUNTDOWN, 0.0, "too_large"),
        (r"\boxed{(x+1)^{99999}}", "", INTEGRAL, 0.0, "too_large"),
        (r"\boxed{exit()}", "6*7*2", COUNTDOWN, 0.0, "not_evaluated"),
        ("<answer>1 2\n3 4</answer>", "1 2\n3 4", GRIDS, 1.0, ""),
        ("<answer>1 2\n3 5</answer>", "1 2\n3 4", GRIDS, 0.05, ""),
        # LaTeX is what the task's scorer makes of its plain text, or of itself.
        (r"\boxed{\text{Yes}}", "Yes", SUM, 1.0, ""),
        (r"\boxed{\mathbf{62}}", "62", SUM, 1.0, ""),
        (r"\boxed{\textbf{\text{Yes}}}", "Yes", SUM, 1.0, ""),
        (r"\boxed{8{,}717{,}446}", "8717446", SUM, 1.0, ""),
        (r"\boxed{8\,717\,446}", "8717446", SUM, 1.0, ""),
        (r"The answer is $62$.", "62", SUM, 1.0, ""),
        (r"\boxed{x = 62}", "62", SUM, 1.0, ""),
        (r"\boxed{\(x = -62^\circ\)}", "-62", SUM, 1.0, ""),
        (r"\boxed{\frac{1}{2}}", "1/2", SUM, 1.0, ""),
        (r"\boxed{-\dfrac12}", "-1/2", SUM, 1.0, ""),
        (r"\boxed{x_{1} = \nicefrac{1}{12}}", "1/12", SUM, 1.0, ""),
        (r"\boxed{3\frac{1}{2}}", "31/2", SUM, 0.0, ""),
        (r"\boxed{62 = 63}", "63", SUM, 2 / 7, ""),
        (r"\boxed{5\times 7\cdot 7}", "5 × 7 × 7", SUM, 1.0, ""),
        (r"\boxed{A \to B}", "A → B", SUM, 1.0, ""),
        (r"\boxed{\text{No}}", "Yes", SUM, 0.0, ""),
        (r"\boxed{x^{2}}", r"x^{2}", SUM, 1.0, ""),
        (r"\boxed{6\times 7\cdot\left(2\right)}", "6*7*2", COUNTDOWN, 1.0, ""),
        (r"\boxed{6(7)(2) = 84}", "6*7*2", COUNTDOWN, 1.0, ""),
        (r"\boxed{\frac{6}{2}\times 7}", "6*7*2", COUNTDOWN, 0.05, ""),
        (r"\boxed{\text{exit}()}", "6*7*2", COUNTDOWN, 0.0, "not_evaluated"),
        (r"\boxed{\frac{e^{2x} + x^{3}}{2} + C}", "", INTEGRAL, 1.0, ""),
        (r"\boxed{\begin{pmatrix}1 & 2\\ 3 & 4\end{pmatrix}}", "1 2\n3 4", GRIDS, 1.0, ""),
    ],
)
@pytest.mark.exhaustive
def test_a_task_scores_the_marked_answer(
    response: str, answer: str, row: dict[str, Any], reward: float, reason: str
) -> None:
    scored = score(response, answer, row)
    assert (scored.reward, scored.reason) == (reward, reason)


def test_the_score_is_a_metric_of_its_task() -> None:
    assert score(r"\boxed{12}", "12", SUM).metrics == {"chain_sum": 1.0, "scorer_errors": 0.0}


def test_rows_of_other_sets_are_an_error() -> None:
    with pytest.raises(RowError, match="it scores rows of sets with gym only"):
        score(r"\boxed{1}", "1", {"level": 3})


@pytest.mark.slow
def test_every_task_scores_its_own_answer_1_and_runs_no_program(tmp_path: Path) -> None:
    call = f"open('{tmp_path}/seen','w')"
    path = "+".join(f"chr({ord(c)})" for c in f"{tmp_path}/seen")
    programs = (
        *(
            call,
            f"[{call}]",
            f"[{call} for x in [1]]",
            f"__import__('os').mkdir('{tmp_path}/seen')",
        ),
        *(f"open({path},chr(119))", f"eval({path})", f"(1).__class__({call})"),
        *(f"sin.__class__({call})", f"f'{{{call}}}'", f"lambda: {call}", "exit()", "quit()"),
    )
    run = subprocess.run(
        [sys.executable, "-c", OPEN, *programs],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONHASHSEED": "0"},
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout.splitlines()[-1]) == [97, []]
    assert list(tmp_path.iterdir()) == []
