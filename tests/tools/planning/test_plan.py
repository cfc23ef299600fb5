"""Whole plans: memory by hand, verdicts, the list of layouts, errors."""

from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.config.section import with_values
from bapo_megatron.tools.planning.memory import NoRoomError
from bapo_megatron.tools.planning.plan import (
    MODES,
    LayoutEstimate,
    Plan,
    PlanOptions,
    choose_layout,
    make_plan,
)
from bapo_megatron.tools.planning.scenario import Passes
from tests.tools.planning.cases import published, qwen3, run_config
from tests.tools.planning.one_gpu import draft

RUN_7B: dict[str, Any] = {
    "parallel": {"tensor": 4, "sequence": True},
    "rollout": {"groups_per_step": 64, "samples_per_group": 16, "max_response_tokens": 8192},
    "train": {"max_tokens_per_micro_batch": 16384},
}


def plan_7b(options: PlanOptions | None = None, **changes: Any) -> Plan:
    config = run_config(**{**RUN_7B, **changes})
    return make_plan(config, published("deepseek-r1-distill-qwen-7b"), options or PlanOptions())


def test_the_memory_of_the_7b_run_by_hand() -> None:
    (stage,) = plan_7b(PlanOptions(trainer_gpus=8)).stages
    # 28 layers and two tables of 152,064 × 3584, over 4 ranks; 57 norms whole.
    layer = (2 * 3584**2 + 2 * 512 * 3584 + 3 * 3584 * 18944 + 3584 + 2 * 512) // 4
    parameters = 28 * layer + 2 * 152_064 * 3584 // 4 + 57 * 3584
    assert stage.parameters == parameters == 1_904_057_344
    assert stage.weights_bytes == 2 * parameters
    assert stage.gradients_bytes == 4 * parameters
    assert stage.optimizer_bytes == 12 * parameters / 2  # over two data-parallel ranks
    assert stage.activations_bytes == 28 * 41_758 * 16384
    logits = 16384 * 38_016 * 2  # 152,064 columns over 4 ranks, in bfloat16
    head = 38_016 * 3584 * 2 + 2 * 16384 * 3584 * 2 + 16384 * (2 * 2 * 3584 // 4 + 1)
    assert stage.logits_bytes == logits + head
    assert stage.total_bytes == pytest.approx(43.8e9, rel=0.01)


def test_the_step_of_the_7b_run_by_hand() -> None:
    plan = plan_7b(PlanOptions(trainer_gpus=8))
    assert plan.passes == Passes(forward_only=0, repeated=0.05)
    work = plan.workload
    assert work.samples_per_step == 1024
    assert work.tokens_per_step == 1024 * (256 + 4096)
    # 3 samples of 4352 tokens fit 16,384; 2 replicas.
    assert work.micro_batches == 171
    assert work.micro_batch_tokens == 13_031


@pytest.mark.parametrize(
    ("algorithm", "forward_only", "repeated"),
    [
        ({"updates_per_batch": 4}, 0, 1.0),
        ({"updates_per_batch": 4, "epochs": 2}, 0, 2.0),
        ({"updates_per_batch": 4, "bapo": {"speculate": "never"}}, 4, 0.0),
        ({"updates_per_batch": 4, "bapo": {"speculate": "never"}, "epochs": 2}, 8, 0.0),
        ({"updates_per_batch": 4, "objective": "gspo"}, 4, 0.0),
        ({"updates_per_batch": 4, "objective": "clip"}, 0, 0.0),
        ({"updates_per_batch": 4, "behaviour": "recomputed"}, 4, 0.75),
        ({"updates_per_batch": 4, "behaviour": "recomputed", "objective": "gspo"}, 7, 0.0),
        ({"updates_per_batch": 4, "behaviour": "recomputed", "objective": "clip"}, 4, 0.0),
        ({"updates_per_batch": 4, "bapo": {"scope": "micro_batch"}}, 0, 0.0),
    ],
)
def test_passes_are_those_that_the_trainer_makes(
    algorithm: dict[str, Any], forward_only: int, repeated: float
) -> None:
    plan = plan_7b(PlanOptions(miss_share=0.25), algorithm=algorithm)
    assert plan.passes == Passes(forward_only, repeated)


def test_a_miss_costs_a_loss_pass() -> None:
    plain, wrong = (
        {phase.name: phase.seconds for phase in plan_7b(PlanOptions(miss_share=share)).phases}
        for share in (0.0, 0.5)
    )
    assert wrong["forward + backward"] == pytest.approx(1.5 * plain["forward + backward"])
    assert wrong["forward-only"] == plain["forward-only"] == 0.0


def test_the_optimizer_is_divided_over_data_and_context_ranks() -> None:
    context = {"tensor": 4, "sequence": True, "context": 2}
    divided = plan_7b(PlanOptions(trainer_gpus=16), parallel=context)
    assert divided.stages[0].optimizer_bytes == 12 * 1_904_057_344 / 4
    offloaded = plan_7b(megatron={"optimizer_offload_share": 0.75})
    assert offloaded.stages[0].optimizer_bytes == 3 * 1_904_057_344
    # float32 weights, two moments and gradients: 16 bytes of three quarters.
    assert offloaded.stages[0].host_bytes == 12 * 1_904_057_344
    assert offloaded.host_bytes_per_node == 4 * 12 * 1_904_057_344
    (optimizer,) = (phase for phase in offloaded.phases if phase.name == "optimizer")
    # A quarter at 70 % of 3.35 TB/s; the rest, with gradient and weight, at 25 GB/s.
    seconds = 1_904_057_344 * (30 / 4 / (0.7 * 3.35e12) + (30 + 4 + 2) * 3 / 4 / 25e9)
    assert optimizer.compute_s == pytest.approx(offloaded.workload.updates_per_step * seconds)
    # float32 needs no master weights.
    stage = plan_7b(model={"path": "x", "dtype": "float32"}).stages[0]
    assert stage.weights_bytes == 4 * 1_904_057_344
    assert stage.optimizer_bytes == 8 * 1_904_057_344


def test_the_kv_cache_of_a_rollout_gpu_by_hand() -> None:
    memory = plan_7b().rollout
    assert memory.kv_bytes_per_token == 2 * 28 * 4 * 128 * 2
    assert memory.kv_cache_bytes == pytest.approx(0.8 * 80e9 - 2 * 7_615_616_512)
    assert memory.kv_cache_tokens == 850_459
    assert memory.longest_sequences == 850_459 // 9216
    limited = plan_7b(
        rollout={**RUN_7B["rollout"], "server": {"tensor": 2, "max_total_tokens": 20_000}}
    ).rollout
    assert limited.kv_cache_bytes == 20_000 * 57_344 / 2


def test_a_rollout_that_runs_ahead_takes_its_time_beside_the_training() -> None:
    plans = [
        plan_7b(rollout={**RUN_7B["rollout"], "async_steps": number, "oversample_groups": 0})
        for number in (0, 1)
    ]
    assert plans[0].phases == plans[1].phases
    rollout_s, *others_s = [phase.seconds for phase in plans[0].phases]
    assert plans[0].step_s == pytest.approx(rollout_s + sum(others_s))
    assert plans[1].step_s == max(rollout_s, sum(others_s))
    assert plans[1].gpu_hours_per_step < plans[0].gpu_hours_per_step


def test_the_disk_of_a_run_by_hand() -> None:
    rollout = {**RUN_7B["rollout"], "samples_per_group": 8, "oversample_groups": 16}
    rollout |= {"async_steps": 1, "keep_dumps": 30}
    checkpoint = {"every_steps": 20, "keep_last": 3, "keep_every": 50, "best": "eval/x/avg_at_k"}
    plan = plan_7b(
        PlanOptions(trainer_gpus=4, response_tokens=1000),
        rollout=rollout,
        train={**RUN_7B["train"], "steps": 200},
        checkpoint=checkpoint,
        eval={"sets": [{"path": "x.jsonl"}]},
        replay={"batches": 2},
    )
    # Kept: 3 newest, 2 whose step is a multiple of 20 and 50, the best; and one that is written.
    # In each: 16 + 64 groups on their way and 2 batches of 64, of 8 samples of 1,000 tokens.
    assert [(use.what, use.each_bytes, use.number) for use in plan.disk] == [
        ("checkpoint", 14 * 7_615_616_512, 7),
        ("its unfinished samples", pytest.approx(5.6 * 208 * 8 * 1000), 7),
        ("dump", pytest.approx(7.8 * 64 * 8 * 1000), 30),
        ("export", 2 * 7_615_616_512, 1),
    ]
    rounds = {**rollout, "oversample_groups": 0, "async_steps": 0, "partial_tokens": 4096}
    # Two rounds: the groups of another batch are on their way.
    plan = plan_7b(PlanOptions(trainer_gpus=4, response_tokens=1000), rollout=rounds)
    assert plan.disk[1].each_bytes == pytest.approx(5.6 * 64 * 8 * 1000)
    kept = plan_7b(rollout={**RUN_7B["rollout"], "dump": False}, checkpoint={"at_end": False})
    assert [use.number for use in kept.disk] == [0, 0, 0, 0]
    # The last step is saved, whether or not it is a multiple.
    for every in (0, 200, 100, 60):
        plan = plan_7b(checkpoint={"every_steps": every}, train={**RUN_7B["train"], "steps": 100})
        assert plan.disk[0].number == (2 if every == 60 else 1)


def test_a_server_too_small_for_its_model_is_planned_larger_and_says_so() -> None:
    plan = make_plan(
        run_config(), published("deepseek-r1-distill-qwen-32b"), PlanOptions(trainer_gpus=1)
    )
    assert plan.rollout.gpus_per_server == 2  # 65.5 GB of weights in 64 GB
    assert any("rollout.server.tensor = 1" in note for note in plan.notes)


def test_what_fits_depends_on_the_memory_of_the_gpu() -> None:
    assert plan_7b(PlanOptions(trainer_gpus=4)).fits
    assert not plan_7b(PlanOptions(trainer_gpus=4, gpu_memory_gb=60)).fits  # 55.2 + 5 GB
    assert plan_7b(PlanOptions(trainer_gpus=4, gpu="H200")).assumptions.gpu_memory_bytes == 141e9


DIVIDED = {"server": {"first_gpu": 4, "count": 4}}
COLOCATED = {"colocated": True, "weight_sync": {"method": "tensor"}}
"""The two ways of docs/launch.md to use a node of eight GPUs."""


def test_servers_on_other_gpus_of_the_node_are_reached_within_it() -> None:
    plan = plan_7b(PlanOptions(trainer_gpus=4), rollout={**RUN_7B["rollout"], **DIVIDED})
    assert (plan.assumptions.rollout_gpus, plan.gpus, plan.fits) == (4, 8, True)
    assert plan.phases[-1].seconds == pytest.approx(2 * 7_615_616_512 / (0.7 * 450e9))
    assert plan.sampling_bytes == 0


@pytest.mark.parametrize(
    ("options", "rollout", "trainer_gpus", "rollout_gpus"),
    [
        ({"gpus": 8}, DIVIDED, 4, 4),  # the configured servers leave 4
        ({"gpus": 8}, COLOCATED, 8, 1),  # all, in turns; a server is configured
        ({"gpus": 32}, {}, 16, 16),  # nothing says, so half
        ({"gpus": 32, "trainer_gpus": 8}, {}, 8, 24),
        ({"trainer_gpus": 8}, {}, 8, 8),
    ],
)
def test_gpus_are_all_of_them_and_the_trainers_are_what_servers_leave(
    options: dict[str, int], rollout: dict[str, Any], trainer_gpus: int, rollout_gpus: int
) -> None:
    plan = plan_7b(PlanOptions(**options), rollout={**RUN_7B["rollout"], **rollout})
    assert plan.trainer_gpus == plan.layout.gpus == trainer_gpus
    assert plan.assumptions.rollout_gpus == rollout_gpus
    assert plan.gpus == options.get("gpus", trainer_gpus + rollout_gpus)


@pytest.mark.parametrize(("host_memory_gb", "fits"), [(None, True), (122, True), (121, False)])
def test_a_node_must_hold_what_lies_on_the_host(host_memory_gb: float | None, fits: bool) -> None:
    offloaded = {"optimizer_offload_share": 1.0}
    options = PlanOptions(trainer_gpus=4, host_memory_gb=host_memory_gb, host_gb_per_s=50)
    fast = plan_7b(options, megatron=offloaded)
    assert fast.fits is fits  # 4 · 16 · 1.904 = 121.9 GB
    slow = plan_7b(PlanOptions(trainer_gpus=4), megatron=offloaded)
    (fast_s, slow_s) = (plan.phases[-2].compute_s for plan in (fast, slow))
    assert slow_s == pytest.approx(2 * fast_s)  # 25 GB/s


def test_our_own_layers_are_slower_as_measured() -> None:
    fused, local = (
        plan_7b(PlanOptions(layers=layers)) for layers in ("transformer-engine", "local")
    )
    ratios = [
        b.compute_s / a.compute_s
        for a, b in zip(fused.phases, local.phases, strict=True)
        if a.compute_s
    ]
    assert ratios == pytest.approx([1, 48_394 / 41_430, 1])  # rollout, passes, optimizer


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "mode", "gigabytes"),
    [
        ("4B", "lora", (21, 22, 22.5, 23)),
        pytest.param("4B", "full", (37, 37.5, 38), marks=pytest.mark.exhaustive),
        pytest.param("14B", "lora", (65, 65.5, 66), marks=pytest.mark.exhaustive),
    ],
)
def test_one_gpu_is_refused_only_where_nothing_fits(
    size: str, mode: str, gigabytes: tuple[float, ...], tmp_path: Path
) -> None:
    hf, config = qwen3(size, tmp_path), with_values(draft(), **MODES[mode])
    smallest = with_values(
        config,
        rollout={"max_response_tokens": 1024, "colocated": True},
        train={"max_tokens_per_micro_batch": 2048},
        ops={"logits_chunk_tokens": 2048},
        megatron={"recompute": "full", "optimizer_offload_share": 1.0},
    )

    def fits(percent: int, options: PlanOptions) -> bool:
        server = {"mem_fraction": percent / 100}
        try:
            return make_plan(with_values(smallest, rollout={"server": server}), hf, options).fits
        except NoRoomError:
            return False

    def is_accepted(options: PlanOptions) -> bool:
        try:
            choose_layout(draft(), hf, options, 1, modes=(mode,))
        except ValueError:
            return False
        return True

    options = [PlanOptions(gpus=1, node_gpus=1, gpu_memory_gb=number) for number in gigabytes]
    possible = [any(fits(percent, option) for percent in range(1, 81)) for option in options]
    assert (possible[0], possible[-1]) == (False, True)
    assert [is_accepted(option) for option in options] == possible


