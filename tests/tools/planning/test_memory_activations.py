"""Activations of a plan against what autograd keeps of small models on the CPU."""

from __future__ import annotations

from typing import Any

import pytest

from bapo_megatron.policy.hf_config import read_hf_config_file
from bapo_megatron.tools.planning.layout import Layout
from bapo_megatron.tools.planning.memory import (
    chunk_bytes,
    chunks_in_flight,
    layer_bytes,
    layer_tensors,
    logits_bytes,
    norm_bytes,
    recomputed_bytes,
    workspace_bytes,
)
from tests.tools.planning.cases import IN_FLIGHT, LENGTHS, MODELS, SAVED, layout_of, small_model
from tests.tools.planning.runs import scenario

TOKENS = sum(LENGTHS)


def planned(case: str) -> tuple[float, float, float]:
    """Bytes of four layers, of everything kept, and of the peak."""
    family, dtype, parallel, megatron = SAVED[case]
    model = {"path": "x", "dtype": dtype}
    run = scenario(
        small_model(family, 4), layout_of(parallel), "local", model=model, megatron=megatron
    )
    layers = chunk_bytes(run) * TOKENS
    passing = (recomputed_bytes(run) + workspace_bytes(run)) * TOKENS
    peak = layers + max(passing, logits_bytes(run, TOKENS))
    return layers, layers + norm_bytes(run) * TOKENS, peak


@pytest.mark.slow
@pytest.mark.parametrize("case", SAVED)
def test_a_layer_keeps_the_planned_bytes_exactly(case: str, measured: dict[str, Any]) -> None:
    # Beside them, selective recomputation keeps 4 bytes per layer: a copy of the last length.
    assert measured["saved"][case]["per_4_layers"] == pytest.approx(planned(case)[0], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("case", SAVED)
def test_the_forward_pass_keeps_little_beside_layers_and_final_norm(
    case: str, measured: dict[str, Any]
) -> None:
    # Token ids (8 bytes each), and a cosine and a sine for each of 32 channels.
    beside = measured["saved"][case]["total"] - planned(case)[1]
    assert 0 <= beside <= (8 + 2 * 4 * 32) * TOKENS + 1024


@pytest.mark.slow
@pytest.mark.parametrize("case", SAVED)
def test_the_peak_of_the_backward_pass_is_planned_to_ten_percent(
    case: str, measured: dict[str, Any]
) -> None:
    # The workspace is an estimate: which temporaries live at the same time is autograd's order.
    assert planned(case)[2] == pytest.approx(measured["saved"][case]["peak"], rel=0.1)


def test_what_a_layer_of_the_7b_model_keeps_by_hand() -> None:
    hf = read_hf_config_file(MODELS / "deepseek-r1-distill-qwen-7b.json")
    layout = Layout(tensor=4, sequence=True)
    run = scenario(hf, layout)
    # Per token and rank: 28 heads of 128 channels and 4 key/value heads over 4 ranks.
    assert layer_tensors(run, "none") == {
        "norms and inputs of the two products": 2 * (2 * 2 * 3584 / 4 + 1),
        "queries, keys, values": 2 * (896 + 128 + 128),
        "rotated queries, keys": 2 * (896 + 128),
        "attention's output": 2 * 896,
        "gate and up": 2 * 2 * 4736,
        "input of the down product": 2 * 4736,
        "log-sums of attention": 4 * 7,
    }
    assert layer_bytes(run, "none") == 41_758
    assert layer_bytes(run, "selective") == 41_758 - 28
    assert chunk_bytes(run) == 28 * 41_758
    by_four = scenario(hf, layout, megatron={"recompute": "full", "recompute_layers": 4})
    assert chunk_bytes(by_four) == 7 * 2 * 3584 / 4


def test_chunked_logits_do_not_grow_with_the_vocabulary_times_the_length() -> None:
    hf = read_hf_config_file(MODELS / "deepseek-r1-distill-qwen-32b.json")
    layout = Layout(tensor=8, sequence=True)
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
    planned_counts = [
        [
            chunks_in_flight(Layout(pipeline=pipeline, virtual=virtual), stage, micro_batches)
            for stage in range(pipeline)
        ]
        for pipeline, virtual, micro_batches in IN_FLIGHT
    ]
    assert planned_counts == measured["in_flight"]
    assert planned_counts[2] == [4, 3, 2, 1]
