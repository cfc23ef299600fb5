"""What the ranks of test_policy_parity.py do."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from bapo_megatron.config.megatron import LoraConfig, MegatronConfig, ModelConfig, OptimizerConfig
from bapo_megatron.policy.adapters import adapter_table
from bapo_megatron.policy.hf_weights import local_weights
from bapo_megatron.policy.train_state import TrainState
from bapo_megatron.policy.weight_export import gather_weights
from bapo_megatron.policy.weight_table import weight_table
from bapo_megatron.runtime.distributed import (
    ProcessGroups,
    any_rank,
    broadcast_bytes,
    first_message,
)
from tests.distributed_launch import joined
from tests.policy.build import build_state, layout_of
from tests.policy.families import VOCAB_SIZE
from tests.policy.tiny_models import SEQUENCES, Batches, Problem, make_problems


def build(
    model_dir: Path,
    groups: ProcessGroups,
    *,
    dtype: str = "float32",
    megatron: dict[str, Any] | None = None,
    lora: LoraConfig | None = None,
    sequence: bool = True,
    **optimizer: Any,
) -> TrainState:
    """Build it in the layout of ``groups``, sequence-parallel wherever that is possible."""
    return build_state(
        ModelConfig(path=model_dir, dtype=dtype, lora=lora or LoraConfig()),
        groups,
        parallel=layout_of(groups, sequence=sequence and groups.tensor.size() > 1),
        optimizer=OptimizerConfig(**{"lr": 1e-3, **optimizer}),
        megatron=MegatronConfig.model_validate(megatron or {}),
    )


def multiples_of(context_size: int) -> tuple[int, int]:
    """What micro-batches and sequences are padded to."""
    return (2, 1) if context_size == 1 else (2 * context_size, 2 * context_size)


def problems_of(
    groups: ProcessGroups, batches: Batches = SEQUENCES, seed: int = 0
) -> list[Problem]:
    """This rank's share of ``batches``, padded as its layout needs."""
    size, rank = groups.context.size(), groups.context.rank()
    problems = make_problems(seed, *multiples_of(size), batches=batches)
    return [p.part(rank, size) for p in problems[groups.data_rank :: groups.data_size]]


def forward_backward(state: TrainState, problems: list[Problem]) -> None:
    """Gradients of the problems' losses, through Megatron's schedule."""
    remaining = iter(problems)

    def loss_fn(logits_NV: Tensor, _: Any) -> tuple[Tensor, None]:
        vocab_start = state.model.groups.tensor.rank() * logits_NV.shape[1]
        return next(remaining).loss(logits_NV, vocab_start), None

    state.forward_backward([problem.micro_batch for problem in problems], loss_fn)


def snapshot(state: TrainState) -> dict[str, Tensor]:
    """Copies of all weights by Hugging Face name, on rank 0."""
    weights = state.model.gather_weights()
    return {name: tensor.clone() for name, tensor in weights}


def single_rank(qwen2: Path) -> dict[str, Any]:
    """What does not depend on the layout."""
    results: dict[str, Any] = {}
    with joined() as groups:
        decaying = build(qwen2, groups, lr=0.1, weight_decay=0.5)
        results["decay"] = _weights_around_update(decaying, 0.0)
        state = build(qwen2, groups)
        results["non_finite"] = _weights_around_update(state, math.nan)
        results["after non_finite"] = _weights_around_update(state)
        state = build(qwen2, groups, dtype="bfloat16")
        batches = [problem.micro_batch for problem in problems_of(groups)]
        logits = state.model.forward_only(batches, lambda logits_NV, _: logits_NV)
        results["bfloat16"] = {"logits": logits, **_weights_around_update(state)}
        results["held logits"] = _count_held_logits(build(qwen2, groups))
        results["unpadded"] = error_of(_forward_with_tokens_outside_sequences, qwen2, groups)
        results["no batch"] = error_of(build(qwen2, groups).forward_backward, [], None)
    return results


def two_ranks(qwen2: Path, root: Path) -> dict[str, Any]:
    """Tensor parallel with sequence parallel, then collectives."""
    with joined() as groups:
        results: dict[str, Any] = {"collectives": _collectives(groups)}
    with joined(tensor=2) as groups:
        results["odd tokens"] = error_of(_forward_odd_tokens, qwen2, groups)
        blocked = root / "blocked"
        if groups.rank == 0:
            blocked.write_text("a file where a directory should be made")
        dist.barrier()
        results["unwritable"] = error_of(build(qwen2, groups).model.export_hf, blocked / "model")
    return results


