"""``bapo-megatron serve``."""

from typing import Annotated

import typer

from bapo_megatron.commands.options import ConfigArgument, OverridesArgument, load
from bapo_megatron.config.load import ConfigError
from bapo_megatron.config.rollout import WITH_SERVERS
from bapo_megatron.config.scorers import TEACHER_KEY
from bapo_megatron.config.section import with_values
from bapo_megatron.engine.load import load_kind


def command(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    teacher: Annotated[
        bool, typer.Option("--teacher", help="Serve the teacher of algorithm.distillation.")
    ] = False,
) -> None:
    """Run rollout.server.count servers on this node until Ctrl-C, for a trainer elsewhere."""
    run = load(config, overrides)
    if not teacher:
        load_kind(run.rollout.engine).serve(run, typer.echo)
        return
    path = run.algorithm.distillation.teacher.path
    if path is None:
        raise ConfigError(
            f"{TEACHER_KEY}.path: must name the teacher for serve --teacher, got none; set it"
        )
    served = with_values(run, model={"path": path}, rollout={"colocated": False})
    served = served.without_router_replay()
    engine = run.algorithm.distillation.teacher.engine
    kind = load_kind(engine if engine in WITH_SERVERS else WITH_SERVERS[0])
    kind.serve(served, typer.echo, key=f"{TEACHER_KEY}.servers")
