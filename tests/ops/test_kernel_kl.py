"""kl_partials, kl_combine and kl_backward_ against float64, for every instruction set.

Shape legend: T = tokens, V = columns, P = tensor-parallel ranks.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from tests.ops.kernel_calls import (
    DTYPES,
    KlResults,
    assert_close,
    kl_gradient_,
    kl_partials,
    kl_results,
    partials,
    random_logits,
    random_targets,
    threads,
)
from tests.oracles.kl import kl_divergence, kl_logits_gradient, kl_term_size
from tests.oracles.logprob import spacing, token_logprobs
from tests.tolerances import EPS, assert_within

pytestmark = pytest.mark.usefixtures("isa")
BLOCK = 1024
"""Columns that the kernels sum at a time."""
KL_TOLERANCE = 32 * EPS
"""Times the size of the terms, at least 1. Eight lanes sum a block: √128 · ε / 2 = 6e-7 is likely,
and 128 ε the worst case."""
EDGE_COLUMNS = [1, 3, 31, 1023, 1025, 19_008]

both_directions = pytest.mark.parametrize("direction", ["reverse", "forward"])
all_dtypes = pytest.mark.parametrize("dtype", DTYPES)


def make_rows(
    num_tokens: int, num_columns: int, dtype: torch.dtype, *, noise: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Student, teacher and targets; rows of strides V + 3 and V + 8 that begin anywhere.

    The teacher is as far from the student as two random rows, or only by ``noise`` times that.
    """
    student_TV = random_logits(num_tokens, num_columns + 3, dtype)[:, 1 : 1 + num_columns]
    other_TV = random_logits(num_tokens, num_columns, torch.float32, seed=1)
    teacher_TW = torch.full((num_tokens, num_columns + 8), torch.nan, dtype=dtype)
    teacher_TV = teacher_TW[:, 2 : 2 + num_columns]
    teacher_TV.copy_(other_TV if noise == 1.0 else student_TV.float() + noise * other_TV)
    return student_TV, teacher_TV, random_targets(num_tokens, num_columns)


