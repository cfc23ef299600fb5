"""What ``/generate`` is sent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bapo_megatron.engine.base import GenerateRequest, SamplingSettings


def sampling_params(sampling: SamplingSettings) -> dict[str, float | int]:
    """The settings as JSON, complete, so that no server default acts.

    The seed acts only with ``--enable-deterministic-inference``, which without one gives all
    responses the same.
    """
    return {
        "temperature": sampling.temperature,
        "max_new_tokens": sampling.max_new_tokens,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        **({} if sampling.seed is None else {"sampling_seed": sampling.seed}),
    }


def stream_body(request: GenerateRequest) -> dict[str, Any]:
    """A request whose answer is streamed; its id is added by who sends it."""
    return {
        "input_ids": list(request.input_ids),
        "sampling_params": sampling_params(request.sampling)
        | {"stream_interval": request.stream_tokens},
        "return_logprob": request.return_logprobs,
        "stream": True,
    }
