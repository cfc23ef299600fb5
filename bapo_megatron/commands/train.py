"""``bapo-megatron train``."""

import os
import signal
from typing import Annotated

import typer

from bapo_megatron.commands.options import ConfigArgument, OverridesArgument, load
from bapo_megatron.errors import InterruptedRunError, StoppedError
from bapo_megatron.runtime.processes import end_with_parent
from bapo_megatron.telemetry.console import say
from bapo_megatron.trainer.stopping import Stopping


def command(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run; short for resume=true.")
    ] = False,
) -> None:
    """Train a policy; start several ranks with python -m bapo_megatron.torchrun."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # No rank outlives torchrun. SIGKILL, because Python runs no handler while a collective
        # waits in C++; what rank 0 started ends by itself once rank 0 is gone.
        end_with_parent(signal.SIGKILL)
    run_config = load(config, overrides, resume=resume)
    is_first = os.environ.get("RANK", "0") == "0"
    stopping = Stopping(run_config.train)
    stopping.listen(keeps_time=is_first)
    from bapo_megatron.trainer.opening import how_to_continue, open_run

    try:
        with open_run(run_config, stopping) as opening:
            from bapo_megatron.policy.megatron_import import import_megatron

            import_megatron()  # takes seconds, while the engine starts
            from bapo_megatron.trainer.loop import train as run_training

            run_training(run_config, stopping, opening)
    except StoppedError as stopped:
        if is_first:
            line = f"{stopped}{how_to_continue(run_config.run_dir)}"
            if stopping.is_interrupted:  # a calling script must not go on
                raise InterruptedRunError(line) from None
            say(line)
    except KeyboardInterrupt:
        # Typer would exit with a status alone, without saying how to continue.
        raise InterruptedRunError(f"interrupted{how_to_continue(run_config.run_dir)}") from None