def random_grads(num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of log-prob, entropy and KL."""
    generator = torch.Generator().manual_seed(1)
    by_logprob_T, by_entropy_T, by_kl_T = torch.randn(3, num_tokens, generator=generator)
    return by_logprob_T, 0.1 * by_entropy_T, by_kl_T


def assert_matches(
    results: KlResults,
    student_TV: Tensor,
    teacher_TV: Tensor,
    target_T: Tensor,
    direction: str,
    temperature: float = 1.0,
) -> None:
    expected = token_logprobs(student_TV, target_T, temperature)
    assert_close(results.logprob, expected.logprob_T)
    assert_close(results.entropy, expected.entropy_T)
    expected_T = kl_divergence(student_TV, teacher_TV, direction, temperature)
    size_T = kl_term_size(student_TV, teacher_TV, direction, temperature).clamp(min=1.0)
    assert_within(((results.kl - expected_T).abs() / size_T).max(), KL_TOLERANCE, "kl")
    teacher_TV = teacher_TV.double()
    assert torch.equal(results.teacher_max.double(), teacher_TV.amax(1))
    d_TV = (teacher_TV - teacher_TV.amax(1, keepdim=True)) / temperature
    assert_close(results.teacher_log_sum, torch.logsumexp(d_TV, 1))


def assert_gradient(
    actual_TV: Tensor,
    student_TV: Tensor,
    teacher_TV: Tensor,
    target_T: Tensor,
    grads: tuple[Tensor, Tensor, Tensor],
    direction: str,
    temperature: float = 1.0,
) -> None:
    """As in test_kernel_backward: one rounding, and 2e-6 · max(1, |log p|) of the terms' size.

    Probabilities below 2^-126 may be 0; here they are multiplied by log-ratios of up to 1e4.
    """
    exact = kl_logits_gradient(student_TV, teacher_TV, target_T, grads, direction, temperature)
    log_p_TV = token_logprobs(student_TV, target_T, temperature).logprobs_TV.abs()
    log_q_TV = token_logprobs(teacher_TV, target_T, temperature).logprobs_TV.abs()
    relative = 2e-6 if actual_TV.dtype == torch.float32 else 5e-6
    size_TV = torch.maximum(log_p_TV, log_q_TV).clamp(1.0, 200.0) * exact.term_size_TV
    slack_TV = relative * size_TV + 2.0**-110
    if actual_TV.dtype != torch.float32:
        slack_TV = slack_TV + 0.5 * spacing(exact.gradient_TV, actual_TV.dtype)
    error_TV = (actual_TV.double() - exact.gradient_TV).abs()
    assert bool((error_TV <= slack_TV).all()), f"{(error_TV / slack_TV).max():.2f} times the limit"


@both_directions
@pytest.mark.parametrize("temperature", [0.6, 1.7])
@all_dtypes
@pytest.mark.parametrize("noise", [1.0, 0.01])
@pytest.mark.parametrize("num_columns", EDGE_COLUMNS)
def test_value_and_gradient_match_float64(
    num_columns: int, noise: float, dtype: torch.dtype, temperature: float, direction: str
) -> None:
    rows = make_rows(1 if num_columns == 31 else 7, num_columns, dtype, noise=noise)
    grads = random_grads(len(rows[0]))
    results = kl_results(*rows, direction, temperature=temperature)
    assert_matches(results, *rows, direction, temperature)
    student_TV, teacher_TV, target_T = rows
    actual_TV = student_TV.clone()
    kl_gradient_(
        actual_TV, teacher_TV, target_T, results, grads, direction, temperature=temperature
    )
    assert_gradient(actual_TV, *rows, grads, direction, temperature)


@both_directions
@pytest.mark.parametrize("only", [0, 1, 2])
def test_each_gradient_alone_matches_float64(only: int, direction: str) -> None:
    rows = make_rows(9, 77, torch.float32)
    zero_T = torch.zeros(9)
    grads: list[Tensor] = [zero_T, zero_T, zero_T]
    grads[only] = random_grads(9)[only]
    passed: list[Tensor | None] = [grads[0] if only == 0 else None, grads[1] if only == 1 else None]
    results = kl_results(*rows, direction)
    student_TV, teacher_TV, target_T = rows
    actual_TV = kl_gradient_(
        student_TV.clone(), teacher_TV, target_T, results, (*passed, grads[2]), direction
    )
    assert_gradient(actual_TV, *rows, tuple(grads), direction)
    filled_TV = kl_gradient_(
        student_TV.clone(), teacher_TV, target_T, results, tuple(grads), direction
    )
    assert torch.equal(actual_TV, filled_TV)


def test_both_directions_by_hand() -> None:
    # d = (x − 3) / 2 = (−1, 0, −2) and d' = (x' − 2) / 2 = (0, −1, −1): s' = 1 + 2 e^−1.
    student_TV, teacher_TV = torch.tensor([[1.0, 3.0, -1.0]]), torch.tensor([[2.0, 0.0, 0.0]])
    # reverse: −e^−1 + 1 − e^−2; forward: 1 − e^−1 + e^−1.
    for direction, cross in (("reverse", 0.4967853), ("forward", 1.0)):
        part_T8 = kl_partials(student_TV, teacher_TV, torch.tensor([2]), direction, temperature=2.0)
        expected = [3.0, 1.5032147, -0.6385500, -1.0, 2.0, 1.7357589, cross, 0.0]
        torch.testing.assert_close(part_T8, torch.tensor([expected]), rtol=1e-6, atol=0)
        # cross / s − log s + log s' with s of the first row: 0.3304819 − 0.4076059 + 0.5514446.
        kl = 0.4743206 if direction == "reverse" else 0.5761169 - 0.5514446 + 0.4076059
        results = torch.ops.bapo.kl_combine(part_T8[None], 2.0, direction)
        assert results[-1].item() == pytest.approx(kl, abs=3e-7)


@both_directions
@all_dtypes
@pytest.mark.parametrize("num_columns", [1, 70, 2 * BLOCK + 7])
def test_the_students_partials_have_the_bits_without_a_teacher(
    num_columns: int, dtype: torch.dtype, direction: str
) -> None:
    student_TV, teacher_TV, target_T = make_rows(5, num_columns, dtype)
    student_TV[0].copy_(torch.linspace(-30, 30, num_columns))
    part_T8 = kl_partials(student_TV, teacher_TV, target_T, direction, temperature=0.6)
    assert torch.equal(part_T8[:, :4], partials(student_TV, target_T, temperature=0.6))
    teacher_T4 = partials(teacher_TV, target_T, temperature=0.6)
    assert torch.equal(part_T8[:, 4:6], teacher_T4[:, :2])


@both_directions
@all_dtypes
@pytest.mark.parametrize("num_columns", EDGE_COLUMNS)
def test_equal_logits_have_a_divergence_and_gradient_of_exactly_zero(
    num_columns: int, dtype: torch.dtype, direction: str
) -> None:
    student_TV, _, target_T = make_rows(5, num_columns, dtype)
    student_TV[0].copy_(torch.linspace(-30, 30, num_columns))
    student_TV[1, 1::3] = -torch.inf
    teacher_TV = student_TV.clone()
    results = kl_results(student_TV, teacher_TV, target_T, direction, temperature=0.6)
    assert results.kl.tolist() == [0.0] * 5
    grads = (None, None, torch.full((5,), 3.0))
    kl_gradient_(student_TV, teacher_TV, target_T, results, grads, direction, temperature=0.6)
    assert not student_TV.any()


@both_directions
@all_dtypes
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_ranks_merge_to_the_whole_row_and_padding_is_neither_read_nor_kept(
    num_ranks: int, dtype: torch.dtype, direction: str
) -> None:
    # 64 ids: over two ranks of 48 the second has padding, of three the last one nothing else.
    per_rank = {1: 71, 2: 48, 3: 32}[num_ranks]
    student_TV, teacher_TV, target_T = make_rows(19, 64, dtype)
    teacher_TV[:, 3::7] = -torch.inf
    teacher_TV[2, :48] = -torch.inf  # of whole ranks
    student_TV[3, :48] = -torch.inf
    target_T[3] = 50
    starts = [rank * per_rank for rank in range(num_ranks)]
    padded = torch.full((2, 19, num_ranks * per_rank), torch.nan, dtype=dtype)
    padded[0, :, :64], padded[1, :, :64] = student_TV, teacher_TV
    shards = [rows.split(per_rank, dim=1) for rows in padded]

    parts = [
        kl_partials(*pair, target_T, direction, vocab_start=start, vocab_size=64, temperature=0.6)
        for start, *pair in zip(starts, *shards, strict=True)
    ]
    results = KlResults(*torch.ops.bapo.kl_combine(torch.stack(parts), 0.6, direction))
    rows = (student_TV, teacher_TV, target_T)
    assert_matches(results, *rows, direction, 0.6)

    grads = random_grads(19)
    gradient = [
        kl_gradient_(
            student_TC.clone(),
            teacher_TC,
            target_T,
            results,
            grads,
            direction,
            vocab_start=start,
            vocab_size=64,
            temperature=0.6,
        )
        for start, student_TC, teacher_TC in zip(starts, *shards, strict=True)
    ]
    actual_TW = torch.cat(gradient, dim=1)
    assert_gradient(actual_TW[:, :64], *rows, grads, direction, 0.6)
    assert not actual_TW[:, 64:].any()


def test_a_vanishing_second_probability_is_floored_and_counts_as_constant() -> None:
    # One half on a column whose log-prob is −150 ln 2: −ln 2 + 75 ln 2 = 51.2928914.
    both, one = torch.zeros(1, 2), torch.tensor([[0.0, -torch.inf]])
    target_T = torch.tensor([0])
    for direction, student_TV, teacher_TV in (("reverse", both, one), ("forward", one, both)):
        results = kl_results(student_TV, teacher_TV, target_T, direction)
        assert results.kl.item() == pytest.approx(51.2928914, abs=1e-5)
        split = [
            kl_partials(
                student_TV[:, rank : rank + 1],
                teacher_TV[:, rank : rank + 1],
                target_T,
                direction,
                vocab_start=rank,
                vocab_size=2,
            )
            for rank in (0, 1)
        ]
        merged = KlResults(*torch.ops.bapo.kl_combine(torch.stack(split), 1.0, direction))
        assert merged.kl.item() == pytest.approx(51.2928914, abs=1e-5)
        grads = (None, None, torch.ones(1))
        kl_gradient_(
            student_TV := student_TV.clone(), teacher_TV, target_T, results, grads, direction
        )
        # p_j (log p_j − log q_j − KL): half of ∓(ln 2 + 51.2928914); forward: p − q, and nothing
        # where no change of the logit is seen.
        expected = [-25.9930193, 25.9930193] if direction == "reverse" else [0.5, 0.0]
        assert student_TV[0].tolist() == pytest.approx(expected, abs=1e-5)


@both_directions
@all_dtypes
@pytest.mark.parametrize("num_columns", [5, 64, 2 * BLOCK + 7])
def test_adversarial_rows_match_float64(
    num_columns: int, dtype: torch.dtype, direction: str
) -> None:
    """Every row against every other one: maxima at either end, none, or none possible."""
    spike_V = torch.zeros(num_columns)
    spike_V[num_columns // 2] = 30.0
    some_impossible_V = torch.linspace(-3, 3, num_columns)
    some_impossible_V[::3] = -torch.inf
    only_last_V = torch.full((num_columns,), -torch.inf)
    only_last_V[-1] = -7.0
    climbing_V = torch.linspace(-80, 80, num_columns)
    rows_RV = torch.stack(
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
    student_TV, teacher_TV = rows_RV.repeat(7, 1), rows_RV.repeat_interleave(7, 0)
    target_T = torch.full((49,), num_columns - 1)
    results = kl_results(student_TV, teacher_TV, target_T, direction)
    assert_matches(results, student_TV, teacher_TV, target_T, direction)
    assert bool((results.kl >= -1e-6).all())  # of rows that are equal the terms cancel
    grads = random_grads(49)
    actual_TV = kl_gradient_(student_TV.clone(), teacher_TV, target_T, results, grads, direction)
    assert_gradient(actual_TV, student_TV, teacher_TV, target_T, grads, direction)


@both_directions
@pytest.mark.parametrize("bad_row", ["student", "teacher"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("column", [0, BLOCK, 2 * BLOCK + 2])
def test_a_bad_logit_of_either_row_makes_its_token_nan_and_no_other(
    column: int, bad: float, bad_row: str, direction: str
) -> None:
    student_TV, teacher_TV, target_T = make_rows(3, 2 * BLOCK + 3, torch.bfloat16)
    clean = kl_results(student_TV, teacher_TV, target_T, direction)
    (student_TV if bad_row == "student" else teacher_TV)[1, column] = bad
    results = kl_results(student_TV, teacher_TV, target_T, direction)
    for result_T, clean_T in zip(results, clean, strict=True):
        assert result_T[1].isnan()
        assert torch.equal(result_T[[0, 2]], clean_T[[0, 2]])
    grads = random_grads(3)
    expected_TV = kl_gradient_(student_TV.clone(), teacher_TV, target_T, clean, grads, direction)
    actual_TV = kl_gradient_(student_TV, teacher_TV, target_T, results, grads, direction)
    assert actual_TV[1].isnan().all()
    assert torch.equal(actual_TV[[0, 2]], expected_TV[[0, 2]])


@both_directions
@pytest.mark.parametrize("number", range(8))
def test_a_nan_partial_makes_all_seven_results_nan(number: int, direction: str) -> None:
    part_T8 = kl_partials(*make_rows(3, 40, torch.float32), direction)
    partials_PT8 = torch.stack([part_T8, part_T8])
    partials_PT8[1, 1, number] = torch.nan
    for result_T in torch.ops.bapo.kl_combine(partials_PT8, 1.0, direction):
        assert result_T.isnan().tolist() == [False, True, False]


@both_directions
@pytest.mark.parametrize("impossible", ["student", "teacher"])
def test_a_row_without_a_possible_column_is_nan(impossible: str, direction: str) -> None:
    student_TV, teacher_TV, target_T = make_rows(1, 70, torch.float32)
    (student_TV if impossible == "student" else teacher_TV).fill_(-torch.inf)
    results = kl_results(student_TV, teacher_TV, target_T, direction)
    assert all(result_T.isnan().all() for result_T in results)


@both_directions
@all_dtypes
def test_a_token_without_gradient_gets_zeros_whatever_its_logits_hold(
    dtype: torch.dtype, direction: str
) -> None:
    student_TV, teacher_TV, target_T = make_rows(3, 70, dtype)
    student_TV[1, 4] = teacher_TV[1, 5] = torch.nan
    results = kl_results(student_TV, teacher_TV, target_T, direction)
    gate_T = torch.tensor([1.0, 0.0, 1.0])
    by_logprob_T, by_entropy_T, by_kl_T = (gate_T * grad_T for grad_T in random_grads(3))
    grads = (by_logprob_T, by_entropy_T, by_kl_T)
    actual_TV = kl_gradient_(student_TV, teacher_TV, target_T, results, grads, direction)
    assert not actual_TV[1].any()
    assert actual_TV[[0, 2]].isfinite().all()
    assert actual_TV[[0, 2]].any()


@both_directions
@all_dtypes
def test_a_nan_gradient_stays_in_its_row(dtype: torch.dtype, direction: str) -> None:
    student_TV, teacher_TV, target_T = make_rows(3, 70, dtype)
    results = kl_results(student_TV, teacher_TV, target_T, direction)
    # All bits set: rounding it like a number would carry into the sign.
    by_kl_T = torch.ones(3)
    by_kl_T[1] = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)[0]
    grads = (None, None, by_kl_T)
    actual_TV = kl_gradient_(student_TV, teacher_TV, target_T, results, grads, direction)
    assert actual_TV[1].isnan().all()
    assert not actual_TV[[0, 2]].isnan().any()


@both_directions
def test_the_teacher_and_memory_around_the_student_stay(direction: str) -> None:
    whole_TW = random_logits(7, 90, torch.bfloat16)
    teacher_TV = random_logits(7, 60, torch.bfloat16, seed=1)
    before_TW, teacher_before_TV = whole_TW.clone(), teacher_TV.clone()
    student_TV, target_T = whole_TW[:, 11:71], random_targets(7, 60)
    results = kl_results(student_TV, teacher_TV, target_T, direction)
    kl_gradient_(student_TV, teacher_TV, target_T, results, random_grads(7), direction)
    assert torch.equal(teacher_TV, teacher_before_TV)
    assert torch.equal(whole_TW[:, :11], before_TW[:, :11])
    assert torch.equal(whole_TW[:, 71:], before_TW[:, 71:])
    assert not torch.equal(student_TV, before_TW[:, 11:71])


@both_directions
@all_dtypes
def test_no_tokens_give_empty_results(dtype: torch.dtype, direction: str) -> None:
    rows_TV, none_T = torch.empty(0, 16, dtype=dtype), torch.empty(0, dtype=torch.int64)
    results = kl_results(rows_TV, rows_TV, none_T, direction)
    assert [len(result_T) for result_T in results] == [0] * 7
    empty_T = torch.empty(0)
    kl_gradient_(rows_TV, rows_TV, none_T, results, (None, None, empty_T), direction)


@both_directions
@all_dtypes
def test_one_thread_and_eight_give_the_same_bits(dtype: torch.dtype, direction: str) -> None:
    student_TV, teacher_TV, target_T = make_rows(67, 1500, dtype)
    outcomes = []
    for number in (1, 8):
        with threads(number):
            results = kl_results(student_TV, teacher_TV, target_T, direction)
            copy_TV = student_TV.clone()
            kl_gradient_(copy_TV, teacher_TV, target_T, results, random_grads(67), direction)
            outcomes.append((*results, copy_TV))
    assert all(torch.equal(*pair) for pair in zip(*outcomes, strict=True))


@both_directions
def test_ops_are_registered_as_torch_wants_them(direction: str) -> None:
    student_TV, teacher_TV, target_T = make_rows(3, 40, torch.bfloat16)
    where = (0, 40, 0.6, direction)
    opcheck(torch.ops.bapo.kl_partials.default, (student_TV, teacher_TV, target_T, *where))
    opcheck(torch.ops.bapo.kl_combine.default, (torch.ones(2, 3, 8), 0.6, direction))
    numbers = [torch.ones(3)] * 6
    grads = (torch.ones(3), None, torch.ones(3))
    opcheck(
        torch.ops.bapo.kl_backward_.default,
        (student_TV.clone(), teacher_TV, target_T, *numbers, *grads, *where),
    )


NUMBERS = ("max", "log_sum", "entropy", "teacher_max", "teacher_log_sum", "kl")
STUDENT_TV, TEACHER_TV = torch.zeros(3, 8), torch.ones(3, 8)
BAD_LOGITS = [
    ({"student": STUDENT_TV.double()}, "student must be float32, bfloat16 or float16, got float64"),
    ({"student": torch.zeros(8, 3).t()}, "columns of student must be adjacent .* got stride 3"),
    ({"teacher": TEACHER_TV.half()}, "teacher must be float32, got float16"),
    (
        {"teacher": torch.ones(3, 9)},
        r"teacher must have the shape of student, \[3, 8\], got \[3, 9",
    ),
    ({"teacher": torch.zeros(8).expand(3, 8)}, "rows of teacher must not overlap, got stride 0"),
    ({"target": torch.tensor([0, 1])}, r"target must have shape \[3\], got \[2\]"),
    ({"target": torch.tensor([0, 8, 1])}, r"target must lie in .* \[0, 8\), got 8 at token 1"),
    ({"vocab_size": 0}, "vocab_size must be >= 1, got 0"),
    ({"temperature": 0.0}, "temperature must be > 0 and finite, got 0"),
    ({"direction": "both"}, "direction must be reverse or forward, got 'both'"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_LOGITS)
def test_bad_logits_are_refused_with_their_name(changes: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "student": STUDENT_TV,
        "teacher": TEACHER_TV,
        "target": torch.tensor([0, 1, 2]),
        "vocab_start": 0,
        "vocab_size": 8,
        "temperature": 1.0,
        "direction": "reverse",
        **changes,
    }
    with pytest.raises(RuntimeError, match=message):
        torch.ops.bapo.kl_partials(**arguments)
    floats = {name: torch.ones(3) for name in (*NUMBERS, "grad_kl")}
    with pytest.raises(RuntimeError, match=message):
        torch.ops.bapo.kl_backward_(**arguments, **floats, grad_logprob=None, grad_entropy=None)
    assert not STUDENT_TV.any()


@pytest.mark.parametrize("name", [*NUMBERS, "grad_logprob", "grad_entropy", "grad_kl"])
def test_bad_numbers_are_refused_with_their_name(name: str) -> None:
    for value, message in (
        (torch.zeros(2), rf"{name} must have shape \[3\], got \[2\]"),
        (torch.zeros(3).double(), f"{name} must be float32, got float64"),
        (torch.zeros(6)[::2], f"{name} must be contiguous, got stride 2"),
    ):
        numbers: dict[str, Tensor | None] = {
            **{number: torch.zeros(3) for number in NUMBERS},
            "grad_logprob": None,
            "grad_entropy": None,
            "grad_kl": torch.ones(3),
            name: value,
        }
        with pytest.raises(RuntimeError, match=message):
            torch.ops.bapo.kl_backward_(
                STUDENT_TV,
                TEACHER_TV,
                torch.tensor([0, 1, 2]),
                **numbers,
                vocab_start=0,
                vocab_size=8,
                temperature=1.0,
                direction="reverse",
            )
    assert not STUDENT_TV.any()


@pytest.mark.parametrize(
    ("partials_PT8", "direction", "message"),
    [
        (torch.zeros(1, 3, 8).double(), "reverse", "partials must be float32, got float64"),
        (torch.zeros(1, 3, 4), "reverse", r"partials must have shape \[P, T, 8\] .* got \[1, 3, 4"),
        (torch.zeros(1, 8, 3).transpose(1, 2), "reverse", "partials must be contiguous"),
        (torch.zeros(1, 3, 8), "", "direction must be reverse or forward, got ''"),
    ],
)
def test_bad_partials_are_refused(partials_PT8: Tensor, direction: str, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        torch.ops.bapo.kl_combine(partials_PT8, 1.0, direction)
