"""Configurations to plan."""

from __future__ import annotations

import json
from typing import Any

from bapo_megatron.config.schema import RunConfig


def run_config(**settings: Any) -> RunConfig:
    """A run with the sections given, the rest by default."""
    given = {"name": "run", "run_dir": "runs/run", "model": {"path": "models/none"}, **settings}
    return RunConfig.model_validate_json(json.dumps(given))
