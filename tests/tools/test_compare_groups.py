"""Groups of runs: looked for on the disk, read with their seeds, compared seed by seed."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron import cli
from bapo_megatron.evaluation.results import write_results
from bapo_megatron.evaluation.samples import ResultsError
from bapo_megatron.tools.compare import (
    Comparison,
    compare_groups,
    evaluations_in,
    find_group,
    group_scores,
    newest_results,
    read_group,
)
from bapo_megatron.types import EvalProblem, EvalResult
from tests.evaluation.results import result


def scored(seed: int, num_right: int, **options: Any) -> EvalResult:
    """Ten problems of one sample, of which so many are right."""
    answers = {f"a:{row}": ["2" if row < num_right else "3"] for row in range(10)}
    return result(answers, settings={"seed": seed}, **options)


def evaluated(run_dir: Path, seed: int, num_right: int, step: int = 6) -> Path:
    """The directory of a run that was evaluated before training and after a step."""
    write_results([scored(seed, 1)], run_dir / "eval" / "start.json")
    write_results([scored(seed, num_right)], run_dir / "eval" / f"step_{step:06d}.json")
    (run_dir / "config.yaml").write_text(f"seed: {seed}\n")
    return run_dir


def groups_of(
    first: dict[int, int], second: dict[int, int], *, common: bool = False
) -> list[Comparison]:
    groups = [{s: [scored(s, right)] for s, right in group.items()} for group in (first, second)]
    return compare_groups(*groups, k_values=(1, 4), common_only=common)


def test_runs_with_equal_seeds_are_pairs() -> None:
    (comparison,) = groups_of({2: 5, 0: 3, 1: 4}, {0: 5, 1: 5, 2: 9})
    assert (comparison.seeds, comparison.seeds_left_out) == ((0, 1, 2), ())
    assert (comparison.num_problems, comparison.num_left_out) == (30, 0)
    average = comparison.scores[0]
    assert average.name == "avg@1"
    assert (average.first, average.second) == pytest.approx((0.4, 19 / 30))
    # Differences 0.2, 0.1, 0.4: mean 7/30, s = 0.15275, t(0.975, 2) = 4.3027.
    assert average.paired.difference == pytest.approx(7 / 30)
    assert average.paired.high - average.paired.low == pytest.approx(2 * 0.37946, rel=1e-4)
    assert average.paired.p_value == pytest.approx(0.1181, abs=1e-4)
    # Rewards are 0 or 1, so pass@1 would be avg@1 again.
    assert [score.name for score in comparison.scores] == ["avg@1", "maj@1"]


def test_seeds_that_only_one_group_has_are_refused_or_left_out() -> None:
    groups = {0: 1, 1: 2, 2: 3}, {1: 3, 2: 5, 3: 9}
    with pytest.raises(ResultsError, match=r"B \[1, 2, 3\], 2 in common; .*--common"):
        groups_of(*groups)
    (comparison,) = groups_of(*groups, common=True)
    assert (comparison.seeds, comparison.seeds_left_out) == ((1, 2), (0, 3))
    assert comparison.scores[0].paired.difference == pytest.approx(0.15)
    with pytest.raises(ResultsError, match="1 in common; at least 2"):
        groups_of({0: 1, 1: 2}, {1: 3}, common=True)


def test_a_pair_is_on_the_same_problems_and_sets() -> None:
    first = {seed: [scored(seed, 1)] for seed in (0, 1)}
    other = {0: [scored(0, 1)], 1: [scored(1, 1, answer="9")]}
    with pytest.raises(ResultsError, match=r"^seed 1: a:0: .*'2' in A and '9' in B"):
        compare_groups(first, other, k_values=(), common_only=False)
    named = {0: [scored(0, 1)], 1: [scored(1, 1, name="more")]}
    with pytest.raises(ResultsError, match=r"seed 1: .* got sums, more"):
        compare_groups(first, named, k_values=(), common_only=False)


def test_scores_of_a_group_have_intervals_over_its_seeds() -> None:
    average, majority = group_scores({1: [scored(1, 4)], 0: [scored(0, 2)]})
    assert (average.name, average.by_seed) == ("avg@1", {0: 0.2, 1: 0.4})
    assert majority.name == "maj@1"
    alone = group_scores({0: [scored(0, 2)]})[0]
    assert (alone.mean, alone.low, alone.high) == (0.2, None, None)
    # They stay within the bounds of scores.
    # s / √2 = 0.1, t(0.975, 1) = 12.706: uncut from -0.9706 to 1.5706.
    assert (average.low, average.high) == (majority.low, majority.high) == (0.0, 1.0)
    # A reward of 1.5 is no share: its mean may be anywhere.
    beyond = replace(scored(0, 2), problems=(EvalProblem("a:0", "2", (1.5,), (0,)),))
    average, majority = group_scores({1: [scored(1, 4)], 0: [beyond]})
    assert (average.low, average.high) == pytest.approx((-0.9706, 1.5706), abs=1e-4)
    assert (majority.low, majority.high) == (0.0, 1.0)
    # Differences 1 and 0: mean 0.5, s / √2 = 0.5.
    (comparison,) = groups_of({0: 0, 1: 5}, {0: 10, 1: 5})
    assert (comparison.scores[0].paired.low, comparison.scores[0].paired.high) == (-1.0, 1.0)


def test_the_newest_evaluation_of_a_run_is_its_own_or_that_of_its_last_step(tmp_path: Path) -> None:
    run_dir = evaluated(tmp_path / "run", seed=0, num_right=3)
    write_results([scored(0, 2)], run_dir / "eval" / "step_000010.json")
    (run_dir / "eval" / "step_000011.json.settings.json").write_text("{}")
    assert {step: path.name for step, path in evaluations_in(run_dir).items()} == {
        0: "start.json",
        6: "step_000006.json",
        10: "step_000010.json",
    }
    assert newest_results(run_dir) == run_dir / "eval" / "step_000010.json"
    write_results([scored(0, 2)], run_dir / "eval.json")
    assert newest_results(run_dir) == run_dir / "eval.json"
    assert newest_results(tmp_path) is None


def test_a_group_is_a_directory_of_runs_or_a_pattern(tmp_path: Path) -> None:
    runs = [evaluated(tmp_path / "grpo" / f"seed{seed}", seed, 3) for seed in (1, 0)]
    (tmp_path / "grpo" / "notes").mkdir()
    assert find_group(tmp_path / "grpo") == runs[::-1]
    assert find_group(tmp_path / "grpo" / "seed[0-9]") == runs[::-1]
    assert find_group(runs[0]) == find_group(tmp_path / "none") == []
    assert list(read_group(runs)) == [1, 0]


def test_what_is_no_group_is_refused_in_one_line(tmp_path: Path) -> None:
    first = evaluated(tmp_path / "a", seed=0, num_right=3)
    same = evaluated(tmp_path / "b", seed=0, num_right=3)
    earlier = evaluated(tmp_path / "c", seed=1, num_right=3, step=4)
    write_results([result({"a:0": ["2"]})], tmp_path / "d" / "eval" / "step_000006.json")
    for other, place in (
        (same, "b/eval/step_000006.json: seed 0"),
        (earlier, "c/eval/step_000004.json: .* step_000006.json"),
        (tmp_path / "none", "none: has no evaluation"),
        (tmp_path / "d", "d/eval/step_000006.json: records no seed"),
    ):
        with pytest.raises(ResultsError, match=place):
            read_group([first, other])


def test_compare_says_whether_its_interval_is_about_problems_or_seeds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def shown(*arguments: str) -> str:
        cli.app(["compare", *arguments], standalone_mode=False)
        return capsys.readouterr().out

    for name, rights in {"grpo": (3, 4, 5), "bapo": (5, 5, 9)}.items():
        for seed, num_right in enumerate(rights):
            evaluated(tmp_path / name / f"seed{seed}", seed, num_right)
    grpo, bapo = str(tmp_path / "grpo"), str(tmp_path / "bapo")

    by_seed = shown(grpo, bapo)
    for cell in ("40.00%", "63.33%", "+23.33%", "-14.61% … +61.28%", "0.1181"):
        assert cell in by_seed
    assert "sums: 30 problems over 3 seeds\nruns paired by seed 0, 1, 2\n" in by_seed
    assert "across seeds, not problems" in by_seed
    (comparison,) = json.loads(shown(grpo, bapo, "--json"))
    assert comparison["seeds"] == [0, 1, 2]

    by_problem = shown(f"{grpo}/seed0", f"{bapo}/seed0")
    assert "across problems, not seeds" in by_problem
    assert "+20.00%" in by_problem

    with pytest.raises(ResultsError, match=f"{grpo} is a group of runs, {bapo}/seed0 is not"):
        shown(grpo, f"{bapo}/seed0")