@pytest.mark.parametrize(("mem_fraction", "fits"), [(0.4, True), (0.7, False)])
def test_a_colocated_server_must_fit_beside_what_the_trainer_keeps(
    mem_fraction: float, fits: bool
) -> None:
    server = {"count": 8, "mem_fraction": mem_fraction}
    rollout = {**RUN_7B["rollout"], **COLOCATED, "server": server}
    plan = plan_7b(PlanOptions(trainer_gpus=8), rollout=rollout)
    assert (plan.assumptions.rollout_gpus, plan.gpus, plan.fits) == (8, 8, fits)
    # Weights, gradients, and optimizer states of two replicas: 2 + 4 + 12 / 2 bytes.
    kept = 12 * 1_904_057_344
    assert plan.sampling_bytes == kept + mem_fraction * 80e9
    assert plan.gpu_hours_per_step == pytest.approx(plan.step_s * 8 / 3600)


def test_a_gpu_that_takes_turns_copies_new_weights_in_its_own_memory() -> None:
    options = PlanOptions(gpus=1, gpu_memory_gb=400)
    plan = plan_7b(options, parallel={}, rollout={**RUN_7B["rollout"], **COLOCATED})
    assert plan.phases[-1].seconds == pytest.approx(2 * 2 * 7_615_616_512 / (0.7 * 3.35e12))


