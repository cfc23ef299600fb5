"""What Megatron itself builds and keeps; for a process of its own.

One process plays every rank, with the fake backend (``tests.policy.fake_world``), so the results of
collectives are arbitrary; shapes and storages are those of a real run.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from torch.distributed._tools.mem_tracker import MemTracker

from bapo_megatron.config.megatron import MegatronConfig, ModelConfig, ParallelConfig
from bapo_megatron.policy.megatron_setup import build_chunks, seed_everything
from tests.policy.fake_world import fake_world, stage_parameters
from tests.tools.planning.cases import (
    LENGTHS,
    MODELS,
    SAVED,
    parameter_cases,
    published,
    small_model,
)


def parameters() -> list[list[list[int]]]:
    """Parameters of each chunk of each stage, by case."""
    return [
        [
            stage_parameters(published(model), ModelConfig(path=MODELS), parallel, stage)
            for stage in range(parallel.pipeline)
        ]
        for model, parallel in parameter_cases()
    ]


def saved() -> dict[str, dict[str, float]]:
    """Bytes that autograd keeps, of each layer and in all, and the peak of the backward pass."""
    results = {}
    for case, (family, dtype, parallel, megatron) in SAVED.items():
        with small(family, dtype, parallel, megatron, 4) as gpt:
            total, peak = _forward_backward(gpt)
        with small(family, dtype, parallel, megatron, 8) as gpt:
            twice, _ = _kept(gpt)
        results[case] = {"total": total, "per_4_layers": twice - total, "peak": peak}
    return results


@contextmanager
def small(
    family: str, dtype: str, parallel: dict[str, Any], megatron: dict[str, Any], layers: int
) -> Iterator[GPTModel]:
    """A small model's first chunk on the first rank, with random weights on the CPU."""
    config = ParallelConfig(**parallel)
    with fake_world(config, 0) as played:
        groups = replace(played, device=torch.device("cpu"))
        seed_everything(0, groups)
        (gpt, *_) = build_chunks(
            small_model(family, layers),
            ModelConfig(path=MODELS, dtype=dtype),
            config,
            MegatronConfig.model_validate(megatron),
            groups,
        )
        for parameter in gpt.parameters():
            parameter.data.normal_(0, 0.02)
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        yield gpt.train()


def _forward(gpt: GPTModel) -> torch.Tensor:
    tokens = sum(LENGTHS)
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    return gpt(
        input_ids=torch.arange(tokens)[None] % 512,
        position_ids=torch.arange(tokens)[None],
        attention_mask=None,
        packed_seq_params=PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=ends,
            cu_seqlens_kv=ends,
            max_seqlen_q=max(LENGTHS),
            max_seqlen_kv=max(LENGTHS),
        ),
    )


def _kept(gpt: GPTModel) -> tuple[int, torch.Tensor]:
    """Bytes of the distinct storages that the forward pass keeps, and its output."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in gpt.parameters()}
    storages = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if tensor.numel() and storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = _forward(gpt)
    return sum(storages.values()), output


def _forward_backward(gpt: GPTModel) -> tuple[int, int]:
    """Bytes that the forward pass keeps, and the peak of both without parameters."""
    with MemTracker() as tracker:
        kept, output = _kept(gpt)
        output.backward(torch.ones_like(output))
    (peak,) = tracker.get_tracker_snapshot("peak").values()
    kinds = {str(kind): value for kind, value in peak.items()}
    return kept, sum(value for kind, value in kinds.items() if "ACT" in kind or "TEMP" in kind)
