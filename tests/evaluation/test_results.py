"""Scores of a set, their files and tables, and the comparison of two."""

from __future__ import annotations

import io
import json
import re
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from bapo_megatron.config.evaluation import EvalConfig, eval_reward
from bapo_megatron.config.reward import RewardConfig
from bapo_megatron.evaluation import summary
from bapo_megatron.evaluation.report import (
    markdown_table,
    read_results,
    rich_table,
    scoring_lines,
    write_results,
)
from bapo_megatron.evaluation.settings import ResultsError, fingerprint, prompts_digest
from bapo_megatron.telemetry.metrics import eval_metrics
from bapo_megatron.tools.compare import compare_results
from bapo_megatron.types import EvalResult, FinishReason, Prompt
from tests.evaluation.results import result

FIRST = {"a:0": ["2", "2", "3", ""], "a:1": ["5", "5", "2", "4"], "a:2": ["", "", "", ""]}
SECOND = {"a:0": ["2", "2", "2", "2"], "a:1": ["2", "5", "2", "2"], "a:2": ["", "2", "", ""]}


def compare(first: EvalResult, second: EvalResult, *, common: bool = False):
    return compare_results(
        [first], [second], k_values=(1, 2), num_resamples=999, seed=0, common_only=common
    )


def test_the_scores_of_a_set_by_hand():
    scored = result(FIRST, num_tokens=30)
    values = {score.name: score.value for score in scored.scores}
    # Right samples: 2, 1, 0 of 4.
    assert values["avg@4"] == values["pass@1"] == pytest.approx(3 / 12)
    assert values["pass@2"] == pytest.approx((5 / 6 + 1 / 2 + 0) / 3)
    assert values["pass@4"] == pytest.approx(2 / 3)
    # Votes of all four: "2" wins the first problem, "5" the second, nobody the third.
    assert values["maj@4"] == pytest.approx(1 / 3)
    # By its six pairs, the first problem: {2,2} 1, {2,3} ½, {2,-} 1, {2,3} ½, {2,-} 1, {3,-} 0;
    # the second: {5,5} 0, {5,2} ½, {5,4} 0, {5,2} ½, {5,4} 0, {2,4} ½.
    assert values["maj@2"] == pytest.approx((4 / 6 + 1.5 / 6) / 3)
    assert list(values) == ["avg@4", "pass@1", "pass@2", "pass@4", "maj@2", "maj@4"]
    assert (scored.missing_answers, scored.answer_found_share) == (5, 7 / 12)
    assert (scored.generated_tokens, scored.tokens_per_s) == (360, 360)
    assert scored.problems[1].votes == (0, 0, 1, 2)


def test_scores_and_intervals_do_not_depend_on_the_order_of_problems():
    many = {f"a:{row}": ["2"] * (row % 5) + ["3"] * (4 - row % 5) for row in range(12)}
    assert result(many) == result(dict(reversed(many.items())))
    assert [p.prompt_id for p in result(many).problems][9:] == ["a:9", "a:10", "a:11"]


def test_cells_of_tables_are_shown_as_they_are():
    rows, out = [["[red]a|b[/]", "1"]], io.StringIO()
    Console(file=out, width=60).print(rich_table("of [/x]", ["set", "[n]"], rows, num_left=1))
    assert all(text in out.getvalue() for text in ("of [/x]", "[n]", "[red]a|b[/]"))
    written = markdown_table(["set", "[n]"], rows, num_left=1)
    assert written == "| set | [n] |\n| --- | ---: |\n| [red]a\\|b[/] | 1 |\n"
    # A line of Markdown is a row.
    assert markdown_table(["set"], [["a\r\nb\n"]], num_left=1) == "| set |\n| --- |\n| a b |\n"


def test_the_bootstrap_leaves_the_event_loop_alone(monkeypatch: pytest.MonkeyPatch):
    threads, scores_of = [], summary.scores_of

    def recorded(*arguments, **options):
        threads.append(threading.current_thread())
        return scores_of(*arguments, **options)

    monkeypatch.setattr(summary, "scores_of", recorded)
    result(FIRST)
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()


def test_lengths_truncation_and_time_outs_are_counted():
    lengths = result(
        {"a:0": ["2"]}, num_tokens=7, finish_reason=FinishReason.LENGTH, timed_out=True
    )
    assert (lengths.truncated_share, lengths.grading_timeouts) == (1.0, 1)
    assert lengths.response_tokens_median == lengths.response_tokens_p95 == 7
    assert [score.name for score in lengths.scores] == ["avg@1", "pass@1", "maj@1"]