def test_layouts_use_all_gpus_divide_the_model_and_fill_every_combination() -> None:
    plan = plan_7b(PlanOptions(trainer_gpus=8))
    hf = published("deepseek-r1-distill-qwen-7b")
    assert {estimate.layout.gpus for estimate in plan.layouts} == {8}
    # 4 key/value heads: no tensor 8; 28 layers: no pipeline 8, and 7 chunks per stage of 4.
    sizes = {
        (e.layout.tensor, e.layout.pipeline, e.layout.context, e.layout.data) for e in plan.layouts
    }
    powers = (1, 2, 4, 8)
    assert sizes == {
        (t, p, c, d)
        for t in powers[:3]
        for p in powers[:3]
        for c in powers
        for d in powers
        if t * p * c * d == 8
    }
    virtual = {e.layout.virtual for e in plan.layouts if e.layout.pipeline == 4}
    assert virtual == {1, 7}
    assert all(hf.num_layers % (e.layout.pipeline * e.layout.virtual) == 0 for e in plan.layouts)


def configured(plan: Plan) -> LayoutEstimate:
    (estimate,) = (estimate for estimate in plan.layouts if estimate.is_configured)
    return estimate


def test_layouts_that_fit_come_first_and_the_fastest_of_them_leads() -> None:
    plan = plan_7b(PlanOptions(trainer_gpus=4))
    verdicts = [estimate.fits for estimate in plan.layouts]
    assert verdicts == sorted(verdicts, reverse=True)
    times = [estimate.training_s for estimate in plan.layouts if estimate.fits]
    assert times == sorted(times)
    assert configured(plan).layout == plan.layout
    assert configured(plan).memory_bytes == plan.worst_stage.total_bytes
    plan = plan_7b(parallel={"tensor": 4, "sequence": False})  # not listed otherwise
    assert not configured(plan).layout.sequence


