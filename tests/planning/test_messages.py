"""Collectives of a plan against those that Megatron's model calls, and against rings by hand."""

from __future__ import annotations

from typing import Any

import pytest

from bapo_megatron.planning.plan import PlanOptions, make_assumptions
from bapo_megatron.planning.timing import Messages, sent_bytes
from bapo_megatron.planning.workload import plan_workload
from tests.planning.cases import LENGTHS, MESSAGES, layout_of, small_model
from tests.planning.runs import run_config


def planned(parallel: dict[str, Any], **settings: Any) -> Messages:
    """The messages of one micro-batch of the small model."""
    tokens = sum(LENGTHS)
    config = run_config(
        parallel=parallel,
        data={"max_prompt_tokens": 1},
        rollout={"max_response_tokens": tokens, "groups_per_step": 1, "samples_per_group": 2},
        train={"max_tokens_per_micro_batch": 2 * tokens},
        **settings,
    )
    options = PlanOptions(prompt_tokens=1, response_tokens=tokens // 2 - 1)
    layout, hf = layout_of(parallel), small_model("qwen2", 4)
    assumptions = make_assumptions(config, layout.gpus, options)
    workload = plan_workload(config, hf, layout, assumptions)
    assert (workload.micro_batches, workload.micro_batch_tokens) == (1, tokens // layout.context)
    return Messages(config, hf, layout, config.megatron, workload, assumptions)


def volume(messages: Messages, phase: str, operation: str) -> float:
    return sum(
        c.count * c.tensor_bytes
        for c in messages.all()
        if (c.phase, c.operation) == (phase, operation) and not c.name.startswith("loss")
    )


@pytest.mark.parametrize("case", ["tensor", "sequence"])
def test_tensor_parallel_moves_what_megatron_s_model_moves(
    case: str, measured: dict[str, Any]
) -> None:
    messages = planned(MESSAGES[case])
    for key, sizes in measured["messages"][case].items():
        assert volume(messages, *key.split()) == sum(sizes), key
    assert {f"{c.phase} {c.operation}" for c in messages.all() if c.phase != "update"} - {
        "forward all-gather",  # the loss stage's, which the model does not have
        "sync all-gather",
    } <= set(measured["messages"][case])


def test_context_parallel_moves_keys_and_values(measured: dict[str, Any]) -> None:
    messages, sizes = planned(MESSAGES["context"]), measured["messages"]["context"]
    assert volume(messages, "forward", "all-gather") == sum(sizes["forward all-gather"])
    # A ring passes keys and values round again, which our own attention does not.
    gradients = sum(sizes["backward reduce-scatter"])
    assert volume(messages, "backward", "all-gather") == 2 * gradients


def test_a_ring_sends_all_but_its_own_part_once_or_twice() -> None:
    assert sent_bytes("all-gather", 800, 4) == 600
    assert sent_bytes("reduce-scatter", 800, 4) == 600
    assert sent_bytes("all-reduce", 800, 4) == 1200
    assert sent_bytes("send", 800, 2) == 800


def test_nothing_is_sent_by_a_single_gpu() -> None:
    assert planned({}).all() == []


@pytest.mark.parametrize(
    ("algorithm", "expected_bytes"),
    [
        # 37 + 1 and 16 + 1 bins of four numbers, and four counters
        ({}, 8 * (4 * (38 + 17) + 4)),
        # 17 + 1 and 5 + 1 bins; Eq. 5 sees the dual clip as another bin
        ({"bapo": {"preset": "recipe"}}, 8 * (4 * (18 + 6) + 4)),
        ({"bapo": {"preset": "recipe", "contribution": "gradient"}}, 8 * (4 * (18 + 7) + 4)),
        ({"objective": "tests.algorithm.own_objectives:HighEntropy"}, 8 * 64),
        # an integer for each of the two responses
        ({"objective": "tests.algorithm.own_objectives:Gspo"}, 8 * 2),
        ({"objective": "clip"}, None),
    ],
)
def test_what_an_objective_sums_up_is_a_message(
    algorithm: dict[str, Any], expected_bytes: int | None
) -> None:
    messages = planned({"context": 2}, algorithm=algorithm).all()
    sizes = [message.tensor_bytes for message in messages if message.name == "objective: table"]
    assert sizes == ([] if expected_bytes is None else [expected_bytes])


def test_full_recomputation_repeats_the_messages_within_layers() -> None:
    parallel = {"tensor": 2, "sequence": True}
    kept = planned(parallel)
    again = planned(parallel, megatron={"recompute": "full"})
    for first, second in zip(kept.all(), again.all(), strict=True):
        more = again.per_step(second) - kept.per_step(first)
        within = first.name.startswith("layers") and first.phase == "forward"
        assert more == (1 if within else 0), first.name


def test_overlap_hides_the_messages_of_data_parallel() -> None:
    settings = {"overlap_grad_reduce": True, "overlap_param_gather": True}
    hidden = {c.name: c.hidden_by for c in planned({"context": 2}, megatron=settings).all()}
    shown = {c.name: c.hidden_by for c in planned({"context": 2}).all()}
    assert (hidden["gradients"], hidden["weights"]) == ("backward", "forward")
    assert (shown["gradients"], shown["weights"]) == ("nothing", "nothing")
