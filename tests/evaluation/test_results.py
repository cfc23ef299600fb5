"""Votes and scores of a set, their files and tables, and the comparison of two."""

import asyncio
import json
import re
import threading
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bapo_megatron.config.evaluation import EvalConfig, EvalSamplingConfig, eval_reward
from bapo_megatron.config.reward import RewardConfig
from bapo_megatron.config.schema import RunConfig
from bapo_megatron.evaluation import results as summary
from bapo_megatron.evaluation.estimators import NO_VOTE, UNKNOWN_VOTE
from bapo_megatron.evaluation.results import (
    count_votes,
    read_results,
    scoring_lines,
    write_results,
)
from bapo_megatron.evaluation.samples import ResultsError, fingerprint, prompts_digest
from bapo_megatron.reward.pool import RewardPool
from bapo_megatron.telemetry.metrics import eval_metrics
from bapo_megatron.tools.compare import compare_results
from bapo_megatron.types import EvalResult, FinishReason, Prompt
from tests.evaluation.results import TextEquality, result

FIRST = {"a:0": ["2", "2", "3", ""], "a:1": ["5", "5", "2", "4"], "a:2": ["", "", "", ""]}
SECOND = {"a:0": ["2", "2", "2", "2"], "a:1": ["2", "5", "2", "2"], "a:2": ["", "2", "", ""]}


def compare(first: EvalResult, second: EvalResult, *, common: bool = False):
    return compare_results([first], [second], k_values=(1, 2), common_only=common)


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
    cut_off = result({"a:0": ["2"]}, finish_reason=FinishReason.LENGTH, timed_out=True)
    assert (cut_off.truncated_share, cut_off.grading_timeouts) == (1.0, 1)
    assert cut_off.response_tokens_median == cut_off.response_tokens_p95 == 10
    assert [score.name for score in cut_off.scores] == ["avg@1", "pass@1", "maj@1"]


def test_scores_and_intervals_do_not_depend_on_the_order_of_problems():
    many = {f"a:{row}": ["2"] * (row % 5) + ["3"] * (4 - row % 5) for row in range(12)}
    assert result(many) == result(dict(reversed(many.items())))
    assert [p.prompt_id for p in result(many).problems][9:] == ["a:9", "a:10", "a:11"]


def test_the_bootstrap_leaves_the_event_loop_alone(monkeypatch: pytest.MonkeyPatch):
    threads, scores_of = [], summary.scores_of

    def recorded(*arguments, **options):
        threads.append(threading.current_thread())
        return scores_of(*arguments, **options)

    monkeypatch.setattr(summary, "scores_of", recorded)
    result(FIRST)
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()


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
    assert columns == {5, 8, 13}
    # Earlier versions wrote three of the scores twice.
    earlier = [{**entry, "avg_at_k": 0.25, "pass_at_k": 1.0, "maj_at_k": 0.5} for entry in written]
    (tmp_path / "eval.json").write_text(json.dumps(earlier))
    assert read_results(tmp_path / "eval.json") == results


def test_a_score_that_is_no_single_function_s_says_what_it_is(tmp_path: Path):
    def scored(*functions: tuple[str, float]) -> EvalResult:
        entries = [{"name": name, "weight": weight} for name, weight in functions]
        return result(FIRST, settings={"reward": {"functions": entries}})

    assert scoring_lines([scored(("math", 1.0)), result(FIRST)]) == []
    mixed = scored(("math", 1.0), ("style", 0.1))
    assert scoring_lines([mixed]) == ["sums: scored by math + 0.1 style"]
    assert scoring_lines([scored(("math", 2.0))]) == ["sums: scored by 2 math"]
    write_results([mixed], tmp_path / "eval.json")
    assert "\nsums: scored by math + 0.1 style\n" in (tmp_path / "eval.md").read_text()


@pytest.mark.parametrize(
    ("answers", "num_silent"),
    [({"a:0": ["", ""], "a:1": ["", ""]}, 4), ({"a:0": ["2", "3"], "a:1": ["2", ""]}, 1)],
    ids=["a number without an answer", "answers to some rows only"],
)
def test_answers_that_a_reward_does_not_return_cannot_vote(
    answers: dict[str, list[str]], num_silent: int, tmp_path: Path
):
    scored = result(answers, right="2", answer_found=True)
    assert [score.name for score in scored.scores] == ["avg@2", "pass@1", "pass@2"]
    assert scored.problems[1].votes[1] == UNKNOWN_VOTE
    [line] = scoring_lines([scored])
    assert line.endswith(f", {num_silent} of 4 have none (docs/evaluation.md)")
    names = {name.removeprefix("eval/sums/") for name in eval_metrics([scored])}
    assert "avg_at_k" in names
    assert names.isdisjoint({"maj_at_k", "maj_at_k_low", "answer_found_share", "missing_answers"})
    write_results([scored], tmp_path / "eval.json")
    assert read_results(tmp_path / "eval.json") == [scored]
    table = (tmp_path / "eval.md").read_text()
    assert "| sums | maj@2 | – | – |" in table
    [comparison] = compare(scored, result({"a:0": ["2", "2"], "a:1": ["2", "2"]}))
    assert [score.name for score in comparison.scores] == ["avg@2", "pass@2"]
    silent = result({"a:0": ["", ""]})  # no response has an answer: every vote is lost
    assert silent.has_votes
    assert [score.value for score in silent.scores if score.name == "maj@2"] == [0.0]


