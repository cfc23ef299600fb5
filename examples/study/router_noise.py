"""A local engine whose routers choose with noise: what other numerics do, but more of it.

``rollout.engine: examples.study.router_noise:NoisyKind`` adds noise to the scores by which experts
are chosen, not to those that weigh them, so that a trainer which repeats the choice computes what
the engine computed.

Shape legend: N = tokens, E = experts, K = experts of a token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bapo_megatron.engine.local.kind import LocalKind

if TYPE_CHECKING:
    from torch import Tensor, nn

    from bapo_megatron.config.schema import RunConfig
    from bapo_megatron.engine.base import Backend

STD = 0.1
"""Standard deviation of the noise on the logarithm of a score."""


class NoisyKind(LocalKind):
    """The engine ``local`` with noise, for Qwen3-MoE."""

    def open(self, config: RunConfig, device: str, *, awaits_weights: bool) -> Backend:
        """See ``EngineKind``."""
        from bapo_megatron.engine.local.engine import LocalBackend, LocalEngine  # torch

        class NoisyBackend(LocalBackend):
            async def connect(self, address: str) -> LocalEngine:
                engine = await super().connect(address)
                add_noise(engine._model, config.seed)
                return engine

        return NoisyBackend(config.model, config.rollout.local, device)


def add_noise(model: Any, seed: int, std: float = STD) -> None:
    """Have the routers of a transformers Qwen3-MoE choose with noise that ``seed`` draws."""
    import torch

    generator = torch.Generator(model.device).manual_seed(seed)

    def choose(
        gate: nn.Module, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits_NE, weights_NK, _ = output
        score_NE = logits_NE.float().softmax(dim=-1)
        noise_NE = torch.randn(score_NE.shape, generator=generator, device=score_NE.device)
        chosen_NK = (score_NE.log() + std * noise_NE).topk(weights_NK.shape[1], dim=-1).indices
        weights = score_NE.gather(1, chosen_NK)
        weights = weights / weights.sum(dim=-1, keepdim=True)  # norm_topk_prob
        return logits_NE, weights.to(weights_NK.dtype), chosen_NK

    for layer in model.get_decoder().layers:
        layer.mlp.gate.register_forward_hook(choose)
