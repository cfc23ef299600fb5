"""Plans with a reference or a teacher: memory and time by hand, and models as they are built."""

from typing import Any

import pytest

from bapo_megatron.config.scorers import REFERENCE_KEY, TEACHER_KEY
from bapo_megatron.tools.planning.memory import stage_parameters, waiting_parameters
from bapo_megatron.tools.planning.plan import Plan, PlanOptions, make_plan
from bapo_megatron.tools.planning.scenario import FrozenSpec
from tests.tools.planning.cases import FROZEN, layout_of, published, run_config
from tests.tools.planning.test_plan import COLOCATED, RUN_7B, configured

TEACHER_32B = {"path": "models/32b", "memory": "host"}
DISTILLED = {"distillation": {"coefficient": 1.0, "teacher": TEACHER_32B}}
OVER_VOCABULARY = {"distillation": {**DISTILLED["distillation"], "loss": "reverse_kl"}}
CHUNKED = {"ops": {"logits_chunk_tokens": 1024}}

# 64 layers of 5120 hidden, 5120 query, 1024 key and 27,648 MLP channels over 4 ranks.
LAYER_32B = (2 * 5120**2 + 2 * 1024 * 5120 + 3 * 5120 * 27_648 + 5120 + 2 * 1024) // 4 + 2 * 5120
TABLE_32B = 152_064 * 5120 // 4
RANK_32B = 64 * LAYER_32B + 2 * TABLE_32B + 5120


def plan_scored(options: PlanOptions | None = None, model: str = "", **changes: Any) -> Plan:
    """The 7B run with 8 GPUs and a published model of 32B (or another) as reference or teacher."""
    config = run_config(**{**RUN_7B, **changes})
    scored = published(model or "deepseek-r1-distill-qwen-32b")
    frozen = dict.fromkeys((REFERENCE_KEY, TEACHER_KEY), scored)
    policy = published("deepseek-r1-distill-qwen-7b")
    return make_plan(config, policy, options or PlanOptions(trainer_gpus=8), frozen)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "stages"),
    [
        # 4 layers of 96 in norms and 336 · 32 in projections; 128 padded rows of 32; a final norm.
        # The head, which is the embedding, stays on the GPU.
        ("tied", [(47_520, 43_424)]),
        # Two ranks divide projections and tables; the last stage has a copy of the embedding.
        ("tied, divided", [(12_992, 12_992), (13_024, 10_976)]),
        # 2 layers of 64 in norms, 64 in biases and 240 · 32 in projections; a table each.
        ("untied, interleaved", [(19_712, 19_712), (19_744, 15_648)]),
    ],
)
def test_every_stage_of_a_frozen_model_has_the_parameters_that_are_built(
    case: str, stages: list[tuple[int, int]], measured: dict[str, Any]
) -> None:
    _, parallel = FROZEN[case]
    built, layout = measured["frozen"][case], layout_of(parallel)
    model = FrozenSpec(TEACHER_KEY, built["hf"], waits_in_host=True, keeps_hidden=True)
    planned = [
        (stage_parameters(model.hf, layout, stage), waiting_parameters(model, layout, stage))
        for stage in range(layout.pipeline)
    ]
    assert planned == built["stages"] == stages


def test_the_memory_of_a_7b_run_with_a_32b_teacher_in_host_memory_by_hand() -> None:
    plan = plan_scored(algorithm=OVER_VOCABULARY, **CHUNKED)
    (stage,), (alone,) = plan.stages, plan_scored(**CHUNKED).stages
    assert plan.frozen_parameters == {TEACHER_KEY: 32_763_876_352}
    assert stage.frozen_bytes == 2 * TABLE_32B  # the head
    assert stage.host_bytes == 2 * (RANK_32B - TABLE_32B)
    assert plan.host_bytes_per_node == 8 * stage.host_bytes
    # 1024 responses of 4096 tokens over two replicas.
    assert stage.teacher_hidden_bytes == 512 * 4096 * 2 * 5120
    layer = (
        2 * (2 * 2 * 5120 / 4 + 1)  # two norms: input, output, 1/rms
        + 2 * (2 * 1280 + 3 * 256)  # queries and keys twice, values
        + 2 * 1280  # attention's output
        + 3 * 2 * 6912  # gate, up, input of the down product
        + 4 * 10  # log-sums
    )
    assert layer == 60_970
    assert stage.scoring_bytes == stage.host_bytes + 16_384 * layer
    # A second buffer of 1024 rows of 152,064 / 4 columns.
    assert stage.logits_bytes - alone.logits_bytes == 1024 * 2 * 38_016
    assert stage.activations_bytes > stage.scoring_bytes
    more = stage.frozen_bytes + stage.teacher_hidden_bytes
    assert alone.logits_bytes < stage.logits_bytes < stage.workspace_bytes
    assert stage.total_bytes == alone.total_bytes + more


