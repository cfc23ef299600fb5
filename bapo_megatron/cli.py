"""The command line: parse, call, turn user errors into one line and a non-zero exit status."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Annotated

import typer

from bapo_megatron import cli_data
from bapo_megatron.cli_eval import compare, evaluate
from bapo_megatron.cli_grade import grade
from bapo_megatron.cli_options import ConfigArgument, OverridesArgument
from bapo_megatron.cli_options import load as _load
from bapo_megatron.interruption import end_by_exception
from bapo_megatron.parent import end_with_parent
from bapo_megatron.telemetry.console import uncut_console

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Reinforcement learning with verifiable rewards by BAPO.",
)

INTERRUPTED = 130
"""Exit status after Ctrl-C."""

app.add_typer(cli_data.app, name="data")


@app.command()
def train(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run; short for resume=true.")
    ] = False,
) -> None:
    """Train with BAPO; start it with torchrun for more than one rank."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # No rank outlives torchrun. SIGKILL, because Python runs no handler while a collective
        # waits in C++; what rank 0 started ends by itself once rank 0 is gone.
        end_with_parent(signal.SIGKILL)
    run_config = _load(config, [*(overrides or []), *(["resume=true"] if resume else [])])
    from bapo_megatron.policy.quiet import ignore_known_warnings

    ignore_known_warnings()  # before megatron is imported
    from bapo_megatron.trainer.loop import train as run_training
    from bapo_megatron.trainer.resume import how_to_continue

    try:
        run_training(run_config)
    except KeyboardInterrupt:
        # Typer would make a status of it, after which nobody knows the run.
        _complain(f"interrupted{how_to_continue(run_config)}")
        sys.exit(INTERRUPTED)


app.command("eval")(evaluate)
app.command()(compare)


@app.command()
def generate(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    steps: Annotated[int, typer.Option(min=1, help="Batches to generate.")] = 1,
) -> None:
    """Generate batches with model.path and the training prompts, without a trainer."""
    run_config = _load(config, overrides)
    from bapo_megatron.trainer.generate import generate_batches

    generate_batches(run_config, steps).print(uncut_console())


@app.command()
def serve(config: ConfigArgument, overrides: OverridesArgument = None) -> None:
    """Run rollout.server.count servers on this node until Ctrl-C, for a trainer elsewhere."""
    run_config = _load(config, overrides)
    from bapo_megatron.engine.load import load_kind

    load_kind(run_config.rollout.engine).serve(run_config, typer.echo)


