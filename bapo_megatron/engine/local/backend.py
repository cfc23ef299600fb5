"""The one engine of a run, in this process, and the model that it samples with."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from bapo_megatron.engine.local.cache import ATTENTION, register_attention
from bapo_megatron.engine.local.engine import LocalEngine
from bapo_megatron.errors import RolloutError
from bapo_megatron.names import shown
from bapo_megatron.torchvision_names import declare_torchvision_operators

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from bapo_megatron.config.megatron import ModelConfig
    from bapo_megatron.config.rollout import LocalConfig
    from bapo_megatron.engine.base import EngineServer


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model of transformers, ready to sample."""

    model: Any
    stop_ids: frozenset[int]
    """Tokens that end a response."""
    max_positions: int
    vocab_size: int


class LocalBackend:
    """A ``Backend`` without servers."""

    servers: Sequence[EngineServer] = ()

    def __init__(self, model: ModelConfig, local: LocalConfig, device: str) -> None:
        """Keep the settings; ``device`` is ``cuda`` or ``cpu``."""
        self._model = model
        self._local = local
        self._device = device

    async def connect(self) -> Sequence[LocalEngine]:
        """Load ``model.path``."""
        try:
            loaded = await asyncio.to_thread(
                load_model, self._model.path, self._model.dtype, self._device
            )
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise RolloutError(
                f"model.path: transformers cannot load '{self._model.path}' ({shown(error)}); "
                "download or save the model again, or free memory"
            ) from error
        return (LocalEngine(loaded, self._local.max_rows),)


def load_model(path: Path, dtype: str, device: str) -> LoadedModel:
    """Load a Hugging Face directory on ``cuda`` (the current device) or ``cpu``.

    Raises:
        OSError: Files are missing.
        SafetensorError: They are damaged.
        ValueError: A weight is missing, or they cannot be used.
        RuntimeError: It does not fit the memory.
    """
    declare_torchvision_operators()
    import transformers

    transformers.utils.logging.disable_progress_bar()
    register_attention()
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        path,
        dtype=getattr(torch, dtype),
        attn_implementation=ATTENTION,
        local_files_only=True,
        output_loading_info=True,
    )
    if missing := sorted(report["missing_keys"]):
        raise ValueError(f"it lacks {missing[0]}")  # transformers would make up weights
    model.to(device).eval().requires_grad_(False)
    for parameter in model.parameters():
        # Memory of its own: in a mapped file, results would depend on the alignment of its tensors.
        parameter.data = parameter.data.clone()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
    stop_ids: set[int | None] = set()
    for source in (model.config, model.generation_config, tokenizer):
        given = source.eos_token_id
        stop_ids |= set(given) if isinstance(given, list) else {given}
    return LoadedModel(
        model=model,
        stop_ids=frozenset(stop_ids - {None}),
        max_positions=model.config.max_position_embeddings,
        vocab_size=model.config.vocab_size,
    )
