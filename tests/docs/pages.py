"""The Markdown pages of the repository, taken apart: code blocks, code spans, links, anchors."""

import re
from pathlib import Path
from typing import NamedTuple

from tests.launch import REPOSITORY

PAGES = sorted(
    [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md"), *REPOSITORY.glob("csrc/*.md")]
)
CURRENT = [
    page for page in PAGES if page.name != "changelog.md" and page.parent.name != "benchmarks"
]
"""Without the changelog and measurements of named commits, which also name what is gone."""

_FENCE = re.compile(
    r"^(?P<indent> *)(?P<fence>`{3,})(?P<info>[^\n`]*)\n(?P<code>.*?)^(?P=indent)(?P=fence)$",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    title: str
    """``title="…"`` after the language; empty without."""
    code: str

    @property
    def place(self) -> str:
        """Page and line, for messages and names of tests."""
        return f"{name_of(self.page)}:{self.line}"


def name_of(page: Path) -> str:
    """The path of a page in the repository."""
    return str(page.relative_to(REPOSITORY))


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page."""
    text = page.read_text()
    fenced = []
    for match in _FENCE.finditer(text):
        language, _, title = match["info"].partition(" ")
        line = text.count("\n", 0, match.start()) + 1
        title = title.removeprefix('title="').removesuffix('"')
        fenced.append(Block(page, line, language, title, match["code"]))
    return fenced


def prose(page: Path) -> str:
    """The text of a page without its fenced blocks; every other line keeps its number."""
    return _FENCE.sub(lambda match: "\n" * match[0].count("\n"), page.read_text())


def spans(page: Path) -> list[str]:
    """The code spans of a page, on one line each, without other frameworks' in migrating.md."""
    text = prose(page)
    if page.name == "migrating.md":
        text = re.sub(r"^(\| [^|]*\|).*", r"\1", text, flags=re.MULTILINE)
    return [" ".join(code.split()) for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", text)]


def links(page: Path) -> list[str]:
    """The targets of a page's links and images."""
    text = re.sub(r"(?<!`)`[^`]+`(?!`)", "`", prose(page))
    return re.findall(r"\]\(\s*<?([^\s)>]+)>?\s*\)", text)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings as code hosts make them; headings have no links."""
    headings = re.findall(r"^#{1,6} +(.+?)\s*$", prose(page), re.MULTILINE)
    slugs = [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
    assert len(slugs) == len(set(slugs)), f"{name_of(page)}: two headings have one anchor"
    return set(slugs)
