"""Every link of every page leads to a file that exists, and to a heading that it has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.docs.pages import PAGES, anchors, links, name_of
from tests.launch import REPOSITORY

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        if link.startswith(("https://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link}: no such file"
        assert target.is_relative_to(REPOSITORY), f"{link}: outside the repository"
        if anchor:
            assert target.suffix == ".md", f"{link}: only pages have anchors"
            assert anchor in anchors(target), f"{link}: no such heading"


def test_links_and_anchors_are_found_as_they_are_written(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# What c_low is, and `why`\n## Twice\n## Twice\n"
        "[a](b.md#c) `[no](link)` ![d\ne](<f g.png>) [h](i.png)\n"
        "```text\n# not a heading\n[no](link)\n```\n"
    )
    assert links(page) == ["b.md#c", "i.png"]
    assert anchors(page) == {"what-c_low-is-and-why", "twice", "twice-1"}


def test_every_page_is_reached_from_the_readme() -> None:
    reached: set[Path] = set()
    pending = [REPOSITORY / "README.md"]
    while pending:
        page = pending.pop()
        if page in reached:
            continue
        reached.add(page)
        for link in links(page):
            target = (page.parent / link.partition("#")[0]).resolve()
            if target.is_dir():
                pending += target.glob("*.md")
            elif target.suffix == ".md" and target.exists():
                pending.append(target)
    assert set(PAGES) <= reached