def gather_columns(logits_NV: Tensor, groups: ProcessGroups) -> Tensor:
    parts = [torch.empty_like(logits_NV) for _ in range(groups.tensor.size())]
    dist.all_gather(parts, logits_NV.contiguous(), group=groups.tensor)
    return torch.cat(parts, dim=1)[:, :VOCAB_SIZE]


def hf_gradients(state: TrainState) -> dict[str, Tensor]:
    """Whole gradients by Hugging Face name, on rank 0.

    Each rank of the data group has reduced a part of them.
    """
    groups = state.model.groups
    for ddp in state.wrapped:
        for group, buffers in (
            (groups.data, ddp.buffers),
            (groups.expert_data, ddp.expert_parallel_buffers),
        ):
            for buffer in buffers:
                part = buffer.grad_data.chunk(group.size())[group.rank()].clone()
                parts = [torch.empty_like(part) for _ in range(group.size())]
                dist.all_gather(parts, part, group=group)
                buffer.grad_data.copy_(torch.cat(parts))
    model = state.model
    trained = [weight for weight in weight_table(model.hf) if not weight.is_buffer]
    local = dict(local_weights(model.chunks, model.hf, groups))
    if model.lora is not None:
        local, trained = dict(model.lora.parameters()), adapter_table(model.hf, model.lora.config)
    gradients = gather_weights(
        local, model.hf, groups, trained, read=lambda _, parameter: parameter.main_grad
    )
    return {name: gradient.clone() for name, gradient in gradients}


def _weights_around_update(state: TrainState, scale: float = 1.0) -> dict[str, Any]:
    """Weights before and after an update on problems whose losses are scaled."""
    before = snapshot(state)
    problems = problems_of(state.model.groups)
    forward_backward(state, [Problem(p.micro_batch, p.coefficient_NV * scale) for p in problems])
    step = state.optimizer_step()
    after, num_updates = snapshot(state), state.num_updates
    return {"before": before, "after": after, "step": step, "num_updates": num_updates}


def _count_held_logits(state: TrainState) -> list[int]:
    """How many micro-batches have logits in memory when those of one come, without gradients."""
    storages: list[StorageWeakRef] = []

    def count(logits_NV: Tensor, _: Any) -> int:
        storages.append(StorageWeakRef(logits_NV.untyped_storage()))
        return sum(not storage.expired() for storage in storages)

    return state.model.forward_only([p.micro_batch for p in make_problems()], count)


def _forward_with_tokens_outside_sequences(directory: Path, groups: ProcessGroups) -> None:
    (problem, *_) = problems_of(groups)
    batch = problem.micro_batch
    # The tensor is shared with the frozen micro-batch.
    batch.cu_seqlens[-1] -= 1
    build(directory, groups).model.forward_only([batch], lambda logits_NV, _: logits_NV)


def _forward_odd_tokens(directory: Path, groups: ProcessGroups) -> None:
    problems = make_problems(pad_to_multiple=1)
    odd = next(p.micro_batch for p in problems if p.micro_batch.num_tokens % 2)
    build(directory, groups).model.forward_only([odd], lambda logits_NV, _: logits_NV)


def _collectives(groups: ProcessGroups) -> dict[str, Any]:
    rank = groups.rank
    large = bytes(range(256)) * 1000
    return {
        "bytes": broadcast_bytes(large if rank == 0 else None, groups) == large,
        "empty": broadcast_bytes(b"" if rank == 0 else None, groups),
        "any": [any_rank(rank == flagged, groups.control) for flagged in (0, 1, 2)],
        "first": [first_message(f"{rank}" if rank >= k else None, groups) for k in (0, 1, 99)],
    }


def error_of(function: Callable[..., Any], *args: Any, **options: Any) -> str:
    """What a rank says of a call."""
    try:
        function(*args, **options)
    except (ValueError, OSError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def export(model: Path, target: Path) -> None:
    """Write the model as a Hugging Face directory, on one rank."""
    with joined() as groups:
        build(model, groups).model.export_hf(target)
