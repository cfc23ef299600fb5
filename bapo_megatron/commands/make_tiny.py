"""``bapo-megatron make-tiny``."""

from pathlib import Path
from typing import Annotated

import typer

_MAX_SEED = 2**63 - 1


def command(
    out: Annotated[Path, typer.Argument(help="Directory for model/, train.jsonl, heldout.jsonl.")],
    seed: Annotated[
        int, typer.Option(min=0, max=_MAX_SEED, help="Seed of data, initialisation and warm-up.")
    ] = 0,
) -> None:
    """Make a tiny Qwen2 model, pretrained on sums, and its data (deterministic)."""
    from bapo_megatron.tiny.make import make_tiny  # transformers takes seconds

    report = make_tiny(out, seed=seed)
    typer.echo(
        f"made {report.model_dir} ({report.num_parameters:,} parameters) "
        f"in {report.warmup_s:.0f} s, final loss {report.final_loss:.3f}"
    )