def test_recomputation_trades_memory_for_time() -> None:
    kept, again = plan_7b(), plan_7b(megatron={"recompute": "full"})
    assert again.stages[0].activations_bytes == 28 * 2 * 3584 / 4 * 16384
    passes = {p.name: p.compute_s for p in kept.phases}
    more = {p.name: p.compute_s for p in again.phases}
    # A third forward pass over the layers, 6.5 of 7.1 parameters' worth: 4/3 less the head's part.
    ratio = more["forward + backward"] / passes["forward + backward"]
    assert 1.30 < ratio < 4 / 3


def test_the_time_of_products_is_operations_over_peak_and_mfu() -> None:
    options = PlanOptions(trainer_gpus=4, gpu="A100", mfu_share=0.5, prompt_tokens=96)
    plan = plan_7b(options, algorithm={"bapo": {"speculate": "never"}})
    length, samples = 96 + 4096, 1024
    # Two operations per weight and token, without the embedding; and 2·L² per query channel.
    weights = 7_615_616_512 - 152_064 * 3584 - 57 * 3584 - 28 * 4608
    mean_square = 96**2 + 2 * 96 * 4096 + 4 / 3 * 4096**2
    forward = samples * (2 * weights * length + 2 * 28 * 3584 * mean_square)
    phases = {phase.name: phase for phase in plan.phases}
    assert phases["forward-only"].compute_s == pytest.approx(forward / (4 * 0.5 * 312e12))
    assert phases["forward + backward"].compute_s == pytest.approx(3 * forward / (2 * 312e12))


