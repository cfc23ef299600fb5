"""Layouts of models with experts, and what their ranks do."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from tests.distributed_launch import joined, run_ranks
from tests.policy.parity_ranks import (
    build,
    forward_backward,
    gather_columns,
    hf_gradients,
    snapshot,
)
from tests.policy.tiny_models import SEQUENCES, Problem, make_model, make_problems

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from torch import Tensor

    from bapo_megatron.policy.train_state import TrainState
    from bapo_megatron.runtime.distributed import ProcessGroups

BATCHES = (
    *SEQUENCES,
    ((13, 14, 15, 16, 17, 18), (60, 61, 62)),
    ((80,), (90, 3, 90, 4, 90, 5), (2, 2)),
)
"""One for each of four data-parallel ranks."""


FAMILIES = ("qwen3_moe", "glm4_moe", "deepseek_v3")
Batches = tuple[tuple[tuple[int, ...], ...], ...]
"""Token ids of the sequences of micro-batches."""
Results = dict[str, list[dict[str, Any]]]
"""By layout and family, of each rank."""


def make_models(root: Path) -> dict[str, Path]:
    """Four layers, so that two stages have two chunks each."""
    return {name: make_model(name, root / name, num_hidden_layers=4) for name in FAMILIES}


@dataclass(frozen=True)
class Layout:
    """A layout of ``ranks`` ranks."""

    name: str
    ranks: int
    sizes: dict[str, Any] = field(default_factory=dict)
    """Of ``ParallelConfig``."""
    megatron: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


_RECOMPUTE = {"recompute": "full"}
_SEQUENCE = {"tensor": 2, "sequence": True}
_WHOLE = {**_SEQUENCE, "expert_tensor": 1}
_INTERLEAVED = {"pipeline": 2, "virtual_pipeline": 2}
LAYOUTS = (
    Layout("one rank", 1),
    Layout("one rank, recomputed", 1, {}, _RECOMPUTE),
    Layout("one rank, attention recomputed", 1, {}, {"recompute": "selective"}),
    Layout("EP 2", 2, {"expert": 2}),
    Layout("EP 2, recomputed", 2, {"expert": 2}, _RECOMPUTE),
    Layout("TP 2", 2, _SEQUENCE),
    Layout("TP 2, ETP 1", 2, _WHOLE),
    Layout("TP 2 × EP 2, ETP 1", 2, {**_WHOLE, "expert": 2}),
    Layout("PP 2", 2, {"pipeline": 2}),
    Layout("PP 2 × VPP 2", 2, _INTERLEAVED),
    Layout("PP 2, recomputed", 2, {"pipeline": 2}, _RECOMPUTE),
    Layout("CP 2", 2, {"context": 2}),
    Layout("CP 2 × EP 2", 2, {"context": 2, "expert": 2}),
    Layout("DP 2", 2),
    Layout("TP 2 × EP 2, ETP 2", 4, {**_SEQUENCE, "expert": 2}),
    Layout("TP 2 × EP 2, ETP 1, DP 2", 4, {**_WHOLE, "expert": 2}),
    Layout("TP 2 × EP 4, ETP 1", 4, {**_WHOLE, "expert": 4}),
    Layout("EP 2 × DP 4, recomputed", 4, {"expert": 2}, _RECOMPUTE),
    Layout("PP 2 × EP 2", 4, {"pipeline": 2, "expert": 2}),
    Layout("PP 2 × VPP 2 × CP 2 × EP 2", 4, {**_INTERLEAVED, "context": 2, "expert": 2}),
    Layout("TP 2 × PP 2 × EP 2, ETP 1", 4, {**_WHOLE, "pipeline": 2, "expert": 2}),
)
COVERING = (
    *("one rank, attention recomputed", "EP 2", "TP 2, ETP 1", "PP 2, recomputed"),
    *("TP 2 × EP 2, ETP 2", "TP 2 × EP 4, ETP 1", "PP 2 × VPP 2 × CP 2 × EP 2"),
)
"""Every kind of parallelism, alone or with another; all layouts are in ``bench_experts``."""
REPLAYED = (
    *("one rank, recomputed", "TP 2 × EP 2, ETP 1", "PP 2, recomputed"),
    "PP 2 × VPP 2 × CP 2 × EP 2",
)
"""Layouts whose routers repeat choices in the suite."""
CHECKPOINTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"EP 1": {}},
    2: {
        "EP 2": {"expert": 2},
        "TP 2 × ETP 2": _SEQUENCE,
        "PP 2": {"pipeline": 2},
        "CP 2 × EP 2": {"context": 2, "expert": 2},
    },
    4: {"TP 2 × EP 2": {**_SEQUENCE, "expert": 2}},
}
"""Layouts that save and continue from each other, by their number of ranks."""
LR = 1e-3
BALANCE = 3.0
"""Coefficient of the load balancing loss."""


def multiples_of(context_size: int) -> tuple[int, int]:
    """What micro-batches and sequences are padded to."""
    return (2, 1) if context_size == 1 else (2 * context_size, 2 * context_size)


def problems_of(groups: ProcessGroups, batches: Batches = BATCHES) -> list[Problem]:
    """This rank's share of ``batches``, padded as its layout needs."""
    size, rank = groups.context.size(), groups.context.rank()
    problems = make_problems(0, *multiples_of(size), batches=batches)
    return [p.part(rank, size) for p in problems[groups.data_rank :: groups.data_size]]


