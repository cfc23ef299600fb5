"""The token-chunked path against all logits at once and against float64 autograd."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bapo_megatron.ops.chunked import OutputHead, TeacherRows
from tests.ops.chunked_problem import (
    EARLIER_GRADIENT,
    HIDDEN_SIZE,
    PADDED_VOCAB,
    ClippedLoss,
    Outcome,
    Problem,
    away_from_bounds,
    chunked_loss,
    collect,
    float32_bound,
    leaves,
    make_problem,
    make_teacher,
    relative_error,
    run_chunked,
    run_oracle,
    run_unchunked,
    with_main_grad,
    worst_error,
)
from tests.tolerances import assert_within, sum_bound

CHUNK_TOKENS = [1, 7, 64, 1000]
"""make_problem has 61 tokens: one at a time, a last chunk of 5, and all of them in one chunk."""
with_and_without_teachers = pytest.mark.parametrize("direction", [None, "reverse", "forward"])
with_teachers = pytest.mark.parametrize("direction", ["reverse", "forward"])


def teacher_of(problem: Problem, direction: str | None) -> TeacherRows | None:
    return None if direction is None else make_teacher(problem, direction)


@with_and_without_teachers
@pytest.mark.parametrize("entropy_coefficient", [0.0, 0.03])
@pytest.mark.parametrize("chunk_tokens", CHUNK_TOKENS)
def test_float32_is_near_autograd_in_float64(
    chunk_tokens: int, entropy_coefficient: float, direction: str | None
) -> None:
    problem = make_problem(seed=1)
    settings: dict[str, Any] = {"entropy_coefficient": entropy_coefficient}
    settings["teacher"] = teacher_of(problem, direction)
    expected = run_oracle(problem, **settings)
    bound = float32_bound(problem, expected, **settings)
    actual = run_chunked(problem, chunk_tokens=chunk_tokens, **settings)
    assert_within(worst_error(actual, expected), bound)
    without = run_oracle(problem, entropy_coefficient=entropy_coefficient)
    if direction is None:
        unchunked = run_unchunked(problem, entropy_coefficient=entropy_coefficient)
        assert_within(worst_error(unchunked, expected), bound)
    else:  # the divergence is not a small part of the gradient
        assert relative_error(without.weight_VH, expected.weight_VH) > 0.1


@with_and_without_teachers
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_gradients_are_as_good_as_without_chunks(
    dtype: torch.dtype, direction: str | None
) -> None:
    """Against float64 with the same rounded inputs."""
    problem = away_from_bounds(make_problem(num_rows=400, num_tokens=300).to("cpu", dtype))
    settings: dict[str, Any] = {"entropy_coefficient": 0.03}
    teacher = teacher_of(problem, direction)
    expected = run_oracle(problem, teacher=teacher, **settings)
    actual = run_chunked(problem, chunk_tokens=64, teacher=teacher, **settings)
    assert_within(worst_error(actual, expected), 0.05)
    if direction is None:
        unchunked = run_unchunked(problem, **settings)
        assert worst_error(actual, expected) < 1.2 * worst_error(unchunked, expected)
    assert actual.hidden_NH is not None
    assert actual.hidden_NH.dtype is dtype
    assert actual.logprob_T.dtype is torch.float32


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_equals_the_cpu() -> None:
    problem = make_problem(num_rows=400, num_tokens=300)
    for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 0.02)):
        expected = run_chunked(problem.to("cpu", dtype), entropy_coefficient=0.03)
        actual = run_chunked(problem.to("cuda", dtype), entropy_coefficient=0.03)
        for name in ("loss", "logprob_T", "entropy_T", "hidden_NH", "weight_VH"):
            error = relative_error(getattr(actual, name).cpu(), getattr(expected, name))
            assert error < limit, (dtype, name, error)


@with_and_without_teachers
@pytest.mark.parametrize("chunk_tokens", CHUNK_TOKENS)
def test_the_collection_pass_has_the_bits_of_the_loss_pass_and_no_gradient(
    chunk_tokens: int, direction: str | None
) -> None:
    """With the same chunks: the ratio of a token to itself is exactly 1."""
    problem = make_problem(seed=3)
    hidden_NH, weight_VH = leaves(problem)
    collected = collect(hidden_NH, OutputHead(weight_VH), problem.tokens, chunk_tokens)
    teacher = teacher_of(problem, direction)
    outcome = run_chunked(problem, chunk_tokens=chunk_tokens, teacher=teacher)
    assert torch.equal(collected.logprob_T, outcome.logprob_T)
    assert torch.equal(collected.entropy_T, outcome.entropy_T)
    assert not collected.logprob_T.requires_grad
    assert not collected.entropy_T.requires_grad


@with_and_without_teachers
@pytest.mark.parametrize("entropy_coefficient", [0.0, 0.03])
def test_without_response_tokens_everything_is_0(
    entropy_coefficient: float, direction: str | None
) -> None:
    problem = make_problem(num_tokens=0)
    teacher = teacher_of(problem, direction)
    outcome = run_chunked(problem, entropy_coefficient=entropy_coefficient, teacher=teacher)
    assert outcome.loss.item() == 0.0
    assert outcome.logprob_T.shape == outcome.entropy_T.shape == (0,)
    assert torch.equal(outcome.hidden_NH, torch.zeros(90, HIDDEN_SIZE))
    assert torch.equal(outcome.weight_VH, torch.zeros(PADDED_VOCAB, HIDDEN_SIZE))


class _CountProducts(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        products = ("mm", "addmm", "addmm_", "matmul")
        self.products += func.overloadpacket.__name__ in products
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("direction", "products"), [(None, 3), ("forward", 4)])
def test_a_chunk_takes_three_matrix_products_and_a_teacher_one(
    dtype: torch.dtype, direction: str | None, products: int
) -> None:
    problem = make_problem().to("cpu", dtype)
    with _CountProducts() as counted:
        run_chunked(problem, chunk_tokens=16, teacher=teacher_of(problem, direction))
    assert counted.products == products * 4  # 61 tokens


def test_the_loss_can_end_a_pipeline_stage() -> None:
    """Megatron frees the output's data, which it refuses for a view."""
    problem = make_problem()
    hidden_NH, weight_VH = leaves(problem)
    for entropy_coefficient in (0.0, 0.03):
        loss, policy = chunked_loss(
            hidden_NH,
            OutputHead(weight_VH),
            problem.tokens,
            ClippedLoss(problem.tokens, entropy_coefficient),
        )
        assert loss.shape == ()
        assert loss.dtype is torch.float32
        assert not loss._is_view()
        assert not policy.logprob_T.requires_grad
        assert not policy.entropy_T.requires_grad


