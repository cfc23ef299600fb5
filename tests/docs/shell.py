"""What the pages tell people to type, and the commands of this project in it."""

import re
import shlex
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import typer

from bapo_megatron.cli import app
from tests.docs.pages import blocks, name_of, prose, spans

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


def typed_commands(page: Path) -> list[Typed]:
    """The commands of a page: in blocks for the shell, indented, and in code spans."""
    indented = re.findall(r"^ {4}(?=\S*python |bapo-megatron ).*", prose(page), re.MULTILINE)
    texts = [block.code for block in blocks(page) if block.language == "sh"]
    lines = [line for text in texts for line in text.replace("\\\n", " ").splitlines()]
    commands = (_arguments(c) for line in (*lines, *indented, *spans(page)) for c in _simple(line))
    return [Typed(name_of(page), arguments) for arguments in dict.fromkeys(commands) if arguments]


def _simple(line: str) -> list[list[str]]:
    """The simple commands of a line; none in prose, such as an apostrophe."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="();<>|&")
    lexer.whitespace_split = True
    try:
        words = list(lexer)
    except ValueError:
        return []
    parts = groupby(words, lambda word: set(word) <= set("();<>|&"))
    return [list(part) for is_between, part in parts if not is_between]


def _arguments(words: list[str]) -> tuple[str, ...]:
    """The arguments for bapo-megatron in a simple command; () if it does not call it."""
    for place, word in enumerate(words):
        rest = words[place + 1 :]
        is_program = word == "bapo-megatron" and all("=" in before for before in words[:place])
        if is_program or (word == "-m" and rest[:1] == ["bapo_megatron"]):
            rest = rest if is_program else rest[1:]
            return tuple(part.strip("[]") if part[:2] == "[-" else part for part in rest)
        script = word.removeprefix("examples/")
        if word != script and script in _SCRIPTS and rest:
            return (*_SCRIPTS[script], *(rest[2:] if script == "demo.sh" else rest))
        if word != script and script == "evaluate.sh" and len(rest) >= 3:
            return ("eval", rest[0], f"model.path={rest[1]}", f"run_dir={rest[2]}", *rest[3:])
    return ()


def parse(arguments: tuple[str, ...]) -> dict[str, Any]:
    """Return the parameters of a command by name, without running it; raise if it takes others."""
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
