"""Parameters, state and activations of a plan: what Megatron builds, allocates and keeps."""

from dataclasses import replace
from typing import Any

import pytest

from bapo_megatron.tools.planning.activations import (
    chunk_bytes,
    layer_tensors,
    logits_bytes,
    recomputed_bytes,
    workspace_bytes,
)
from bapo_megatron.tools.planning.memory import (
    chunks_in_flight,
    model_parameters,
    plan_memory,
    stacked_bytes,
    stage_parameters,
)
from bapo_megatron.tools.planning.scenario import LayerKind, Layout, plan_workload
from tests.tools.planning.cases import (
    IN_FLIGHT,
    LENGTHS,
    PARAMETERS,
    SAVED,
    STATE,
    layout_of,
    published,
    scenario,
    small_model,
)

TOKENS = sum(LENGTHS)


@pytest.mark.slow
@pytest.mark.parametrize("case", PARAMETERS)
def test_every_stage_has_the_parameters_that_megatron_builds(
    case: str, measured: dict[str, Any]
) -> None:
    model, parallel = PARAMETERS[case]
    hf, layout = published(model), layout_of(parallel)
    planned = [stage_parameters(hf, layout, stage) for stage in range(layout.pipeline)]
    assert planned == [sum(chunks) for chunks in measured["parameters"][case]]


def test_biases_of_all_projections_of_attention_are_counted() -> None:
    plain = small_model("qwen3", 2)
    biased = replace(plain, qkv_bias=True, output_bias=True)
    # In each layer 512 of the query, 128 of the key, 128 of the value, 256 of the output.
    assert model_parameters(biased) == model_parameters(plain) + 2 * 1024


@pytest.mark.slow
@pytest.mark.parametrize("case", STATE)
def test_state_takes_the_planned_bytes(case: str, measured: dict[str, Any]) -> None:
    dtype, parallel, megatron = STATE[case]
    run = scenario(
        small_model("qwen2", 4),
        layout_of(parallel),
        model={"path": "x", "dtype": dtype},
        parallel=parallel,
        megatron=megatron,
    )
    (memory,) = plan_memory(run, plan_workload(run))
    state = measured["state"][case]
    assert memory.weights_bytes == state["weights"]
    # Buffers are padded to multiples of 128 elements, and each parameter in them to 64.
    assert memory.gradients_bytes == pytest.approx(state["gradients"], rel=2e-3)
    assert memory.optimizer_bytes == pytest.approx(state["masters"] + state["moments"], rel=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("case", SAVED)
@pytest.mark.exhaustive
def test_activations_are_those_that_autograd_keeps(case: str, measured: dict[str, Any]) -> None:
    family, dtype, parallel, megatron = SAVED[case]
    model = {"path": "x", "dtype": dtype}
    run = scenario(
        small_model(family, 4), layout_of(parallel), "local", model=model, megatron=megatron
    )
    layers = chunk_bytes(run) * TOKENS
    # Beside them, selective recomputation keeps 4 bytes per layer: a copy of the last length.
    assert measured["saved"][case]["per_4_layers"] == pytest.approx(layers, rel=1e-6)
    # Token ids (8 bytes each), and a cosine and a sine for each of 32 channels.
    norm = run.share.norm(run.hf.hidden_size) * TOKENS
    beside = measured["saved"][case]["total"] - layers - norm
    assert 0 <= beside <= (8 + 2 * 4 * 32) * TOKENS + 1024
    # The workspace is an estimate: which temporaries live at the same time is autograd's order.
    passing = (recomputed_bytes(run) + workspace_bytes(run)) * TOKENS + stacked_bytes(run)
    peak = layers + max(passing, logits_bytes(run, TOKENS))
    assert peak == pytest.approx(measured["saved"][case]["peak"], rel=0.1)


def test_what_a_layer_of_the_7b_model_keeps_by_hand() -> None:
    hf, layout = published("deepseek-r1-distill-qwen-7b"), Layout(tensor=4, sequence=True)
    run = scenario(hf, layout)
    # Per token and rank: 28 heads of 128 channels and 4 key/value heads over 4 ranks.
    assert layer_tensors(run, "none", hf.mixers[0]) == {
        "norms and inputs of the two products": 2 * (2 * 2 * 3584 / 4 + 1),
        "queries, keys, values": 2 * (896 + 128 + 128),
        "rotated queries, keys": 2 * (896 + 128),
        "attention's output": 2 * 896,
        "gate and up": 2 * 2 * 4736,
        "input of the down product": 2 * 4736,
        "log-sums of attention": 4 * 7,
    }
    assert sum(layer_tensors(run, "none", hf.mixers[0]).values()) == 41_758
    assert sum(layer_tensors(run, "selective", hf.mixers[0]).values()) == 41_758 - 28
    assert chunk_bytes(run) == 28 * 41_758
    by_four = scenario(hf, layout, megatron={"recompute": "full", "recompute_layers": 4})
    assert chunk_bytes(by_four) == 7 * 2 * 3584 / 4


@pytest.mark.parametrize(
    ("layers", "lora", "is_grouped"),
    [
        ("local", {}, True),
        ("local", {"rank": 8, "targets": ["q_proj", "o_proj"]}, True),
        ("local", {"rank": 8, "targets": ["q_proj", "down_proj"]}, False),
        ("local", {"rank": 8}, False),
        ("transformer-engine", {}, False),
    ],
)
def test_only_adapters_of_experts_have_them_computed_one_by_one(
    layers: LayerKind, lora: dict[str, Any], is_grouped: bool
) -> None:
    hf = small_model("qwen3_moe", 2)
    run = scenario(hf, Layout(), layers, model={"path": "x", "lora": lora})
    assert run.groups_experts == is_grouped
    # A grouped product copies the gates and up projections of 8 experts, of 96 channels.
    assert stacked_bytes(run) == pytest.approx(is_grouped * 2 * 8 * 2 * 96 * 256)


def test_chunked_logits_do_not_grow_with_the_vocabulary_times_the_length() -> None:
    hf, layout = published("deepseek-r1-distill-qwen-32b"), Layout(tensor=8, sequence=True)
    run = scenario(hf, layout, ops={"logits_chunk_tokens": 1024})
    columns, hidden = 19_008, 5120
    for tokens in (8192, 65536):
        chunked = logits_bytes(run, tokens)
        hidden_states = (
            tokens * (2 * 2 * hidden / 8 + 4 / 8)  # final norm: input, output, 1/rms
            + tokens * 2 * hidden  # gathered
            + tokens * (4 * hidden + 2 * hidden / 8)  # gradient, summed and divided
        )
        assert chunked - hidden_states == 1024 * (2 * columns + 2 * hidden + 4 * hidden)
    assert logits_bytes(scenario(hf, layout), 65536) > 65536 * 2 * columns


@pytest.mark.slow
def test_chunks_in_flight_are_those_of_megatron_s_schedules(measured: dict[str, Any]) -> None:
    planned = [
        [
            chunks_in_flight(Layout(pipeline=pipeline, virtual=virtual), stage, micro_batches)
            for stage in range(pipeline)
        ]
        for pipeline, virtual, micro_batches in IN_FLIGHT
    ]
    assert planned == measured["in_flight"]
    assert planned[2] == [4, 3, 2, 1]
