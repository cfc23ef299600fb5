"""Configurations that tests break: a base to inherit from, and a runnable one."""

from pathlib import Path

import pytest

from bapo_megatron.config.check import check_config
from bapo_megatron.config.load import load_config
from tests.config.files import BASE, write_runnable


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A current directory with configs/base.yaml."""
    monkeypatch.chdir(tmp_path)
    Path("configs").mkdir()
    Path("configs/base.yaml").write_text(BASE)
    return Path("configs")


@pytest.fixture
def check(tmp_path, monkeypatch):
    """Checks a runnable configuration with overrides, in a directory with its files."""
    monkeypatch.chdir(tmp_path)
    path = write_runnable()
    Path("empty").mkdir()
    Path("dumps").mkdir()
    for step in (1, 2, 4):
        Path(f"dumps/step_{step:06d}.parquet").touch()

    def run(*overrides: str, world_size: int = 1) -> None:
        check_config(load_config(path, overrides), world_size)

    return run
