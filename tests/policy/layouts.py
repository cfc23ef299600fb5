"""The table of layouts, the models that run in each, and what their ranks do."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any

from torch import Tensor

from bapo_megatron.config.megatron import LoraConfig
from bapo_megatron.policy.train_state import TrainState
from bapo_megatron.policy.weight_export import MAX_FILE_BYTES
from bapo_megatron.runtime.distributed import ProcessGroups
from tests.distributed_launch import joined, run_ranks
from tests.policy.oracle import Gradients, Oracle
from tests.policy.parity_ranks import (
    build,
    forward_backward,
    gather_columns,
    hf_gradients,
    multiples_of,
    problems_of,
    snapshot,
)
from tests.policy.tiny_models import (
    SEQUENCES,
    VOCAB_SIZE,
    Batches,
    Problem,
    make_model,
    make_problems,
)
from tests.tolerances import assert_within

Results = dict[str, list[dict[str, Any]]]
"""By layout and model, of each rank."""

BATCHES: Batches = (
    *SEQUENCES,
    ((13, 14, 15, 16, 17, 18), (60, 61, 62)),
    ((80,), (90, 3, 90, 4, 90, 5), (2, 2)),
)
"""One for each of four data-parallel ranks."""
LR = 1e-3
BALANCE = 3.0
"""Coefficient of the load balancing loss."""


@dataclass(frozen=True)
class Layout:
    """A layout of ``ranks`` ranks."""

    name: str
    ranks: int
    sizes: dict[str, Any] = field(default_factory=dict)
    """Of ``ParallelConfig``; sequence-parallel wherever that is possible."""
    megatron: dict[str, Any] = field(default_factory=dict)
    models: tuple[str, ...] = ()
    """Those that run in it; all if there are none."""
    sequence: bool = True
    max_file_bytes: int = MAX_FILE_BYTES
    """Of exports."""

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
    Layout("TP 2", 2, _SEQUENCE, max_file_bytes=20_000),
    Layout("TP 2, ETP 1", 2, _WHOLE),
    Layout("TP 2 × EP 2, ETP 1", 2, {**_WHOLE, "expert": 2}),
    Layout("PP 2", 2, {"pipeline": 2}),
    Layout("PP 2 × VPP 2", 2, _INTERLEAVED, max_file_bytes=20_000),
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


def layouts_of(*names: str, models: tuple[str, ...] = ()) -> tuple[Layout, ...]:
    """Those of LAYOUTS."""
    found = tuple(replace(layout, models=models) for layout in LAYOUTS if layout.name in names)
    assert len(found) == len(names)
    return found


def _tokens(length: int) -> tuple[int, ...]:
    return tuple((7 * length + 5 * n * n + n) % VOCAB_SIZE for n in range(length))


@dataclass(frozen=True)
class Suite:
    """Models, and the layouts in which all checks of test_layouts.py see them."""

    families: tuple[str, ...]
    layouts: tuple[Layout, ...]
    batches: Batches = BATCHES
    is_exhaustive: bool = False


EXPERTS = ("qwen3_moe", "glm4_moe", "deepseek_v3")
_HYBRIDS = ("qwen3_5_text", "qwen3_next", "qwen3_5_moe_text")
_NO_CONTEXT = ("mistral_window", "gemma3_text", "gpt_oss")
"""Windows and sinks have no context parallelism."""
_OTHERS = ("olmo2", "minimax_m2", "glm4_moe_lite", "nemotron_h")
SUITES = {
    "dense": Suite(
        ("qwen2", "qwen3", "llama", "mistral", "qwen3_5_text", "qwen3_next"),
        layouts_of("one rank", "TP 2", "PP 2 × VPP 2", "CP 2", "DP 2"),
    ),
    "experts": Suite(
        (*EXPERTS, "moonlight"),
        # Every kind of parallelism, alone or with another; all layouts are in ``bench_experts``.
        layouts_of(
            *("one rank, attention recomputed", "EP 2", "TP 2, ETP 1", "PP 2, recomputed"),
            *("TP 2 × EP 2, ETP 2", "TP 2 × EP 4, ETP 1", "PP 2 × VPP 2 × CP 2 × EP 2"),
        ),
    ),
    "others": Suite((*_NO_CONTEXT, *_OTHERS), layouts_of("TP 2, ETP 1")),
    "others in all": Suite(
        (*_NO_CONTEXT, *_OTHERS),
        layouts_of("one rank, recomputed", "PP 2 × VPP 2", "DP 2")
        + layouts_of("CP 2", models=_OTHERS)
        + layouts_of("EP 2", "TP 2 × EP 2, ETP 1", models=("gpt_oss", *_OTHERS[1:])),
        is_exhaustive=True,
    ),
    # Around the borders of the delta rule's chunks.
    "hybrids": Suite(
        _HYBRIDS,
        layouts_of("one rank", "one rank, recomputed", "TP 2", "PP 2 × VPP 2", "CP 2", "DP 2")
        + layouts_of("EP 2", "TP 2 × EP 2, ETP 1", models=_HYBRIDS[1:]),
        batches=tuple(
            tuple(map(_tokens, lengths))
            for lengths in ((1, 64, 65), (300,), (2, 63, 1, 3), (128, 129, 1))
        ),
        is_exhaustive=True,
    ),
}


class SuiteRun:
    """A suite's models, exports and results, and the oracles of its models."""

    def __init__(self, suite: Suite, root: Path) -> None:
        self.suite, self._root = suite, root
        self.exports = root / "exports"

    @cached_property
    def models(self) -> dict[str, Path]:
        # So that two stages have two chunks each; longer than any sequence.
        sizes = {"num_hidden_layers": 4, "max_position_embeddings": 512}
        families = self.suite.families
        return {name: make_model(name, self._root / name, **sizes) for name in families}

    @cached_property
    def results(self) -> Results:
        arguments = (self.models, self.exports, self.suite.batches)
        return by_rank(run_layouts, self.suite.layouts, *arguments)

    @cached_property
    def oracles(self) -> dict[str, Oracle]:
        return {name: Oracle.of(name, path) for name, path in self.models.items()}

    @cached_property
    def gradients(self) -> dict[str, Gradients]:
        problems = make_problems(batches=self.suite.batches)
        return {name: oracle.gradients(problems) for name, oracle in self.oracles.items()}


