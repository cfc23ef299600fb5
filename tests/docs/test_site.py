"""The documentation as a site: complete, without a warning, and without a request to others."""

import asyncio
import html
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from bapo_megatron.cli import COMMANDS
from bapo_megatron.config.describe import describe_keys
from tests.chromium import Tab, chromium_tab
from tests.docs.pages import PAGES, blocks, name_of, prose
from tests.docs.shell import options_of
from tests.launch import REPOSITORY

LOADS = (
    r"""<(?:script|img|iframe|link|source|video|object|embed)\b[^>]*?\b(?:src|href|data)=["']?"""
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; a warning is an error."""
    folder = tmp_path_factory.mktemp("site")
    result = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", folder],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    return folder


@pytest.mark.slow
@pytest.mark.exhaustive
def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 50
    for page in pages:
        assert not re.findall(LOADS + r"((?:https?:)?//[^\"'\s>]+)", page.read_text()), page
    for sheet in site.rglob("*.css"):
        assert not re.findall(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", sheet.read_text()), sheet


@pytest.mark.slow
def test_every_key_command_and_option_is_in_the_reference(site: Path) -> None:
    keys = html.unescape((site / "reference" / "configuration.html").read_text())
    for key in describe_keys():
        assert f"<code>{key.name}</code>" in keys, key.name
    commands = (site / "reference" / "commands.html").read_text()
    for name in COMMANDS:
        for option in options_of(name):
            assert re.search(rf"<code>[^<]*{option}\b", commands), (name, option)


@pytest.mark.slow
def test_the_api_has_what_the_examples_import(site: Path) -> None:
    api = (site / "reference" / "api.html").read_text()
    imported = [
        f"{module}.{name.strip()}"
        for block in blocks(REPOSITORY / "docs" / "extending.md")
        for module, names in re.findall(r"^from (bapo_megatron\S+) import (.+)$", block.code, re.M)
        for name in names.split(",")
        if module != "bapo_megatron.config.load"
    ]
    assert len(imported) >= 4
    for name in (*imported, "bapo_megatron.engine.base.Engine", "bapo_megatron.types.Sample"):
        assert f'id="{name}"' in api, name


@pytest.mark.slow
def test_links_to_files_beside_the_pages_lead_to_their_text(site: Path) -> None:
    assert "source/examples/rewards/service.py.html" in (site / "rewards.html").read_text()
    service = (site / "source" / "examples" / "rewards" / "service.py.html").read_text()
    assert "ThreadingHTTPServer" in service
    assert 'href="benchmarks/index.html"' in (site / "index.html").read_text()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_list_begins_after_an_empty_line(page: Path) -> None:
    """What code hosts show as a list is one on the site too."""
    item = re.compile(r"([-*]|\d+\.) ")
    lines = prose(page).splitlines()
    for before, line in pairwise(lines):
        if item.match(line):
            assert not before or before[0] == " " or item.match(before), line


@pytest.mark.browser
def test_the_search_finds_the_guide_first_in_pages_opened_from_files(
    site: Path, tmp_path: Path
) -> None:
    texts = {
        "dump_tokens": ("formats.html", "reference/configuration.html"),
        "checkpoint": ("formats.html", "reference/configuration.html"),
        "kernels": ("kernels.html", "benchmarks/gpu_h100_202611.html"),
    }

    async def look() -> Tab:
        async with chromium_tab(tmp_path / "profile") as tab:
            for words, (first, another) in texts.items():
                box = "document.querySelector('.md-search__input')"
                await tab.open((site / "index.html").as_uri(), f"{box} !== null")
                await tab.run(f"{box}.focus()")
                await tab.send("Input.insertText", text=words)
                links = "document.querySelectorAll('a.md-search-result__link')"
                await tab.until(f"{links}.length > 0")
                addresses = await tab.run(f"[...{links}].map(a => a.href)")
                assert addresses[0].startswith((site / first).as_uri()), words
                other = (site / another).as_uri()
                assert any(address.startswith(other) for address in addresses), words
        return tab

    tab = asyncio.run(look())
    assert tab.errors == []
    assert all(address.startswith(("file:", "data:")) for address in tab.requests)
