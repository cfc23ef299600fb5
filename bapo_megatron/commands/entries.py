"""Lines, tables and entries for people: panels on a terminal, else Markdown.

What a model or a data file wrote is shown as it is: it is neither markup nor obeyed.
"""

import re
from collections.abc import Sequence

from rich.console import Console, Group
from rich.panel import Panel
from rich.text import Text

from bapo_megatron.evaluation.report import markdown_table, rich_table
from bapo_megatron.telemetry.console import visible

_STYLES = {"heading": "bold", "fact": "dim", "row": "dim", "environment": "cyan"}
"""Look of the kinds of parts on a terminal; further kinds are plain text."""


def print_lines(console: Console, lines: Sequence[str]) -> None:
    """Print lines, in Markdown as paragraphs."""
    if console.is_terminal:
        console.print(Text(visible("\n".join(lines))), highlight=False)
    else:
        console.out(visible("\n\n".join(lines)), highlight=False)


def print_rows(
    console: Console,
    title: str,
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    num_left: int,
) -> None:
    """Print a table, its first ``num_left`` columns aligned to the left; Markdown has no title."""
    rows = [[visible(cell) for cell in row] for row in rows]
    if console.is_terminal:
        console.print(rich_table(title, headings, rows, num_left=num_left))
    else:
        console.out(markdown_table(headings, rows, num_left=num_left), highlight=False, end="")


def print_entry(
    console: Console,
    title: str,
    parts: Sequence[tuple[str, str]],
    special_tokens: Sequence[str] = (),
) -> None:
    """Print an entry: title, parts with their kinds; ``special_tokens`` in prompts are marked."""
    title, parts = visible(title), [(kind, visible(text)) for kind, text in parts]
    if console.is_terminal:
        texts = []
        for kind, text in parts:
            texts.append(Text("\n" * (kind == "heading") + text, _STYLES.get(kind, "")))
            if kind == "prompt" and special_tokens:
                texts[-1].highlight_words(special_tokens, "bold magenta")
        panel = Panel(Group(*texts), title=Text(title), title_align="left")
        console.print(panel, highlight=False)
        return
    lines, before = ["", f"### {title}"], ""
    for kind, text in parts:
        if not kind == before == "fact":
            lines.append("")
        marked = {"heading": f"**{text}**", "fact": f"- {text}", "row": text}
        lines.append(marked[kind] if kind in marked else _fenced(text))
        before = kind
    console.out("\n".join(lines), highlight=False)


def _fenced(text: str) -> str:
    """A text as a Markdown code block that nothing inside can end."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return "\n".join([fence, text.removesuffix("\n"), fence])