def built(
    layouts: Sequence[Layout], models: dict[str, Path], **optimizer: float
) -> Iterator[tuple[str, ProcessGroups, TrainState]]:
    """A training state of each model in each layout, with the names of both."""
    for layout in layouts:
        with joined(**layout.sizes) as groups:
            for name in layout.models or models:
                state = build(models[name], groups, megatron=layout.megatron, **optimizer)
                yield f"{layout.name}, {name}", groups, state


def by_rank(run: Callable[..., dict[str, Any]], layouts: Sequence[Layout], *args: Any) -> Results:
    """What ``run`` returns of layouts, by layout and model, of each rank."""
    results: Results = {}
    for ranks in sorted({layout.ranks for layout in layouts}):
        fitting = [layout for layout in layouts if layout.ranks == ranks]
        of_ranks = run_ranks(run, ranks, fitting, *args, timeout_s=300)
        results |= {name: [result[name] for result in of_ranks] for name in of_ranks[0]}
    return results


def run_layouts(
    layouts: Sequence[Layout],
    models: dict[str, Path],
    exports: Path,
    batches: Batches = BATCHES,
    adapters: dict[str, LoraConfig] | None = None,
) -> dict[str, Any]:
    """By layout and model: logits, exports, gradients, the norm, the weights after an update.

    With adapters also the logits of the base; what is exported first is merged.
    """
    results: dict[str, Any] = {}
    for layout in layouts:
        with joined(**layout.sizes) as groups:
            for name in layout.models or models:
                state = build(
                    models[name],
                    groups,
                    megatron=layout.megatron,
                    lora=adapters[name] if adapters else None,
                    sequence=layout.sequence,
                    lr=LR,
                )
                key = f"{layout.name}, {name}"
                problems = problems_of(groups, batches)
                results[key] = _run(state, problems, exports / key, layout.max_file_bytes)
    return results