def test_decoding_reads_weights_and_cache_at_the_memory_bandwidth() -> None:
    plan = plan_7b(PlanOptions(trainer_gpus=4))
    # 1024 samples on 4 servers; half of 4096 response tokens behind a prompt of 256, on average.
    read = 2 * 7_615_616_512 + 256 * (256 + 2048) * 57_344
    assert plan.rollout_tokens_per_s == pytest.approx(256 / (read / (0.7 * 3.35e12)))
    assert plan.phases[0].seconds == pytest.approx(1024 * 4096 / (4 * plan.rollout_tokens_per_s))


def test_a_rollout_ends_with_its_longest_response_unless_it_is_resumed() -> None:
    few = {**RUN_7B["rollout"], "groups_per_step": 1}
    alone_s = 8192 * 2 * 7_615_616_512 / (0.7 * 3.35e12)
    assert plan_7b(rollout=few).phases[0].seconds == pytest.approx(alone_s)
    resumed = plan_7b(rollout={**few, "oversample_groups": 1}).phases[0].seconds
    # Four samples on each of 4 servers, 4096 tokens each.
    read = 2 * 7_615_616_512 + 4 * (256 + 2048) * 57_344
    assert resumed == pytest.approx(4096 * read / (0.7 * 3.35e12))
    # With rounds of 6,000 tokens a step ends after as many decode steps.
    rounds = plan_7b(rollout={**few, "partial_tokens": 6000}).phases[0].seconds
    assert rounds == pytest.approx(alone_s * 6000 / 8192)


@pytest.mark.parametrize(
    ("method", "node_gpus", "bytes_per_s", "lora", "num_bytes"),
    [
        ("broadcast", 8, 0.7 * 450e9, {}, 2 * 7_615_616_512),  # trainer and servers are 8 GPUs
        ("broadcast", 4, 0.7 * 50e9, {}, 2 * 7_615_616_512),
        ("tensor", 8, 0.7 * 450e9, {}, 2 * 7_615_616_512),
        ("disk", 8, 2e9 / 2, {}, 2 * 7_615_616_512),  # written, then read
        ("disk", 8, 2e9 / 2, {"rank": 8}, 2 * 7_615_616_512),  # merged
        # 28 layers of q, k, v, o, gate, up and down, A and B of rank 8 each, in float32.
        (
            "disk adapter",
            8,
            2e9 / 2,
            {"rank": 8},
            4 * 28 * 8 * (2 * 7168 + 2 * 4096 + 3 * (3584 + 18944)),
        ),
    ],
)
def test_new_weights_take_the_way_that_is_configured(
    method: str, node_gpus: int, bytes_per_s: float, lora: dict[str, int], num_bytes: int
) -> None:
    sync = dict(zip(("method", "adapters"), method.split(), strict=False))
    rollout = {**RUN_7B["rollout"], "weight_sync": sync}
    options = PlanOptions(trainer_gpus=4, node_gpus=node_gpus)
    plan = plan_7b(options, rollout=rollout, model={"path": "models/none", "lora": lora})
    assert plan.phases[-1].name == "weight sync"
    assert plan.phases[-1].seconds == pytest.approx(num_bytes / bytes_per_s)


