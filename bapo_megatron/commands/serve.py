"""``bapo-megatron serve``."""

import typer

from bapo_megatron.commands.options import ConfigArgument, OverridesArgument, load
from bapo_megatron.engine.load import load_kind


def command(config: ConfigArgument, overrides: OverridesArgument = None) -> None:
    """Run rollout.server.count servers on this node until Ctrl-C, for a trainer elsewhere."""
    run_config = load(config, overrides)
    load_kind(run_config.rollout.engine).serve(run_config, typer.echo)
