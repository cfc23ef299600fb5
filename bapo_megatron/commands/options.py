"""Arguments shared by several commands."""

from pathlib import Path
from typing import Annotated

import typer

from bapo_megatron.config.load import load_config
from bapo_megatron.config.schema import RunConfig
from bapo_megatron.runtime.gpus import GPUS, MAX_GPUS

ConfigArgument = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file of the run.")]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Dotted overrides: rollout.temperature=0.6"),
]
IgnoreFieldOption = Annotated[
    list[str] | None,
    typer.Option(help="As model.ignored_config_fields: a field of config.json; repeatable."),
]
GpuOption = Annotated[str, typer.Option(help=f"{', '.join(GPUS)}.")]
GpuMemoryOption = Annotated[
    float | None, typer.Option(min=1, max=1e6, help="GB per GPU; default: that GPU's.")
]
HostMemoryOption = Annotated[
    float | None, typer.Option(min=1, max=1e6, help="GB per node; default: no limit.")
]
NodeGpusOption = Annotated[int, typer.Option(min=1, max=MAX_GPUS, help="GPUs per node.")]
LocalLayersOption = Annotated[
    bool, typer.Option("--local-layers", help="Without Transformer Engine.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def load(config: Path, overrides: list[str] | None, *, resume: bool = False) -> RunConfig:
    """Return the validated configuration of a command, with ``resume=true`` for ``--resume``."""
    return load_config(config, [*(overrides or []), *["resume=true"] * resume])
