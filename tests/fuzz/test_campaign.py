"""Bad input gets one line with its place: known cases by name, and a part of the campaign."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.fuzz.known_commands import KNOWN
from tests.launch import REPOSITORY

pytestmark = pytest.mark.slow
NUM_CASES = 40


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """How each case ended, by its name."""
    out = tmp_path_factory.mktemp("campaign") / "cases.jsonl"
    campaign = [sys.executable, "-m", "tests.fuzz.campaign", "--cases", str(NUM_CASES)]
    done = subprocess.run(
        [*campaign, "--seed", "0", "--out", str(out)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert out.exists(), done.stderr
    cases = [json.loads(line) for line in out.read_text().splitlines()]
    return {case["name"]: case for case in cases}


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_case_is_one_line_with_its_place(
    name: str, ended: dict[str, dict[str, Any]]
) -> None:
    assert ended[name]["fault"] == "", ended[name]


def test_no_case_of_the_campaign_is_accepted_hangs_or_ends_in_a_traceback(
    ended: dict[str, dict[str, Any]],
) -> None:
    others = [case for name, case in ended.items() if name not in KNOWN]
    assert len(others) == NUM_CASES
    assert [case for case in others if case["fault"]] == []
