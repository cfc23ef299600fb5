"""Compiled kernels, the readable reference and the chunked path train alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed_launch import run_ranks
from tests.trainer.aggregation_ranks import gradients_of_each_path

pytestmark = pytest.mark.distributed

PATHS = {
    "reference": {"backend": "reference"},
    "compiled": {"backend": "cpu"},
    "chunked": {"backend": "cpu", "logits_chunk_tokens": 13},
}

SEARCHES = {
    "update": {"bapo": {"target": 0.38}},
    "micro_batch": {"bapo": {"target": 0.38, "scope": "micro_batch"}, "dual_clip": 3.0},
    "fixed": {"objective": "clip", "entropy_coefficient": 0.0},
}


def _assert_equal(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual["loss"] == pytest.approx(expected["loss"], abs=1e-6)
    assert actual["entropy"] == pytest.approx(expected["entropy"], rel=1e-6)
    assert actual["bounds"] == expected["bounds"]
    assert actual["gradients"].keys() == expected["gradients"].keys()
    for name, gradient in expected["gradients"].items():
        scale = float(gradient.abs().max())
        difference = float((actual["gradients"][name] - gradient).abs().max())
        assert difference <= 2e-5 * scale + 1e-8, name


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize(
    ("num_ranks", "tensor", "sequence"),
    [
        pytest.param(1, 1, False, id="one rank"),
        pytest.param(2, 2, False, id="TP 2"),
        pytest.param(2, 2, True, id="TP 2 with SP"),
        pytest.param(2, 1, False, id="DP 2"),
    ],
)
def test_every_path_gives_the_loss_and_the_gradients_of_the_reference(
    random_model: Path,
    mixed_dumps: Path,
    num_ranks: int,
    tensor: int,
    sequence: bool,
    search: str,
) -> None:
    dump = mixed_dumps / "step_000001.parquet"
    ranks = run_ranks(
        gradients_of_each_path,
        num_ranks,
        random_model,
        dump,
        tensor,
        sequence,
        PATHS,
        SEARCHES[search],
    )
    for results in ranks:
        for path in ("compiled", "chunked"):
            _assert_equal(results[path], results["reference"])