def test_where_training_needs_less_the_scoring_pass_is_the_peak() -> None:
    changes = {"megatron": {"recompute": "full"}, "algorithm": DISTILLED}
    (stage,) = plan_scored(**changes).stages
    assert stage.host_bytes == 2 * RANK_32B
    assert (stage.frozen_bytes, stage.teacher_hidden_bytes) == (0, 0)
    # All logits at once: 152,064 / 4 columns, and what they are computed from.
    assert stage.scoring_bytes == 2 * RANK_32B + 16_384 * (2 * 38_016 + 2 * 5120)
    kept = stage.weights_bytes + stage.gradients_bytes + stage.optimizer_bytes
    assert stage.total_bytes == kept + stage.scoring_bytes


def test_a_reference_without_a_path_is_another_policy_on_the_gpu() -> None:
    plan = plan_scored(algorithm={"kl": {"coefficient": 0.001}})
    (stage,), (alone,) = plan.stages, plan_scored().stages
    assert plan.frozen_parameters == {REFERENCE_KEY: 7_615_616_512}
    assert stage.frozen_bytes == stage.weights_bytes == 2 * 1_904_057_344
    assert (stage.host_bytes, plan.host_bytes_per_node) == (0, 0)
    assert stage.total_bytes == alone.total_bytes + stage.frozen_bytes
    # With a teacher, both are there; the larger of their passes counts.
    kl = {"kl": {"coefficient": 0.001, "reference": {"memory": "host"}}}
    (both,) = plan_scored(algorithm={**kl, **DISTILLED}).stages
    assert both.host_bytes == 2 * (1_904_057_344 + RANK_32B)
    assert both.scoring_bytes == plan_scored(algorithm=DISTILLED).stages[0].scoring_bytes


@pytest.mark.parametrize("node_gpus", [4, 8])
def test_a_node_s_host_memory_is_that_of_its_ranks(node_gpus: int) -> None:
    options = PlanOptions(trainer_gpus=8, node_gpus=node_gpus)
    parallel = {"tensor": 4, "sequence": True, "pipeline": 2}
    plan = plan_scored(options, algorithm=DISTILLED, parallel=parallel)
    half = 32 * LAYER_32B + TABLE_32B
    assert [stage.host_bytes for stage in plan.stages] == [2 * half, 2 * (half + 5120)]
    ranks = {4: 4 * (half + 5120), 8: 4 * half + 4 * (half + 5120)}
    assert plan.host_bytes_per_node == 2 * ranks[node_gpus]


def test_servers_on_the_trainer_s_gpus_leave_room_for_frozen_weights() -> None:
    server = {"count": 8, "mem_fraction": 0.4}
    rollout = {**RUN_7B["rollout"], **COLOCATED, "server": server}
    plan = plan_scored(rollout=rollout, algorithm={"kl": {"coefficient": 0.001}})
    # Weights of both models, gradients, and optimizer states of two replicas.
    assert plan.sampling_bytes == (2 + 2 + 4 + 6) * 1_904_057_344 + 0.4 * 80e9


@pytest.mark.parametrize("algorithm", [{}, {"updates_per_batch": 4, "epochs": 2}])
def test_a_teacher_reads_each_sample_of_a_step_once(algorithm: dict[str, Any]) -> None:
    options = PlanOptions(trainer_gpus=4, gpu="A100", mfu_share=0.5, prompt_tokens=96)
    plan = plan_scored(options, algorithm={**algorithm, **DISTILLED})
    phases = {phase.name: phase for phase in plan.phases}
    assert list(phases)[:2] == ["rollout", "scoring (teacher)"]
    scoring = phases["scoring (teacher)"]
    # Two operations per weight and token, without the embedding; and 2·L² per query channel.
    weights = 32_763_876_352 - 152_064 * 5120 - 129 * 5120 - 64 * 7168
    mean_square = 96**2 + 2 * 96 * 4096 + 4 / 3 * 4096**2
    forward = 1024 * (2 * weights * 4192 + 2 * 64 * 5120 * mean_square)
    assert scoring.compute_s == pytest.approx(forward / (4 * 0.5 * 312e12))
    # Sums of hidden states over 4 ranks, two of each layer and the embedding's: 2 · 3/4 of each.
    work = plan.workload
    times = work.micro_batches * algorithm.get("updates_per_batch", 1)
    sent = times * (2 * 64 + 1) * 2 * 3 / 4 * work.micro_batch_tokens * 2 * 5120
    assert scoring.sent_bytes == {"tensor": pytest.approx(sent), "context": 0, "pipeline": 0}
    copied_s = 2 * RANK_32B / 25e9
    assert scoring.messages_s == pytest.approx(sent / (0.7 * 300e9) + copied_s)
    assert scoring.seconds == pytest.approx(scoring.compute_s + scoring.messages_s)
    alone = plan_scored(options, algorithm=algorithm)
    assert plan.passes == alone.passes
    assert plan.phases[2:] == alone.phases[1:]
    assert plan.step_s == pytest.approx(alone.step_s + scoring.seconds)


