"""Every file in configs/ can be planned, and the layouts of those for clusters are built."""

from dataclasses import replace

import pytest

from bapo_megatron.policy.architecture import Experts
from bapo_megatron.policy.hf_config import read_hf_config_file
from bapo_megatron.tools.planning.plan import PlanOptions, make_plan
from tests.config.shipped import CLUSTER_RUNS, FRAGMENTS, NAMES, hf_config_file, load_shipped
from tests.tools.planning.cases import PARAMETERS, layout_of, small_model


@pytest.mark.parametrize("name", CLUSTER_RUNS)
def test_the_layout_of_a_run_on_a_cluster_is_built_on_the_meta_device(name: str) -> None:
    config = load_shipped(name)
    parallel = config.parallel.model_dump(exclude_defaults=True, exclude={"timeout_s"})
    built = [(model, layout_of(sizes)) for model, sizes in PARAMETERS.values()]
    assert (hf_config_file(config).stem, layout_of(parallel)) in built


@pytest.mark.parametrize("name", [n for n in NAMES if n not in {*CLUSTER_RUNS, *FRAGMENTS}])
def test_the_small_runs_can_be_planned_too(name: str) -> None:
    experts = Experts(8, 2, 64) if "experts" in name else None
    model = replace(small_model("qwen2", 4), experts=experts)
    plan = make_plan(load_shipped(name), model, PlanOptions())
    assert plan.fits
    assert plan.step_s > 0


def test_a_model_with_experts_fits_on_four_nodes_and_its_routes_are_counted() -> None:
    config = load_shipped("qwen3-30b-a3b-32k")
    hf = read_hf_config_file(hf_config_file(config))
    plan = make_plan(config, hf, PlanOptions(trainer_gpus=32))
    assert plan.fits
    routes = 48 * 8 * 128 * 16 * (256 + 16384)  # a byte each, of prompts and responses
    assert (plan.disk[-1].what, plan.disk[-1].each_bytes) == ("its experts", routes)
    assert plan.disk[-1].number == plan.disk[2].number == 8


def test_a_hybrid_fits_on_four_nodes_and_its_states_are_counted() -> None:
    config = load_shipped("qwen3.5-27b-32k")
    plan = make_plan(
        config, read_hf_config_file(hf_config_file(config)), PlanOptions(trainer_gpus=32)
    )
    assert plan.fits
    # A state [128, 128] of each of 48 heads, float32, and three inputs of 10,240 channels, in 48
    # layers on two GPUs; keys and values of 4 heads of 256 channels in 16 layers.
    assert plan.rollout.state_bytes == 48 * (48 * 128 * 128 * 4 + 3 * 10_240 * 2) / 2
    assert plan.rollout.kv_bytes_per_token == 16 * 2 * 4 * 256 * 2 / 2


def test_without_a_number_of_gpus_the_fewest_that_fit_are_planned() -> None:
    config = load_shipped("qwen3-30b-a3b-32k")
    hf = read_hf_config_file(hf_config_file(config))
    plan = make_plan(config, hf, PlanOptions())
    assert (plan.trainer_gpus, plan.fits) == (16, True)
    assert not make_plan(config, hf, PlanOptions(trainer_gpus=8)).fits
    none_fits = make_plan(config, hf, PlanOptions(gpu_memory_gb=40))
    assert (none_fits.trainer_gpus, none_fits.fits) == (8, False)
