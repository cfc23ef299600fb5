"""The model of any rank of any layout, without memory, weights or other ranks.

Megatron's modules ask process groups for their sizes, so one process plays one rank after the other
in a world that does not exist: torch's fake backend answers every collective with nothing.
Parameters are on the meta device: they have names, shapes and types, and no storage.
"""

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
from bapo_megatron.policy import cpu_compat
from bapo_megatron.policy.hf_config import HfConfig
from bapo_megatron.policy.megatron_setup import build_chunks
from bapo_megatron.runtime.distributed import ProcessGroups, megatron_groups

META = torch.device("meta")


def stage_parameters(
    hf: HfConfig, model: ModelConfig, parallel: ParallelConfig, stage: int
) -> list[int]:
    """Count what a rank of a pipeline stage allocates for each of its chunks, by building them.

    All ranks of a stage hold equally many. Not for a process that has joined a process group, nor
    for one that will use a GPU later (``cpu_compat``).

    Raises:
        ValueError: The model cannot be divided so.
    """
    if not torch.cuda.is_available():
        cpu_compat.install()
    rank = stage * parallel.tensor * parallel.context
    with fake_world(parallel, rank) as groups, _EverythingOnMeta():
        # The megatron section changes no shape, and parts of it need a GPU.
        chunks = build_chunks(hf, model, parallel, MegatronConfig(), groups)
    for chunk in chunks:
        strays = [name for name, p in chunk.named_parameters() if p.device != META]
        assert not strays, f"allocated: {strays}"
    return [sum(parameter.numel() for parameter in chunk.parameters()) for chunk in chunks]


@contextmanager
def fake_world(parallel: ParallelConfig, rank: int) -> Iterator[ProcessGroups]:
    """Be one rank of one data-parallel replica for the duration of a block.

    Ranks are numbered tensor first, then context, then pipeline. Groups name the meta device.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    if dist.is_initialized():
        raise RuntimeError("this process is a rank already; build meta models in a process apart")
    virtual = parallel.virtual_pipeline
    excepthook = sys.excepthook  # torch puts one around it that names the rank
    dist.init_process_group(
        "fake",
        store=FakeStore(),
        rank=rank,
        world_size=parallel.tensor * parallel.context * parallel.pipeline,
    )
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor,
            pipeline_model_parallel_size=parallel.pipeline,
            virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
            context_parallel_size=parallel.context,
            create_gloo_process_groups=False,
        )
        world = dist.group.WORLD
        assert world is not None
        yield megatron_groups(parallel, world, META)
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        sys.excepthook = excepthook


class _EverythingOnMeta(TorchFunctionMode):
    """Makes every new tensor a meta tensor, also where Megatron names a device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _device_constructors():
            kwargs["device"] = META
        return func(*args, **kwargs)
