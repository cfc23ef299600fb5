"""Start-up check: which temperature convention do a server's log-probs follow?

The trainer divides its logits by the sampling temperature T, so the engine must report
log_softmax(logits / T). A server with ``SGLANG_RETURN_ORIGINAL_LOGPROB=1`` reports
log_softmax(logits) instead, which no single answer gives away. Differences between tokens of one
position do: their logsumexp cancels, and at T they are 1/T times, or exactly, those at 1.

K = probed tokens of one position.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from bapo_megatron.errors import RolloutError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bapo_megatron.engine.sglang.client import SglangClient

_NUM_TOP = 16
_SMALLEST_SEPARATION = 0.1
"""Root mean square distance of the conventions, in nats, below which kernels that work in bfloat16
hide it; ratios are then wrong by no more than that."""


async def check_temperature_convention(
    client: SglangClient, temperature: float, prompts: Sequence[Sequence[int]]
) -> None:
    """Make sure that a server's log-probs are those of the tempered distribution.

    Nothing is to be checked where the conventions coincide: at T = 1, and for a model that is
    indifferent between all tokens.

    Args:
        client: The server.
        temperature: T of the run.
        prompts: Contexts whose next token is probed; none where only evaluations are made.

    Raises:
        RolloutError: The log-probs follow the other convention, or none.
    """
    if temperature == 1.0 or not prompts:
        return
    at_run, at_one = [], []
    for prompt in prompts:
        run_K, one_K = await _contrasts(client, temperature, prompt)
        at_run.append(run_K)
        at_one.append(one_K)
    run, one = np.concatenate(at_run), np.concatenate(at_one)
    separation = _root_mean_square(one / temperature - one)
    from_scaled = _root_mean_square(run - one / temperature)
    from_unscaled = _root_mean_square(run - one)
    if separation < _SMALLEST_SEPARATION or from_scaled < separation / 2:
        return
    if from_unscaled < separation / 2:
        raise RolloutError(
            f"{client.address}: its log-probs ignore the temperature ({temperature:g}), so every "
            "importance ratio would be wrong; start the server without "
            "SGLANG_RETURN_ORIGINAL_LOGPROB=1"
        )
    raise RolloutError(
        f"{client.address}: its log-probs at temperature {temperature:g} belong neither to "
        f"log_softmax(logits / T) (distance {from_scaled:.3g}) nor to log_softmax(logits) "
        f"({from_unscaled:.3g}); start it without logit processors and penalties, and without "
        "SGLANG_RETURN_ORIGINAL_LOGPROB"
    )


async def _contrasts(
    client: SglangClient, temperature: float, prompt: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """[K] log-probs relative to their mean over the probed tokens, at ``temperature`` and at 1."""
    at_run = await client.next_token_logprobs(prompt, temperature, num_top=_NUM_TOP)
    token_ids = sorted(at_run)
    at_one = await client.next_token_logprobs(prompt, 1.0, token_ids=token_ids)
    run_K = np.array([at_run[token_id] for token_id in token_ids])
    one_K = np.array([at_one[token_id] for token_id in token_ids])
    return run_K - run_K.mean(), one_K - one_K.mean()


def _root_mean_square(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values))))
