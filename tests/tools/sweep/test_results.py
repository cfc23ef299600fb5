"""What a sweep's results are made of, without a run."""

from pathlib import Path

from bapo_megatron.commands.sweep import read_scores
from bapo_megatron.evaluation.results import write_results
from bapo_megatron.tools.sweep.file import load_sweep
from tests.evaluation.results import result
from tests.tools.sweep.files import write_sweep


def test_variants_with_other_numbers_of_samples_are_compared_by_their_averages(
    base: Path, tmp_path: Path
) -> None:
    variants = {name: [f"eval.samples_per_prompt={n}"] for name, n in (("two", 2), ("four", 4))}
    sweep = load_sweep(write_sweep(tmp_path, base, variants=variants))
    for run in sweep.runs:
        num_samples = run.config.eval.samples_per_prompt
        # By seed, 1 or 2 of 4 problems are right with two samples, and 2 or 4 with four.
        num_right = (1 + run.seed) * num_samples // 2
        answers = {f"a:{row}": ["23"[row >= num_right]] * num_samples for row in range(4)}
        settings = {"seed": run.seed, "samples_per_prompt": num_samples}
        write_results(
            [result(answers, settings=settings)], run.run_dir / "eval" / "step_000003.json"
        )
        (run.run_dir / "summary.json").touch()

    (two, four, *_), different_settings = read_scores(sweep)
    names = [(row.variant, row.score.name) for row in (two, four)]
    assert names == [("two", "avg@2"), ("four", "avg@4")]
    assert (two.score.mean, four.score.mean) == (0.375, 0.75)
    assert four.against_first is not None
    assert four.against_first.paired.difference == 0.375
    assert different_settings == ["four: sampled with samples_per_prompt 2 and 4"]
