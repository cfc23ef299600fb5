"""What the pages tell people to type, and the commands of this project in it."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from bapo_megatron.cli import app
from tests.docs.pages import blocks, name_of, prose, spans

if TYPE_CHECKING:
    from pathlib import Path

_SCRIPTS = {
    "single_node.sh": ["train"],
    "multi_node.sh": ["train"],
    "slurm.sbatch": ["train"],
    "rollout_servers.sh": ["serve"],
    "demo.sh": ["train", "configs/demo.yaml"],
}
"""Scripts of examples/ that pass their arguments to a command, and how that command begins."""


class Typed(NamedTuple):
    """A command of this project as a page shows it."""

    page: str
    arguments: tuple[str, ...]
    """From the name of the command on; the name of a placeholder is in capitals."""


def typed_commands(page: Path) -> list[Typed]:
    """The commands of a page: in blocks for the shell, indented, and in code spans."""
    indented = re.findall(r"^ {4}(?=\S*python |bapo-megatron ).*", prose(page), re.MULTILINE)
    texts = [block.code for block in blocks(page) if block.language == "sh"]
    texts += [*indented, *spans(page)]
    found = (arguments for text in texts for arguments in _commands_in(text))
    return [Typed(name_of(page), arguments) for arguments in dict.fromkeys(found)]


def _commands_in(text: str) -> list[tuple[str, ...]]:
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        for words in _simple_commands(line):
            if (arguments := _arguments(words)) is not None:
                found.append(tuple(arguments))
    return found


def _simple_commands(line: str) -> list[list[str]]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars="();<>|&")
    lexer.whitespace_split = True
    try:
        words = list(lexer)
    except ValueError:  # prose in a code span, such as an apostrophe
        return []
    commands: list[list[str]] = [[]]
    for word in words:
        if set(word) <= set("();<>|&"):
            commands.append([])
        else:
            commands[-1].append(word)
    return commands


def _arguments(words: list[str]) -> list[str] | None:
    """The arguments for bapo-megatron in a simple command; None if it does not call it."""
    for place, word in enumerate(words):
        rest = words[place + 1 :]
        is_program = word == "bapo-megatron" and all("=" in before for before in words[:place])
        if is_program or (word == "-m" and rest[:1] == ["bapo_megatron"]):
            rest = rest if is_program else rest[1:]
            return [part.strip("[]") if part[:2] == "[-" else part for part in rest] or None
        script = word.removeprefix("examples/")
        if word != script and script in _SCRIPTS and rest:
            own = rest[2:] if script == "demo.sh" else rest
            return [*_SCRIPTS[script], *own]
        if word != script and script == "evaluate.sh" and len(rest) >= 3:
            return ["eval", rest[0], f"model.path={rest[1]}", f"run_dir={rest[2]}", *rest[3:]]
    return None


def parse(arguments: tuple[str, ...]) -> dict[str, Any]:
    """Return the parameters of a command by name, without running it.

    Raises:
        typer.TyperException: There is no such command, or it does not take these arguments.
    """
    name, command, rest = _resolve(list(arguments))
    return command.make_context(name, rest).params


def options_of(name: str) -> set[str]:
    """The options of a command, those of its subcommands included."""
    _, command, _ = _resolve([name])
    parts = [command, *getattr(command, "commands", {}).values()]
    names = {name for part in parts for parameter in part.params for name in parameter.opts}
    return {name for name in names if name.startswith("-")}


def _resolve(arguments: list[str]) -> tuple[str, Any, list[str]]:
    command: Any = typer.main.get_command(app)
    name = "bapo-megatron"
    while arguments and hasattr(command, "resolve_command"):
        context = command.context_class(command, info_name=name)
        name, command, arguments = command.resolve_command(context, arguments)
    return name, command, arguments