def added_bound(problem: Any, expected: Outcome) -> float:
    """Relative, of what was added to ``EARLIER_GRADIENT``: one rounding of each sum beside it."""
    assert expected.weight_VH is not None
    sums_VH = expected.weight_VH.abs() + EARLIER_GRADIENT
    num_chunks = -(-len(problem.tokens.rows_T) // 7)
    rounding = sum_bound(num_chunks, sums_VH.norm() / expected.weight_VH.norm())
    return float32_bound(problem, expected, entropy_coefficient=0.0) + rounding


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_is_added_to_main_grad_in_float32(dtype: torch.dtype) -> None:
    problem = away_from_bounds(make_problem().to("cpu", dtype))
    expected = run_oracle(problem, entropy_coefficient=0.0)
    weight_VH: Any = with_main_grad(problem.weight_VH)
    hidden_NH, _ = leaves(problem)
    loss, _ = chunked_loss(hidden_NH, OutputHead(weight_VH), problem.tokens, chunk_tokens=7)
    loss.backward()
    bound = 0.05
    if dtype is torch.float32:
        bound = added_bound(problem, expected)
    added_VH = weight_VH.main_grad - EARLIER_GRADIENT
    assert_within(relative_error(added_VH, expected.weight_VH), bound)
    assert weight_VH.main_grad.dtype is torch.float32
    assert weight_VH.grad_added_to_main_grad
    # A gradient must arrive so that Megatron's hook runs; the hook drops its values.
    assert weight_VH.grad.shape == weight_VH.shape
    assert weight_VH.grad.dtype is dtype


def test_a_tied_weight_gets_the_embeddings_gradient_beside_the_heads() -> None:
    problem = make_problem()
    weight_VH: Any = with_main_grad(problem.weight_VH, zero_out_wgrad=True)
    hidden_NH, _ = leaves(problem)
    loss, _ = chunked_loss(hidden_NH, OutputHead(weight_VH), problem.tokens)
    embedded = torch.nn.functional.embedding(torch.tensor([3, 5, 3]), weight_VH)
    (loss + embedded.sum()).backward()
    # Megatron's hook adds the .grad of such a weight: it must hold the embedding's part and no
    # more.
    embedding_VH = torch.zeros(PADDED_VOCAB, HIDDEN_SIZE)
    embedding_VH[3], embedding_VH[5] = 2.0, 1.0
    assert torch.equal(weight_VH.grad, embedding_VH)
    expected = run_oracle(problem, entropy_coefficient=0.0)
    added_VH = weight_VH.main_grad - EARLIER_GRADIENT
    assert_within(relative_error(added_VH, expected.weight_VH), added_bound(problem, expected))


def test_a_frozen_weight_or_frozen_hidden_states_get_no_gradient() -> None:
    problem = make_problem()
    expected = run_oracle(problem, entropy_coefficient=0.0)
    hidden_NH, weight_VH = leaves(problem)
    frozen_VH: Any = with_main_grad(problem.weight_VH).requires_grad_(False)
    chunked_loss(hidden_NH, OutputHead(frozen_VH), problem.tokens)[0].backward()
    assert bool((frozen_VH.main_grad == EARLIER_GRADIENT).all())
    assert not frozen_VH.grad_added_to_main_grad
    assert frozen_VH.grad is None
    bound = float32_bound(problem, expected, entropy_coefficient=0.0)
    assert_within(relative_error(hidden_NH.grad, expected.hidden_NH), bound, "hidden states")
    chunked_loss(problem.hidden_NH, OutputHead(weight_VH), problem.tokens)[0].backward()
    assert_within(relative_error(weight_VH.grad, expected.weight_VH), bound, "weight")


def test_a_loss_is_differentiated_once_and_not_scaled_after_it_was_computed() -> None:
    problem = make_problem()
    hidden_NH, weight_VH = leaves(problem)
    loss, _ = chunked_loss(hidden_NH, OutputHead(weight_VH), problem.tokens)
    with pytest.raises(RuntimeError, match="a gradient other than 1; multiply the losses of token"):
        (2.0 * loss).backward()
    assert hidden_NH.grad is None
    assert weight_VH.grad is None
    loss.backward(retain_graph=True)
    with pytest.raises(AssertionError, match="handed out once; compute the loss again"):
        loss.backward()


def test_gradients_switched_off_are_refused_before_anything_is_added() -> None:
    problem = make_problem()
    weight_VH: Any = with_main_grad(problem.weight_VH)
    hidden_NH, _ = leaves(problem)
    with torch.no_grad(), pytest.raises(AssertionError, match="call chunked_logprobs"):
        chunked_loss(hidden_NH, OutputHead(weight_VH), problem.tokens)
    frozen: Any = with_main_grad(problem.weight_VH).requires_grad_(False)
    with pytest.raises(AssertionError, match="call chunked_logprobs"):
        chunked_loss(problem.hidden_NH, OutputHead(frozen), problem.tokens)
    for weight in (weight_VH, frozen):
        assert bool((weight.main_grad == EARLIER_GRADIENT).all())


def test_a_main_grad_of_16_bits_is_refused() -> None:
    problem = make_problem()
    hidden_NH, _ = leaves(problem)
    rounded: Any = with_main_grad(problem.weight_VH)
    rounded.main_grad = rounded.main_grad.bfloat16()
    with pytest.raises(AssertionError, match="set grad_reduce_in_fp32"):
        chunked_loss(hidden_NH, OutputHead(rounded), problem.tokens)


@with_teachers
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loss_that_ignores_the_divergence_has_the_bits_without_a_teacher(
    dtype: torch.dtype, direction: str
) -> None:
    problem = make_problem().to("cpu", dtype)
    teacher = make_teacher(problem, direction)
    ignoring = ClippedLoss(problem.tokens, 0.03, ignores_kl=True)
    with_teacher = run_chunked(problem, teacher=teacher, chunk_tokens=16, token_loss=ignoring)
    without = run_chunked(problem, entropy_coefficient=0.03, chunk_tokens=16)
    for name in ("loss", "logprob_T", "entropy_T", "hidden_NH", "weight_VH"):
        assert torch.equal(getattr(with_teacher, name), getattr(without, name))


def test_nothing_reaches_the_teacher() -> None:
    problem = make_problem()
    weight_VH: Any = with_main_grad(make_teacher(problem, "reverse").head.weight)
    hidden_TH = make_teacher(problem, "reverse").hidden_TH.requires_grad_()
    before_VH = weight_VH.detach().clone()
    teacher = TeacherRows(hidden_TH, OutputHead(weight_VH), "reverse")
    run_chunked(problem, teacher=teacher)
    assert hidden_TH.grad is None
    assert weight_VH.grad is None
    assert bool((weight_VH.main_grad == EARLIER_GRADIENT).all())
    assert torch.equal(weight_VH.detach(), before_VH)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"hidden_TH": slice(1, None)}, AssertionError, "one row of the teacher per target"),
        ({"weight": slice(1, None)}, AssertionError, "both heads divide one vocabulary"),
        ({"dtype": torch.bfloat16}, RuntimeError, "teacher must be float32, got bfloat16"),
    ],
)
def test_a_teacher_that_does_not_fit_is_refused(
    change: dict[str, Any], error: type[Exception], words: str
) -> None:
    problem = make_problem()
    teacher = make_teacher(problem.to("cpu", change.get("dtype", torch.float32)), "reverse")
    rows, columns = (change.get(name, slice(None)) for name in ("hidden_TH", "weight"))
    head = OutputHead(teacher.head.weight[columns])
    with pytest.raises(error, match=words):
        run_chunked(problem, teacher=TeacherRows(teacher.hidden_TH[rows], head, "reverse"))
