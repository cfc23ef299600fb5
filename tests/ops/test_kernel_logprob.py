"""logprob_partials and logprob_combine against float64, for every instruction set.

Shape legend: N = rows of logits, V = columns, T = tokens, P = tensor-parallel ranks.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from tests.ops.kernel_calls import (
    DTYPES,
    TokenResults,
    assert_close,
    partials,
    random_logits,
    random_targets,
    threads,
    token_results,
)
from tests.oracles.logprob import token_logprobs

pytestmark = pytest.mark.usefixtures("isa")
BLOCK = 1024
"""Columns that the kernels sum at a time."""


def assert_matches(
    results: TokenResults, logits_TV: Tensor, target_T: Tensor, temperature: float = 1.0
) -> None:
    expected = token_logprobs(logits_TV, target_T, temperature)
    assert_close(results.logprob, expected.logprob_T)
    assert_close(results.entropy, expected.entropy_T)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_tokens", "vocab_size"),
    [(1, 1), (31, 2), (32, 63), (33, 64), (1, 65), (4097, 35), (33, BLOCK + 1), (6, 19_008)],
)
def test_logprob_and_entropy_match_float64(
    num_tokens: int, vocab_size: int, dtype: torch.dtype, temperature: float
) -> None:
    logits_TV = random_logits(num_tokens, vocab_size, dtype)
    target_T = random_targets(num_tokens, vocab_size)
    results = token_results(logits_TV, target_T, temperature=temperature)
    assert_matches(results, logits_TV, target_T, temperature)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_of_eighty_keep_the_tolerance(dtype: torch.dtype, temperature: float) -> None:
    logits_TV = random_logits(64, 3001, dtype, scale=30.0).clamp(-80, 80)
    logits_TV[::2] = logits_TV[::2].sort(dim=1).values
    logits_TV[1::4] += 77
    target_T = random_targets(64, 3001)
    results = token_results(logits_TV, target_T, temperature=temperature)
    assert_matches(results, logits_TV, target_T, temperature)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_tokens_give_empty_results(dtype: torch.dtype) -> None:
    empty_T = torch.empty(0, dtype=torch.int64)
    assert partials(torch.empty(0, 16, dtype=dtype), empty_T).shape == (0, 4)
    assert partials(torch.ones(5, 16, dtype=dtype), empty_T, rows_T=empty_T).shape == (0, 4)
    assert all(
        len(result) == 0 for result in torch.ops.bapo.logprob_combine(torch.ones(2, 0, 4), 1)
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_may_be_strided_unaligned_selected_and_repeated(dtype: torch.dtype) -> None:
    logits_NV = random_logits(40, 700, dtype)[:, 3 : 3 + 517]
    rows_T = torch.tensor([39, 0, 7, 7, 21])
    target_T = random_targets(5, 517)
    results = token_results(logits_NV, target_T, rows_T=rows_T)
    assert_matches(results, logits_NV[rows_T], target_T)


def test_partials_hold_raw_maximum_and_target_and_scaled_sums() -> None:
    # d = (x − 3) / 2 = (−1, 0, −2): s = 1 + e^−1 + e^−2, t = −e^−1 − 2 e^−2.
    part_T4 = partials(torch.tensor([[1.0, 3.0, -1.0]]), torch.tensor([2]), temperature=2.0)
    expected = torch.tensor([[3.0, 1.5032147, -0.6385500, -1.0]])
    torch.testing.assert_close(part_T4, expected, rtol=1e-6, atol=0)
    assert part_T4[0, 0] == 3.0
    assert part_T4[0, 3] == -1.0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocab_size", "per_rank"), [(100, 32), (64, 32), (33, 16)])
def test_ranks_merge_to_the_whole_row_and_padding_is_not_read(
    vocab_size: int, per_rank: int, dtype: torch.dtype
) -> None:
    # Four ranks; where 64 ids fill two ranks, the other two have padding only.
    logits_TV = random_logits(19, vocab_size, dtype)
    target_T = random_targets(19, vocab_size)
    padded_TW = torch.full((19, 4 * per_rank), torch.nan, dtype=dtype)
    padded_TW[:, :vocab_size] = logits_TV
    parts = [
        partials(
            padded_TW[:, start : start + per_rank],
            target_T,
            vocab_start=start,
            vocab_size=vocab_size,
            temperature=0.6,
        )
        for start in range(0, 4 * per_rank, per_rank)
    ]
    results = TokenResults(*torch.ops.bapo.logprob_combine(torch.stack(parts), 0.6))
    assert_matches(results, logits_TV, target_T, 0.6)
    assert torch.equal(results.max, logits_TV.float().amax(dim=1))


def test_a_rank_of_padding_reports_minus_infinity_and_zeros() -> None:
    part_T4 = partials(
        torch.full((2, 16), torch.nan), torch.tensor([0, 3]), vocab_start=32, vocab_size=32
    )
    assert part_T4.tolist() == [[-torch.inf, 0.0, 0.0, 0.0]] * 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_columns", [5, 64, 2 * BLOCK + 7])
def test_adversarial_rows_match_float64(num_columns: int, dtype: torch.dtype) -> None:
    spike_V = torch.zeros(num_columns)
    spike_V[num_columns // 2] = 300.0
    some_impossible_V = torch.linspace(-3, 3, num_columns)
    some_impossible_V[::3] = -torch.inf
    only_last_V = torch.full((num_columns,), -torch.inf)
    only_last_V[-1] = -7.0
    climbing_V = torch.arange(num_columns) * (2000.0 / num_columns) - 1000.0
    logits_TV = torch.stack(
        [
            torch.full((num_columns,), 80.0),
            torch.full((num_columns,), -1e4),
            spike_V,
            some_impossible_V,
            only_last_V,
            climbing_V,
            climbing_V.flip(0),
        ]
    ).to(dtype)
    target_T = torch.full((7,), num_columns - 1)
    assert_matches(token_results(logits_TV, target_T), logits_TV, target_T)


def test_columns_of_minus_infinity_add_exactly_nothing() -> None:
    logits_TV = torch.full((1, 100), -torch.inf)
    logits_TV[0, 37] = 0.0
    assert partials(logits_TV, torch.tensor([37])).tolist() == [[0.0, 1.0, 0.0, 0.0]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("column", [0, 500, BLOCK, 2 * BLOCK + 2])
@pytest.mark.parametrize("others", [0.0, -torch.inf])
def test_nan_and_infinity_make_their_token_nan_and_no_other(
    others: float, column: int, bad: float, dtype: torch.dtype
) -> None:
    logits_TV = random_logits(3, 2 * BLOCK + 3, dtype)
    target_T = torch.tensor([1, 1, 1])
    clean = token_results(logits_TV, target_T)
    logits_TV[1] += others
    logits_TV[1, column] = bad
    results = token_results(logits_TV, target_T)
    for result_T, clean_T in zip(results, clean, strict=True):
        assert result_T[1].isnan()
        assert torch.equal(result_T[[0, 2]], clean_T[[0, 2]])


def test_a_row_without_a_possible_column_is_nan() -> None:
    results = token_results(torch.full((1, 70), -torch.inf), torch.tensor([0]))
    assert all(result_T.isnan().all() for result_T in results)


def test_combine_skips_a_rank_at_minus_infinity_and_spreads_nan() -> None:
    nothing = [-torch.inf, 0.0, 0.0, 0.0]
    two_equal = [1.0, 2.0, 0.0, 1.0]
    bad = [torch.nan, torch.nan, torch.nan, 0.0]
    partials_PT4 = torch.tensor([[nothing, nothing, bad], [two_equal, nothing, two_equal]])
    results = TokenResults(*torch.ops.bapo.logprob_combine(partials_PT4, 1.0))
    half = pytest.approx(-0.6931472, abs=1e-7)  # two equal columns: log 1/2
    assert results.logprob[0].item() == half
    assert -results.entropy[0].item() == half
    assert results.max[0].item() == 1.0
    assert -results.log_sum[0].item() == half
    for result_T in results:
        assert result_T[1:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_thread_and_eight_give_the_same_bits(dtype: torch.dtype) -> None:
    logits_TV = random_logits(67, 1500, dtype)
    target_T = random_targets(67, 1500)
    with threads(1):
        alone = token_results(logits_TV, target_T)
    with threads(8):
        shared = token_results(logits_TV, target_T)
    assert all(torch.equal(*pair) for pair in zip(alone, shared, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_ops_are_registered_as_torch_wants_them(dtype: torch.dtype) -> None:
    logits_NV = random_logits(5, 40, dtype)
    rows_T, target_T = torch.tensor([4, 0]), torch.tensor([39, 1])
    opcheck(torch.ops.bapo.logprob_partials.default, (logits_NV, rows_T, target_T, 0, 40, 0.6))
    opcheck(torch.ops.bapo.logprob_partials.default, (logits_NV[:2], None, target_T, 0, 40, 0.6))
    opcheck(torch.ops.bapo.logprob_combine.default, (torch.ones(2, 3, 4), 0.6))


LOGITS_NV = torch.zeros(3, 8)
TARGET_T = torch.tensor([0, 1, 2])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"logits": LOGITS_NV.double()},
            "logits must be float32, bfloat16 or float16, got float64",
        ),
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
)
def test_bad_input_is_refused_with_its_name(changes: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "logits": LOGITS_NV,
        "rows": None,
        "target": TARGET_T,
        "vocab_start": 0,
        "vocab_size": 8,
        "temperature": 1.0,
    }
    with pytest.raises(RuntimeError, match=message):
        torch.ops.bapo.logprob_partials(**{**arguments, **changes})


@pytest.mark.parametrize(
    ("partials_PT4", "message"),
    [
        (torch.zeros(1, 3, 4, dtype=torch.float64), "partials must be float32, got float64"),
        (torch.zeros(3, 4), r"partials must have shape \[P, T, 4\] .* got \[3, 4\]"),
        (torch.zeros(0, 3, 4), r"partials must have shape .* got \[0, 3, 4\]"),
        (torch.zeros(1, 4, 3).transpose(1, 2), "partials must be contiguous"),
    ],
)
def test_bad_partials_are_refused(partials_PT4: Tensor, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        torch.ops.bapo.logprob_combine(partials_PT4, 1.0)


@pytest.mark.gpu
def test_a_tensor_on_another_device_is_refused() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    with pytest.raises(RuntimeError, match="target must be on the device of logits, cpu, got cuda"):
        torch.ops.bapo.logprob_partials(LOGITS_NV, None, TARGET_T.cuda(), 0, 8, 1.0)
