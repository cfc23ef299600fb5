"""The table of commands; a user's error becomes one line and a non-zero exit status."""

import importlib
import io
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from bapo_megatron import __version__
from bapo_megatron.errors import (
    InterruptedRunError,
    RolloutError,
    describe_cause,
    describe_os_error,
    is_explained,
)
from bapo_megatron.runtime.exits import exits_noticed
from bapo_megatron.runtime.processes import (
    CLOSED_PIPE,
    RequestedExit,
    end_by_exception,
    own_compiler_cache,
    rank_mark,
    received_signal,
    write_stacks_on_signal,
)

INTERRUPTED = 130
"""Exit status after Ctrl-C."""

COMMANDS = {
    "init": "Write a first configuration for a model, a file of prompts and some GPUs.",
    "train": "Train a policy; start several ranks with python -m bapo_megatron.torchrun.",
    "eval": "Evaluate model.path on the configured sets, or grade earlier samples again.",
    "compare": "Compare two evaluations problem by problem, or two groups of runs seed by seed.",
    "sweep": "Train variants of a configuration by several seeds, and compare them.",
    "generate": "Generate batches from the training prompts with model.path, without a trainer.",
    "serve": "Run rollout.server.count servers on this node until Ctrl-C, for a trainer elsewhere.",
    "plan": "Estimate memory, messages and time of a run on a cluster, and list other layouts.",
    "config": "Print and check the resolved configuration; without CONFIG, list keys and meanings.",
    "data": "Show the prompts of a run before it starts.",
    "samples": "Read a step's responses in the terminal, sorted and filtered.",
    "grade": "Score the responses in a file with the rewards of a run.",
    "bounds": "Search the clip bounds for the tokens in a file, as training does.",
    "plot": "Draw the training dynamics of one or several runs as a PNG.",
    "report": "Write an HTML page about one run or several: curves, checks, rollouts to read.",
    "convert": "Convert a Hugging Face model to a Megatron checkpoint, or a checkpoint to a model.",
    "make-tiny": "Make a tiny Qwen2 model, warmed up on sums, and its data (deterministic).",
    "doctor": "Report what was built, which kernels will run, and what does not fit together.",
}
"""What ``--help`` says of each command. The code of ``x`` is ``commands.x.command``."""

_MODULES = {"eval": "evaluate", "data": "data_show", "make-tiny": "make_tiny"}


class _Commands(TyperGroup):
    """Imports a command when it is called, so that ``--help`` does not take seconds."""

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
    cls=_Commands, add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False
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


class _StandardOutput(io.FileIO):
    """Standard output whose errors name it; where its reader has ended, the command ends, too."""

    def write(self, content: Any, /) -> int:
        if not content:  # typer tries so whether it may write, and /dev/full refuses that
            return 0
        try:
            return super().write(content)
        except OSError as error:
            # Nobody gets what is left, which Python would try to write once more at its end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            if isinstance(error, BrokenPipeError):
                raise RequestedExit(CLOSED_PIPE) from None
            raise OSError(error.errno, error.strerror, "standard output") from error


def _prepare() -> None:
    """Check what every command is given: arguments and standard output, which gets its class."""
    for argument in sys.argv[1:]:
        try:
            argument.encode()
        except UnicodeEncodeError:
            shown = repr(os.fsencode(argument)).removeprefix("b")
            raise ValueError(
                f"argument {shown}: must be UTF-8, names of files, too; rename the file"
            ) from None
    output: Any = sys.stdout
    if sys.stdout is None:
        raise ValueError("standard output: closed; redirect it to a file, or to /dev/null")
    if sys.stdout is sys.__stdout__:
        raw: Any = _StandardOutput(output.fileno(), "w", closefd=False)
        sys.stdout = io.TextIOWrapper(
            raw if output.write_through else io.BufferedWriter(raw),
            output.encoding,
            output.errors,
            line_buffering=output.line_buffering,
            write_through=output.write_through,
        )


