"""What Megatron itself builds, keeps and sends; for a process of its own.

One process plays every rank, with the fake backend (``tests.policy.fake_world``), so the results of
collectives are arbitrary; shapes, storages and messages are those of a real run.
"""

import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches
from torch.distributed._tools.mem_tracker import MemTracker

from bapo_megatron.config.megatron import (
    MegatronConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
)
from bapo_megatron.policy.frozen import FrozenModel
from bapo_megatron.policy.hf_config import read_hf_config_file
from bapo_megatron.policy.local_layers import PackedSequences
from bapo_megatron.policy.megatron_setup import build_chunks, seed_everything, wrap_for_precision
from bapo_megatron.policy.model import Model
from bapo_megatron.policy.optimizer import build_optimizer, wrap_for_data_parallel
from tests.policy.fake_world import fake_world, stage_parameters
from tests.policy.tiny_models import make_model
from tests.tools.planning.cases import (
    FROZEN,
    IN_FLIGHT,
    LENGTHS,
    MESSAGES,
    MODELS,
    PARAMETERS,
    SAVED,
    STATE,
    small_model,
)


def parameters() -> dict[str, list[list[int]]]:
    """Parameters of each chunk of each stage."""
    counted = {}
    for case, (model, parallel) in PARAMETERS.items():
        hf = read_hf_config_file(MODELS / f"{model}.json")
        config = ParallelConfig(**parallel)
        counted[case] = [
            stage_parameters(hf, ModelConfig(path=MODELS), config, stage)
            for stage in range(config.pipeline)
        ]
    return counted


def frozen() -> dict[str, dict[str, Any]]:
    """Each frozen model's config, and of each stage its parameters in all and in host memory."""
    results = {}
    for case, (family, parallel) in FROZEN.items():
        config = ParallelConfig(**parallel)
        with tempfile.TemporaryDirectory() as folder:
            source = make_model(family, Path(folder), num_hidden_layers=4)
            stages = [_frozen_parameters(source, config, stage) for stage in range(config.pipeline)]
            hf = read_hf_config_file(source / "config.json")
        results[case] = {"hf": hf, "stages": stages}
    return results


def _frozen_parameters(source: Path, parallel: ParallelConfig, stage: int) -> tuple[int, int]:
    with fake_world(parallel, stage * parallel.tensor) as played:
        groups = replace(played, device=torch.device("cpu"))
        seed_everything(0, groups)
        model = Model.build(
            ModelConfig(path=source), parallel, MegatronConfig(), groups, returns_hidden_states=True
        )
        built = FrozenModel.freeze(model, on_host=True, keeps_head=True)
        total = sum(p.numel() for chunk in built.model.chunks for p in chunk.parameters())
        return total, sum(waiting.numel() for waiting in built._host.values())


def saved() -> dict[str, dict[str, float]]:
    """Bytes that autograd keeps, of each layer and in all, and the peak of the backward pass."""
    results = {}
    for case, (family, dtype, parallel, megatron) in SAVED.items():
        with small(family, dtype, parallel, megatron, 4) as gpt:
            total, peak = _forward_backward(gpt, parallel)
        with small(family, dtype, parallel, megatron, 8) as gpt:
            twice, _ = _kept(gpt, parallel)
        results[case] = {"total": total, "per_4_layers": twice - total, "peak": peak}
    return results


def messages() -> dict[str, dict[str, list[int]]]:
    """Bytes of the whole tensor of each collective, by pass and operation."""
    results = {}
    for case, parallel in MESSAGES.items():
        with small("qwen2", "bfloat16", parallel, {}, 4) as gpt:
            sent: dict[str, list[int]] = defaultdict(list)
            with _recorded("forward", sent):
                output = _forward(gpt, parallel)
            with _recorded("backward", sent):
                output.backward(torch.ones_like(output))
        results[case] = dict(sent)
    return results


def state() -> dict[str, dict[str, int]]:
    """Bytes of weights, gradients and optimizer state, as Megatron allocates them."""
    results = {}
    for case, (dtype, parallel, megatron) in STATE.items():
        with small("qwen2", dtype, parallel, megatron, 4) as gpt:
            for parameter in gpt.parameters():
                del parameter.main_grad
            config = MegatronConfig.model_validate(megatron)
            wrapped = wrap_for_data_parallel(wrap_for_precision([gpt]), config)
            # Groups for checkpoints; the fake backend has none over gloo.
            with mock.patch.multiple(
                parallel_state,
                get_data_parallel_group_gloo=mock.DEFAULT,
                get_expert_data_parallel_group_gloo=mock.DEFAULT,
            ):
                optimizer = build_optimizer(wrapped, OptimizerConfig(), config)
            masters = {}
            states = {}
            for inner in optimizer.chained_optimizers:
                for group in inner.optimizer.param_groups:
                    for master in group["params"]:
                        masters[master.data_ptr()] = master
                        states[master] = inner.optimizer.state.get(master, {})
            weights = {storage_of(parameter) for parameter in gpt.parameters()}
            results[case] = {
                "weights": sum(p.numel() * p.element_size() for p in gpt.parameters()),
                "gradients": sum(b.grad_data.nbytes for ddp in wrapped for b in ddp.buffers),
                "masters": sum(t.nbytes for t in masters.values() if storage_of(t) not in weights),
                "moments": sum(
                    values.nbytes
                    for entries in states.values()
                    for name, values in entries.items()
                    if name.startswith("exp_avg")
                ),
            }
    return results


