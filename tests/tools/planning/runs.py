"""Configurations to plan."""

from __future__ import annotations

import json
from typing import Any

from bapo_megatron.config.schema import RunConfig
from bapo_megatron.policy.hf_config import HfConfig
from bapo_megatron.tools.planning.hardware import LayerKind
from bapo_megatron.tools.planning.layout import Layout
from bapo_megatron.tools.planning.plan import PlanOptions, make_assumptions
from bapo_megatron.tools.planning.workload import Passes, Scenario


def run_config(**settings: Any) -> RunConfig:
    """A run with the sections given, the rest by default."""
    given = {"name": "run", "run_dir": "runs/run", "model": {"path": "models/none"}, **settings}
    return RunConfig.model_validate_json(json.dumps(given))


def scenario(
    hf: HfConfig, layout: Layout, layers: LayerKind = "transformer-engine", **settings: Any
) -> Scenario:
    """Such a run of a model in a layout, whose steps have nothing but a loss pass per update."""
    config = run_config(**settings)
    assumptions = make_assumptions(config, layout.gpus, PlanOptions(layers=layers))
    return Scenario(config, hf, layout, assumptions, Passes(forward_only=0, repeated=0.0))
