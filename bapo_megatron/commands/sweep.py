"""``bapo-megatron sweep``: variants of a configuration over several seeds, run and compared."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from bapo_megatron.commands.options import JsonOption
from bapo_megatron.evaluation.estimators import PairedDifference, holm
from bapo_megatron.runtime.files import atomic_write_text
from bapo_megatron.telemetry.console import rich_table, say, uncut_console
from bapo_megatron.tools.compare import GroupScore, compare_groups, group_scores, read_group
from bapo_megatron.tools.sweep.file import Sweep, load_sweep
from bapo_megatron.tools.sweep.run import run_sweep, slurm_script

_NONE = "–"
_METHOD = (
    "Intervals: Student's t over seeds, 95 %, on the same problems. p: paired t-test of runs with "
    "equal seeds."
)


def command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="YAML file of the sweep.")],
    slurm: Annotated[
        bool, typer.Option("--slurm", help="Write a script for sbatch instead of running.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Train variants of a configuration over several seeds, and compare them.

    Rerun the command to continue: finished runs are kept, interrupted ones resume.
    """
    sweep = load_sweep(file, is_here=not slurm)
    directory = sweep.config.dir
    if slurm:
        script = directory / "sweep.sbatch"
        atomic_write_text(script, slurm_script(sweep))
        submit = shlex.join(["sbatch", str(script)])
        say(f"wrote {script} for {len(sweep.runs)} runs; submit it with: {submit}")
        return
    failures = run_sweep(sweep)
    scores, settings = read_scores(sweep)
    text = json.dumps(results_json(sweep, scores, settings, failures), indent=2)
    atomic_write_text(directory / "sweep.json", f"{text}\n")
    if as_json:
        typer.echo(text)
    elif scores:
        print_table(sweep, scores, settings, uncut_console())
    say(f"scores: {directory}/sweep.json")
    for run in sweep.runs:
        if reason := failures.get(run.label):
            say(f"{run.label} failed: {reason}; log: {run.log}")
    if failures:
        raise ValueError(
            f"{len(failures)} of {len(sweep.runs)} runs did not finish; correct the cause, and "
            "rerun the command to continue them"
        )


@dataclass(frozen=True, slots=True)
class AgainstFirst:
    """A score's difference from that of the first variant."""

    paired: PairedDifference
    seeds: tuple[int, ...]
    """Those of the pairs."""
    corrected_p: float
    """p, corrected by Holm for the number of variants."""


@dataclass(frozen=True, slots=True)
class VariantScore:
    """One score of one variant; a row of the table."""

    variant: str
    score: GroupScore
    against_first: AgainstFirst | None
    """None for the first variant, and for fewer than two pairs."""


def read_scores(sweep: Sweep) -> tuple[list[VariantScore], list[str]]:
    """Read the scores of all finished runs.

    A variant is compared with the first one where they have at least two seeds in common.

    Returns:
        The rows by set and score, then in the order of the variants; and settings in which the
        variants' evaluations differ, such as ``wide: sampled with temperature 0.6 and 1.0``.

    Raises:
        ResultsError: The evaluations of two variants cannot be compared.
        OSError: A file cannot be read.
    """
    groups = {
        name: read_group(finished)
        for name, runs in sweep.variants.items()
        if (finished := [run.run_dir for run in runs if run.is_finished])
    }
    first = groups.get(next(iter(sweep.variants)), {})
    scores: dict[tuple[str, str], dict[str, GroupScore]] = {}
    pairs: dict[tuple[str, str], dict[str, tuple[PairedDifference, tuple[int, ...]]]] = {}
    settings = []
    for name, group in groups.items():
        for score in group_scores(group):
            scores.setdefault(_key(score.set_name, score.name), {})[name] = score
        if group is first or len(group.keys() & first.keys()) < 2:
            continue
        k_values = sweep.variants[name][0].config.eval.k_values
        for comparison in compare_groups(first, group, k_values=k_values, common_only=True):
            settings += [f"{name}: sampled with {text}" for text in comparison.different_settings]
            for difference in comparison.scores:
                key = _key(comparison.set_name, difference.name)
                pairs.setdefault(key, {})[name] = difference.paired, comparison.seeds
    rows: list[VariantScore] = []
    for key, by_variant in scores.items():
        paired = pairs.get(key, {})
        corrected = holm([difference.p_value for difference, _ in paired.values()])
        against = {
            name: AgainstFirst(difference, seeds, p_value)
            for (name, (difference, seeds)), p_value in zip(paired.items(), corrected, strict=True)
        }
        rows += [VariantScore(name, score, against.get(name)) for name, score in by_variant.items()]
    return rows, settings


def _key(set_name: str, score_name: str) -> tuple[str, str]:
    """What a score has in common with its difference from the first variant's.

    That is named ``A, B`` where the names differ, as those of avg@n do by n.
    """
    return set_name.rpartition(", ")[2], "avg" if score_name.startswith("avg@") else score_name


def print_table(
    sweep: Sweep, scores: Sequence[VariantScore], settings: Sequence[str], console: Console
) -> None:
    """Print the rows of ``read_scores``, its settings, and how to read them."""
    first, *others = sweep.variants
    headings = ["set", "score", "variant", "seeds", "mean", "95 % interval"]
    compared = [f"− {first}", "95 % interval", "p", "p, Holm"] if others else []
    rows = []
    for row in scores:
        score, against = row.score, row.against_first
        cells = [score.set_name, score.name, row.variant, str(len(score.by_seed))]
        cells += [f"{score.mean:.2%}", _interval(score.low, score.high, "")]
        differences = [_NONE] * 4
        if against is not None:
            paired = against.paired
            differences = [f"{paired.difference:+.2%}", _interval(paired.low, paired.high, "+")]
            differences += [f"{paired.p_value:.4f}", f"{against.corrected_p:.4f}"]
        rows.append(cells + differences[: len(compared)])
    console.print(rich_table(str(sweep.config.dir), headings + compared, rows, num_left=3))
    for line in (*settings, _METHOD):
        console.print(line, markup=False, highlight=False)


def _interval(low: float | None, high: float | None, sign: str) -> str:
    return _NONE if low is None or high is None else f"{low:{sign}.2%} … {high:{sign}.2%}"


def results_json(
    sweep: Sweep,
    scores: Sequence[VariantScore],
    settings: Sequence[str],
    failures: Mapping[str, str],
) -> dict[str, Any]:
    """Return everything as JSON values; docs/launch.md lists the fields."""
    return {
        "file": str(sweep.file),
        "variants": {name: list(overrides) for name, overrides in sweep.config.variants.items()},
        "runs": [
            {
                "variant": run.variant,
                "seed": run.seed,
                "run_dir": str(run.run_dir),
                "is_finished": run.is_finished,
                "failure": failures.get(run.label),
            }
            for run in sweep.runs
        ],
        "intervals": _METHOD,
        "different_settings": settings,
        "scores": [
            {"variant": row.variant, **asdict(row.score)}
            | {"against_first": row.against_first and asdict(row.against_first)}
            for row in scores
        ],
    }