def built(
    layouts: list[Layout], models: dict[str, Path], **optimizer: float
) -> Iterator[tuple[str, ProcessGroups, TrainState]]:
    """A training state of each model in each layout, with the names of both."""
    for layout in layouts:
        with joined(**layout.sizes) as groups:
            for family, directory in models.items():
                state = build(directory, groups, megatron=layout.megatron, **optimizer)
                yield f"{layout.name}, {family}", groups, state


def by_rank(run: Callable[..., dict[str, Any]], layouts: list[Layout], *args: Any) -> Results:
    """What ``run`` returns of layouts, by layout and family, of each rank."""
    results: Results = {}
    for ranks in sorted({layout.ranks for layout in layouts}):
        fitting = [layout for layout in layouts if layout.ranks == ranks]
        of_ranks = run_ranks(run, ranks, fitting, *args, timeout_s=300)
        results |= {name: [result[name] for result in of_ranks] for name in of_ranks[0]}
    return results


def run_layouts(
    layouts: list[Layout], models: dict[str, Path], export: Path, batches: Batches = BATCHES
) -> dict[str, Any]:
    """By layout and family: logits, gradients, the norm, the weights after an update."""
    results: dict[str, Any] = {}
    for name, groups, state in built(layouts, models, lr=LR):
        problems = problems_of(groups, batches)
        logits = state.model.forward_only(
            [problem.micro_batch for problem in problems],
            lambda logits_NV, _, groups=groups: gather_columns(logits_NV, groups),
        )
        if groups.rank == 0:
            export.mkdir(exist_ok=True)
        state.model.export_hf(export / name, durable=False)
        forward_backward(state, problems)
        results[name] = {
            "place": (
                groups.data_rank,
                groups.data_size,
                groups.context.rank(),
                groups.context.size(),
            ),
            "logits": logits,
            "gradients": hf_gradients(state),
            "step": state.optimizer_step(),
            "weights": snapshot(state),
        }
    return results


def run_replays(layouts: list[Layout], models: dict[str, Path]) -> dict[str, Any]:
    """By layout and family: what changes when routers replay their own choices, or get others."""
    results: dict[str, Any] = {}
    for name, groups, state in built(layouts, models):
        assert state.model.routers is not None
        problems = problems_of(groups)
        with state.model.routers.recorded() as recorded:
            results[name] = {"free": _run(state, problems)}
        num_experts = state.model.hf.dimensions["experts"]
        routes = {
            "own": recorded[: len(problems)],
            "half": [_half_free(part) for part in recorded[: len(problems)]],
            "other": [(part + 1) % num_experts for part in recorded[: len(problems)]],
        }
        results[name] |= {kind: _run(state, problems, parts) for kind, parts in routes.items()}
    return results


def run_balanced(layouts: list[Layout], models: dict[str, Path]) -> dict[str, Any]:
    """By layout and family, on rank 0: the gradients without and with the load balancing loss."""
    results: dict[str, Any] = {}
    for name, groups, state in built(layouts, models):
        assert state.model.routers is not None
        problems = problems_of(groups)
        forward_backward(state, problems)
        results[name] = [hf_gradients(state)]
        whole = make_problems(0, *multiples_of(groups.context.size()), batches=BATCHES)
        num_tokens = sum(problem.micro_batch.num_tokens for problem in whole)
        state.model.routers.balance(BALANCE, num_tokens)
        forward_backward(state, problems)
        results[name].append(hf_gradients(state))
    return results


def _half_free(routes: Tensor) -> Tensor:
    """Leave every second token to the router."""
    free = routes.clone()
    free[::2] = -1
    return free


def _run(
    state: TrainState, problems: list[Problem], routes: Sequence[Tensor | None] = ()
) -> dict[str, Any]:
    """Logits, and, on rank 0, gradients; and what the routers' metrics are made of."""
    groups, routers = state.model.groups, state.model.routers
    assert routers is not None
    parts = [
        replace(problem, micro_batch=replace(problem.micro_batch, routes=part))
        for problem, part in zip_longest(problems, routes)
    ]
    logits = state.model.forward_only(
        [part.micro_batch for part in parts],
        lambda logits_NV, _: gather_columns(logits_NV, groups),
    )
    forward_backward(state, parts)
    return {
        "logits": logits,
        "gradients": hf_gradients(state),
        "sums": routers.take_sums(state.model.hf.num_layers),
    }
