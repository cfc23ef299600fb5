"""``bapo-megatron convert``."""

import time
from pathlib import Path
from typing import Annotated

import typer

from bapo_megatron.commands.options import IgnoreFieldOption
from bapo_megatron.telemetry.console import ProgressLine


def command(
    source: Annotated[
        Path, typer.Argument(help="Hugging Face directory, or a torch_dist checkpoint (step_<n>).")
    ],
    target: Annotated[Path, typer.Argument(help="Directory to write, in the other format.")],
    hf: Annotated[
        Path | None,
        typer.Option(
            help="Model directory with config.json and tokenizer, if SOURCE does not name one."
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32 or bfloat16; default: that of SOURCE.")
    ] = None,
    max_file_gb: Annotated[
        float,
        typer.Option(
            min=1e-6,
            max=1e6,
            help="Size limit of a weight file, and of host memory, in 10^9 bytes.",
        ),
    ] = 5.0,
    ignore_field: IgnoreFieldOption = None,
    force: Annotated[
        bool, typer.Option("--force", help="Delete and replace a TARGET that is not empty.")
    ] = False,
) -> None:
    """Convert a Hugging Face model to a Megatron checkpoint, or a checkpoint to a model."""
    from bapo_megatron.policy.megatron_import import import_megatron

    import_megatron()
    from bapo_megatron.policy.convert import convert as run_conversion

    with ProgressLine() as progress:

        def report(done_bytes: int, total_bytes: int) -> None:
            done_gb, total_gb = done_bytes / 1e9, total_bytes / 1e9
            progress.update(f"{done_gb / total_gb:.0%}: {done_gb:.1f}/{total_gb:.1f} GB")

        start_s = time.monotonic()
        result = run_conversion(
            source,
            target,
            hf_dir=hf,
            dtype=dtype,
            max_file_bytes=int(max_file_gb * 1e9),
            ignored_fields=ignore_field or (),
            force=force,
            report=report,
        )
    typer.echo(
        f"wrote {target} ({result.format}): {result.num_tensors} tensors, "
        f"{result.num_bytes / 1e9:.3g} GB {str(result.dtype).removeprefix('torch.')}, "
        f"{result.num_files} file{'s' * (result.num_files > 1)}, {time.monotonic() - start_s:.0f} s"
    )
