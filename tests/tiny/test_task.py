import random
import re

import pytest

from examples.tiny.model import build_tokenizer
from examples.tiny.task import Problem, SolutionMixture, split_problems, write_solution


@pytest.mark.parametrize(
    ("mixture", "expected"),
    [
        ({"sloppy_step_share": 0}, "3+5=8\n+2=10\n\\boxed{10}"),
        (
            {"sloppy_step_share": 1, "right_guess_share": 1, "min_guesses": 2, "max_guesses": 2},
            "3+5 maybe 8, no 8\n+2 maybe 10, no 10\n\\boxed{10}",
        ),
    ],
)
def test_a_solution_writes_every_partial_sum_or_its_guesses_and_a_boxed_answer(mixture, expected):
    mixture = SolutionMixture(**mixture)
    assert write_solution(Problem((3, 5, 2)), mixture, random.Random(0)) == expected


def test_wrong_guesses_miss_the_sum_by_one_to_three_and_are_never_negative():
    mixture = SolutionMixture(sloppy_step_share=1, right_guess_share=0)
    for seed in range(300):
        solution = write_solution(Problem((0, 2)), mixture, random.Random(seed))
        guesses = [int(guess) for guess in re.findall(r"(?:maybe|no) (\d+)", solution)]
        assert 5 <= len(guesses) <= 7
        assert set(guesses) <= {0, 1, 3, 4, 5}
        assert solution.endswith(f"{guesses[-1]}\n\\boxed{{{guesses[-1]}}}")


def test_about_a_third_of_the_mixture_is_right_and_the_wrong_solutions_are_longer():
    tokenizer = build_tokenizer()
    rng = random.Random(0)
    lengths: dict[bool, list[int]] = {True: [], False: []}
    for problem in split_problems(seed=0).heldout:
        for _ in range(4):
            solution = write_solution(problem, SolutionMixture(), rng)
            right = solution.endswith(f"\\boxed{{{problem.answer}}}")
            lengths[right].append(len(tokenizer.encode(solution)) + 1)
    right_tokens, wrong_tokens = sum(lengths[True]), sum(lengths[False])
    assert 0.27 < len(lengths[True]) / 2048 < 0.40
    assert wrong_tokens / len(lengths[False]) > 1.5 * right_tokens / len(lengths[True])
    assert max(max(lengths[True]), max(lengths[False])) <= 80


def test_splits_are_disjoint_hold_every_sum_once_and_depend_on_the_seed_alone():
    splits = split_problems(seed=3)
    prompts = [problem.prompt for part in splits for problem in part]
    assert (len(splits.train), len(splits.heldout)) == (2048, 512)
    assert len(prompts) == len(set(prompts)) == 100 + 1000 + 10000
    assert split_problems(seed=3) == splits
    assert split_problems(seed=2).heldout != splits.heldout