def test_failed_functions_and_the_parts_of_a_reward_are_reported(tmp_path: Path):
    parts = {"components": {"math": 0.5, "style": 0.25}, "metrics": {"style/words": 3}}
    failed = result({"a:0": ["2", "3"]}, failed=True, **parts)
    assert scoring_lines([failed]) == [
        "sums: a reward function failed on 2 samples, which scored 0",
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
    section = eval_reward(reward, math)
    assert (section.functions, section.timeout_s) == (math.functions, 9)
    with pytest.raises(ValueError, match="the name 'judge' occurs twice"):
        EvalConfig.model_validate({"functions": [judge, judge]})


WHOLE = asdict(result({"a:0": ["2", "3"]}))
PROBLEM = WHOLE["problems"][0]


@pytest.mark.parametrize(
    "content",
    [
        {},
        [],
        [{}],
        [WHOLE, WHOLE],
        [{**WHOLE, "samples_per_prompt": 0}],
        [{**WHOLE, "problems": []}],
        [{**WHOLE, "problems": [PROBLEM, PROBLEM]}],
        [{**WHOLE, "problems": [{**PROBLEM, "rewards": [1.0]}]}],
        [{**WHOLE, "problems": [{**PROBLEM, "votes": [0]}]}],
        [{**WHOLE, "problems": [{**PROBLEM, "rewards": [1.0, 1e16]}]}],
    ],
)
def test_what_is_no_result_is_refused_in_one_line(tmp_path: Path, content: object):
    path = tmp_path / "eval.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ResultsError, match=r"eval\.json: holds no results that this version reads"):
        read_results(path)


def test_a_comparison_is_paired_by_problem_whatever_the_order():
    (compared,) = compare(result(FIRST), result(dict(reversed(SECOND.items()))))
    assert (compared.num_problems, compared.num_left_out) == (3, 0)
    by_name = {score.name: score for score in compared.scores}
    # Rewards are 0 or 1, so pass@1 would be avg@4 again.
    assert list(by_name) == ["avg@4", "pass@2", "pass@4", "maj@2", "maj@4"]
    average = by_name["avg@4"]
    assert (average.first, average.second) == (pytest.approx(3 / 12), pytest.approx(8 / 12))
    # By problem + 2/4, + 2/4, + 1/4: every resample is above 0.
    paired = average.paired
    assert paired.difference == pytest.approx(5 / 12)
    assert (paired.low, paired.high, paired.p_value) == (0.25, 0.5, 2 / 10_001)


def test_a_comparison_has_the_scores_that_both_can_tell_and_that_differ():
    fewer = {prompt: answers[:2] for prompt, answers in SECOND.items()}
    (compared,) = compare(result(FIRST), result(fewer))
    assert [score.name for score in compared.scores] == ["avg@4, avg@2", "pass@2", "maj@2"]
    # pass@1 is not avg@2 again where a reward lies between 0 and 1.
    partly = result({"a:0": ["2", "3"]}, components={"math": 0.5})
    problem = replace(partly.problems[0], rewards=(1.0, 0.5))
    (compared,) = compare(replace(partly, problems=(problem,)), partly)
    assert [score.name for score in compared.scores] == ["avg@2", "pass@1", "pass@2", "maj@2"]


def test_other_problems_are_refused_or_left_out():
    fewer = {prompt: SECOND[prompt] for prompt in ("a:0", "a:1")}
    with pytest.raises(ResultsError, match=r"A has 3 problems of sums, B 2 of sums, 2 in common"):
        compare(result(FIRST), result(fewer))
    (compared,) = compare(result(FIRST), result(fewer), common=True)
    assert (compared.num_problems, compared.num_left_out) == (2, 1)
    with pytest.raises(ResultsError, match=r"0 in common"):
        compare(result(FIRST), result({"b:0": ["2", "2", "2", "2"]}), common=True)
    with pytest.raises(ResultsError, match="a:0: has the answer '2' in A and '9' in B"):
        compare(result(FIRST), result(SECOND, answer="9"))


COLD = {"temperature": 0.6, "top_p": 1.0, "weights": "a", "max_turns": 3}


@pytest.mark.parametrize(
    ("second", "different"),
    [
        ({**COLD, "temperature": 1.0}, ("temperature 0.6 and 1.0",)),
        ({**COLD, "weights": "b", "max_turns": 5}, ("max_turns 3 and 5",)),
        ({}, ()),
    ],
)
def test_other_sampling_settings_are_named_where_they_are_known(
    second: dict[str, Any], different: tuple[str, ...]
):
    (compared,) = compare(result(FIRST, settings=COLD), result(SECOND, settings=second))
    assert compared.different_settings == different


def test_sets_are_matched_by_name_where_there_are_several():
    first, second = result(FIRST, name="x"), result(SECOND, name="y")
    compared = compare_results([first, second], [second], k_values=(), common_only=False)
    assert [comparison.set_name for comparison in compared] == ["y"]
    with pytest.raises(ResultsError, match="no set in common"):
        compare_results([first, second], [], k_values=(), common_only=True)


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
    hashes = [fingerprint(tmp_path / name) for name in ("first", "same", "trained", "larger")]
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 3
    (tmp_path / "same" / "config.json").write_text('{"rope_theta": 1}')
    assert fingerprint(tmp_path / "same") not in hashes


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


def test_a_set_has_its_own_sampling_settings_and_the_rollout_s_length_where_it_gives_none():
    def samplings(**sections: Any) -> list[EvalConfig | EvalSamplingConfig]:
        values = {"name": "a", "run_dir": "r", "model": {"path": "m"}, **sections}
        section = RunConfig.model_validate(values).eval
        return [section, *(section.sampling_of(dataset) for dataset in section.sets)]

    other = {"temperature": 0, "top_k": 5, "max_response_tokens": 9}
    sets = {"sets": [{"path": "a.jsonl"}, {"path": "b.jsonl", **other}]}
    common = {"samples_per_prompt": 1, "temperature": 0.7, "max_prompts": 9}
    _, first, second = samplings(eval={**sets, **common})
    assert (first.temperature, first.top_k, first.max_prompts) == (0.7, -1, 9)
    assert (second.temperature, second.top_k, second.max_prompts) == (0.0, 5, 9)
    rollout = {"max_response_tokens": 80}
    for sections, lengths in (
        ({"rollout": rollout}, [80]),
        ({"rollout": rollout, "eval": sets}, [80, 80, 9]),
        ({"rollout": rollout, "eval": {**sets, "max_response_tokens": 70}}, [70, 70, 9]),
        ({"eval": sets}, [4096, 4096, 9]),
    ):
        assert [sampling.max_response_tokens for sampling in samplings(**sections)] == lengths


def votes_of(*answers: str, pool: TextEquality | None = None) -> tuple[tuple[int, ...], int]:
    (votes,) = asyncio.run(count_votes([answers], pool or TextEquality()))
    return votes


@pytest.mark.parametrize(
    ("answers", "votes", "num_timeouts", "num_calls"),
    [
        # Equal answers share a cluster; none is no vote. 12-7, " 7"-7.
        (("7", "", "12", " 7", "12", ""), (0, NO_VOTE, 1, 0, 1, NO_VOTE), 0, 2),
        # Equal texts are compared once.
        ((*["7"] * 8, *["12"] * 8), (*[0] * 8, *[1] * 8), 0, 1),
        # After three time-outs, "slow 1" against a, b and c, "a " is compared with nothing, and
        # equals none by its text.
        (("slow 1", "a", "b", "c", "a ", "c"), (0, 1, 2, 3, 4, 3), 3, 1 + 2 + 3 - 2),
    ],
    ids=["equal answers", "equal texts", "hostile answers"],
)
def test_answers_are_compared_until_their_cluster_is_known(
    answers: tuple[str, ...], votes: tuple[int, ...], num_timeouts: int, num_calls: int
):
    pool = TextEquality()
    assert votes_of(*answers, pool=pool) == (votes, num_timeouts)
    assert pool.num_calls == num_calls


def test_a_problem_whose_comparisons_are_slow_stops_comparing(monkeypatch: pytest.MonkeyPatch):
    pool = TextEquality()
    clock = SimpleNamespace(monotonic=lambda: 6.0 * pool.num_calls)
    monkeypatch.setattr("bapo_megatron.evaluation.results.time", clock)
    counted = votes_of("1", "2", "3", "4", " 1", "2", pool=pool)
    # 2-1, 3-1, 3-2, 4-1: 24 s; then " 1" is compared with nothing.
    assert counted == ((0, 1, 2, 3, 4, 1), 1)
    assert pool.num_calls == 4


@pytest.mark.slow
def test_the_math_reward_s_own_workers_find_equal_values_of_several_problems():
    async def count() -> list[tuple[tuple[int, ...], int]]:
        async with RewardPool(workers=1, timeout_s=20) as pool:
            return await count_votes(
                [
                    (r"\frac{1}{2}", "0.5", "1/2", "0.25"),
                    ("1,000", "1000", "", r"\sqrt{2}", r"2^{1/2}"),
                ],
                pool,
            )

    assert [clusters for clusters, _ in asyncio.run(count())] == [
        (0, 0, 0, 1),
        (0, 0, NO_VOTE, 1, 1),
    ]
