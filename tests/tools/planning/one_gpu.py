"""Print the table of docs/benchmarks/init_one_gpu_202611.md: what ``init`` chooses for one GPU."""

import sys
import tempfile
from pathlib import Path

from bapo_megatron.config.schema import RunConfig
from bapo_megatron.runtime.gpus import GPUS
from bapo_megatron.tools.planning.plan import Plan, PlanOptions, choose_layout
from tests.tools.planning.cases import QWEN3_SHAPES, qwen3, run_config

CARDS = ("RTX4090", "L40S", "H100", "H200")


def draft() -> RunConfig:
    """As ``init`` drafts it, with prompts of up to 1,024 tokens."""
    return run_config(
        model={"path": "models/qwen3", "dtype": "bfloat16"},
        data={"max_prompt_tokens": 1024},
        rollout={"groups_per_step": 64, "samples_per_group": 8, "max_response_tokens": 8192},
        algorithm={"updates_per_batch": 4},
        train={"max_tokens_per_micro_batch": 16384},
    )


def row(size: str, card: str, mode: str) -> str:
    """One line of the table, with what ``init`` chooses, or that it finds nothing."""
    head = f"| {size} | {card}, {GPUS[card].memory_gb} | {mode} "
    with tempfile.TemporaryDirectory() as folder:
        hf = qwen3(size, Path(folder))
    try:
        config, plan = choose_layout(draft(), hf, PlanOptions(gpu=card), 1, modes=(mode,))
    except ValueError:
        return head + "| does not fit | | | | | |"
    return head + _choice(config, plan)


def _choice(config: RunConfig, plan: Plan) -> str:
    saved = {
        "micro-batch": config.train.max_tokens_per_micro_batch < 16384,
        "logits": config.ops.logits_chunk_tokens,
        "host": config.megatron.optimizer_offload_share,
        "recompute": config.megatron.recompute == "full",
        f"responses of {config.rollout.max_response_tokens:,}": (
            config.rollout.max_response_tokens < 8192
        ),
    }
    choices = ", ".join(name for name, is_chosen in saved.items() if is_chosen) or "–"
    sizes = (plan.worst_stage.total_bytes, plan.sampling_bytes, plan.host_bytes_per_node)
    training, sampling, host = (f"{size / 1e9:.1f}" for size in sizes)
    fraction, tokens = config.rollout.server.mem_fraction, plan.rollout.kv_cache_tokens
    return (
        f"| {choices} | {training} | {sampling} | {host} | {fraction:.2f}: {tokens:,} | "
        f"{plan.step_s:,.0f} |"
    )


if __name__ == "__main__":
    for size in sorted(QWEN3_SHAPES, key=lambda size: float(size[:-1])):
        for card in CARDS:
            for mode in ("full", "lora"):
                sys.stdout.write(row(size, card, mode) + "\n")
                sys.stdout.flush()
