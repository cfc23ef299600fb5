"""What the ranks of test_lora.py do, and adapters with random values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from bapo_megatron.config.megatron import LoraConfig
from tests.distributed_launch import joined
from tests.policy.expert_layouts import LR, problems_of
from tests.policy.parity_ranks import (
    build,
    forward_backward,
    gather_columns,
    hf_gradients,
)

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from bapo_megatron.policy.train_state import TrainState
    from bapo_megatron.runtime.distributed import ProcessGroups
    from tests.policy.tiny_models import Problem

LORA = {"rank": 3, "alpha": 6.0}


@dataclass(frozen=True)
class LoraLayout:
    """A layout of ranks, and the families that run in it."""

    name: str
    ranks: int
    families: tuple[str, ...]
    sizes: dict[str, Any] = field(default_factory=dict)
    """Fields of ``ParallelConfig``."""
    megatron: dict[str, Any] = field(default_factory=dict)
    sequence: bool = True


DENSE = ("qwen2", "llama")
EXPERTS = ("qwen3_moe", "deepseek_v3")
HYBRIDS = ("qwen3_5_text", "qwen3_next")
ALL = (*DENSE, *EXPERTS, *HYBRIDS)
LAYOUTS = (
    LoraLayout("one rank", 1, ALL),
    LoraLayout("recomputed", 1, ALL, megatron={"recompute": "full"}),
    LoraLayout("TP 2 + SP", 2, (*DENSE, *EXPERTS), {"tensor": 2}),
    LoraLayout("TP 2", 2, DENSE, {"tensor": 2}, sequence=False),
    LoraLayout("PP 2 × VPP 2", 2, ALL, {"pipeline": 2, "virtual_pipeline": 2}),
    LoraLayout("CP 2", 2, ALL, {"context": 2}),
    LoraLayout("EP 2", 2, EXPERTS, {"expert": 2}),
    LoraLayout("TP 2 × ETP 1", 2, EXPERTS, {"tensor": 2, "expert_tensor": 1}),
    LoraLayout("DP 2, ETP 2", 2, EXPERTS, {"expert_tensor": 2}),
)


def run_layouts(
    layouts: list[LoraLayout], models: dict[str, Path], adapters: dict[str, Path], root: Path
) -> dict[str, Any]:
    """By layout and family: logits, gradients, the norm, adapters after an update, exports."""
    results: dict[str, Any] = {}
    for layout in layouts:
        with joined(**layout.sizes) as groups:
            for family in layout.families:
                config = LoraConfig(**LORA, path=adapters[family])
                state = build(
                    models[family],
                    groups,
                    megatron=layout.megatron,
                    lora=config,
                    sequence=layout.sequence,
                    lr=LR,
                )
                name = f"{layout.name}, {family}"
                results[name] = _run(state, problems_of(groups), groups, root / name)
    return results


def _run(
    state: TrainState, problems: list[Problem], groups: ProcessGroups, root: Path
) -> dict[str, Any]:
    model, batches = state.model, [problem.micro_batch for problem in problems]
    assert model.lora is not None

    def logits() -> list[Tensor]:
        return model.forward_only(batches, lambda logits, _: gather_columns(logits, groups))

    with model.lora.off():
        base = logits()
    if groups.rank == 0:
        root.mkdir(parents=True)
    model.export_hf(root / "merged", durable=False)
    forward_backward(state, problems)
    result = {
        "place": (groups.data_rank, groups.data_size, groups.context.rank(), groups.context.size()),
        "base": base,
        "logits": logits(),
        "gradients": hf_gradients(state),
        "trained": sum(p.numel() for chunk in model.chunks for p in _trained(chunk)),
        "step": state.optimizer_step(),
    }
    model.export_adapter(root / "adapter")
    return result


def _trained(chunk: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in chunk.parameters() if parameter.requires_grad]


def untrained_logits(models: dict[str, Path]) -> dict[str, Any]:
    """Logits of each model with new adapters, and without any."""
    results: dict[str, Any] = {}
    with joined() as groups:
        problems = problems_of(groups)
        for family, directory in models.items():
            for kind, config in {"new": LoraConfig(**LORA), "none": None}.items():
                for dtype in ("float32", "bfloat16"):
                    state = build(directory, groups, lora=config, dtype=dtype)
                    results[f"{family}, {kind}, {dtype}"] = state.model.forward_only(
                        [problem.micro_batch for problem in problems],
                        lambda logits_NV, _: logits_NV.clone(),
                    )
    return results


def train_some(models: dict[str, Path], root: Path) -> dict[str, Any]:
    """Norms of three updates, and exported adapters, on two ranks."""
    overlapping = {"overlap_grad_reduce": True, "overlap_param_gather": True}
    partial = LoraConfig(**LORA, targets=("q_proj",))
    runs: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
        "plain": ("qwen2", {}, {}),
        "overlap": ("qwen2", {}, {"megatron": overlapping}),
        "bfloat16": ("qwen2", {}, {"dtype": "bfloat16"}),
        # Only the last stage has attention, and so adapters.
        "a stage without": (
            "qwen3_5_text",
            {"pipeline": 2, "virtual_pipeline": 1},
            {"lora": partial},
        ),
    }
    results: dict[str, Any] = {}
    for name, (family, sizes, options) in runs.items():
        with joined(**sizes) as groups:
            config = {"lora": LoraConfig(**LORA), "lr": 1e-2, **options}
            state = build(models[family], groups, **config)
            norms = []
            for _ in range(3):
                forward_backward(state, problems_of(groups))
                norms.append(state.optimizer_step().grad_norm)
            state.model.export_adapter(root / name)
            lora = state.model.lora
            assert lora is not None
            results[name] = {
                "norms": norms,
                "dtypes": {str(p.dtype) for _, p in lora.parameters()},
                "adapters": len(lora.adapters),
            }
    return results
