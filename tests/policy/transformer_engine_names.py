"""What models of Transformer Engine's layers hold; a process of its own, which writes it down.

Transformer Engine is imported without its compiled parts, for a GPU that is not there: its modules
name and shape their parameters in Python; the compiled parts import and compute.

python -m tests.policy.transformer_engine_names FOLDER RESULT
"""

import json
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from enum import IntEnum
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import torch

from bapo_megatron.policy.architecture import HfConfig
from bapo_megatron.policy.mixers.latent import LatentAttention
from bapo_megatron.runtime.cpu_torch import uncompiled_imports
from tests.tools.planning import cases

HOPPER = SimpleNamespace(major=9, minor=0, name="no GPU")
CUDNN_VERSION = 91300
"""9.13.0, as cuDNN encodes it."""
ENUMERATIONS = {
    "DType": "kByte kInt32 kFloat32 kFloat16 kBFloat16 kFloat8E4M3 kFloat8E5M2 kFloat4E2M1",
    "NVTE_Fused_Attn_Backend": "NVTE_No_Backend NVTE_F16_arbitrary_seqlen NVTE_FP8",
}
"""Those of the compiled parts that the Python sources mirror; on import they compare the names."""
FAMILIES = {
    "qwen2": "deepseek-r1-distill-qwen-7b",
    "qwen3": "qwen3-0.6b",
    "llama": "octothinker-3b",
    "llama with attention biases": "octothinker-3b",
    "qwen3 with experts": "qwen3-30b-a3b",
    "glm with experts": "glm-4.5-air",
    "gpt-oss": "gpt-oss-20b",
    "moonlight": "moonlight-16b-a3b",
    "moonlight with a latent of queries": "moonlight-16b-a3b",
    "minimax": "minimax-m2",
    "olmo2": "olmo-2-1124-7b",
    "qwen3_5": "qwen3.5-27b",
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "tensor": {"tensor": 2},
    "sequence": {"tensor": 2, "sequence": True},
    "pipeline": {"pipeline": 2},
    "experts": {"tensor": 2, "sequence": True, "expert": 2, "expert_tensor": 1},
}
WITH_EXPERTS = ("qwen3 with experts", "glm with experts", "gpt-oss", "moonlight", "minimax")
CASES = [
    (family, layout)
    for family in FAMILIES
    for layout in LAYOUTS
    # The others need sequence parallelism.
    if not (layout == "tensor" and family.startswith((*WITH_EXPERTS, "qwen3_5")))
    and not (layout == "experts" and not family.startswith(WITH_EXPERTS))
    and not (layout == "sequence" and family == "gpt-oss")  # needs expert_tensor 1
]


def import_transformer_engine(folder: Path) -> None:
    """Import it from ``folder``; Megatron, imported afterwards, finds it installed."""
    sys.path.insert(0, str(folder))
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # else its import loads libraries of CUDA
    for name in ("transformer_engine_torch", "onnx", "onnxscript"):
        sys.modules[name] = MagicMock(__spec__=ModuleSpec(name, None))
    compiled: Any = sys.modules["transformer_engine_torch"]
    compiled.get_cudnn_version = lambda: CUDNN_VERSION
    vars(compiled).update({name: IntEnum(name, names) for name, names in ENUMERATIONS.items()})
    with uncompiled_imports(), warnings.catch_warnings(action="ignore"):
        import transformer_engine  # without its PyTorch part, whose library it does not find

        transformer_engine.common.load_framework_extension = lambda framework: None
        import transformer_engine.pytorch


@contextmanager
def imaginary_gpu() -> Iterator[torch.device]:
    """A device on which modules can be built: their tensors are on the meta device."""
    from tests.policy.fake_world import OnMeta  # imports Megatron

    answers = {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "get_device_properties": lambda device=None: HOPPER,
        "Stream": SimpleNamespace,
    }
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(patch.object(torch.cuda, name, answer))
        stack.enter_context(OnMeta())
        yield torch.device("cuda", 0)


def published(family: str) -> HfConfig:
    """A published model, but for its number of layers."""
    hf = cases.published(FAMILIES[family])
    biases = {"qkv_bias": True, "output_bias": True} if "biases" in family else {}
    first, second = hf.mixers[0], hf.mixers[-1]
    if isinstance(first, LatentAttention) and "latent" in family:
        first = second = replace(first, query_rank=1536)
    return replace(hf, mixers=(first, second), **biases)


def held(hf: HfConfig, parallel: dict[str, Any]) -> dict[str, Any]:
    """Parameters, and entries of a checkpoint, of every stage's first rank."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedObject, apply_factories

    from bapo_megatron.config.megatron import MegatronConfig, ModelConfig, ParallelConfig
    from bapo_megatron.policy.hf_weights import local_weights
    from bapo_megatron.policy.megatron_setup import build_chunks
    from tests.policy.fake_world import fake_world

    config, model = ParallelConfig(**parallel), ModelConfig(path=cases.MODELS)
    modules: set[str] = set()
    parameters: dict[str, Any] = {}
    tensors: dict[str, list[int]] = {}
    states: list[str] = []
    for stage in range(config.pipeline):
        with fake_world(config, stage * config.tensor) as played, imaginary_gpu() as gpu:
            (chunk,) = build_chunks(
                hf, model, config, MegatronConfig(), replace(played, device=gpu)
            )
            modules |= {
                type(module).__name__
                for module in chunk.decoder.modules()
                if any(True for _ in module.parameters(recurse=False))
            }
            for weight, parameter in local_weights([chunk], hf, played):
                is_divided = getattr(parameter, "tensor_model_parallel", False)
                parameters[weight.megatron] = {
                    "shape": list(parameter.shape),
                    "axis": parameter.partition_dim if is_divided else None,  # type: ignore[attr-defined]
                    "sees part of the tokens": getattr(parameter, "sequence_parallel", False),
                }
            entries = chunk.sharded_state_dict()
            apply_factories(entries)
            for entry in nested_values(entries):
                if isinstance(entry, ShardedObject):
                    states.append(entry.unique_key)
                else:
                    tensors[entry.key] = list(entry.global_shape)
    return {
        "modules": sorted(modules),
        "parameters": parameters,
        "tensors": tensors,
        "states": sorted(states),
    }


def stand_in_for_fla() -> None:
    """Let Megatron find kernels that are never called."""
    kernels = ("fla.modules.convolution", "fla.modules.l2norm", "fla.ops.gated_delta_rule")
    for name in ("fla", "fla.modules", "fla.ops", *kernels):
        sys.modules[name] = MagicMock(__spec__=ModuleSpec(name, None))


def main(folder: Path, result: Path) -> None:
    """Write what each model holds in each layout."""
    import_transformer_engine(folder)
    stand_in_for_fla()
    from bapo_megatron.policy.megatron_import import import_megatron, stand_in_for_apex

    stand_in_for_apex()  # as on a GPU
    import_megatron()
    built = [held(published(family), LAYOUTS[layout]) for family, layout in CASES]
    result.write_text(json.dumps(built))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
