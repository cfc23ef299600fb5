"""Weights, gradients and optimizer state of a plan against what Megatron allocates."""

from __future__ import annotations

from typing import Any

import pytest

from bapo_megatron.tools.planning.memory import plan_memory
from bapo_megatron.tools.planning.workload import plan_workload
from tests.tools.planning.cases import STATE, layout_of, small_model
from tests.tools.planning.runs import scenario


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
    found = measured["state"][case]
    assert memory.weights_bytes == found["weights"]
    # Buffers are padded to multiples of 128 elements, and each parameter in them to 64.
    assert memory.gradients_bytes == pytest.approx(found["gradients"], rel=2e-3)
    assert memory.optimizer_bytes == pytest.approx(found["masters"] + found["moments"], rel=2e-3)