def main() -> None:
    """Run the command line.

    What a user can cause (``ValueError``, ``OSError``, ``RolloutError``) becomes one line, and so
    does the end of another rank; anything else is a defect and keeps its traceback.
    ``BAPO_TRACEBACK=1`` shows every traceback.
    """
    end_by_exception()
    write_stacks_on_signal()
    mark = rank_mark()
    try:
        if mark is not None:
            mark.touch()
        _prepare()
        own_compiler_cache()
        with exits_noticed(_end_early):
            # standalone_mode=False returns the status that a command asked for instead of exiting;
            # an interrupt inside a command comes back as a status too.
            status = app(standalone_mode=False)
        sys.stdout.flush()
    except KeyboardInterrupt:
        status = INTERRUPTED
    except InterruptedRunError as error:
        _complain(str(error))
        sys.exit(INTERRUPTED)
    except typer.Exit as error:
        sys.exit(error.exit_code)
    except Exception as error:  # noqa: BLE001 - the last handler; defects keep their traceback
        # torch's C++ code may drop the exception of a signal and raise another one.
        number = received_signal()
        status = _report(error) if number is None else 128 + number
        if status != INTERRUPTED:
            sys.exit(status)
    if status == INTERRUPTED:
        _complain("interrupted")
    if mark is not None:
        mark.unlink(missing_ok=True)
    sys.exit(status)


def _end_early(line: str) -> None:
    """Say that others' code ends this process."""
    _complain(line)
    _tell_torchrun(line)


def _report(error: Exception) -> int:
    """Say what ended the command, and return its exit status."""
    from bapo_megatron.config.load import ConfigError
    from bapo_megatron.policy.checkpoint_files import CheckpointError
    from bapo_megatron.reward.base import RewardError

    lost_peer = _as_lost_peer(error)
    error = lost_peer or error
    line = describe_cause(error)
    if isinstance(error, typer.BadParameter):
        line = " ".join(error.format_message().split())
        line += "" if ";" in line else "; see --help"
    elif isinstance(error, OSError) and (error.filename is not None or is_explained(error)):
        line = f"{error.filename or 'this process'}: {describe_os_error(error)}"
    elif isinstance(error, FileNotFoundError) and _is_homeless():
        line = "the current working directory has been deleted; change to another one"
    elif isinstance(error, RolloutError):
        line = str(error)  # may end with the last lines of a log
    is_usage = isinstance(error, typer.TyperException | ConfigError)
    is_users = isinstance(error, ValueError | OSError | RolloutError | RewardError)
    if os.environ.get("BAPO_TRACEBACK") == "1" or not (is_usage or is_users or lost_peer):
        traceback.print_exception(error)
        line = f"{type(error).__name__}: {line}"
    else:
        _complain(line)
    if not _is_peer_loss(error):
        _tell_torchrun(line, has_remedy=isinstance(error, CheckpointError))
    return 2 if is_usage else 1


def _is_homeless() -> bool:
    """Whether the working directory is gone: ``os.getcwd`` then names no file in its error."""
    try:
        Path.cwd()
    except FileNotFoundError:
        return True
    return False


def _as_lost_peer(error: Exception) -> Exception | None:
    """Return a ``LostPeerError`` if a collective, whoever called it, failed because a rank ended.

    Rank 0 keeps its traceback: if the network failed and no rank ended, one rank must say so.
    """
    if not _is_peer_loss(error):
        return None
    from bapo_megatron.runtime.distributed import LostPeerError

    if isinstance(error, LostPeerError):
        return error
    if os.environ.get("RANK", "0") == "0":
        return None
    lost = LostPeerError()
    lost.__cause__ = error
    return lost


def _is_peer_loss(error: Exception) -> bool:
    if not isinstance(error, RuntimeError):
        return False
    from bapo_megatron.runtime.distributed import LostPeerError, is_peer_loss  # torch takes seconds

    return isinstance(error, LostPeerError) or is_peer_loss(error)


def _complain(line: str) -> None:
    """Print an error line, which names the rank unless it is rank 0.

    In one write, else the lines of two ranks may mix.
    """
    from bapo_megatron.telemetry.console import visible  # a quarter of a second

    rank = os.environ.get("RANK")
    place = f"[rank {rank}] " if rank not in (None, "0") else ""
    sys.stderr.write(f"{place}bapo-megatron: {visible(line)}\n")
    sys.stderr.flush()


def _tell_torchrun(line: str, *, has_remedy: bool = False) -> None:
    """Give torchrun the error for its own report, the last thing that it prints.

    With ``has_remedy`` the line says how to continue, and nothing is to be added.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        from bapo_megatron.telemetry.console import visible  # a quarter of a second

        extra = {"timestamp": str(int(time.time())), "has_remedy": has_remedy}
        message = {"message": visible(line), "extraInfo": extra}
        Path(file).write_text(json.dumps({"message": message}))
