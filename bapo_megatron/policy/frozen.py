"""A model that scores and is not trained: the reference of a KL divergence, or a teacher."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn

from bapo_megatron.policy.hf_weights import find_tensors, load_weights, local_weights
from bapo_megatron.policy.model import Model


@dataclass(eq=False, repr=False)
class FrozenModel:
    """A ``Model`` in the policy's layout, whose weights can be kept in host memory.

    With the policy itself, it is the base of the policy's adapters, and takes no memory.
    """

    model: Model
    _host: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    """Weights that are kept in host memory between passes."""

    @classmethod
    def freeze(cls, model: Model, *, on_host: bool, keeps_head: bool = False) -> Self:
        """Stop the training of a model of its own, without adapters.

        With ``on_host`` its weights are in host memory between passes, with ``keeps_head`` all but
        the language-model head.
        """
        frozen = cls(model)
        head = model.head.weight if keeps_head and model.head is not None else None
        for parameter in (p for chunk in model.chunks for p in chunk.parameters()):
            parameter.requires_grad_(False)
            if on_host and parameter is not head:
                waiting = torch.empty_like(parameter, device="cpu", pin_memory=parameter.is_cuda)
                frozen._host[parameter] = waiting.copy_(parameter.data)
        frozen._release()
        return frozen

    @contextmanager
    def on_device(self) -> Iterator[Model]:
        """Yield the model with all its weights on the device, and adapters off; routers replay."""
        device, lora = self.model.groups.device, self.model.lora
        for parameter, waiting in self._host.items():
            # Copied even on a CPU: one code path.
            parameter.data = torch.empty_like(waiting, device=device)
            parameter.data.copy_(waiting, non_blocking=True)
        try:
            with lora.off() if lora else nullcontext():
                yield self.model
        finally:
            self._release()

    def load(self, directory: Path) -> None:
        """Replace the weights by those of a Hugging Face model of the same architecture.

        A collective of all ranks.

        Raises:
            ValueError: ``directory`` has other tensors.
        """
        model = self.model
        files, _ = find_tensors(model.hf, directory)
        local = local_weights(model.chunks, model.hf, model.groups)
        load_weights(local, model.hf, files, model.groups)

    def _release(self) -> None:
        for parameter, waiting in self._host.items():
            parameter.data = waiting
