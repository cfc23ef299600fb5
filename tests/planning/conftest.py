from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.launch import REPOSITORY


@pytest.fixture(scope="session")
def measured() -> dict[str, Any]:
    """What Megatron builds, keeps and sends (tests/planning/measured.py)."""
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.planning.measured"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)
