"""The table of commands; a user's error becomes one line and a non-zero exit status."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from bapo_megatron import __version__
from bapo_megatron.errors import InterruptedRunError, RolloutError
from bapo_megatron.processes import end_by_exception

INTERRUPTED = 130
"""Exit status after Ctrl-C."""

COMMANDS = {
    "train": "Train a policy; start it with torchrun for more than one rank.",
    "eval": "Score the configured evaluation sets with model.path, or grade samples again.",
    "compare": "Compare two evaluations on the same problems by a paired bootstrap.",
    "generate": "Generate batches with model.path and the training prompts, without a trainer.",
    "serve": "Run the configured engines on this node until Ctrl-C, for a trainer elsewhere.",
    "plan": "Estimate memory, messages and time of a run on a cluster, and list other layouts.",
    "config": "Print the resolved configuration; without CONFIG, every key with its meaning.",
    "data": "Look at prompts before a run, at responses after it.",
    "grade": "Score the responses in a file by the code that trains.",
    "bounds": "Search the clip bounds for tokens in a file, by the code that trains.",
    "plot": "Draw the training dynamics of runs into one PNG.",
    "convert": "Convert a Hugging Face model to a Megatron checkpoint, or a checkpoint to a model.",
    "make-tiny": "Make a tiny Qwen2 model with a warm-up on sums, and its data (deterministic).",
    "doctor": "Say what was built, which kernels will run, and what does not fit together.",
}
"""What ``--help`` says of each command. The code of ``x`` is ``commands.x.command``."""

_MODULES = {"eval": "evaluate", "data": "data_show", "make-tiny": "make_tiny"}


class _Commands(TyperGroup):
    """Imports a command when it is called, so that ``--help`` takes no seconds."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        return name, command if name is None else _load(name), rest


def _load(name: str) -> Any:
    module = importlib.import_module(f"bapo_megatron.commands.{_MODULES.get(name, name)}")
    if hasattr(module, "app"):
        return typer.main.get_command(module.app)
    single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    single.command(name)(module.command)
    return typer.main.get_command(single)


app = typer.Typer(
    cls=_Commands,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"bapo-megatron {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Reinforcement learning with verifiable rewards by BAPO."""


def _listed() -> None:
    """Stands for a command until it is called."""


for _name, _help in COMMANDS.items():
    app.command(_name, help=_help)(_listed)


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
    except InterruptedRunError as error:
        _complain(str(error))
        sys.exit(INTERRUPTED)
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