def test_results_come_back_from_their_file_and_stand_in_markdown(tmp_path: Path):
    results = [result(FIRST), result(SECOND, name="more")]
    write_results(results, tmp_path / "eval.json")
    assert read_results(tmp_path / "eval.json") == results
    written = json.loads((tmp_path / "eval.json").read_text())
    assert written[0]["scores"][0]["value"] == results[0].avg_at_k == 0.25
    lines = (tmp_path / "eval.md").read_text().splitlines()
    (row,) = [line for line in lines if line.startswith("| sums | avg@4 |")]
    assert re.fullmatch(r"\| sums \| avg@4 \| 25\.00% \| [\d.]+% … [\d.]+% \|", row)
    columns = {line.count("|") for line in lines if line.startswith("| more |")}
    assert columns == {5, 13}
    # Earlier versions wrote three of the scores twice.
    earlier = [{**entry, "avg_at_k": 0.25, "pass_at_k": 1.0, "maj_at_k": 0.5} for entry in written]
    (tmp_path / "eval.json").write_text(json.dumps(earlier))
    assert read_results(tmp_path / "eval.json") == results


def test_a_score_that_is_no_single_function_s_says_what_it_is(tmp_path: Path):
    def scored(*functions: tuple[str, float]) -> EvalResult:
        entries = [{"name": name, "weight": weight} for name, weight in functions]
        sampling = dict.fromkeys(("weights", "temperature", "top_p", "top_k"), 1)
        settings = {**sampling, "max_response_tokens": 9, "reward": {"functions": entries}}
        return result(FIRST, settings=settings)

    assert scoring_lines([scored(("math", 1.0)), result(FIRST)]) == []
    mixed = scored(("math", 1.0), ("style", 0.1))
    assert scoring_lines([mixed]) == ["sums: scored by math + 0.1 style"]
    assert scoring_lines([scored(("math", 2.0))]) == ["sums: scored by 2 math"]
    write_results([mixed], tmp_path / "eval.json")
    assert "\nsums: scored by math + 0.1 style\n" in (tmp_path / "eval.md").read_text()


def test_failed_functions_and_the_parts_of_a_reward_are_reported(tmp_path: Path):
    parts = {"components": {"math": 0.5, "style": 0.25}, "metrics": {"style/words": 3}}
    failed = result({"a:0": ["2", "3"]}, failed=True, **parts)
    assert scoring_lines([failed]) == [
        "sums: a reward function failed on 2 samples and gave 0",
    ]
    values = eval_metrics([failed])
    assert values["eval/sums/grading_errors"] == 2
    parts_of = {name: value for name, value in values.items() if "/reward/" in name}
    assert parts_of == {
        "eval/sums/reward/math": 0.5,
        "eval/sums/reward/style": 0.25,
        "eval/sums/reward/style/words": 3.0,
    }
    write_results([failed], tmp_path / "eval.json")
    assert read_results(tmp_path / "eval.json") == [failed]
    alone = result({"a:0": ["2"]}, components={"math": 1.0})
    assert (alone.grading_errors, alone.reward_means) == (0, {})


def test_evaluations_have_functions_of_their_own_where_some_are_given():
    judge = {"name": "judge", "url": "https://judge.example"}
    reward = RewardConfig.model_validate({"functions": [judge], "timeout_s": 9})
    math = EvalConfig.model_validate({"functions": [{"name": "math", "function": "math"}]})
    assert eval_reward(reward, EvalConfig()) is reward
    own = eval_reward(reward, math)
    assert (own.functions, own.timeout_s) == (math.functions, 9)
    with pytest.raises(ValueError, match="the name 'judge' occurs twice"):
        EvalConfig.model_validate({"functions": [judge, judge]})


def test_what_is_no_result_is_refused_in_one_line(tmp_path: Path):
    path = tmp_path / "eval.json"
    for content in ("{", "[{}]", '[{"scores": [], "problems": []}]', "3"):
        path.write_text(content)
        with pytest.raises(ResultsError, match=r"holds no results that this version reads .*eval"):
            read_results(path)


def test_a_comparison_is_paired_by_problem_whatever_the_order():
    reordered = dict(reversed(SECOND.items()))
    (found,) = compare(result(FIRST), result(reordered))
    assert (found.num_problems, found.num_left_out) == (3, 0)
    by_name = {score.name: score for score in found.scores}
    # Rewards are 0 or 1, so pass@1 would be avg@4 again.
    assert list(by_name) == ["avg@4", "pass@2", "pass@4", "maj@2", "maj@4"]
    average = by_name["avg@4"]
    assert (average.first, average.second) == (pytest.approx(3 / 12), pytest.approx(8 / 12))
    # By problem + 2/4, + 2/4, + 1/4: every resample is above 0.
    assert average.paired.difference == pytest.approx(5 / 12)
    assert average.paired.low == 0.25
    assert average.paired.high == 0.5
    assert average.paired.p_value == 0.002


def test_results_with_other_numbers_of_samples_share_what_both_can_tell():
    fewer = {prompt: answers[:2] for prompt, answers in SECOND.items()}
    (found,) = compare(result(FIRST), result(fewer))
    assert [score.name for score in found.scores] == ["avg@4, avg@2", "pass@2", "maj@2"]


