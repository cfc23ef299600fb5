"""What the ranks of test_chunked_distributed.py do; each returns its errors by name."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from bapo_megatron.ops.chunked import OutputHead, TeacherRows
from tests.algorithm import centering_problem
from tests.distributed_launch import joined
from tests.ops.chunked_problem import (
    EARLIER_GRADIENT,
    ClippedLoss,
    Outcome,
    Problem,
    chunked_loss,
    collect,
    float32_bound,
    make_problem,
    make_teacher,
    relative_error,
    run_oracle,
    run_unchunked,
    with_main_grad,
)
from tests.tolerances import HEADROOM

ENTROPY_COEFFICIENT = 0.03
COLLECTIVES = ("all_gather_into_tensor", "all_gather", "all_reduce", "reduce_scatter_tensor")


def two_ranks() -> dict[str, Any]:
    """By division over two ranks: errors against float64 of the whole problem, and their bound."""
    results: dict[str, Any] = {}
    with joined(tensor=2) as groups:
        for num_tokens in (61, 5, 0):
            for sequence_parallel in (False, True):
                name = f"{num_tokens} tokens, sequence parallel {sequence_parallel}"
                results[name] = _divide_vocabulary(groups.tensor, num_tokens, sequence_parallel)
        for direction in ("reverse", "forward"):
            divided = _divide_vocabulary(groups.tensor, 61, True, direction)
            results[f"teacher, {direction}"] = divided
        for kind in ("reinforce", "dual", "bapo"):
            results[f"centering, {kind}"] = _divide_centering(groups.tensor, kind)
        for num_tokens in (61, 5, 0):
            divided = _divide_logits(groups.tensor, num_tokens)
            results[f"{num_tokens} tokens, whole logits"] = divided
        results["collectives"] = {
            "of whole logits": _count_collectives_of_logits(groups.tensor),
            "per chunk": _count_collectives(groups.tensor, chunk_tokens=16),
            "in one chunk": _count_collectives(groups.tensor, chunk_tokens=1000),
            "with a teacher": _count_collectives(groups.tensor, chunk_tokens=16, teacher=True),
        }
    return results


def _whole(problem: Problem, **settings: Any) -> tuple[Outcome, float]:
    """The problem in float64, and how far float32 may be off."""
    settings["entropy_coefficient"] = ENTROPY_COEFFICIENT
    whole = run_oracle(problem, **settings)
    return whole, float32_bound(problem, whole, **settings)


def _divide_vocabulary(
    group: dist.ProcessGroup,
    num_tokens: int,
    sequence_parallel: bool,
    direction: str | None = None,
) -> tuple[dict[str, float], float]:
    """The vocabulary of student and teacher over two ranks, of which the second has padding."""
    problem = make_problem(num_tokens=num_tokens)
    teacher = None if direction is None else make_teacher(problem, direction)
    whole, bound = _whole(problem, teacher=teacher)
    rank = dist.get_rank(group)
    rows = _part(problem.hidden_NH, rank) if sequence_parallel else slice(None)
    columns = _part(problem.weight_VH, rank)
    weight_VH: Any = with_main_grad(problem.weight_VH[columns])
    hidden_MH = problem.hidden_NH[rows].clone().requires_grad_()
    head = OutputHead(weight_VH, group, sequence_parallel)
    token_loss = ClippedLoss(problem.tokens, ENTROPY_COEFFICIENT)

    collected = collect(hidden_MH, head, problem.tokens, 16)
    part = None if teacher is None else _teacher_part(teacher, group)
    loss, policy = chunked_loss(hidden_MH, head, problem.tokens, token_loss, teacher=part)
    loss.backward()
    assert whole.hidden_NH is not None
    assert whole.weight_VH is not None
    errors = {
        "loss": relative_error(loss.detach(), whole.loss),
        "logprob": relative_error(policy.logprob_T, whole.logprob_T),
        "entropy": relative_error(policy.entropy_T, whole.entropy_T),
        "collected": relative_error(collected.logprob_T, whole.logprob_T),
        "hidden": relative_error(hidden_MH.grad, whole.hidden_NH[rows]),
        "weight": relative_error(weight_VH.main_grad - EARLIER_GRADIENT, whole.weight_VH[columns]),
        "kl": 0.0 if teacher is None else relative_error(token_loss.kl_T, whole.kl_T),
    }
    return errors, bound


def _divide_centering(group: dist.ProcessGroup, kind: str) -> tuple[dict[str, float], float]:
    """A head of likeliest tokens whose columns lie on both ranks."""
    problem = centering_problem.Problem(8, drift=0.4, temperature=0.9)
    weight = centering_problem.KINDS[kind][1]
    whole = problem.oracle(weight)
    rounded = centering_problem.error(problem.oracle(weight, torch.float32), whole)
    columns = _part(problem.weight_VH, dist.get_rank(group))
    hidden_TH, weight_VH = problem.gradients(kind, columns_of=columns, group=group)
    expected = [whole[0], whole[1][columns]]
    pairs = zip(("hidden", "weight"), (hidden_TH, weight_VH), expected, strict=True)
    return {name: relative_error(a, e) for name, a, e in pairs}, max(HEADROOM * rounded, 1e-6)


def _divide_logits(group: dist.ProcessGroup, num_tokens: int) -> tuple[dict[str, float], float]:
    """The columns of the logits over two ranks."""
    problem = make_problem(num_tokens=num_tokens)
    whole, bound = _whole(problem)
    columns = _part(problem.weight_VH, dist.get_rank(group))
    part = run_unchunked(
        problem, entropy_coefficient=ENTROPY_COEFFICIENT, columns=columns, group=group
    )
    assert part.hidden_NH is not None
    assert part.weight_VH is not None
    for summed in (part.hidden_NH, part.weight_VH):
        dist.all_reduce(summed, group=group)
    names = ("loss", "logprob_T", "entropy_T", "hidden_NH", "weight_VH")
    errors = {name: relative_error(getattr(part, name), getattr(whole, name)) for name in names}
    same_bits = [torch.empty_like(part.logprob_T) for _ in range(2)]
    dist.all_gather(same_bits, part.logprob_T, group=group)
    return errors | {"same bits": float(not torch.equal(*same_bits))}, bound


def _count_collectives_of_logits(group: dist.ProcessGroup) -> list[str]:
    """Names of the collectives of log-probs and their gradient without chunks."""
    problem = make_problem()
    columns = _part(problem.weight_VH, dist.get_rank(group))
    with _recorded_collectives() as names:
        run_unchunked(problem, entropy_coefficient=0.0, columns=columns, group=group)
    return names


def _teacher_part(teacher: TeacherRows, group: dist.ProcessGroup) -> TeacherRows:
    """The teacher with this rank's half of its head."""
    weight_VH = teacher.head.weight
    part_VH = weight_VH[_part(weight_VH, dist.get_rank(group))]
    return replace(teacher, head=OutputHead(part_VH, group))


