"""Bad input that once was a traceback or silently accepted gets one line with its place.

The random cases are a command of their own, ``make fuzz``.
"""

import json
from typing import Any

import pytest

from tests.distributed_launch import start_fork
from tests.fuzz.campaign import main
from tests.fuzz.known import KNOWN

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """How each case ended, by its name."""
    out = tmp_path_factory.mktemp("campaign") / "cases.jsonl"
    process = start_fork(main, ["--cases=0", f"--out={out}"])
    process.join(500)
    assert process.exitcode in (0, 1)  # 1 where a case has a fault
    cases = [json.loads(line) for line in out.read_text().splitlines()]
    return {case["name"]: case for case in cases}


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_case_is_one_line_with_its_place(
    name: str, outcomes: dict[str, dict[str, Any]]
) -> None:
    assert outcomes[name]["fault"] == "", outcomes[name]
