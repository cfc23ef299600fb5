"""``bapo-megatron make-tiny``."""

from pathlib import Path
from typing import Annotated

import typer

_MAX_SEED = 2**63 - 1
_MAX_EXPERTS = 256


def command(
    out: Annotated[Path, typer.Argument(help="Directory for model/, train.jsonl, heldout.jsonl.")],
    seed: Annotated[
        int, typer.Option(min=0, max=_MAX_SEED, help="Seed of data, initialisation and warm-up.")
    ] = 0,
    experts: Annotated[
        int, typer.Option(min=0, max=_MAX_EXPERTS, help="Experts of a layer; 0: a dense model.")
    ] = 0,
) -> None:
    """Make a tiny model, pretrained on sums, and its data (deterministic)."""
    from bapo_megatron.tiny.make import make_tiny  # transformers takes seconds
    from bapo_megatron.tiny.model import EXPERTS_PER_TOKEN

    if 0 < experts < EXPERTS_PER_TOKEN:
        raise typer.BadParameter(
            f"must be 0 or at least {EXPERTS_PER_TOKEN}", param_hint="--experts"
        )
    report = make_tiny(out, seed=seed, num_experts=experts)
    typer.echo(
        f"made {report.model_dir} ({report.num_parameters:,} parameters) "
        f"in {report.warmup_s:.0f} s, final loss {report.final_loss:.3f}"
    )
