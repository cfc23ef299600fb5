"""What every op refuses, by name and unchanged; and that each is registered as torch wants it."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from bapo_megatron.ops import extension
from tests.ops.kernel_calls import GRID, ISAS, filled_table, grid_tensor
from tests.oracles.token_batches import paper_rule, random_tokens

NUMBERS = ("max", "log_sum", "entropy")
KL_NUMBERS = (*NUMBERS, "teacher_max", "teacher_log_sum", "kl")
TOKENS = ("logprob", "behaviour_logprob", "advantage", "mask")


def valid(op: str) -> dict[str, Any]:
    """Arguments of an op over three tokens and eight columns, in its order."""

    def floats(*names: str) -> dict[str, Tensor]:
        return {name: torch.ones(3) for name in names}

    logits = {"logits": torch.zeros(3, 8), "rows": None, "target": torch.tensor([0, 1, 2])}
    rows = {"student": torch.zeros(3, 8), "teacher": torch.ones(3, 8)}
    pair = {**rows, "target": torch.tensor([0, 1, 2])}
    columns, direction = (
        {"vocab_start": 0, "vocab_size": 8, "temperature": 1.0},
        {"direction": "reverse"},
    )
    grads = {"grad_logprob": torch.ones(3), "grad_entropy": None}
    table = {"table": torch.zeros(224, dtype=torch.int64), "grid": grid_tensor(GRID)}
    arguments: dict[str, dict[str, Any]] = {
        "logprob_partials": logits | columns,
        "logprob_combine": {"partials": torch.ones(2, 3, 4), "temperature": 1.0},
        "logits_backward_": logits | floats(*NUMBERS) | grads | columns,
        "kl_partials": pair | columns | direction,
        "kl_combine": {"partials": torch.ones(2, 3, 8), "temperature": 1.0} | direction,
        "kl_backward_": pair
        | floats(*KL_NUMBERS)
        | grads
        | floats("grad_kl")
        | columns
        | direction,
        "contributions_": table | floats(*TOKENS) | {"weight": "uniform"},
        "search_bounds": table | {"target": 0.4, "contribution": "surrogate", "measure": "share"},
        "importance_ratio": floats(*TOKENS[:2]),
    }
    return arguments[op]


def broken_grid(offset: int, value: int | float) -> dict[str, Tensor]:
    """The grid's bytes with one 4-byte number replaced."""
    content = bytearray(GRID.to_bytes())
    kind = np.int32 if isinstance(value, int) else np.float32
    content[offset : offset + 4] = np.array([value], dtype=kind).tobytes()
    return {"grid": torch.frombuffer(content, dtype=torch.uint8)}


def unfit(*names: str) -> list[tuple[dict[str, Any], str]]:
    """Each of these tensors of a float32 per token with another length, type or stride."""
    return [
        ({name: value}, f" {name} must {rule}")
        for name in names
        for value, rule in (
            (torch.zeros(2), r"have shape \[3\], got \[2\]"),
            (torch.zeros(3).double(), "be float32, got float64"),
            (torch.zeros(6)[::2], "be contiguous, got stride 2"),
        )
    ]