def test_pass_at_1_is_listed_where_it_is_not_avg_at_n_again():
    partly = result({"a:0": ["2", "3"]}, components={"math": 0.5})
    problem = replace(partly.problems[0], rewards=(1.0, 0.5))
    (found,) = compare(replace(partly, problems=(problem,)), partly)
    assert [score.name for score in found.scores] == ["avg@2", "pass@1", "pass@2", "maj@2"]


def test_other_problems_are_refused_or_left_out():
    fewer = {prompt: SECOND[prompt] for prompt in ("a:0", "a:1")}
    with pytest.raises(
        ResultsError, match=r"A has 3 problems of sums, B 2 of sums, 2 in common; .* --common"
    ):
        compare(result(FIRST), result(fewer))
    (found,) = compare(result(FIRST), result(fewer), common=True)
    assert (found.num_problems, found.num_left_out) == (2, 1)
    with pytest.raises(ResultsError, match=r"0 in common; compare results on the same data$"):
        compare(result(FIRST), result({"b:0": ["2", "2", "2", "2"]}), common=True)


def test_other_sampling_settings_are_named_where_they_are_known():
    first = result(FIRST, settings={"temperature": 0.6, "top_p": 1.0, "weights": "a"})
    second = result(SECOND, settings={"temperature": 1.0, "top_p": 1.0, "weights": "b"})
    (found,) = compare(first, second)
    assert found.different_settings == ("temperature 0.6 and 1.0",)
    (found,) = compare(first, result(SECOND))
    assert found.different_settings == ()
    first, second = (result(FIRST, settings={"environment": "x:Y", "max_turns": n}) for n in (3, 5))
    assert compare(first, second)[0].different_settings == ("max_turns 3 and 5",)


def test_other_answers_under_the_same_names_are_refused():
    with pytest.raises(ResultsError, match="a:0: has the answer '2' in A and '9' in B"):
        compare(result(FIRST), result(SECOND, answer="9"))


def test_sets_are_matched_by_name_where_there_are_several():
    first, second = result(FIRST, name="x"), result(SECOND, name="y")
    found = compare_results(
        [first, second], [second], k_values=(), num_resamples=200, seed=0, common_only=False
    )
    assert [comparison.set_name for comparison in found] == ["y"]
    with pytest.raises(ResultsError, match="no set in common: x, y against none"):
        compare_results([first, second], [], k_values=(), num_resamples=1, seed=0, common_only=True)


def test_a_model_is_told_from_one_that_was_trained_on(tmp_path: Path):
    weights = np.random.default_rng(0).bytes(3 << 20)
    for name in ("first", "same", "trained", "larger"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_bytes(weights)
    trained = bytearray(weights)
    for place in range(0, len(trained), 1000):  # every five hundredth bfloat16
        trained[place] ^= 1
    (tmp_path / "trained" / "model.safetensors").write_bytes(trained)
    (tmp_path / "larger" / "model.safetensors").write_bytes(weights + b"\0")
    found = [fingerprint(tmp_path / name) for name in ("first", "same", "trained", "larger")]
    assert found[0] == found[1]
    assert len(set(found)) == 3
    (tmp_path / "same" / "config.json").write_text('{"rope_theta": 1}')
    assert fingerprint(tmp_path / "same") not in found


def test_prompts_are_told_apart_by_tokens_answers_and_rows():
    prompt = Prompt("a:0", (1, 2), "3", "1+2")
    others = [
        Prompt("a:0", (1, 4), "3", "1+2"),
        Prompt("a:0", (1, 2), "4", "1+2"),
        Prompt("a:0", (1, 2), "3", "1+2", row={"tests": [1], "budget": 2}),
        Prompt("a:0", (1, 2), "3", "1+2", row={"tests": [1], "budget": 3}),
    ]
    assert len({prompts_digest([p]) for p in [prompt, *others]} | {prompts_digest([])}) == 6
    reordered = Prompt("a:0", (1, 2), "3", "1+2", row={"budget": 2, "tests": [1]})
    assert prompts_digest([reordered]) == prompts_digest([others[2]])
    assert prompts_digest([prompt]) == prompts_digest([Prompt("a:0", (1, 2), "3", "other text")])


def test_a_set_has_its_own_sampling_settings_where_it_gives_some():
    config = EvalConfig.model_validate(
        {
            "sets": [{"path": "a.jsonl"}, {"path": "b.jsonl", "temperature": 0, "top_k": 5}],
            "samples_per_prompt": 1,
            "temperature": 0.7,
            "max_prompts": 9,
        }
    )
    first, second = (config.sampling_of(dataset) for dataset in config.sets)
    assert (first.temperature, first.top_k, first.max_prompts) == (0.7, -1, 9)
    assert (second.temperature, second.top_k, second.max_prompts) == (0.0, 5, 9)
