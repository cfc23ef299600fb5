"""Bytes of a plan against the collectives that Megatron's model calls, and against hand counts."""

from typing import Any

import pytest

from bapo_megatron.tools.planning.plan import PlanOptions, make_plan
from bapo_megatron.tools.planning.scenario import Scenario
from bapo_megatron.tools.planning.timing import (
    context_bytes,
    data_bytes,
    pipeline_bytes,
    tensor_bytes,
)
from tests.tools.planning.cases import (
    LENGTHS,
    MESSAGES,
    layout_of,
    run_config,
    scenario,
    small_model,
)

TOKENS = sum(LENGTHS)


def run_of(parallel: dict[str, Any], **megatron: Any) -> Scenario:
    """The small model of four layers: h = 256, 64 key channels, bfloat16."""
    return scenario(small_model("qwen2", 4), layout_of(parallel), megatron=megatron)


def sent(measured: dict[str, Any], case: str, *passes: str) -> float:
    """What each of two ranks in a ring sends for the collectives that Megatron's model called."""
    share = {"all-gather": 1 / 2, "reduce-scatter": 1 / 2, "all-reduce": 2 / 2}
    return sum(
        share[key.split()[1]] * sum(sizes)
        for key, sizes in measured["messages"][case].items()
        if key.split()[0] in passes
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "forward", "both"),
    [
        # Nine sums (two in each of four layers, the embedding's) of 512 tokens · 256 · 2 bytes, an
        # all-reduce each over two ranks; as many of gradients.
        ("tensor", 9 * 262_144, 18 * 262_144),
        # The same; inputs are gathered once more for the backward pass, half a hidden state each.
        ("sequence", 9 * 262_144, 22.5 * 262_144),
    ],
)
def test_tensor_parallel_sends_what_megatron_s_model_sends(
    case: str, forward: float, both: float, measured: dict[str, Any]
) -> None:
    run = run_of(MESSAGES[case])
    assert tensor_bytes(run, TOKENS, trains=False) == forward == sent(measured, case, "forward")
    assert tensor_bytes(run, TOKENS, trains=True) == both
    assert sent(measured, case, "forward", "backward") == both


@pytest.mark.slow
def test_context_parallel_sends_keys_and_values(measured: dict[str, Any]) -> None:
    # Keys and values of 64 channels each, of the 256 tokens of a rank: 65,536 bytes in 4 layers.
    once = context_bytes(run_of(MESSAGES["context"]), TOKENS // 2)
    assert once == 4 * 65_536
    assert once == sum(measured["messages"]["context"]["forward all-gather"]) / 2
    # A ring passes keys and values round again, which our own attention does not.
    sizes = measured["messages"]["context"]["backward reduce-scatter"]
    assert once == sum(sizes) / 2


def test_full_recomputation_repeats_the_sums_of_layers() -> None:
    kept, again = run_of({"tensor": 2}), run_of({"tensor": 2}, recompute="full")
    more = tensor_bytes(again, TOKENS, trains=True) - tensor_bytes(kept, TOKENS, trains=True)
    assert more == 8 * 262_144
    assert tensor_bytes(again, TOKENS, trains=False) == tensor_bytes(kept, TOKENS, trains=False)


def test_a_pipeline_sends_hidden_states_for_each_chunk() -> None:
    assert pipeline_bytes(run_of({"tensor": 2}), TOKENS) == 0
    assert pipeline_bytes(run_of({"pipeline": 2}), TOKENS) == 262_144
    divided = {"pipeline": 2, "virtual_pipeline": 2, "tensor": 2, "sequence": True}
    assert pipeline_bytes(run_of(divided), TOKENS) == 2 * 131_072


def test_data_parallel_sends_gradients_and_updated_weights() -> None:
    # 4 + 2 bytes of 1000 parameters, 3/4 of them to other ranks.
    assert data_bytes(run_of({"context": 4}), 1000, 4) == 4500
    assert data_bytes(run_of({}), 1000, 1) == 0


def test_overlap_hides_the_messages_of_data_parallel_and_a_single_gpu_sends_nothing() -> None:
    def exposed_s(**megatron: Any) -> float:
        config = run_config(parallel={"context": 2}, megatron=megatron)
        phases = make_plan(config, small_model("qwen2", 4), PlanOptions()).phases
        (optimizer,) = (phase for phase in phases if phase.name == "optimizer")
        assert optimizer.sent_bytes["data"] > 0
        return optimizer.messages_s

    assert exposed_s() > 0
    assert exposed_s(overlap_grad_reduce=True, overlap_param_gather=True) == 0
    plan = make_plan(run_config(), small_model("qwen2", 4), PlanOptions())
    assert plan.sent_bytes == {"tensor": 0, "context": 0, "pipeline": 0, "data": 0}
