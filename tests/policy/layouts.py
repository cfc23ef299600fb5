"""The table of layouts, the models that run in each, and what their ranks do."""

import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
from megatron.core.tensor_parallel import layers
from torch import Tensor

from bapo_megatron.config.megatron import LoraConfig
from bapo_megatron.policy import megatron_setup
from bapo_megatron.policy.megatron_import import APEX_PRODUCTS, stand_in_for_apex
from bapo_megatron.policy.train_state import TrainState
from bapo_megatron.policy.weight_export import MAX_FILE_BYTES
from bapo_megatron.runtime.distributed import ProcessGroups
from tests.distributed_launch import joined, run_ranks
from tests.policy.families import RECURRENT, VOCAB_SIZE, WITH_EXPERTS, WITH_WINDOWS, marks
from tests.policy.oracle import Oracle
from tests.policy.parity_ranks import (
    build,
    forward_backward,
    gather_columns,
    hf_gradients,
    multiples_of,
    problems_of,
    snapshot,
)
from tests.policy.tiny_models import SEQUENCES, Batches, Lazy, Models, Problem, make_problems
from tests.tolerances import assert_within

Results = dict[str, list[dict[str, Any]]]
"""By case, of each rank."""
LR = 1e-3
BALANCE = 3.0
"""Coefficient of the load balancing loss."""
ROUTERS = (".gate.weight", ".router.weight")
"""How names of routers end."""


@dataclass(frozen=True)
class Layout:
    """A layout of ``ranks`` ranks."""

    name: str
    ranks: int
    sizes: dict[str, Any] = field(default_factory=dict)
    """Of ``ParallelConfig``; sequence-parallel wherever that is possible."""
    megatron: dict[str, Any] = field(default_factory=dict)
    sequence: bool = True
    max_file_bytes: int = MAX_FILE_BYTES
    """Of exports."""

    def fits(self, family: str) -> bool:
        """Whether it divides what the family has; windows and sinks have no context parallelism."""
        return (family in WITH_EXPERTS or "expert" not in self.sizes) and (
            family not in WITH_WINDOWS or "context" not in self.sizes
        )


class Case(NamedTuple):
    """A tiny model in a layout."""

    layout: Layout
    family: str

    def __str__(self) -> str:
        return f"{self.layout.name}, {self.family}"


_RECOMPUTE = {"recompute": "full"}
_SEQUENCE = {"tensor": 2, "sequence": True}
_WHOLE = {**_SEQUENCE, "expert_tensor": 1}
_INTERLEAVED = {"pipeline": 2, "virtual_pipeline": 2}
LAYOUTS = (
    Layout("one rank", 1),
    Layout("one rank, recomputed", 1, {}, _RECOMPUTE),
    Layout("one rank, attention recomputed", 1, {}, {"recompute": "selective"}),
    Layout("EP 2", 2, {"expert": 2}),
    Layout("TP 2", 2, _SEQUENCE),
    Layout("TP 2, ETP 1", 2, _WHOLE, max_file_bytes=20_000),
    Layout("TP 2 × EP 2, ETP 1", 2, {**_WHOLE, "expert": 2}),
    Layout("TP 2 without SP", 2, {"tensor": 2, "expert_tensor": 1}, sequence=False),
    Layout("PP 2 × VPP 2", 2, _INTERLEAVED, max_file_bytes=20_000),
    Layout("PP 2, recomputed", 2, {"pipeline": 2}, _RECOMPUTE),
    Layout("CP 2", 2, {"context": 2}),
    Layout("CP 2 × EP 2", 2, {"context": 2, "expert": 2}),
    Layout("DP 2", 2),
    Layout("DP 2, ETP 2", 2, {"expert_tensor": 2}),
    Layout("TP 2 × EP 2, ETP 2", 4, {**_SEQUENCE, "expert": 2}),
    Layout("TP 2 × EP 4, ETP 1", 4, {**_WHOLE, "expert": 4}),
    Layout("PP 2 × VPP 2 × CP 2 × EP 2", 4, {**_INTERLEAVED, "context": 2, "expert": 2}),
)
EXPERTS = ("qwen3_moe", "glm4_moe", "deepseek_v3")
"""Those whose experts run in every kind of layout."""


def cases_of(families: Iterable[str], *layouts: str) -> list[Case]:
    """These models in those of ``layouts`` that fit them."""
    named = [layout for layout in LAYOUTS if layout.name in layouts]
    assert len(named) == len(layouts)
    return [Case(x, family) for x in named for family in families if x.fits(family)]


def in_every_case(cases: Iterable[Case]) -> pytest.MarkDecorator:
    """Parameters of a test; those on four ranks are exhaustive."""
    parameters = [
        pytest.param(
            case,
            id=str(case),
            marks=[pytest.mark.exhaustive] if case.layout.ranks > 2 else marks(case.family),
        )
        for case in cases
    ]
    return pytest.mark.parametrize("case", parameters)


