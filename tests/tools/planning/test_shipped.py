"""Every file in configs/ can be planned, and the layouts of the paper's are built."""

from __future__ import annotations

import pytest

from bapo_megatron.tools.planning.plan import PlanOptions, make_plan
from tests.config.shipped import FRAGMENTS, NAMES, PAPER_RUNS, hf_config_file, load_shipped
from tests.tools.planning.cases import PARAMETERS, layout_of, small_model


@pytest.mark.parametrize("name", PAPER_RUNS)
def test_the_layout_of_a_run_of_the_paper_is_built_on_the_meta_device(name: str) -> None:
    config = load_shipped(name)
    parallel = config.parallel.model_dump(exclude_defaults=True, exclude={"timeout_s"})
    built = [(model, layout_of(sizes)) for model, sizes in PARAMETERS.values()]
    assert (hf_config_file(config).stem, layout_of(parallel)) in built


@pytest.mark.parametrize("name", [n for n in NAMES if n not in {*PAPER_RUNS, *FRAGMENTS}])
def test_the_small_runs_can_be_planned_too(name: str) -> None:
    plan = make_plan(load_shipped(name), small_model("qwen2", 4), PlanOptions())
    assert plan.fits
    assert plan.step_s > 0
