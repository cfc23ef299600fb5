"""What the ranks of test_lora.py do, and adapters with random values."""

from pathlib import Path
from typing import Any

from bapo_megatron.config.megatron import LoraConfig
from tests.distributed_launch import joined
from tests.policy.layouts import BATCHES, Layout, layouts_of
from tests.policy.parity_ranks import build, forward_backward, problems_of

LORA = {"rank": 3, "alpha": 6.0}


DENSE = ("qwen2", "llama")
EXPERTS = ("qwen3_moe", "deepseek_v3")
ALL = (*DENSE, *EXPERTS, "qwen3_5_text", "qwen3_next")
LAYOUTS = (
    *layouts_of("one rank", "one rank, recomputed", "PP 2 × VPP 2", "CP 2"),
    *layouts_of("TP 2", models=(*DENSE, *EXPERTS)),
    Layout("TP 2 without SP", 2, {"tensor": 2}, models=DENSE, sequence=False),
    *layouts_of("EP 2", models=EXPERTS),
    Layout("TP 2, ETP 1", 2, {"tensor": 2, "expert_tensor": 1}, models=EXPERTS),
    Layout("DP 2, ETP 2", 2, {"expert_tensor": 2}, models=EXPERTS),
)


def untrained_logits(models: dict[str, Path]) -> dict[str, Any]:
    """Logits of each model with new adapters, and without any."""
    results: dict[str, Any] = {}
    with joined() as groups:
        problems = problems_of(groups, BATCHES)
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
                forward_backward(state, problems_of(groups, BATCHES))
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