def chosen(request: pytest.FixtureRequest) -> list[Case]:
    """The cases that tests of the fixture's module are about to see: others need not run."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    calls = [getattr(x, "callspec", None) for x in items if x.module is request.module]
    cases = [call.params["case"] for call in calls if call and "case" in call.params]
    return list({str(case): case for case in cases}.values())


def _tokens(length: int) -> tuple[int, ...]:
    return tuple((7 * length + 5 * n * n + n) % VOCAB_SIZE for n in range(length))


BATCHES: Batches = (
    *SEQUENCES,
    ((13, 14, 15, 16, 17, 18), (60, 61, 62)),
    ((80,), (90, 3, 90, 4, 90, 5), (2, 2)),
)
"""One for each of four data-parallel ranks."""
LONG: Batches = tuple(
    tuple(map(_tokens, lengths)) for lengths in ((1, 64, 65), (300,), (2, 63, 1, 3), (128, 129, 1))
)
"""Around the borders of the chunks of recurrences."""


def batches_of(family: str) -> Batches:
    """What a model is trained on."""
    return LONG if family in RECURRENT else BATCHES


def in_layouts(cases: Iterable[Case]) -> Iterator[tuple[Case, ProcessGroups]]:
    """Each case, in process groups that its layout's other cases share."""
    for _, of_layout in groupby(cases, key=lambda case: case.layout.name):
        first = next(of_layout)
        with joined(**first.layout.sizes) as groups:
            for case in (first, *of_layout):
                yield case, groups


def built(
    cases: Iterable[Case], models: Models, adapters: dict[str, LoraConfig] | None = None
) -> Iterator[tuple[Case, ProcessGroups, TrainState]]:
    """A training state of each case."""
    for case, groups in in_layouts(cases):
        lora = adapters[case.family] if adapters else None
        options = {"megatron": case.layout.megatron, "sequence": case.layout.sequence}
        yield case, groups, build(models[case.family], groups, lora=lora, lr=LR, **options)


def by_rank(
    run: Callable[..., dict[str, Any]], cases: Sequence[Case], models: Models, *args: Any
) -> Results:
    """What ``run`` returns of cases, of each rank; a layout's ranks start at its first result."""

    def of_layout(name: str) -> Results:
        fitting = [case for case in cases if case.layout.name == name]
        directories = {case.family: models[case.family] for case in fitting}
        of_ranks = run_ranks(
            run, fitting[0].layout.ranks, fitting, directories, *args, timeout_s=600
        )
        return {case: [result[case] for result in of_ranks] for case in of_ranks[0]}

    jobs = Lazy(of_layout)
    return Lazy(lambda case: jobs[case.rpartition(", ")[0]][case])


def run_cases(
    cases: Sequence[Case],
    models: Models,
    exports: Path,
    adapters: dict[str, LoraConfig] | None = None,
) -> dict[str, Any]:
    """By case: logits, exports, gradients, the norm, the weights after an update.

    With adapters also the logits of the base; what is exported first is merged.
    """
    results: dict[str, Any] = {}
    for case, groups, state in built(cases, models, adapters):
        problems = problems_of(groups, batches_of(case.family))
        export = exports / str(case)
        results[str(case)] = _run(state, problems, export, case.layout.max_file_bytes)
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


def run_routed(cases: Sequence[Case], models: Models) -> dict[str, Any]:
    """By case: what changes if routers replay their own choices, get others, or are balanced."""
    results: dict[str, Any] = {}
    for case, groups, state in built(cases, models):
        routers, batches = state.model.routers, batches_of(case.family)
        assert routers is not None
        problems = problems_of(groups, batches)
        with routers.recorded() as recorded:
            free = _run_routed(state, problems)
        num_experts = state.model.hf.dimensions["experts"]
        routes = {
            "own": recorded[: len(problems)],
            "half": [_half_free(part) for part in recorded[: len(problems)]],
            "other": [(part + 1) % num_experts for part in recorded[: len(problems)]],
        }
        result = {"free": free} | {k: _run_routed(state, problems, r) for k, r in routes.items()}
        whole = make_problems(0, *multiples_of(groups.context.size()), batches=batches)
        routers.balance(BALANCE, sum(problem.micro_batch.num_tokens for problem in whole))
        forward_backward(state, problems)
        results[str(case)] = result | {"balanced": hf_gradients(state)}
    return results


def run_accumulated(cases: Sequence[Case], models: Models) -> dict[str, Any]:
    """By case: gradients that layers add to those of the micro-batch before, as on GPUs."""
    stand_in_for_apex()
    module, settings = importlib.import_module(APEX_PRODUCTS), megatron_setup._speed_options
    product = mock.Mock(wraps=module.wgrad_gemm_accum_fp32)

    def options_of_gpu(*args: Any, **options: Any) -> dict[str, Any]:
        return {**settings(*args, **options), "gradient_accumulation_fusion": True}

    results: dict[str, Any] = {}
    with (
        mock.patch.object(layers, "fused_weight_gradient_mlp_cuda", module, create=True),
        mock.patch.object(layers, "_grad_accum_fusion_available", True),
        mock.patch.object(module, "wgrad_gemm_accum_fp32", product),
        mock.patch.object(megatron_setup, "_speed_options", options_of_gpu),
    ):
        for case, groups, state in built(cases, models):
            product.reset_mock()
            forward_backward(state, problems_of(groups))
            results[str(case)] = {"gradients": hf_gradients(state), "products": product.call_count}
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
