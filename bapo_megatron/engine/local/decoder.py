"""The decode loop: which responses are rows of a step, and the step itself.

Everything depends on the order of responses and the number of steps, never on the clock or on
bursts, so that the same requests repeat bit for bit.

A step samples one token per row. Responses are admitted first come, first served. A prefill
computes all tokens of a response but the last, which the first step computes like any other. Rows
of finished responses stay, as padding, until the rows are regrouped (``_regroup``).

A token is drawn with a uniform number that depends only on the response's seed and the position.

Shape legend: B = rows, a multiple of 8; V = vocabulary; K = steps; W = columns of the cache;
R = inputs of a prefill; P = positions; D = hidden size; E = experts of a token in all layers;
N = values of a token: its id and log-prob, then those of the likeliest tokens, likeliest first.
"""

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from bapo_megatron.data.record import Completion
from bapo_megatron.data.token_columns import SAMPLER_TOP_IDS, SAMPLER_TOP_LOGPROBS
from bapo_megatron.engine.base import GenerateRequest, SamplingSettings, Scores
from bapo_megatron.engine.local.cache import DecodeCache, Prefill, RecurrentPadding
from bapo_megatron.errors import RolloutError
from bapo_megatron.types import FinishReason, VersionSpan

MULTIPLE = 8
"""Divides the rows of a step and the positions of a prefill: small matrix products use other
kernels, whose results differ by more."""
_DRAWS_PER_COUNT = 4
"""64-bit numbers that Philox generates per value of its counter."""
_MIN_FREE_COLUMNS = 64
"""Minimum room of a new cache, in steps; a longer one doubles, up to what is needed."""
_MAX_PREFILL_TOKENS = 16384
"""Tokens of a forward pass, with padding; a longer input gets its own pass."""
_SCORED_POSITIONS = 512
"""Positions whose logits are in memory at once."""
_ADMITTED_SHARE = 8
"""If more are waiting, at least ``max_rows`` / 8 responses are admitted together."""


def uniform_numbers(seed: int, position: int, count: int) -> np.ndarray:
    """[count] float64 in [0, 1) from ``position`` on; each depends only on seed and position."""
    skipped = position % _DRAWS_PER_COUNT
    philox = np.random.Philox(key=seed, counter=position // _DRAWS_PER_COUNT)
    return np.random.Generator(philox).random(skipped + count)[skipped:]


@dataclass(slots=True, kw_only=True)
class Filters:
    """Sampling settings of the rows, as tensors [B, 1]; None if no row uses one."""

    temperature_B1: Tensor
    """float32; 1 for greedy rows."""
    is_greedy_B1: Tensor | None
    top_p_B1: Tensor | None
    """float64; infinite for rows without one, like ``top_k_B1``."""
    top_k_B1: Tensor | None

    @classmethod
    def of_rows(cls, rows: Sequence[SamplingSettings], num_rows: int, device: torch.device) -> Self:
        """Combine the settings of rows; further rows are padding."""
        settings = [*rows, *[SamplingSettings(1.0, 1, seed=0)] * (num_rows - len(rows))]

        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float64, device=device)[:, None]

        is_greedy = any(s.temperature == 0 for s in settings)
        is_filtered = any(s.top_p < 1 or s.top_k > 0 for s in settings)
        top_p = [s.top_p if s.top_p < 1 else math.inf for s in settings]
        top_k = [s.top_k if s.top_k > 0 else math.inf for s in settings]
        return cls(
            temperature_B1=column([s.temperature or 1.0 for s in settings]).float(),
            is_greedy_B1=column([s.temperature for s in settings]) == 0 if is_greedy else None,
            top_p_B1=column(top_p) if is_filtered else None,
            top_k_B1=column(top_k) if is_filtered else None,
        )


