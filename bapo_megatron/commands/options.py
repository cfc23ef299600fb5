"""Arguments shared by several commands."""

from pathlib import Path
from typing import Annotated

import typer

from bapo_megatron.config.load import load_config
from bapo_megatron.config.schema import RunConfig

ConfigArgument = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file of the run.")]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Dotted overrides: rollout.temperature=0.6"),
]
IgnoreFieldOption = Annotated[
    list[str] | None,
    typer.Option(help="As model.ignored_config_fields: a field of config.json; repeatable."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def load(config: Path, overrides: list[str] | None, *, resume: bool = False) -> RunConfig:
    """Return the validated configuration of a command, with ``resume=true`` for ``--resume``."""
    return load_config(config, [*(overrides or []), *["resume=true"] * resume])