def _run(
    state: TrainState, problems: list[Problem], export: Path, max_file_bytes: int
) -> dict[str, Any]:
    model, groups = state.model, state.model.groups
    result: dict[str, Any] = {
        "place": (groups.data_rank, groups.data_size, groups.context.rank(), groups.context.size())
    }
    if model.lora is not None:
        with model.lora.off():
            result["base"] = _logits(state, problems)
    result["metrics"] = model.adapter_metrics()
    result["logits"] = _logits(state, problems)
    if groups.rank == 0:
        export.mkdir(parents=True)
    model.export_hf(export / "model", max_file_bytes, durable=False)
    forward_backward(state, problems)
    trained = [p for chunk in model.chunks for p in chunk.parameters() if p.requires_grad]
    result |= {
        "gradients": hf_gradients(state),
        "trained": sum(parameter.numel() for parameter in trained),
        "step": state.optimizer_step(),
    }
    if model.lora is not None:
        model.export_adapter(export / "adapter")
        return result
    return result | {"weights": snapshot(state)}


def _logits(state: TrainState, problems: list[Problem]) -> list[Tensor]:
    return state.model.forward_only(
        [problem.micro_batch for problem in problems],
        lambda logits_NV, _: gather_columns(logits_NV, state.model.groups),
    )


def check_logits(
    of_ranks: list[dict[str, Any]], oracle: Oracle, batches: Batches = BATCHES, kind: str = "logits"
) -> None:
    """Logits of a layout's ranks against float64; all but the last pipeline stage have none."""
    num_rows = 0
    for result in of_ranks:
        data_rank, data_size, context_rank, context_size = result["place"]
        multiples = multiples_of(context_size)
        problems = make_problems(0, *multiples, batches=batches)[data_rank::data_size]
        for actual_NV, problem in zip(result[kind], problems, strict=bool(result[kind])):
            whole_NV, bound = oracle.logits(problem)
            # A context rank has some rows of the whole.
            part = problem.part(context_rank, context_size).micro_batch
            rows = part.target_T if context_size > 1 else slice(None)
            assert whole_NV.std() > 0.5
            assert_within((actual_NV - whole_NV[rows]).abs().max(), bound, kind)
            num_rows += len(actual_NV)
    assert num_rows >= sum(len(sequence) for sequences in batches for sequence in sequences)


def run_replays(layouts: Sequence[Layout], models: dict[str, Path]) -> dict[str, Any]:
    """By layout and model: what changes when routers replay their own choices, or get others."""
    results: dict[str, Any] = {}
    for name, groups, state in built(layouts, models):
        assert state.model.routers is not None
        problems = problems_of(groups, BATCHES)
        with state.model.routers.recorded() as recorded:
            results[name] = {"free": _run_routed(state, problems)}
        num_experts = state.model.hf.dimensions["experts"]
        routes = {
            "own": recorded[: len(problems)],
            "half": [_half_free(part) for part in recorded[: len(problems)]],
            "other": [(part + 1) % num_experts for part in recorded[: len(problems)]],
        }
        results[name] |= {kind: _run_routed(state, problems, r) for kind, r in routes.items()}
    return results


def run_balanced(layouts: Sequence[Layout], models: dict[str, Path]) -> dict[str, Any]:
    """By layout and model, on rank 0: the gradients without and with the load balancing loss."""
    results: dict[str, Any] = {}
    for name, groups, state in built(layouts, models):
        assert state.model.routers is not None
        problems = problems_of(groups, BATCHES)
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


def _run_routed(
    state: TrainState, problems: list[Problem], routes: Sequence[Tensor | None] = ()
) -> dict[str, Any]:
    """Logits, and, on rank 0, gradients; and what the routers' metrics are made of."""
    routers = state.model.routers
    assert routers is not None
    parts = [
        replace(problem, micro_batch=replace(problem.micro_batch, routes=part))
        for problem, part in zip_longest(problems, routes)
    ]
    logits = _logits(state, parts)
    forward_backward(state, parts)
    return {
        "logits": logits,
        "gradients": hf_gradients(state),
        "sums": routers.take_sums(state.model.hf.num_layers),
    }
