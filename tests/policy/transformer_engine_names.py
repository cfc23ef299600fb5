"""What models of Transformer Engine's layers hold; a process of its own, which writes it down.

python -m tests.policy.transformer_engine_names FOLDER RESULT
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from bapo_megatron.policy.hf_config import HfConfig, read_hf_config_file
from tests.policy.uncompiled_transformer_engine import imaginary_gpu, import_transformer_engine
from tests.tools.planning.cases import MODELS

FAMILIES = {
    "qwen2": "deepseek-r1-distill-qwen-7b",
    "qwen3": "qwen3-0.6b",
    "llama": "octothinker-3b",
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "tensor": {"tensor": 2},
    "sequence": {"tensor": 2, "sequence": True},
    "pipeline": {"pipeline": 2},
}


def published(family: str) -> HfConfig:
    """A published model, but for its number of layers."""
    return replace(read_hf_config_file(MODELS / f"{FAMILIES[family]}.json"), num_layers=2)


def held(hf: HfConfig, parallel: dict[str, Any]) -> dict[str, Any]:
    """Parameters, and entries of a checkpoint, of every stage's first rank."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedObject, apply_factories

    from bapo_megatron.config.megatron import MegatronConfig, ModelConfig, ParallelConfig
    from bapo_megatron.policy.hf_weights import local_weights
    from bapo_megatron.policy.megatron_setup import build_chunks
    from bapo_megatron.policy.meta_model import fake_world

    config, model = ParallelConfig(**parallel), ModelConfig(path=MODELS)
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
            for weight, parameter in local_weights([chunk], hf):
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


def main(folder: Path, result: Path) -> None:
    """Write what each model holds in each layout."""
    import_transformer_engine(folder)
    from bapo_megatron.policy.megatron_import import import_megatron, stand_in_for_apex

    stand_in_for_apex()  # as on a GPU
    import_megatron()
    found = {
        family: {name: held(published(family), layout) for name, layout in LAYOUTS.items()}
        for family in FAMILIES
    }
    result.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