FIRST_UPPER, FIRST_LOWER = 16, 16 + 4 * 256
"""Offsets in the grid's bytes, behind two counts, a flag and the order."""
LOGITS_NV, TARGET_T = torch.zeros(3, 8), torch.tensor([0, 1, 2])
TABLE = filled_table(random_tokens(np.random.default_rng(0), 50, paper_rule()), GRID)
REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "logprob_partials": [
        ({"logits": LOGITS_NV.double()}, "logits must be float32.* got float64"),
        ({"logits": torch.zeros(8)}, r"logits must have shape \[N, V\], got \[8\]"),
        ({"logits": torch.zeros(8, 3).t()}, "columns of logits must be adjacent .* got stride 3"),
        ({"logits": torch.zeros(8).expand(3, 8)}, "rows of logits must not overlap, got stride 0"),
        ({"target": TARGET_T.int()}, "target must be int64, got int32"),
        ({"target": TARGET_T[:2]}, "target must have one token per row of logits, 3, .* got 2"),
        ({"target": torch.arange(6)[::2]}, "target must be contiguous, got stride 2"),
        ({"target": TARGET_T[None]}, r"target must have shape \[T\], got \[1, 3\]"),
        ({"target": torch.tensor([0, 8, 1])}, r"target must lie in .* \[0, 8\), got 8 at token 1"),
        ({"target": torch.tensor([0, 1, -1])}, r"target must lie in .* got -1 at token 2"),
        ({"rows": TARGET_T[:2]}, r"rows must have shape \[3\], got \[2\]"),
        ({"rows": TARGET_T.float()}, "rows must be int64, got float32"),
        ({"rows": torch.tensor([0, 3, 1])}, r"rows must lie in .* \[0, 3\), got 3 at token 1"),
        ({"rows": torch.tensor([-1, 0, 1])}, "rows must lie in .* got -1 at token 0"),
        ({"vocab_start": -1}, "vocab_start must be >= 0, got -1"),
        ({"vocab_size": 0}, "vocab_size must be >= 1, got 0"),
        ({"temperature": 0.0}, "temperature must be > 0 and finite, got 0"),
        ({"temperature": torch.inf}, "temperature must be > 0 and finite, got inf"),
    ],
    "logprob_combine": [
        ({"partials": torch.zeros(1, 3, 4).double()}, "partials must be float32, got float64"),
        ({"partials": torch.zeros(3, 4)}, r"shape \[P, T, 4\] .* got \[3, 4\]"),
        ({"partials": torch.zeros(0, 3, 4)}, r"must have shape .* got \[0, 3, 4\]"),
        ({"partials": torch.zeros(1, 4, 3).transpose(1, 2)}, "partials must be contiguous"),
    ],
    "logits_backward_": [
        ({"rows": torch.tensor([0, 2, 0])}, "rows must select each row at most once"),
        ({"target": torch.tensor([0, 1, 8])}, r"target must lie in .* \[0, 8\), got 8 at token 2"),
        *unfit(*NUMBERS, "grad_logprob", "grad_entropy"),
    ],
    "kl_partials": [
        ({"student": LOGITS_NV.double()}, "student must be float32.* got float64"),
        ({"student": torch.zeros(8, 3).t()}, "columns of student must be adjacent"),
        ({"teacher": LOGITS_NV.half()}, "teacher must be float32, got float16"),
        ({"teacher": torch.ones(3, 9)}, r"teacher must have the shape of student, \[3, 8\]"),
        ({"teacher": torch.zeros(8).expand(3, 8)}, "rows of teacher must not overlap"),
        ({"target": TARGET_T[:2]}, r"target must have shape \[3\], got \[2\]"),
        ({"target": torch.tensor([0, 8, 1])}, r"target must lie in .* got 8 at token 1"),
        ({"vocab_size": 0}, "vocab_size must be >= 1, got 0"),
        ({"temperature": 0.0}, "temperature must be > 0 and finite, got 0"),
        ({"direction": "both"}, "direction must be reverse or forward, got 'both'"),
    ],
    "kl_combine": [
        ({"partials": torch.zeros(1, 3, 8).double()}, "partials must be float32, got float64"),
        ({"partials": torch.zeros(1, 3, 4)}, r"shape \[P, T, 8\] .* got \[1, 3, 4"),
        ({"partials": torch.zeros(1, 8, 3).transpose(1, 2)}, "partials must be contiguous"),
        ({"direction": ""}, "direction must be reverse or forward, got ''"),
    ],
    "kl_backward_": unfit(*KL_NUMBERS, "grad_logprob", "grad_entropy", "grad_kl"),
    "contributions_": [
        ({"table": torch.zeros(224)}, "table must be int64, got float32"),
        ({"table": torch.zeros(7, dtype=torch.int64)}, r"table must have shape \[224\], got \[7\]"),
        ({"logprob": torch.zeros(2, 2)}, r"logprob must have shape \[T\], got \[2, 2\]"),
        *unfit("behaviour_logprob", "advantage", "mask"),
        ({"weight": "none"}, "weight must be uniform or behaviour_prob, got 'none'"),
    ],
    "search_bounds": [
        ({"target": 1.0}, "target must lie between 0 and 1 with measure share, got 1"),
        ({"target": 300.0, "measure": "ratio"}, "target must lie between 0 and 256 .* got 300"),
        ({"target": 1e-9}, r"target must be above 2\^-25, got 1e-09"),
        ({"target": math.nan}, "target must lie between 0 and 1 .* got nan"),
        ({"contribution": "loss"}, "contribution must be surrogate or gradient, got 'loss'"),
        ({"measure": "sum"}, "measure must be share or ratio, got 'sum'"),
        ({"grid": torch.zeros(10, dtype=torch.uint8)}, r"the 2068 bytes of .* got shape \[10\]"),
        ({"grid": grid_tensor(GRID).to(torch.int8)}, "grid must be uint8, got int8"),
        ({"grid": torch.zeros(2068, dtype=torch.uint8)}, "1 to 256 .* got 0 lower and 0"),
        (broken_grid(0, 257), "1 to 256 .* got 16 lower and 257 upper"),
        (broken_grid(4, -1), "1 to 256 .* got -1 lower and 37 upper"),
        (broken_grid(8, 2), "got 2 for a yes or no"),
        (broken_grid(12, 7), "known order, got 7"),
        (broken_grid(FIRST_UPPER + 4, 9.0), "upper .* ascend, got 9 before 1.3"),
        (broken_grid(FIRST_UPPER + 4, math.nan), "upper .* ascend, got 1.2 before"),
        (broken_grid(FIRST_UPPER, 0.9), "upper .* between 1 and 256, got 0.9"),
        (broken_grid(FIRST_LOWER, 0.1), "lower .* between 0.5 and 1, got 0.1"),
        (broken_grid(8, 1), "dual_clip must be > 1 and finite, got 0"),
    ],
    "importance_ratio": [
        ({"logprob": torch.zeros(2, 2)}, r" logprob must have shape \[T\], got \[2, 2\]"),
        ({"logprob": torch.zeros(3).double()}, " logprob must be float32, got float64"),
        ({"logprob": torch.zeros(6)[::2]}, " logprob must be contiguous, got stride 2"),
        *unfit("behaviour_logprob"),
    ],
}
REFUSED["kl_backward_"] += REFUSED["kl_partials"]


