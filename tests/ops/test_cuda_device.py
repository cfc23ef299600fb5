"""The CUDA kernels on a device against the CPU ops and float64 oracles.

Shape legend: N = rows of logits, V = local columns, T = tokens, P = tensor-parallel ranks.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from bapo_megatron.ops import extension
from tests.cuda_emulation import cases
from tests.ops.kernel_calls import LOWER, UPPER, grid_tensor
from tests.oracles.token_batches import paper_rule, random_tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

EDGE_TOKENS = (0, 1, 31, 32, 33, 4097)
OPS = torch.ops.bapo
assert_partials = cases.assert_partials


@pytest.fixture(autouse=True)
def cuda_build() -> None:
    """On a machine with a device these tests must run, not pass for want of the kernels."""
    assert extension.build_info()["cuda"], "rebuild with nvcc: BAPO_FORCE_CUDA_BUILD=1"


def cuda(value: object) -> object:
    return value.cuda() if isinstance(value, Tensor) else value


def partials_on_both(
    case: cases.StridedLogits, rows_T: Tensor | None, target_T: Tensor, *scalars: float
) -> tuple[Tensor, Tensor]:
    on_cpu = OPS.logprob_partials(case.view_NV, rows_T, target_T, *scalars)
    device = case.to("cuda")
    arguments = map(cuda, (rows_T, target_T))
    return OPS.logprob_partials(device.view_NV, *arguments, *scalars).cpu(), on_cpu


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("columns", [1, 15, 16, 17, 4097, 19008, 33000, 152064])
def test_partials_match_float64_and_the_cpu(columns: int, dtype: torch.dtype) -> None:
    case = cases.strided_logits(33, columns, dtype, gap=1 - columns % 2, offset=1, seed=columns)
    target_T = cases.random_targets(33, columns + 10)
    scalars = (5, columns + 10, 0.6)
    got_T4, cpu_T4 = partials_on_both(case, None, target_T, *scalars)
    assert_partials(got_T4, cases.expected_partials(case.view_NV, None, target_T, *scalars))
    assert_partials(got_T4, cpu_T4)


@pytest.mark.parametrize("num_tokens", EDGE_TOKENS)
def test_partials_of_edge_numbers_of_selected_rows(num_tokens: int) -> None:
    case = cases.strided_logits(num_tokens + 3, 50, torch.bfloat16, gap=3)
    rows_T = (torch.arange(num_tokens) * 7) % (num_tokens + 3)
    target_T = cases.random_targets(num_tokens, 50)
    got_T4, cpu_T4 = partials_on_both(case, rows_T, target_T, 0, 50, 1.0)
    assert_partials(got_T4, cpu_T4)


def test_more_rows_than_a_grid_dimension_other_than_x_holds() -> None:
    case = cases.strided_logits(70_000, 16, torch.float32)
    got_T4, cpu_T4 = partials_on_both(case, None, cases.random_targets(70_000, 16), 0, 16, 1.0)
    assert_partials(got_T4, cpu_T4)


@pytest.mark.parametrize("column", [0, 8, 40999])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_logit_poisons_its_token_and_no_other(bad: float, column: int) -> None:
    case = cases.strided_logits(3, 41001, torch.bfloat16, offset=1)
    case.view_NV[1, column] = bad
    case.view_NV[2, 100:] = -math.inf
    target_T = torch.tensor([3, 4, 5])
    got_T4, _ = partials_on_both(case, None, target_T, 0, 41001, 1.0)
    expected_T4 = cases.expected_partials(case.view_NV, None, target_T, 0, 41001, 1.0)
    assert bool(got_T4[1, :3].isnan().all())
    assert_partials(got_T4, expected_T4)


def test_rows_and_targets_out_of_range_give_nan_without_waiting_for_the_device() -> None:
    logits_NV = cases.strided_logits(5, 20, torch.bfloat16).to("cuda").view_NV[1:4]
    rows_T = torch.tensor([0, -1, 3, 1 << 40, 1, 2, 2]).cuda()
    target_T = torch.tensor([4, 4, 4, 4, -1, 20, 4]).cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got_T4 = OPS.logprob_partials(logits_NV, rows_T, target_T, 0, 20, 1.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert got_T4.isnan().any(dim=1).tolist() == [False, True, True, True, True, True, False]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("num_tokens", EDGE_TOKENS)
def test_shards_give_the_unsharded_log_prob_and_entropy(num_tokens: int, num_ranks: int) -> None:
    vocab_size = 61
    per_rank = {1: 64, 2: 40, 4: 24}[num_ranks]
    case = cases.strided_logits(num_tokens, per_rank * num_ranks, torch.bfloat16)
    case.view_NV.mul_(8)
    target_T = cases.random_targets(num_tokens, vocab_size)
    device = case.to("cuda")
    parts = [
        OPS.logprob_partials(
            device.view_NV[:, start : start + per_rank],
            None,
            target_T.cuda(),
            start,
            vocab_size,
            0.6,
        )
        for start in range(0, per_rank * num_ranks, per_rank)
    ]
    got = OPS.logprob_combine(torch.stack(parts), 0.6)
    expected = cases.expected_tokens(case.view_NV[:, :vocab_size], target_T, 0.6)
    values = (expected.logprob_T, expected.entropy_T, expected.max_T, expected.log_sum_T)
    for value_T, expected_T in zip(got, values, strict=True):
        bound_T = 2e-6 * expected_T.abs().clamp(min=1.0)
        assert bool(((value_T.cpu().double() - expected_T).abs() <= bound_T).all())


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("columns", [1, 15, 16, 17, 4097, 19008, 33000])
def test_the_gradient_matches_float64_within_one_rounding(columns: int, dtype: torch.dtype) -> None:
    case = cases.gradient_case(
        9, columns, dtype, gap=1 - columns % 2, offset=1, padding=columns // 9, temperature=0.6
    )
    device = case.logits.to("cuda")
    OPS.logits_backward_(*case.arguments(device.view_NV))
    case.check(device.view_NV)
    assert device.border_is_intact()


@pytest.mark.parametrize("num_tokens", EDGE_TOKENS)
def test_rows_without_a_token_become_zero(num_tokens: int) -> None:
    case = cases.gradient_case(num_tokens, 50, torch.bfloat16, spare_rows=7, gap=3)
    device = case.logits.to("cuda")
    OPS.logits_backward_(*case.arguments(device.view_NV))
    case.check(device.view_NV)
    assert device.border_is_intact()


def test_a_row_of_several_tokens_becomes_nan_and_its_neighbours_do_not() -> None:
    logits_NV = torch.zeros(8, 40, dtype=torch.bfloat16, device="cuda")
    rows_T = torch.tensor([4, 1, 4, 1 << 40, -1, 2, 4, 1]).cuda()
    log_sum_T = torch.full((8,), math.log(40.0)).cuda()
    zeros_T, ones_T = torch.zeros(8).cuda(), torch.ones(8).cuda()
    target_T = torch.full((8,), 7).cuda()
    OPS.logits_backward_(
        logits_NV, rows_T, target_T, zeros_T, log_sum_T, log_sum_T, ones_T, None, 0, 40, 1.0
    )
    assert logits_NV.isnan().all(dim=1).nonzero().flatten().tolist() == [1, 4]
    assert logits_NV[[0, 3, 5, 6, 7]].eq(0).all()
    assert logits_NV[2].isfinite().all()


def test_a_token_without_gradient_gets_zeros_whatever_its_logits_hold() -> None:
    logits_NV = torch.full((2, 40), math.nan, dtype=torch.bfloat16, device="cuda")
    nan_T = torch.full((2,), math.nan, device="cuda")
    target_T = torch.tensor([1, 2], device="cuda")
    grad_T = torch.tensor([0.0, 1.0], device="cuda")
    OPS.logits_backward_(logits_NV, None, target_T, nan_T, nan_T, nan_T, grad_T, None, 0, 40, 1.0)
    assert logits_NV[0].eq(0).all()
    assert logits_NV[1].isnan().all()


def grid_and_bytes(**changes: object) -> tuple[extension.ClipGrid, Tensor]:
    grid = extension.ClipGrid(LOWER, UPPER, **changes)  # type: ignore[arg-type]
    return grid, grid_tensor(grid)


def token_tensors(num_tokens: int, **rule: object) -> list[Tensor]:
    tokens = random_tokens(np.random.default_rng(num_tokens), num_tokens, paper_rule(**rule))
    return [torch.from_numpy(array) for array in tokens.arrays()]


@pytest.mark.parametrize("weight", ["uniform", "behaviour_prob"])
@pytest.mark.parametrize("num_tokens", [*EDGE_TOKENS, 1 << 20])
@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_the_contribution_table_is_bit_identical_to_the_cpus(
    num_tokens: int, weight: str, dual_clip: float | None
) -> None:
    grid, grid_bytes = grid_and_bytes(dual_clip=dual_clip)
    tokens = token_tensors(min(num_tokens, 8192), dual_clip=dual_clip)
    tokens = [token_T.repeat(max(1, num_tokens // 8192)) for token_T in tokens]
    for index, value in enumerate((math.nan, math.inf, 300.0, 0.5)):
        tokens[index][index : index + 1] = value
    table = torch.arange(grid.num_slots)
    device_table = table.cuda()
    OPS.contributions_(table, grid_bytes, *tokens, weight)
    OPS.contributions_(device_table, grid_bytes, *map(cuda, tokens), weight)
    assert torch.equal(device_table.cpu(), table)


@pytest.mark.parametrize("contribution", ["surrogate", "gradient"])
@pytest.mark.parametrize("measure", ["share", "ratio"])
@pytest.mark.parametrize("order", ["upper_first", "lower_first"])
@pytest.mark.parametrize("dual_clip", [None, 3.0])
@pytest.mark.parametrize("num_tokens", [0, 300])
def test_the_decision_is_the_cpus(
    contribution: str, measure: str, order: str, dual_clip: float | None, num_tokens: int
) -> None:
    grid, grid_bytes = grid_and_bytes(order=order, dual_clip=dual_clip)
    table = torch.zeros(grid.num_slots, dtype=torch.int64)
    OPS.contributions_(table, grid_bytes, *token_tensors(num_tokens), "uniform")
    for target in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8):
        expected = OPS.search_bounds(table, grid_bytes, target, contribution, measure)
        got = OPS.search_bounds(table.cuda(), grid_bytes, target, contribution, measure)
        shares = [2, 3]  # for reports only: converted from 128 bits, perhaps one ulp apart
        torch.testing.assert_close(
            got.cpu()[shares], expected[shares], rtol=1e-14, atol=0, equal_nan=True
        )
        got[shares] = expected[shares] = 0.0
        assert torch.equal(got.cpu(), expected)


@pytest.mark.parametrize(("slot", "value"), [(-4, 1), (-3, 2), (7, -1), (-2, 1 << 31)])
def test_a_table_that_cannot_be_trusted_is_refused(slot: int, value: int) -> None:
    _, grid_bytes = grid_and_bytes()
    table = torch.zeros(224, dtype=torch.int64)
    table[slot] = value
    bounds = OPS.search_bounds(table.cuda(), grid_bytes, 0.4, "surrogate", "share").cpu()
    assert bounds[:2].tolist() == [0.0, math.inf]
    assert bounds[4] == 4


@pytest.mark.parametrize("num_tokens", EDGE_TOKENS)
def test_the_importance_ratio_has_the_cpus_bits(num_tokens: int) -> None:
    logprob_T, behaviour_T, *_ = token_tensors(num_tokens)
    if num_tokens > 30:
        logprob_T[3], behaviour_T[4], logprob_T[5] = math.nan, math.inf, behaviour_T[5] + 21
    expected_T = OPS.importance_ratio(logprob_T, behaviour_T)
    ratio_T = OPS.importance_ratio(logprob_T.cuda(), behaviour_T.cuda())
    torch.testing.assert_close(ratio_T.cpu(), expected_T, rtol=0, atol=0, equal_nan=True)


def test_kernels_run_on_the_current_stream() -> None:
    # The copy on the side stream is queued behind a long wait; a kernel on another stream would
    # read the zeros from before.
    source_NV = torch.randn(64, 512).cuda()
    logits_NV = torch.zeros(64, 512, device="cuda")
    target_T = torch.zeros(64, dtype=torch.int64, device="cuda")
    expected_T4 = OPS.logprob_partials(source_NV, None, target_T, 0, 512, 1.0)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        logits_NV.copy_(source_NV)
        got_T4 = OPS.logprob_partials(logits_NV, None, target_T, 0, 512, 1.0)
    stream.synchronize()
    assert torch.equal(got_T4, expected_T4)