def test_a_frozen_model_s_pass_has_the_bubble_of_the_pipeline() -> None:
    batch = {**RUN_7B["rollout"], "groups_per_step": 1, "samples_per_group": 16}
    plan = plan_scored(
        PlanOptions(trainer_gpus=4, response_tokens=8000),
        rollout=batch,
        parallel={"pipeline": 4},
        algorithm={"kl": {"coefficient": 0, "measure": True}},
    )
    scoring = plan.phases[1]
    assert scoring.name == "scoring (reference)"
    # 16 micro-batches of a stage, and the 3 of the others to wait for.
    busy_s = scoring.compute_s + scoring.messages_s
    assert scoring.bubble_s == pytest.approx(busy_s * 3 / 16)
    assert scoring.sent_bytes["pipeline"] == 16 * plan.workload.micro_batch_tokens * 2 * 3584


def test_other_layouts_are_those_of_both_models_with_the_same_counts() -> None:
    plan = plan_scored(algorithm=DISTILLED)
    estimate = configured(plan)
    assert estimate.memory_bytes == plan.worst_stage.total_bytes
    assert estimate.training_s == pytest.approx(sum(phase.seconds for phase in plan.phases[1:5]))
    # 28 layers divide over 7 stages, 64 do not.
    pipelines = [
        {
            e.layout.pipeline
            for e in plan_scored(PlanOptions(trainer_gpus=7), parallel={}, **scorer).layouts
        }
        for scorer in ({}, {"algorithm": DISTILLED})
    ]
    assert pipelines == [{1, 7}, {1}]
    # 35.2 GB of training without activations; 8 GB or more of weights come on top.
    fits = {
        memory: plan_scored(
            PlanOptions(trainer_gpus=8, gpu_memory_gb=65, rollout_tokens_per_s=1e4),
            algorithm={"distillation": {"coefficient": 1.0, "teacher": {**TEACHER_32B, **where}}},
        ).fits
        for memory, where in (("host", {}), ("device", {"memory": "device"}))
    }
    assert fits == {"host": True, "device": False}


def test_a_teacher_behind_an_engine_is_noted_and_its_columns_take_disk() -> None:
    teacher = {"path": "models/32b", "engine": "local"}
    behind = {"distillation": {"coefficient": 1.0, "loss": "top_k", "teacher": teacher}}
    plan, alone = plan_scored(algorithm=behind, **CHUNKED), plan_scored(**CHUNKED)
    (note,) = plan.notes
    assert note.startswith("teacher.engine = local: ")
    assert (plan.frozen_parameters, plan.phases) == ({}, alone.phases)
    assert plan.stages == alone.stages
    # 64 ids and log-probs, and the log-prob of the token.
    assert plan.disk[2].each_bytes == pytest.approx((7.8 + 4 * 129) * 1024 * 4096)


def test_likeliest_tokens_of_the_sampler_take_disk_in_dumps_and_checkpoints() -> None:
    centred = {"centering": {"top_k": 32}}
    plan, alone = (
        plan_scored(algorithm=algorithm, rollout={"async_steps": 1}, **CHUNKED)
        for algorithm in (centred, {})
    )
    ratios = {
        before.what: after.each_bytes / before.each_bytes
        for before, after in zip(alone.disk, plan.disk, strict=True)
    }
    assert ratios == {
        "checkpoint": 1.0,
        "its unfinished samples": pytest.approx((5.6 + 8 * 32) / 5.6),
        "dump": pytest.approx((7.8 + 8 * 32) / 7.8),
        "export": 1.0,
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"algorithm": DISTILLED, "parallel": {"pipeline": 7}},
            "algorithm.distillation.teacher.path: .*32b': parallel.pipeline: .* = 7 must divide",
        ),
        (
            {"algorithm": OVER_VOCABULARY, "model": "qwen3-0.6b", **CHUNKED},
            "teacher.path: must have the policy's vocab_size 152064 .* reverse_kl, got 151936",
        ),
    ],
)
def test_a_frozen_model_that_does_not_suit_the_policy_is_one_line(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        plan_scored(PlanOptions(), **changes)
    assert "\n" not in str(refused.value)