def _count_collectives(group: dist.ProcessGroup, chunk_tokens: int, teacher: bool = False) -> Any:
    """Names of the collectives of a collection pass and of a loss with sequence parallelism."""
    problem = make_problem()
    rank = dist.get_rank(group)
    hidden_MH = problem.hidden_NH[_part(problem.hidden_NH, rank)].requires_grad_()
    weight_VH = problem.weight_VH[_part(problem.weight_VH, rank)].requires_grad_()
    head = OutputHead(weight_VH, group, sequence_parallel=True)
    changes: dict[str, Any] = {"chunk_tokens": chunk_tokens}
    if teacher:
        changes["teacher"] = _teacher_part(make_teacher(problem, "reverse"), group)
    with _recorded_collectives() as names:
        chunked_loss(hidden_MH, head, problem.tokens, **changes)[0].backward()
    return names


@contextmanager
def _recorded_collectives() -> Iterator[list[str]]:
    """Note which functions of torch.distributed are called, in order."""
    names: list[str] = []

    def call(name: str, function: Any, *args: Any, **options: Any) -> Any:
        names.append(name)
        return function(*args, **options)

    with ExitStack() as stack:
        for name in COLLECTIVES:
            recorded = partial(call, name, getattr(dist, name))
            stack.enter_context(mock.patch.object(dist, name, recorded))
        yield names


def _part(whole: Tensor, rank: int) -> slice:
    """Half of the first dimension."""
    size = whole.shape[0] // 2
    return slice(rank * size, (rank + 1) * size)
