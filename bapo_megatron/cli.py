"""The command line: the commands, and errors as one line with a non-zero exit status."""

import importlib
import io
import json
import os
import re
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
    first_cause,
)
from bapo_megatron.runtime.exits import exits_noticed
from bapo_megatron.runtime.processes import (
    CLOSED_PIPE,
    RequestedExit,
    end_by_exception,
    own_compiler_cache,
    received_signal,
    write_stacks_on_signal,
)

INTERRUPTED = 130
"""Exit status after Ctrl-C."""

COMMANDS = {
    "init": "Write a first configuration for a model, a file of prompts and some GPUs.",
    "fetch": "Fetch the models and data sets of a configuration, and check those already here.",
    "train": "Train a policy; start several ranks with python -m bapo_megatron.torchrun.",
    "eval": "Evaluate model.path on the configured sets, or regrade saved samples.",
    "compare": "Compare two evaluations problem by problem, or two groups of runs seed by seed.",
    "sweep": "Train variants of a configuration over several seeds and compare them.",
    "generate": "Generate batches from the training prompts with model.path, without a trainer.",
    "serve": "Run rollout.server.count servers on this node until Ctrl-C, for a trainer elsewhere.",
    "plan": "Estimate memory, traffic and time of a run on a cluster, and list other layouts.",
    "config": "Print and check the resolved configuration; without CONFIG, list the keys.",
    "data": "Show the prompts of a run before it starts.",
    "samples": "Read a step's responses in the terminal, or save good ones as demonstrations.",
    "grade": "Score the responses in a file with the rewards of a run.",
    "bounds": "Search the clip bounds for the tokens of an update, as training does.",
    "report": "Write an HTML page about one or more runs: curves, checks, rollouts to read.",
    "convert": "Convert a Hugging Face model to a Megatron checkpoint, or a checkpoint to a model.",
    "doctor": "Report what was built, which kernels will run, and what does not fit together.",
}
"""Help line of each command; command ``x`` is ``commands.x.command``, or ``x show`` is
``commands.x.show``, and ``x save`` is ``commands.x.save``."""

_TILDE = re.compile(r"((?:--[a-z-]+=)?)(~(?:/.*)?)", re.DOTALL)
"""A path in the home directory; shells do not expand ``~`` after an option's ``=``."""

_MODULES = {"eval": "evaluate", "data": "data_show"}


class _Commands(TyperGroup):
    """Imports a command only when it is called, so that ``--help`` is fast."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        return name, command if name is None else _load(name), rest


def _load(name: str) -> Any:
    module = importlib.import_module(f"bapo_megatron.commands.{_MODULES.get(name, name)}")
    loaded = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    if hasattr(module, "show"):
        loaded.callback(help=COMMANDS[name], no_args_is_help=True)(_listed)
        for verb in ("show", "save"):
            if function := getattr(module, verb, None):
                loaded.command(verb)(function)
    else:
        loaded.command(name)(module.command)
    return typer.main.get_command(loaded)


app = typer.Typer(cls=_Commands, add_completion=False, pretty_exceptions_enable=False)


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context, version: Annotated[bool, typer.Option("--version")] = False
) -> None:
    """Reinforcement learning with verifiable rewards by BAPO."""
    if version:
        typer.echo(f"bapo-megatron {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        context.get_help()  # which prints it


def _listed() -> None:
    """Placeholder for a command until it is called."""


for _name, _help in COMMANDS.items():
    app.command(_name, help=_help)(_listed)


class _StandardOutput(io.FileIO):
    """Standard output whose errors name it; exits when the reader is gone."""

    def write(self, content: Any, /) -> int:
        if not content:  # a probe of typer, which /dev/full would refuse
            return 0
        try:
            return super().write(content)
        except OSError as error:
            # Discard the rest, which Python would write again at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            if isinstance(error, BrokenPipeError):
                raise RequestedExit(CLOSED_PIPE) from None
            raise OSError(error.errno, error.strerror, "standard output") from error


def _prepare() -> None:
    """Check the arguments and standard output, and expand ``~`` in the arguments.

    Adds the current directory to ``sys.path``, as ``python -m`` does: your code may be there.
    """
    here = str(Path.cwd())
    if not sys.flags.safe_path and here not in sys.path:
        sys.path.insert(0, here)
    for number, argument in enumerate(sys.argv[1:], start=1):
        try:
            argument.encode()
        except UnicodeEncodeError:
            shown = repr(os.fsencode(argument)).removeprefix("b")
            raise ValueError(
                f"argument {shown}: must be UTF-8, file names included; rename the file"
            ) from None
        if match := _TILDE.fullmatch(argument):
            sys.argv[number] = match[1] + str(Path(match[2]).expanduser())
    if sys.stdout is None:
        raise ValueError("standard output: closed; redirect it to a file, or to /dev/null")
    if sys.stdout is sys.__stdout__:
        output: Any = sys.stdout
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

    Errors that a user can cause (``ValueError``, ``OSError``, ``RolloutError``) and the loss of
    another rank become one line; anything else is a bug and keeps its traceback.
    ``BAPO_TRACEBACK=1`` shows every traceback.
    """
    end_by_exception()
    write_stacks_on_signal()
    try:
        _prepare()
        own_compiler_cache()
        with exits_noticed(_end_early):
            # standalone_mode=False returns the exit status instead of exiting, also for Ctrl-C
            # inside a command.
            status = app(standalone_mode=False)
        sys.stdout.flush()
    except KeyboardInterrupt:
        status = INTERRUPTED
    except InterruptedRunError as error:
        _complain(str(error))
        sys.exit(INTERRUPTED)
    except Exception as error:  # noqa: BLE001 - the last handler; bugs keep their traceback
        # torch's C++ code may replace the exception that a signal raised by another one.
        number = received_signal()
        status = _report(error) if number is None else 128 + number
        if status != INTERRUPTED:
            sys.exit(status)
    if status == INTERRUPTED:
        _complain("interrupted")
    sys.exit(status)


