"""Configuration files, and what loading them says."""

from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.config.load import ConfigError, load_config
from bapo_megatron.config.schema import RunConfig

BASE = "name: demo\nrun_dir: runs/demo\nmodel: {path: models/tiny}\n"


def write(folder: Path, text: str, name: str = "a.yaml") -> Path:
    (folder / name).write_text(text)
    return folder / name


def error_of(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def run_config(run_dir: Path, **changes: Any) -> RunConfig:
    """A run named ``sums``, of files that need not exist; ``changes`` are whole sections."""
    settings: dict[str, Any] = {
        "name": "sums",
        "run_dir": run_dir,
        "model": {"path": "model"},
        "data": {"train": {"path": "train.jsonl"}},
    }
    return RunConfig.model_validate(settings | changes)