@pytest.mark.parametrize(
    ("op", "changes", "message"),
    [(op, *row) for op, rows in REFUSED.items() for row in rows],
)
def test_what_an_op_refuses_it_names_and_nothing_is_overwritten(
    op: str, changes: dict[str, Any], message: str
) -> None:
    arguments = valid(op) | changes
    tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
    before = [tensor.clone() for tensor in tensors]
    with pytest.raises(RuntimeError, match=message):
        getattr(torch.ops.bapo, op)(**arguments)
    assert all(torch.equal(*pair) for pair in zip(tensors, before, strict=True))


@pytest.mark.parametrize(
    ("op", "changes"),
    [
        *((op, {}) for op in REFUSED if op != "search_bounds"),
        ("search_bounds", {"table": TABLE}),  # without NaN in what it returns
        ("logprob_partials", {"rows": torch.tensor([2, 0, 1])}),
        ("logits_backward_", {"rows": torch.tensor([2, 0, 1]), "grad_logprob": None}),
        ("kl_partials", {"direction": "forward"}),
        ("kl_backward_", {"direction": "forward", "grad_entropy": torch.ones(3)}),
        *(
            (op, {"logits": torch.zeros(3, 8, dtype=dtype)})
            for op in ("logprob_partials", "logits_backward_")
            for dtype in (torch.bfloat16, torch.float16)
        ),
        ("importance_ratio", {name: torch.zeros(0) for name in TOKENS[:2]}),
    ],
)
def test_every_op_is_registered_as_torch_wants_it(op: str, changes: dict[str, Any]) -> None:
    arguments = tuple((valid(op) | changes).values())
    opcheck(getattr(torch.ops.bapo, op).default, arguments)


@pytest.mark.gpu
def test_a_tensor_on_another_device_is_refused() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    with pytest.raises(RuntimeError, match="target must be on the device of logits, cpu, got cuda"):
        torch.ops.bapo.logprob_partials(LOGITS_NV, None, TARGET_T.cuda(), 0, 8, 1.0)


def test_an_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(ValueError, match=r"isa must be one of auto, portable.*, got 'sse9'"):
        extension.use_isa("sse9")
    assert extension.build_info()["isa"] == ISAS[-1]