def _end_early(line: str) -> None:
    """Report that user or library code exits this process."""
    _complain(line)
    _tell_torchrun(line)


def _report(error: Exception) -> int:
    """Report the error that ended the command, and return the exit status."""
    from bapo_megatron.config.load import ConfigError
    from bapo_megatron.policy.checkpoint_files import CheckpointError
    from bapo_megatron.reward.base import RewardError
    from bapo_megatron.runtime.calls import cut_long_values

    lost_peer, cause = _lost_peer(error), first_cause(error)
    # Rank 0 keeps its traceback: if the network failed and no rank exited, one rank must say so.
    if lost_peer is not None and (lost_peer is error or os.environ.get("RANK", "0") != "0"):
        cause = lost_peer
    line = describe_cause(cause)
    if isinstance(cause, typer.BadParameter):
        line = " ".join(cause.format_message().split())
        line += "" if ";" in line else "; see --help"
    elif isinstance(cause, OSError) and cause.filename is not None:
        line = cut_long_values(f"{cause.filename}: {describe_os_error(cause)}")
    elif isinstance(cause, RolloutError):
        line = str(cause)  # may end with the last lines of a log
    is_usage = isinstance(cause, typer.TyperException | ConfigError)
    is_users = isinstance(cause, ValueError | OSError | RolloutError | RewardError)
    is_expected = is_usage or is_users or cause is lost_peer
    if os.environ.get("BAPO_TRACEBACK") == "1" or not is_expected:
        traceback.print_exception(error)
        line = f"{type(cause).__name__}: {line}"
    else:
        _complain(line)
    if lost_peer is None:
        _tell_torchrun(line, has_remedy=isinstance(cause, CheckpointError))
    return 2 if is_usage else 1


def _lost_peer(error: Exception) -> Exception | None:
    """Return a ``LostPeerError`` if a collective failed because another rank exited."""
    if not isinstance(error, RuntimeError):
        return None
    from bapo_megatron.runtime.distributed import LostPeerError, is_peer_loss  # torch takes seconds

    if isinstance(error, LostPeerError):
        return error
    return LostPeerError() if is_peer_loss(error) else None


def _complain(line: str) -> None:
    """Print an error line, with the rank unless it is 0.

    A single write, so that lines of two ranks do not mix.
    """
    from bapo_megatron.telemetry.console import visible  # a quarter of a second

    rank = os.environ.get("RANK")
    place = f"[rank {rank}] " if rank not in (None, "0") else ""
    sys.stderr.write(f"{place}bapo-megatron: {visible(line)}\n")
    sys.stderr.flush()


def _tell_torchrun(line: str, *, has_remedy: bool = False) -> None:
    """Pass the error to torchrun, which prints it last.

    With ``has_remedy`` the line already says how to continue.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        from bapo_megatron.telemetry.console import visible

        extra = {"timestamp": str(int(time.time())), "has_remedy": has_remedy}
        message = {"message": visible(line), "extraInfo": extra}
        Path(file).write_text(json.dumps({"message": message}))
