"""Models of every family, and their conversions, for the tests of ``convert``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.policy.convert_models import convert_models, make_models


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def converted(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return convert_models(models, tmp_path_factory.mktemp("converted"))
