"""The changelog lists versions by SemVer, the newest first, and has the one of the package."""

from __future__ import annotations

import re

from bapo_megatron import __version__
from tests.launch import REPOSITORY

TEXT = (REPOSITORY / "docs" / "changelog.md").read_text()


def test_versions_are_listed_from_the_newest_with_what_is_unreleased_on_top() -> None:
    first, *versions = re.findall(r"^## (.+)$", TEXT, re.MULTILINE)
    assert first == "Unreleased"
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", version) for version in versions)
    numbers = [tuple(map(int, version.split("."))) for version in versions]
    assert numbers == sorted(set(numbers), reverse=True)
    assert versions[0] == __version__


def test_changes_are_of_three_kinds() -> None:
    assert set(re.findall(r"^### (.+)$", TEXT, re.MULTILINE)) <= {"Breaking", "Added", "Changed"}
