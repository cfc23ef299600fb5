"""One process plays one rank after the other, of any layout: Megatron's models and what they send.

Megatron's modules ask process groups for their sizes. torch's fake backend answers every collective
with nothing, so the world need not exist.
"""

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from bapo_megatron.config.megatron import MegatronConfig, ModelConfig, ParallelConfig
from bapo_megatron.policy.architecture import HfConfig
from bapo_megatron.policy.megatron_setup import build_chunks
from bapo_megatron.runtime.distributed import ProcessGroups, megatron_groups

META = torch.device("meta")


def stage_parameters(
    hf: HfConfig, model: ModelConfig, parallel: ParallelConfig, stage: int
) -> list[int]:
    """Parameters of each chunk of a rank of a pipeline stage; all ranks of a stage hold as many."""
    rank = stage * _stage_ranks(parallel)
    with fake_world(parallel, rank) as groups, OnMeta():
        chunks = build_chunks(hf, model, parallel, MegatronConfig(), groups)
    for chunk in chunks:
        strays = [name for name, p in chunk.named_parameters() if p.device != META]
        assert not strays, f"allocated: {strays}"
    return [sum(parameter.numel() for parameter in chunk.parameters()) for chunk in chunks]


def _stage_ranks(parallel: ParallelConfig) -> int:
    """Ranks of a stage: the fewest over which its parameters and its experts divide."""
    replica = parallel.tensor * parallel.context
    return math.lcm(replica, parallel.expert * parallel.expert_tensor_size)


@contextmanager
def fake_world(parallel: ParallelConfig, rank: int) -> Iterator[ProcessGroups]:
    """Be one rank of one data-parallel replica for the duration of a block, on the meta device.

    Not in a process that is a rank already. Ranks are numbered tensor first, then context, then
    pipeline.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    virtual = parallel.virtual_pipeline
    excepthook = sys.excepthook  # torch puts one around it that names the rank
    dist.init_process_group(
        "fake",
        store=FakeStore(),
        rank=rank,
        world_size=_stage_ranks(parallel) * parallel.pipeline,
    )
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor,
            pipeline_model_parallel_size=parallel.pipeline,
            virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
            context_parallel_size=parallel.context,
            expert_model_parallel_size=parallel.expert,
            expert_tensor_parallel_size=parallel.expert_tensor_size,
            create_gloo_process_groups=False,
        )
        world = dist.group.WORLD
        assert world is not None
        yield megatron_groups(parallel, world, META)
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        sys.excepthook = excepthook


class OnMeta(TorchFunctionMode):
    """Makes new tensors meta tensors, whatever device is named, and leaves them there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.Tensor.to, torch.Tensor.cuda):
            return args[0]
        if func is torch.device and isinstance(args[0], int):
            return func("cuda", *args)  # without a GPU a number alone names no device
        # By name: ``cpu_compat`` wraps some of them.
        names = {constructor.__name__ for constructor in _device_constructors()}
        if "device" in kwargs or getattr(func, "__name__", "") in names:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)