def sample(logits_BV: Tensor, uniform_B1: Tensor, filters: Filters) -> tuple[Tensor, Tensor]:
    """Invert each row's cumulative distribution at its uniform number, float64 in [0, 1).

    Returns:
        [B, 1] int64 tokens, and [B, V] float32 log_softmax(logits / T), whatever the filters.
    """
    logprob_BV = (logits_BV.float() / filters.temperature_B1).log_softmax(dim=-1)
    probability_BV = logprob_BV.exp()
    if filters.top_p_B1 is not None and filters.top_k_B1 is not None:
        # As transformers: the k most likely tokens, then of them those that make up p of their sum.
        sorted_BV, order_BV = probability_BV.sort(dim=-1, descending=True, stable=True)
        rank_V = torch.arange(logits_BV.shape[1], device=logits_BV.device)
        sorted_BV = sorted_BV.double().masked_fill_(rank_V >= filters.top_k_B1, 0.0)
        sums_BV = sorted_BV.cumsum(dim=-1)
        limit_B1 = filters.top_p_B1 * sums_BV[:, -1:]
        is_dropped_BV = (sums_BV - sorted_BV >= limit_B1) | (rank_V >= filters.top_k_B1)
        is_dropped_BV = torch.zeros_like(is_dropped_BV).scatter_(1, order_BV, is_dropped_BV)
        probability_BV.masked_fill_(is_dropped_BV, 0.0)
    # In float64, so that rounding of a long sum hides no token.
    cumulative_BV = probability_BV.cumsum(dim=-1, dtype=torch.float64)
    wanted_B1 = uniform_B1 * cumulative_BV[:, -1:]
    token_B1 = torch.searchsorted(cumulative_BV, wanted_B1, right=True)
    token_B1.clamp_(max=logits_BV.shape[1] - 1)  # for a row that is not finite
    if filters.is_greedy_B1 is not None:
        greedy_B1 = logits_BV.argmax(dim=-1, keepdim=True)
        token_B1 = torch.where(filters.is_greedy_B1, greedy_B1, token_B1)
    return token_B1, logprob_BV


@dataclass(slots=True, eq=False)
class Decoding:
    """One response in the decoder."""

    request: GenerateRequest
    token_ids: list[int] = field(init=False)
    """The input and the sampled tokens."""
    position: int = field(init=False)
    """The next token's position in the response, over all its requests."""
    remaining: int = field(init=False)
    """How many tokens may still be sampled."""
    reason: FinishReason | None = None
    """Why it ended."""
    is_cancelled: bool = False
    """Nobody waits for it any more."""
    number: int = 0
    """Order of arrival."""
    _sampled: list[np.ndarray] = field(default_factory=list)
    """[K, N] What was sampled and is not yet taken, float64."""
    _routes: list[np.ndarray] = field(default_factory=list)
    """[K, E] Experts of tokens not yet taken."""
    _num_routed: int = 0
    """Number of tokens whose experts are known or not wanted."""

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.input_ids)
        self.position = self.request.sampled_tokens
        self.remaining = self.request.sampling.max_new_tokens
        self._num_routed = self.request.routes_from or 0

    @property
    def wants_routes(self) -> bool:
        """Whether the experts of its tokens are to be returned."""
        return self.request.routes_from is not None

    @property
    def num_values(self) -> int:
        """N."""
        return 2 + 2 * self.request.top_logprobs

    def add(self, tape_KN: np.ndarray, routes_KE: np.ndarray | None) -> None:
        """Append sampled tokens, with the experts of the tokens before each of them."""
        if routes_KE is not None:
            self.add_routes(len(self.token_ids) - 1, routes_KE)
        self._sampled.append(tape_KN)
        self.token_ids += tape_KN[:, 0].astype(int).tolist()
        self.position += len(tape_KN)
        self.remaining -= len(tape_KN)

    def add_routes(self, first: int, routes_KE: np.ndarray) -> None:
        """Add the experts of the tokens from ``first`` on, unless known: a token may come again."""
        new_KE = routes_KE[self._num_routed - first :]
        self._routes.append(new_KE)
        self._num_routed += len(new_KE)

    def take(self, version: int, reason: FinishReason) -> Completion:
        """Return what was sampled since the last call, by the weights of ``version``."""
        tape_KN = np.concatenate([np.empty((0, self.num_values)), *self._sampled])
        token_ids, logprobs = tape_KN[:, 0].astype(np.int32), tape_KN[:, 1].astype(np.float32)
        spans = (VersionSpan(version, len(token_ids)),) if len(token_ids) else ()
        routes = np.concatenate(self._routes) if self._routes else None
        columns = {}
        if self.request.top_logprobs:
            columns[SAMPLER_TOP_IDS] = tape_KN[:, 2::2].astype(np.int32)
            columns[SAMPLER_TOP_LOGPROBS] = tape_KN[:, 3::2].astype(np.float32)
        self._sampled, self._routes = [], []
        logprobs = logprobs if self.request.return_logprobs else logprobs[:0]
        return Completion(token_ids, logprobs, spans, reason, routes, columns)