def test_the_bubble_is_that_of_the_schedules() -> None:
    options = PlanOptions(trainer_gpus=4, response_tokens=8000)
    batch = {**RUN_7B["rollout"], "groups_per_step": 1, "samples_per_group": 16}
    plain = plan_7b(options, parallel={"pipeline": 4}, rollout=batch)
    assert plain.workload.micro_batches == 16
    # One sample of 8256 tokens in a micro-batch: (p − 1)/(m + p − 1).
    assert configured(plain).bubble_share == pytest.approx(3 / 19)
    chunks = {"pipeline": 4, "virtual_pipeline": 7}
    interleaved = plan_7b(options, parallel=chunks, rollout=batch)
    assert configured(interleaved).bubble_share == pytest.approx(3 / (7 * 16 + 3))


@pytest.mark.parametrize(
    ("options", "changes", "place"),
    [
        ({"trainer_gpus": 6}, {}, "--trainer-gpus: .* = 4, got 6; give 8"),
        ({"gpus": 8, "trainer_gpus": 8}, {}, "--gpus: must exceed the 8 that train, got 8"),
        ({"gpus": 1}, {}, "--gpus: must exceed the 1 of the servers, got 1; give more, or share"),
        (
            {"gpus": 4},
            {"rollout": {**DIVIDED, "server": {"count": 6, "first_gpu": 2}}},
            "--gpus: must exceed the 6 of the servers, got 4",
        ),
        ({"gpus": 8, "trainer_gpus": 4}, {"rollout": COLOCATED}, "--trainer-gpus: .* got 4"),
        ({"gpu": "H300"}, {}, "--gpu: .* got 'H300'"),
        ({}, {"parallel": {"tensor": 8}}, "parallel.tensor: .* num_attention_heads = 28"),
        ({}, {"parallel": {"tensor": 7}}, "parallel.tensor: .* num_key_value_heads = 4"),
        ({}, {"parallel": {"pipeline": 3}}, "= 3 must divide the model's 28 layers"),
        ({}, {"parallel": {"pipeline": 4, "virtual_pipeline": 2}}, "= 8 must divide"),
        ({}, {"parallel": {"tensor": 1 << 17}}, "parallel: .* got 131072"),
        ({}, {"rollout": {"server": {"tensor": 3}}}, "rollout.server.tensor: must divide"),
        ({}, {"rollout": {"server": {"max_total_tokens": 5119}}}, r"max_total_tokens: .* got 5119"),
        ({}, {"algorithm": {"updates_per_batch": 7}}, "algorithm.updates_per_batch"),
        ({"gpu_memory_gb": 1}, {}, "rollout.server.mem_fraction: 0.8 of 4 GPUs"),
        ({}, {"data": {"max_prompt_tokens": 131072}}, "in the model's 131072 positions"),
        ({"response_tokens": 8193}, {}, "--response-tokens: .* 8192"),
        ({"gpu": "A100"}, {"megatron": {"fp8": "hybrid"}}, "A100"),
    ],
)
def test_what_cannot_be_planned_is_one_line_with_the_place(
    options: dict[str, Any], changes: dict[str, Any], place: str
) -> None:
    with pytest.raises(ValueError, match=place) as refused:
        plan_7b(PlanOptions(**options), **changes)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("options", "changes", "word"),
    [
        ({}, {"megatron": {"fp8": "hybrid"}}, "fp8"),
        ({"layers": "local"}, {"parallel": {"tensor": 4, "context": 2}}, "context > 1"),
        ({"node_gpus": 2}, {}, "2 GPUs"),
    ],
)
def test_what_no_figure_shows_is_noted(
    options: dict[str, Any], changes: dict[str, Any], word: str
) -> None:
    (note,) = plan_7b(PlanOptions(**options), **changes).notes
    assert word in note