@app.command()
def bounds(
    file: Annotated[Path, typer.Argument(help="npz or parquet with the tokens of one update.")],
    preset: Annotated[str, typer.Option(help="paper or recipe")] = "paper",
    contribution: Annotated[
        str | None, typer.Option(help="surrogate (Eq. 8) or gradient (Eq. 5)")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Search the clip bounds for tokens in FILE, by the code that trains.

    FILE holds the columns logprob, behaviour_logprob, advantage and, optionally, mask.
    """
    from bapo_megatron.algorithm.bounds_report import bounds_from_file
    from bapo_megatron.config.load import parse_section
    from bapo_megatron.config.schema import AlgorithmConfig

    given = {"preset": preset} | ({"contribution": contribution} if contribution else {})
    # The preset sets dual_clip as well, which is beside the search's own section.
    config = parse_section(AlgorithmConfig, {"bapo": given}, place="options")
    report = bounds_from_file(file, config.bapo, config.dual_clip)
    if as_json:
        typer.echo(json.dumps(report.to_json_dict(), indent=2))
    else:
        report.print(uncut_console())


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what was built, which kernels will run, and what does not fit together.

    The exit status is 1 if there is a problem.
    """
    from bapo_megatron.doctor import diagnose, print_report, probe, to_json

    findings = diagnose(probe())
    if as_json:
        typer.echo(to_json(findings))
    else:
        print_report(findings, uncut_console())
    if any(finding.verdict == "problem" for finding in findings):
        raise typer.Exit(1)


@app.command("make-tiny")
def make_tiny(
    out: Annotated[Path, typer.Argument(help="Directory for model/, train.jsonl, heldout.jsonl.")],
    seed: Annotated[int, typer.Option(help="Seed of data, initialisation and warm-up.")] = 0,
) -> None:
    """Make a tiny Qwen2 model with a supervised warm-up on sums, and its data (deterministic)."""
    from bapo_megatron.tiny import make_tiny as make

    report = make(out, seed=seed)
    typer.echo(
        f"made {report.model_dir} ({report.num_parameters:,} parameters) "
        f"in {report.warmup_s:.0f} s, final loss {report.final_loss:.3f}"
    )


@app.command()
def plot(
    run_dirs: Annotated[list[Path], typer.Argument(help="One or several run directories.")],
    out: Annotated[Path | None, typer.Option(help="Default: RUN_DIR/dynamics.png")] = None,
) -> None:
    """Draw the training dynamics of runs into one PNG."""
    from bapo_megatron.telemetry.figures import draw_dynamics

    target = out or run_dirs[0] / "dynamics.png"
    draw_dynamics(run_dirs, target)
    typer.echo(f"drew {target}")


@app.command()
def convert(
    source: Annotated[
        Path, typer.Argument(help="Hugging Face directory, or a torch_dist checkpoint (step_<n>).")
    ],
    target: Annotated[Path, typer.Argument(help="Directory to write, of the other kind.")],
    hf: Annotated[
        Path | None,
        typer.Option(
            help="config.json and tokenizer of a checkpoint that does not name its model."
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32 or bfloat16; default: as in SOURCE, bit by bit.")
    ] = None,
    max_file_gb: Annotated[
        float, typer.Option(help="Largest weight file (and host memory), in 10^9 bytes.")
    ] = 5.0,
    force: Annotated[
        bool, typer.Option("--force", help="Delete and replace a TARGET that is not empty.")
    ] = False,
) -> None:
    """Convert a Hugging Face model to a Megatron checkpoint, or a checkpoint to a model."""
    from bapo_megatron.policy.quiet import ignore_known_warnings

    ignore_known_warnings()  # before megatron is imported
    from bapo_megatron.policy.convert import Amount
    from bapo_megatron.policy.convert import convert as run_conversion
    from bapo_megatron.telemetry.progress import ProgressLine

    with ProgressLine() as progress:

        def report(done: Amount, total: Amount) -> None:
            progress.update(
                f"{done.num_bytes / total.num_bytes:.0%}: {done.num_tensors}/{total.num_tensors} "
                f"tensors, {done.num_bytes / 1e9:.1f}/{total.num_bytes / 1e9:.1f} GB"
            )

        start_s = time.monotonic()
        made = run_conversion(
            source,
            target,
            hf_dir=hf,
            dtype=dtype,
            max_file_bytes=int(max_file_gb * 1e9),
            force=force,
            report=report,
        )
    typer.echo(
        f"wrote {target} ({made.format}): {made.amount.num_tensors} tensors, "
        f"{made.amount.num_bytes / 1e9:.3g} GB {str(made.dtype).removeprefix('torch.')}, "
        f"{made.num_files} file{'s' * (made.num_files > 1)}, {time.monotonic() - start_s:.0f} s"
    )


@app.command()
def plan(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    gpus: Annotated[
        int | None, typer.Option(help="Trainer GPUs; default: those of one replica.")
    ] = None,
    gpu: Annotated[str, typer.Option(help="A100, H100, H200 or B200.")] = "H100",
    gpu_memory: Annotated[
        float | None, typer.Option(min=1, help="GB of one GPU; default: that GPU's.")
    ] = None,
    node_gpus: Annotated[int, typer.Option(min=1, help="GPUs of a node.")] = 8,
    mfu: Annotated[
        float, typer.Option(min=0.01, max=1, help="Share of the peak that products reach.")
    ] = 0.4,
    local_layers: Annotated[
        bool, typer.Option("--local-layers", help="Without Transformer Engine.")
    ] = False,
    prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Mean; default: 256, if prompts may be so long.")
    ] = None,
    response_tokens: Annotated[
        int | None, typer.Option(min=1, help="Mean; default: half of the longest.")
    ] = None,
    rollout_gpus: Annotated[
        int | None, typer.Option(min=1, help="Default: rollout.servers', else as the trainer.")
    ] = None,
    rollout_tokens_per_s: Annotated[
        float | None, typer.Option(min=0.001, help="Of one rollout GPU; default: estimated.")
    ] = None,
    model_config: Annotated[
        Path | None, typer.Option(help="A config.json; default: that of model.path.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Compare parameters with Megatron's own model.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Estimate memory, messages and time of CONFIG on a cluster, and list other layouts."""
    run_config = _load(config, overrides)
    from bapo_megatron.planning.command import show_plan
    from bapo_megatron.planning.plan import PlanOptions

    options = PlanOptions(
        gpus=gpus,
        gpu=gpu,
        gpu_memory_gb=gpu_memory,
        node_gpus=node_gpus,
        mfu_share=mfu,
        layers="local" if local_layers else "transformer-engine",
        prompt_tokens=prompt_tokens,
        response_tokens=response_tokens,
        rollout_gpus=rollout_gpus,
        rollout_tokens_per_s=rollout_tokens_per_s,
    )
    show_plan(run_config, options, config_file=model_config, check=check, as_json=as_json)


app.command()(grade)


@app.command("config")
def show_config(
    config: Annotated[Path | None, typer.Argument(metavar="[CONFIG]")] = None,
    overrides: OverridesArgument = None,
) -> None:
    """Print the resolved CONFIG; without one, every key with type, default and meaning."""
    from bapo_megatron.config.describe import print_keys
    from bapo_megatron.config.load import dump_yaml

    if config is not None:
        typer.echo(dump_yaml(_load(config, overrides)), nl=False)
    else:
        print_keys(uncut_console())


def main() -> None:
    """Run the command line.

    What a user can cause (``ValueError``, ``OSError``, ``RolloutError``) becomes one line, and so
    does the end of another rank; anything else is a defect and keeps its traceback.
    ``BAPO_TRACEBACK=1`` shows every traceback.
    """
    end_by_exception()
    try:
        # standalone_mode=False returns the status that a command asked for instead of exiting; an
        # interrupt inside a command comes back as a status too.
        status = app(standalone_mode=False)
    except KeyboardInterrupt:
        status = INTERRUPTED
    except typer.Exit as error:
        sys.exit(error.exit_code)
    except Exception as error:  # noqa: BLE001 - the last handler; defects keep their traceback
        error = _as_lost_peer(error)
        if os.environ.get("BAPO_TRACEBACK") == "1" or not _is_users(error):
            traceback.print_exception(error)
        else:
            _complain(_message(error))
        sys.exit(2 if _is_usage(error) else 1)
    if status == INTERRUPTED:
        _complain("interrupted")
    sys.exit(status)


def _is_usage(error: Exception) -> bool:
    from bapo_megatron.config.load import ConfigError

    return isinstance(error, typer.TyperException | ConfigError)


def _is_users(error: Exception) -> bool:
    from bapo_megatron.errors import RolloutError
    from bapo_megatron.reward.base import RewardError

    if _is_usage(error) or isinstance(error, ValueError | OSError | RolloutError | RewardError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    from bapo_megatron.distributed import LostPeerError  # imports torch, which takes seconds

    return isinstance(error, LostPeerError)


def _as_lost_peer(error: Exception) -> Exception:
    """Recognise another rank's end in the error of any collective, by whoever called it.

    Rank 0 keeps its traceback: where the network failed and no rank ended, one must say so.
    """
    if os.environ.get("RANK", "0") == "0" or not isinstance(error, RuntimeError):
        return error
    from bapo_megatron.distributed import LostPeerError, is_peer_loss

    if not is_peer_loss(error):
        return error
    lost = LostPeerError()
    lost.__cause__ = error
    return lost


def _message(error: Exception) -> str:
    return error.format_message() if isinstance(error, typer.BadParameter) else str(error)


def _complain(line: str) -> None:
    """Print an error line; under torchrun every rank has its own."""
    rank = os.environ.get("RANK")
    place = f"[rank {rank}] " if rank not in (None, "0") else ""
    print(f"{place}bapo-megatron: {line}", file=sys.stderr, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
