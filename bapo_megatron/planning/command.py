"""The ``plan`` command: find the architecture, plan, check, print."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from rich.console import Console

from bapo_megatron.planning.check import check_parameters
from bapo_megatron.planning.plan import make_plan
from bapo_megatron.planning.report import print_plan
from bapo_megatron.policy.hf_config import read_hf_config_file
from bapo_megatron.telemetry.console import uncut_console

if TYPE_CHECKING:
    from pathlib import Path

    from bapo_megatron.config.schema import RunConfig
    from bapo_megatron.planning.plan import PlanOptions
    from bapo_megatron.policy.hf_config import HfConfig


def show_plan(
    config: RunConfig,
    options: PlanOptions,
    *,
    config_file: Path | None,
    check: bool,
    as_json: bool,
) -> None:
    """Print the plan of a run.

    Args:
        config: The run.
        options: Hardware and mean lengths.
        config_file: As of ``read_architecture``.
        check: Compare the parameters with those of the model that Megatron builds.
        as_json: Print JSON instead of tables.

    Raises:
        ValueError: As by ``read_architecture`` and ``make_plan``.
    """
    hf = read_architecture(config.model.path, config_file)
    plan = make_plan(config, hf, options)
    if check:
        check_parameters(config, hf, plan.layout)
        Console(stderr=True).print("parameters: equal to Megatron's on every stage")
    if as_json:
        sys.stdout.write(json.dumps(plan.to_json_dict(), indent=2) + "\n")
    else:
        print_plan(plan, uncut_console())


def read_architecture(model_path: Path, config_file: Path | None) -> HfConfig:
    """Read the model's config.json; nothing else of it is needed.

    Args:
        model_path: ``model.path``.
        config_file: A config.json elsewhere; None: the one in ``model_path``.

    Raises:
        ValueError: There is none, or it describes a model that is not supported.
    """
    if config_file is not None:
        if not config_file.is_file():
            raise ValueError(f"--model-config: no such file '{config_file}'; give a config.json")
        return read_hf_config_file(config_file)
    path = model_path / "config.json"
    if not path.is_file():
        raise ValueError(
            f"model.path: '{model_path}' has no config.json; download that file of the model to it "
            "(hf download OWNER/MODEL config.json --local-dir DIRECTORY), or give --model-config "
            "FILE"
        )
    return read_hf_config_file(path)