@dataclass(slots=True)
class _Rows:
    """The rows of a step; tensors are on the device, arrays on the host."""

    responses: Sequence[Decoding]
    """Responses of the first rows; further rows are padding."""
    cache: DecodeCache
    is_active_B: np.ndarray
    """Whether the row's response is unfinished."""
    first_B: np.ndarray
    """Column of the row's first token."""
    remaining_B: np.ndarray
    uniform_BK: np.ndarray
    """For the columns that the remaining steps write."""
    token_B1: Tensor
    """The last token of each row, the input of the next step."""
    position_B1: Tensor
    """Its position in the sequence."""
    mask_B11W: Tensor
    """0, or -inf before a row's first column."""
    filters: Filters
    num_active: int = 0
    is_ragged: bool = True
    """Whether columns in use are padding in some row."""
    tape: list[np.ndarray] = field(default_factory=list)
    """[B, N] What each step sampled, not yet passed to the responses, float64."""
    route_tape: list[np.ndarray] = field(default_factory=list)
    """[B, E] Experts of the input of each step, if a response wants them."""
    num_taped_B: np.ndarray = field(init=False)
    num_top: int = field(init=False)
    """Maximum number of likeliest tokens that a response wants."""

    def __post_init__(self) -> None:
        self.num_top = max(response.request.top_logprobs for response in self.responses)
        self.num_taped_B = np.zeros(len(self.is_active_B), dtype=np.int64)
        self.update_active()

    def active(self) -> list[Decoding]:
        """Return the unfinished responses."""
        return [self.responses[row] for row in np.flatnonzero(self.is_active_B).tolist()]

    def update_active(self) -> None:
        """Update what depends on which rows are active."""
        first = self.first_B[self.is_active_B]
        self.num_active = len(first)
        if len(first):
            self.cache.first = int(first.min())
            self.is_ragged = int(first.max()) > self.cache.first

    def flush(self) -> None:
        """Pass the tape to the responses."""
        tape_KBN = np.array(self.tape)
        routes_KBE = np.array(self.route_tape)
        for row in np.flatnonzero(self.num_taped_B).tolist():
            response = self.responses[row]
            tape_KN = tape_KBN[: self.num_taped_B[row], row, : response.num_values]
            if not np.isfinite(tape_KN).all():
                raise RolloutError(
                    f"local: a log-prob of '{response.request.label}' is not finite: the weights, "
                    "or their numerics, are broken; continue from an earlier checkpoint"
                )
            routes_KE = routes_KBE[: len(tape_KN), row] if response.wants_routes else None
            response.add(tape_KN, routes_KE)
        self.num_taped_B[:] = 0
        self.tape, self.route_tape = [], []


