"""The content of requests, and checks of a server's model and of what its log-probs mean.

The trainer divides its logits by the sampling temperature T, so the engine must report
log_softmax(logits / T). A server with ``SGLANG_RETURN_ORIGINAL_LOGPROB=1`` reports
log_softmax(logits) instead, which no single answer reveals. Differences between tokens of one
position do: their logsumexp cancels, and at T they are 1/T times those at 1, or the same.

K = probed tokens of one position.
"""

import asyncio
import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bapo_megatron.engine.base import GenerateRequest, SamplingSettings
from bapo_megatron.engine.sglang.http import SglangHttp
from bapo_megatron.errors import RolloutError

_MODEL_FIELDS = (
    *("architectures", "vocab_size", "hidden_size", "intermediate_size"),
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
)
_NUM_TOP = 16
_MIN_SEPARATION = 0.1
"""Root mean square distance of the conventions, in nats, below which kernels that work in bfloat16
hide it; ratios are then wrong by less than that."""


def stream_body(request: GenerateRequest) -> dict[str, Any]:
    """Return the content of a request whose answer is streamed, without its id."""
    sampling_params = _sampling_params(request.sampling)
    return {
        "input_ids": list(request.input_ids),
        "sampling_params": {**sampling_params, "stream_interval": request.stream_tokens},
        "return_logprob": request.return_logprobs,
        "stream": True,
    }


def _sampling_params(sampling: SamplingSettings) -> dict[str, float | int]:
    """All settings, so that no default of the server applies.

    Servers honour the seed only with ``--enable-deterministic-inference``; without a seed, such a
    server samples the same for all responses to a prompt.
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


async def check_temperature_convention(
    http: SglangHttp, temperature: float, prompts: Sequence[Sequence[int]]
) -> None:
    """Check that a server's log-probs are those of the tempered distribution.

    The next token of each prompt is probed; there are none where only evaluations are made. Nothing
    is checked where the conventions coincide: at T = 1, and for a model that is indifferent between
    all tokens.

    Raises:
        RolloutError: The log-probs follow the other convention, or none.
    """
    if temperature == 1.0 or not prompts:
        return
    contrasts = []
    for prompt in prompts:
        at_run = await next_token_logprobs(http, prompt, temperature, num_top=_NUM_TOP)
        at_one = await next_token_logprobs(http, prompt, 1.0, token_ids=sorted(at_run))
        both_2K = np.array([[at_run[token], at_one[token]] for token in sorted(at_run)]).T
        contrasts.append(both_2K - both_2K.mean(axis=1, keepdims=True))
    run, one = np.concatenate(contrasts, axis=1)
    separation = _root_mean_square(one / temperature - one)
    from_scaled = _root_mean_square(run - one / temperature)
    from_unscaled = _root_mean_square(run - one)
    if separation < _MIN_SEPARATION or from_scaled < separation / 2:
        return
    if from_unscaled < separation / 2:
        raise RolloutError(
            f"{http.address}: its log-probs ignore the temperature ({temperature:g}), so every "
            "importance ratio would be wrong; start the server without "
            "SGLANG_RETURN_ORIGINAL_LOGPROB=1"
        )
    raise RolloutError(
        f"{http.address}: its log-probs at temperature {temperature:g} belong neither to "
        f"log_softmax(logits / T) (distance {from_scaled:.3g}) nor to log_softmax(logits) "
        f"({from_unscaled:.3g}); start it without logit processors and penalties, and without "
        "SGLANG_RETURN_ORIGINAL_LOGPROB"
    )


async def check_model(http: SglangHttp, started_with: str, model: Path) -> None:
    """Check that a server, ``started_with`` this model, serves the one in the directory ``model``.

    It reports the architecture. Vocabulary and sizes are compared where its directory can be read
    here too; elsewhere a server of other sizes refuses the first weights.

    Raises:
        RolloutError: It serves another model.
    """
    own, served = await asyncio.to_thread(lambda: (_read(model), _read(Path(started_with))))
    reply = await http.call("/model_info", admin=False)
    with http.checked("/model_info"):
        served["architectures"] = reply.json().get("architectures")
    for field in _MODEL_FIELDS:
        expected, found = own.get(field), served.get(field)
        if None not in (expected, found) and expected != found:
            raise RolloutError(
                f"{http.address}: serves another model than model.path: {field} must be "
                f"{expected}, got {found} ('{started_with}'); start it with '{model}', or take it "
                "off the list of servers"
            )


def _read(model_dir: Path) -> dict[str, Any]:
    """Return ``config.json``; empty where it cannot be read here."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return dict(json.loads((model_dir / "config.json").read_text()))
    return {}


async def next_token_logprobs(
    http: SglangHttp,
    input_ids: Sequence[int],
    temperature: float,
    *,
    token_ids: Sequence[int] = (),
    num_top: int = 0,
) -> dict[int, float]:
    """Ask for log-probs at the position after ``input_ids``; return them by token id.

    The answer has ``token_ids``, the ``num_top`` most likely tokens, and the one that was sampled.
    """
    body = {
        "input_ids": list(input_ids),
        "sampling_params": _sampling_params(SamplingSettings(temperature, max_new_tokens=1)),
        "return_logprob": True,
        "top_logprobs_num": num_top,
        "token_ids_logprob": list(token_ids) or None,
    }
    reply = await http.call_again("/generate", body, admin=False)
    with http.checked("probe of the temperature convention"):
        meta = reply.json()["meta_info"]
        rows = [meta["output_token_logprobs"][0]]
        rows += meta["output_top_logprobs"][0] if num_top else []
        rows += meta["output_token_ids_logprobs"][0] if token_ids else []
        found = {int(token_id): float(logprob) for logprob, token_id, *_ in rows}
        if missing := set(token_ids) - set(found):
            raise ValueError(f"no log-probs of tokens {sorted(missing)}")
        return found


def _root_mean_square(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values))))
