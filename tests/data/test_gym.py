"""Problems that reasoning-gym generates: which they are, and what is refused."""

import subprocess
import sys
from typing import Any

import pytest
from pydantic import ValidationError

from bapo_megatron.config.data import DataConfig, DatasetConfig, TrainSetConfig
from bapo_megatron.data.chat import ChatRenderer
from bapo_megatron.data.overlap import find_overlaps
from bapo_megatron.data.prompts import load_set
from bapo_megatron.data.rows import DataError, Row, read_rows
from tests.data.prompt_sets import load_eval_set

pytestmark = pytest.mark.exhaustive

ONE_DIGIT = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
SUMS = {"name": "chain_sum", "options": ONE_DIGIT}


def rows(*tasks: dict[str, Any], train: bool = True, **fields: Any) -> list[Row]:
    kind = TrainSetConfig if train else DatasetConfig
    return list(read_rows(kind.model_validate({"gym": list(tasks), "size": 8, **fields})))


def asked(*tasks: dict[str, Any], **fields: Any) -> list[str]:
    return [row.fields["question"].rpartition("problem: ")[2] for row in rows(*tasks, **fields)]


def refusal(task: dict[str, Any], **fields: Any) -> str:
    with pytest.raises(DataError) as error:
        rows(task, **fields)
    return str(error.value)


def test_a_row_holds_what_the_task_s_scorer_needs() -> None:
    row = rows(SUMS)[0]
    assert (row.prompt_id, row.place) == ("gym:0", "gym: problem 0")
    assert row.fields["gym"].keys() == {"name", "options", "metadata"}
    assert (row.fields["gym"]["name"], row.fields["gym"]["options"]) == ("chain_sum", ONE_DIGIT)
    text = row.fields["question"].rpartition("problem: ")[2]
    assert str(eval(text.removesuffix(" ="))) == row.fields["answer"]


def test_a_problem_depends_on_its_number_and_the_seed() -> None:
    assert asked(SUMS) == [
        *("0 - 4 =", "4 - 1 =", "1 + 5 =", "5 - 9 ="),
        *("1 - 6 =", "8 - 0 =", "4 + 0 =", "6 + 0 ="),
    ]
    assert asked(SUMS, train=False, size=3) == ["8 + 5 =", "2 + 3 =", "7 - 4 ="]
    assert asked(SUMS, size=3) == asked(SUMS)[:3]
    assert asked(SUMS, seed=1) != asked(SUMS)


def test_tasks_take_turns_by_their_weights() -> None:
    turns = [row.fields["gym"]["name"] for row in rows(SUMS | {"weight": 3}, {"name": "gcd"})]
    assert turns == [*["chain_sum"] * 2, "gcd", *["chain_sum"] * 3, "gcd", "chain_sum"]


def test_training_and_evaluation_have_no_problem_in_common(tokenizer: Any) -> None:
    data = DataConfig(max_prompt_tokens=4096)
    renderer = ChatRenderer(tokenizer, data)
    fields = {"gym": [SUMS], "size": 200}
    train_set = load_set(TrainSetConfig.model_validate(fields), renderer, data)
    eval_set = load_eval_set(renderer, name="gym", **fields)
    assert find_overlaps([train_set], [("gym", eval_set.prompts)]) == []
    assert not {p.text for p in train_set.prompts} & {p.text for p in eval_set.prompts}

    assert train_set.report.num_duplicates == 81
    assert (len(eval_set.prompts), eval_set.report.num_duplicates) == (28, 172)


def test_wrong_tasks_and_options_are_refused_in_one_line() -> None:
    assert refusal({"name": "chain_sums"}) == (
        "gym: gym: 'chain_sums' is no task of reasoning-gym 0.1.25; did you mean 'chain_sum'?"
    )
    assert refusal({"name": "chain_sum", "options": {"max_term": 3}}, name="sums") == (
        "sums: gym: 'chain_sum' has no option 'max_term'; did you mean 'max_terms'?"
    )
    assert refusal({"name": "chain_sum", "options": {"min_terms": 9, "max_terms": 2}}) == (
        'gym: gym: \'chain_sum\' refuses its options {"min_terms": 9, "max_terms": 2}: '
        "AssertionError: max_terms must be >= min_terms"
    )


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"gym": [{"name": "boxnet"}], "size": 1}, "got 'boxnet', which scores its own answer 0"),
        ({"gym": [{"name": "composite"}], "size": 1}, "got 'composite'; list its parts"),
        ({"gym": [SUMS]}, "needs size with gym"),
        ({"path": "a.jsonl", "seed": 1}, "takes size and seed only with gym"),
        ({"path": "a.jsonl", "gym": [SUMS], "size": 1}, "got path and gym; set one"),
        ({"gym": [SUMS], "size": 1, "row_columns": []}, "got one of them with gym; leave it out"),
        ({"gym": [{"name": "gcd", "options": {"size": 3}}], "size": 1}, "set size beside gym"),
    ],
)
def test_settings_that_make_no_set_are_refused(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        TrainSetConfig.model_validate(fields)


def test_a_set_is_generated_in_a_process_of_its_own() -> None:
    code = (
        "import sys\nfrom tests.data.test_gym import SUMS, rows\n"
        "assert len(rows(SUMS)) == 8\nprint('reasoning_gym' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"