class Decoder:
    """The model and its responses; for one thread at a time."""

    def __init__(self, model: Any, stop_ids: Iterable[int], max_rows: int) -> None:
        """Take a transformers model that was loaded with ``cache.ATTENTION``."""
        self._decoder = model.get_decoder()
        self._head = model.get_output_embeddings()
        self._model = model
        self._watch = _ExpertWatch(model)
        self._padding = RecurrentPadding(model)
        self._is_stop_V = np.zeros(self._head.weight.shape[0], dtype=bool)
        self._is_stop_V[[token for token in stop_ids if token < len(self._is_stop_V)]] = True
        self._max_rows = max_rows
        self._waiting: list[Decoding] = []
        self._numbers = itertools.count()
        self._rows: _Rows | None = None

    def add(self, responses: Sequence[Decoding]) -> None:
        """Queue responses, ordered by ``GenerateRequest.order``."""
        for response in sorted(responses, key=lambda response: response.request.order):
            response.number = next(self._numbers)
            self._waiting.append(response)

    def drop_cancelled(self) -> None:
        """Drop responses that nobody waits for."""
        self._waiting = [response for response in self._waiting if not response.is_cancelled]
        if self._rows is not None:
            for row, response in enumerate(self._rows.responses):
                if response.is_cancelled:
                    self._rows.is_active_B[row] = False
            self._rows.update_active()

    def retract(self) -> None:
        """Drop the KV cache; requeue all responses in order of arrival."""
        if self._rows is not None:
            self._waiting = [*self._rows.active(), *self._waiting]
            self._waiting.sort(key=lambda response: response.number)
        self._rows = None

    def clear(self) -> None:
        """Forget all responses."""
        self._waiting, self._rows = [], None

    def run(self, max_steps: int) -> int:
        """Take up to ``max_steps`` steps, fewer only if no response is left; return how many."""
        num_steps = 0
        with torch.inference_mode():
            while num_steps < max_steps and (rows := self._next_rows()) is not None:
                self._step(rows)
                num_steps += 1
        if self._rows is not None:
            self._rows.flush()
            if not self._rows.num_active:
                self._rows = None
        return num_steps

    def score(self, token_ids: Sequence[int], start: int, top_k: int) -> Scores:
        empty_RK = np.empty((0, top_k), np.float32)  # for a sequence without scored tokens
        parts = [(np.empty(0, np.float32), empty_RK.astype(np.int32), empty_RK)]
        with torch.inference_mode():
            padding = [0] * (-len(token_ids) % MULTIPLE)
            tokens_1P = torch.tensor([[*token_ids, *padding]], device=self._model.device)
            hidden_PD = self._forward(tokens_1P, Prefill())[0]
            first, end = start - 1, len(token_ids) - 1
            for begin in range(first - first % MULTIPLE, end, _SCORED_POSITIONS):
                logits = self._head(hidden_PD[begin : begin + _SCORED_POSITIONS]).float()
                logprob_PV = logits[max(first - begin, 0) : end - begin].log_softmax(dim=-1)
                target_P = tokens_1P[0, max(first, begin) + 1 :][: len(logprob_PV)]
                top = logprob_PV.topk(top_k, dim=-1)
                scored = logprob_PV.gather(1, target_P[:, None])[:, 0]
                parts.append(tuple(t.cpu().numpy() for t in (scored, top.indices, top.values)))
        logprobs, top_ids, top_logprobs = map(np.concatenate, zip(*parts, strict=True))
        return Scores(
            logprobs.astype(np.float32), top_ids.astype(np.int32), top_logprobs.astype(np.float32)
        )

    def _next_rows(self) -> _Rows | None:
        """Return the rows of the next step, regrouped where that pays; None if there are none."""
        rows = self._rows
        num_active = 0 if rows is None else rows.num_active
        num_waiting = len(self._waiting)
        num_new = min(num_waiting, self._max_rows - num_active)
        # Admitting a few at a time would cost a prefill in almost every step.
        if num_new and (num_new == num_waiting or num_new * _ADMITTED_SHARE >= self._max_rows):
            return self._regroup(num_new)
        if rows is None or not num_active:
            return None
        is_full = rows.cache.end == rows.cache.num_columns
        has_many_free = 4 * _round_up(num_active) <= 3 * len(rows.is_active_B)
        return self._regroup(0) if is_full or has_many_free else rows

    def _regroup(self, num_new: int) -> _Rows:
        """Combine active and new rows, without columns that are padding in all of them."""
        old, kept_rows, kept = self._rows, [], []
        if old is not None:
            old.flush()
            kept_rows, kept = np.flatnonzero(old.is_active_B).tolist(), old.active()
        new = self._waiting[:num_new]
        prefills = self._prefill(new, len(kept))
        responses = [*kept, *new]
        lengths = [len(response.token_ids) - 1 for response in responses]
        end = max(lengths)
        num_needed = max(len(r.token_ids) - 1 + r.remaining for r in responses)
        num_columns = min(num_needed, end + max(end, _MIN_FREE_COLUMNS))
        num_rows = _round_up(len(responses))
        old_cache = None if old is None else old.cache
        self._rows = None  # so that copied layers of the old cache are freed
        cache = DecodeCache.build(
            self._model, old_cache, kept_rows, prefills, num_rows, num_columns, end
        )
        self._waiting = self._waiting[num_new:]
        self._rows = self._make_rows(responses, lengths, cache, num_rows)
        return self._rows

    def _make_rows(
        self, responses: list[Decoding], lengths: list[int], cache: DecodeCache, num_rows: int
    ) -> _Rows:
        device = self._model.device

        def column(values: list[int]) -> np.ndarray:
            return np.array(values + [0] * (num_rows - len(values)), dtype=np.int64)

        first_B = column([cache.end - length for length in lengths])
        num_steps = cache.num_columns - cache.end
        uniform_BK = np.zeros((num_rows, num_steps))
        for row, response in enumerate(responses):
            seed = response.request.sampling.seed
            uniform_BK[row] = uniform_numbers(seed, response.position, num_steps)
        tokens = column([response.token_ids[-1] for response in responses])
        is_padding_BW = np.arange(cache.num_columns) < first_B[:, None]
        mask_BW = torch.zeros(is_padding_BW.shape, dtype=self._model.dtype, device=device)
        mask_BW.masked_fill_(torch.from_numpy(is_padding_BW).to(device), float("-inf"))
        return _Rows(
            responses=responses,
            cache=cache,
            is_active_B=column([1] * len(responses)).astype(bool),
            first_B=first_B,
            remaining_B=column([response.remaining for response in responses]),
            uniform_BK=uniform_BK,
            token_B1=torch.from_numpy(tokens).to(device)[:, None],
            position_B1=torch.from_numpy(cache.end - first_B).to(device)[:, None],
            mask_B11W=mask_BW[:, None, None],
            filters=Filters.of_rows([r.request.sampling for r in responses], num_rows, device),
        )

    def _prefill(self, responses: Sequence[Decoding], first_row: int) -> list[Prefill]:
        """Prefill all but the last token of each response; equal inputs, as in a group, once."""
        rows_of: dict[tuple[int, ...], list[int]] = {}
        for row, response in enumerate(responses, start=first_row):
            rows_of.setdefault(tuple(response.token_ids[:-1]), []).append(row)
        inputs = sorted((tokens for tokens in rows_of if tokens), key=len)
        prefills = []
        while inputs:
            # Inputs of similar length together, the longest first, for little padding.
            width = _round_up(len(inputs[-1]))
            num_inputs = max(_MAX_PREFILL_TOKENS // width, 1)
            batch, inputs = inputs[-num_inputs:], inputs[:-num_inputs]
            padded = [[*tokens, *[0] * (width - len(tokens))] for tokens in batch]
            starts = [
                (row, index, len(tokens))
                for index, tokens in enumerate(batch)
                for row in rows_of[tokens]
            ]
            prefills.append(Prefill(starts))
            self._padding.lengths = [len(tokens) for tokens in batch]
            self._forward(torch.tensor(padded, device=self._model.device), prefills[-1])
            self._padding.lengths = ()
            wanting = [start for start in starts if responses[start[0] - first_row].wants_routes]
            if wanting:
                routes_RPE = self._watch.take().reshape(len(batch), width, -1)
            for row, index, length in wanting:
                responses[row - first_row].add_routes(0, routes_RPE[index, :length])
        return prefills

    def _forward(self, tokens_RP: Tensor, cache: Prefill) -> Tensor:
        """[R, P, D] last hidden states of whole inputs; padding on the right changes nothing."""
        positions_1P = torch.arange(tokens_RP.shape[1], device=tokens_RP.device)[None]
        hidden_RPD: Tensor = self._decoder(
            input_ids=tokens_RP, position_ids=positions_1P, past_key_values=cache, use_cache=True
        ).last_hidden_state
        return hidden_RPD

    def _step(self, rows: _Rows) -> None:
        """Sample one token per row."""
        cache = rows.cache
        mask = None
        if rows.is_ragged:  # a copy: GPU attention kernels read aligned vectors
            mask = rows.mask_B11W[..., cache.first : cache.end + 1].contiguous()
        hidden_B1D = self._decoder(
            input_ids=rows.token_B1,
            position_ids=rows.position_B1,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        logits_BV = self._head(hidden_B1D[:, 0])
        uniform_B = rows.uniform_BK[:, cache.end - cache.num_columns]
        uniform_B1 = torch.from_numpy(uniform_B).to(logits_BV.device)[:, None]
        token_B1, logprob_BV = sample(logits_BV, uniform_B1, rows.filters)
        drawn = [token_B1.double(), logprob_BV.gather(1, token_B1).double()]
        if rows.num_top:
            top = logprob_BV.topk(rows.num_top)
            drawn.append(torch.stack((top.indices.double(), top.values.double()), -1).flatten(1))
        if any(response.wants_routes for response in rows.responses):
            rows.route_tape.append(self._watch.take())
        drawn_BN = torch.cat(drawn, dim=1).cpu().numpy()
        rows.token_B1 = token_B1
        rows.position_B1 += 1
        cache.end += 1
        self._record(rows, drawn_BN)

    def _record(self, rows: _Rows, drawn_BN: np.ndarray) -> None:
        """Record the tokens of a step, and which responses ended."""
        active_B = rows.is_active_B
        rows.tape.append(drawn_BN)
        rows.num_taped_B += active_B
        rows.remaining_B -= 1
        stops_B = self._is_stop_V[drawn_BN[:, 0].astype(np.int64)]
        ends_B = active_B & (stops_B | (rows.remaining_B == 0))
        for row in np.flatnonzero(ends_B).tolist():
            reason = FinishReason.STOP if stops_B[row] else FinishReason.LENGTH
            rows.responses[row].reason = reason
        if ends_B.any():
            rows.is_active_B = active_B & ~ends_B
            rows.update_active()


class _ExpertWatch:
    """Sees which experts the model's layers use in a forward pass."""

    def __init__(self, model: Any) -> None:
        self._num_layers = model.config.num_hidden_layers
        self._chosen: dict[int, Tensor] = {}
        for number, layer in enumerate(model.get_decoder().layers):
            block = layer.mlp if hasattr(layer, "mlp") else layer.mixer
            if (experts := getattr(block, "experts", None)) is not None:
                experts.register_forward_pre_hook(functools.partial(self._see, number))

    def _see(self, layer: int, experts: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        _, self._chosen[layer], _ = inputs  # hidden states, [tokens, experts per token], weights

    def take(self) -> np.ndarray:
        """Return the experts of each token of the last pass, [tokens, E] int16; −1: no experts."""
        none = torch.full_like(next(iter(self._chosen.values())), -1)
        layers = [self._chosen.get(number, none) for number in range(self._num_layers)]
        return torch.cat(layers, dim=1).to(torch.int16).cpu().numpy()


def _round_up(number: int) -> int:
    return -(-number // MULTIPLE) * MULTIPLE
