"""``bapo-megatron sweep``: variants of a configuration over several seeds, run and compared."""

import json
import shlex
from pathlib import Path
from typing import Annotated

import typer

from bapo_megatron.commands.options import JsonOption
from bapo_megatron.runtime.files import atomic_write_text
from bapo_megatron.telemetry.console import say, uncut_console
from bapo_megatron.tools.plot import draw_dynamics
from bapo_megatron.tools.sweep.file import load_sweep
from bapo_megatron.tools.sweep.results import print_table, read_scores, results_json
from bapo_megatron.tools.sweep.run import run_sweep, slurm_script


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
    if scores:
        finished = [run.run_dir for run in sweep.runs if run.is_finished]
        draw_dynamics(finished, directory / "sweep.png")
        say(f"scores: {directory}/sweep.json   figure: {directory}/sweep.png")
    for failure in failures:
        say(f"{failure.run.label} failed: {failure.reason}; log: {failure.run.log}")
    if failures:
        raise ValueError(
            f"{len(failures)} of {len(sweep.runs)} runs did not finish; correct the cause, and "
            "rerun the command to continue them"
        )