def storage_of(tensor: torch.Tensor) -> int:
    """Where a tensor's memory begins."""
    return tensor.untyped_storage().data_ptr()


def in_flight() -> list[list[int]]:
    """Chunks that wait for their backward pass, of each stage: Megatron's own count."""
    counted = []
    for pipeline, virtual, micro_batches in IN_FLIGHT:
        stages = []
        for stage in range(pipeline):
            with fake_world(ParallelConfig(pipeline=pipeline, virtual_pipeline=virtual), stage):
                total, _, warm_up, _ = get_pp_rank_microbatches(micro_batches, virtual, pipeline)
            stages.append(min(warm_up + 1, total))
        counted.append(stages)
    return counted


class _RmsNormOfGpus(torch.autograd.Function):
    """Keeps what torch's CUDA kernel keeps, input and 1/rms; on a CPU torch composes the norm."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, shape: Any, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        inverse = (hidden.float().square().mean(-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(hidden, weight, inverse)
        return (hidden.float() * inverse * weight).to(hidden.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, _ = ctx.saved_tensors  # values are arbitrary, shapes are not
        by_weight = torch.zeros_like(weight) if ctx.needs_input_grad[2] else None
        return torch.zeros_like(hidden), None, by_weight, None


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
        with mock.patch.object(F, "rms_norm", _RmsNormOfGpus.apply):
            yield gpt.train()


def _forward(gpt: GPTModel, parallel: dict[str, Any]) -> torch.Tensor:
    tokens = sum(LENGTHS) // parallel.get("context", 1)
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    return gpt(
        input_ids=torch.arange(tokens)[None] % 512,
        position_ids=torch.arange(tokens)[None],
        attention_mask=None,
        packed_seq_params=PackedSequences(
            qkv_format="thd",
            cu_seqlens_q=ends,
            cu_seqlens_kv=ends,
            max_seqlen_q=max(LENGTHS),
            max_seqlen_kv=max(LENGTHS),
            lengths=LENGTHS,
        ),
    )


def _kept(gpt: GPTModel, parallel: dict[str, Any]) -> tuple[int, torch.Tensor]:
    """Bytes of the distinct storages that the forward pass keeps, and its output."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in gpt.parameters()}
    storages = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if tensor.numel() and storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = _forward(gpt, parallel)
    return sum(storages.values()), output


def _forward_backward(gpt: GPTModel, parallel: dict[str, Any]) -> tuple[int, int]:
    """Bytes that the forward pass keeps, and the peak of both without parameters."""
    with MemTracker() as tracker:
        kept, output = _kept(gpt, parallel)
        output.backward(torch.ones_like(output))
    (peak,) = tracker.get_tracker_snapshot("peak").values()
    kinds = {str(kind): value for kind, value in peak.items()}
    return kept, sum(value for kind, value in kinds.items() if "ACT" in kind or "TEMP" in kind)


@contextmanager
def _recorded(phase: str, sent: dict[str, list[int]]) -> Iterator[None]:
    """Note the size of the whole tensor of every collective."""

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(first: torch.Tensor, *args: Any, **options: Any) -> Any:
            whole = args[0] if name == "reduce-scatter" else first
            sent[f"{phase} {name}"].append(whole.numel() * whole.element_size())
            return function(first, *args, **options)

        return call

    names = {
        "all_reduce": "all-reduce",
        "all_gather_into_tensor": "all-gather",
        "reduce_scatter_tensor": "reduce-scatter",
    }
    with ExitStack() as stack:
        for function, name in names.items():
            patch = mock.patch.object(dist, function, noted(name, getattr(dist, function)))
            stack.enter_context(patch)
        for module in [m for name, m in sys.modules.items() if name.startswith("megatron.")]:
            for old, name in (
                ("dist_all_gather_func", "all-gather"),
                ("dist_reduce_scatter_func", "reduce-scatter"),
            ):
                if hasattr(module, old):
                    patch = mock.patch.object(module, old, noted(name, getattr(module, old)))
                    stack.enter_context(patch)
        yield
