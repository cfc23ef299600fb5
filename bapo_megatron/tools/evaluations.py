"""The evaluations in run directories, of one run or of the seeds of a group."""

import re
from collections.abc import Sequence
from pathlib import Path

from bapo_megatron.evaluation.report import read_results
from bapo_megatron.evaluation.settings import ResultsError
from bapo_megatron.tools.compare import Results, ResultsBySeed

_FILE = re.compile(r"step_(\d+)\.json")
_PATTERN = re.compile(r"[*?\[]")


def evaluations_in(run_dir: Path) -> dict[int, Path]:
    """Return the results files of a training run by step, ascending; 0 is before training."""
    start = run_dir / "eval" / "start.json"
    found = {0: start} if start.exists() else {}
    for path in run_dir.glob("eval/step_*.json"):
        if match := _FILE.fullmatch(path.name):
            found[int(match[1])] = path
    return dict(sorted(found.items()))


def newest_results(run_dir: Path) -> Path | None:
    """Return the file of a run's newest scores: of ``eval``, else of its last evaluated step."""
    alone = run_dir / "eval.json"
    if alone.exists():
        return alone
    return next(reversed(evaluations_in(run_dir).values()), None)


def find_group(path: Path) -> list[Path]:
    """Return the runs that a directory of runs, or a pattern such as ``runs/a-seed*``, stands for.

    Sorted; empty where it is neither.
    """
    if not path.exists() and _PATTERN.search(str(path)):
        root = Path(path.anchor)
        found = root.glob(str(path.relative_to(root)))
    elif path.is_dir() and newest_results(path) is None:
        found = path.iterdir()
    else:
        return []
    return sorted(run for run in found if (run / "config.yaml").exists() or newest_results(run))


def read_group(run_dirs: Sequence[Path]) -> ResultsBySeed:
    """Read the newest scores of runs that differ in their seeds.

    Raises:
        ResultsError: A run has no scores, not those of the same step, or no seed of its own.
        OSError: A file cannot be read.
    """
    group: dict[int, Results] = {}
    files = [newest_results(run_dir) for run_dir in run_dirs]
    for run_dir, file in zip(run_dirs, files, strict=True):
        if file is None:
            raise ResultsError(
                f"{run_dir}: has no evaluation yet; finish the run, or name a group without it"
            )
        if files[0] is not None and file.name != files[0].name:
            raise ResultsError(
                f"{file}: its newest evaluation must be that of the others, {files[0].name}; "
                "finish the runs of the group"
            )
        results = read_results(file)
        seed = results[0].settings.get("seed")
        if not isinstance(seed, int):
            raise ResultsError(f"{file}: does not tell its seed; evaluate the run again")
        if seed in group:
            raise ResultsError(
                f"{file}: has the seed {seed}, as another run of its group; give the runs of one "
                "group different seeds"
            )
        group[seed] = results
    return group
