"""One random model for all tests of the session."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.engine.local.setting import make_model_dir

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen2 with the tiny tokenizer."""
    return make_model_dir(tmp_path_factory.mktemp("qwen2"))
