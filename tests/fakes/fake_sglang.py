"""A deterministic server with SGLang's interface, for failures that a real one cannot be given.

The token at position p of a sequence is p + 100, whatever came before; a response ends where its
prompt says: at position ``stop_at`` (end of sequence) or after ``max_new_tokens``. The log-prob of
token t at temperature T is that of the fixed logits ``LOGITS_V`` at index t mod V. It streams as
SGLang 0.5.23 does: events come after 1, 1 + k, 1 + 2k, … tokens for ``stream_interval`` k, and
after the last one. Their JSON has null for NaN.
"""

import base64
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np

from bapo_megatron.engine.sglang.keys import NCCL_HEADER
from tests.fakes.fake_server import POLL_S, BrokenError, FakeServer

V = 32
LOGITS_V = 3 * np.sin(np.arange(V))
INFO = {
    "version": "0.5.23",
    "model_path": "",
    "tp_size": 1,
    "pp_size": 1,
    "dp_size": 1,
    "incremental_streaming_output": True,
    "max_total_num_tokens": 1 << 20,
    "enable_return_routed_experts": False,
    "internal_states": [{"effective_max_running_requests_per_dp": 1 << 20}],
    "speculative_algorithm": None,
    "speculative_num_draft_tokens": None,
    "speculative_accept_threshold_single": 1.0,
    "speculative_accept_threshold_acc": 1.0,
    "quantization": None,
    "load_format": "auto",
    "enable_lora": False,
    "max_lora_rank": None,
    "lora_target_modules": None,
}
"""What a server says of itself."""


def token_at(position: int) -> int:
    """The token that the server samples at a position of the whole sequence."""
    return position + 100


def logprob_of(token_id: int, temperature: float) -> float:
    """log_softmax(logits / T) of a token."""
    scaled_V = LOGITS_V / temperature
    return float(scaled_V[token_id % V] - np.log(np.exp(scaled_V).sum()))


@dataclass
class FakeSglang(FakeServer):
    """Start it with ``with``; attributes may be changed while it runs."""

    stop_at: int | None = None
    """Position of the end-of-sequence token, if there is one."""
    token_interval_s: float = 0.0
    """Time for one token; requests can be aborted in between."""
    stalls: dict[int, int] = field(default_factory=dict)
    """Requests with so many input tokens wait for their abort after so many new tokens."""
    connections_to_drop: int = 0
    """So many requests are closed without an answer."""
    breaks_after: dict[int, int] = field(default_factory=dict)
    """Connections of requests with so many input tokens break after so many new tokens, once."""
    broken_at: int | None = None
    """From this position on log-probs are NaN."""
    ignores_aborts: bool = False
    """Go on with requests that are aborted."""
    aborts_at: int | None = None
    """Position at which requests are aborted by nobody."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Replaces fields of ``meta_info`` in the last event of an answer."""
    nccl_settings: dict[str, str] | None = None
    """What it tells of NCCL; None: it was not started by this project."""
    version: str = "0"
    cache_tokens: int = 1 << 20
    info: dict[str, Any] = field(default_factory=dict)
    """Replaces other fields of ``INFO``."""
    architectures: tuple[str, ...] | None = None
    """As in its model's config.json."""
    pause_mode: str | None = None
    """As told by ``/pause_generation``; nothing is sampled meanwhile."""
    loads: list[list[dict[str, Any]]] = field(default_factory=list)
    """What it answers, one after the other, when it is asked for its load; then nothing of use."""
    requests: list[dict[str, Any]] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    max_concurrent: int = 0

    def start(self) -> None:
        """Listen, at the same port after ``crash``."""
        self.pause_mode = None
        self._aborted: set[str] = set()
        self._running: list[str] = []
        super().start()

    def headers(self, path: str) -> dict[str, str]:
        is_told = path == "/server_info" and self.nccl_settings is not None
        return {NCCL_HEADER: json.dumps(self.nccl_settings)} if is_told else {}

    def handle(self, path: str, body: dict[str, Any]) -> tuple[int, Any] | Iterator[Any]:
        self.calls.append(path)
        if path != "/generate":
            return 200, self.answer(path, body)
        if body.get("stream"):
            return self.generate(body)
        *_, last = self.generate(body)
        return 200, last

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/model_info":
            return {"weight_version": self.version, "architectures": self.architectures}
        if path == "/server_info":
            return {**INFO, "max_total_num_tokens": self.cache_tokens, **self.info}
        if path == "/v1/loads":
            return {"loads": self.loads.pop(0)} if self.loads else {}
        if path == "/abort_request":
            with self._lock:
                self._aborted.update(self._running if body.get("abort_all") else [body["rid"]])
        elif path == "/pause_generation":
            self.pause_mode = body["mode"]
        elif path == "/continue_generation":
            self.pause_mode = None
        elif path != "/flush_cache":
            assert path == "/update_weights_from_disk", path
            self.version = body["weight_version"]
        return {"success": True}

    def generate(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of one request; without ``stream`` only the last one is an answer."""
        rid = body.get("rid", "")
        with self._lock:
            self.requests.append(body)
            if self.connections_to_drop > 0:
                self.connections_to_drop -= 1
                raise BrokenError
            running = self._running  # ``start`` after a crash begins another list
            running.append(rid)
            self.max_concurrent = max(self.max_concurrent, len(running))
        try:
            yield from self._generate(body, rid)
        finally:
            with self._lock:
                running.remove(rid)

    def _generate(self, body: dict[str, Any], rid: str) -> Iterator[dict[str, Any]]:
        interval = body["sampling_params"].get("stream_interval", 1)
        limit = body["sampling_params"]["max_new_tokens"]
        start, num_sent, finish = len(body["input_ids"]), 0, "length"
        ids: list[int] = []
        versions: list[str] = []
        while len(ids) < limit:
            self.wait_while_hanging()
            if self.is_down:
                raise BrokenError
            if rid in self._aborted and not self.ignores_aborts:
                finish = "abort"
                break
            if len(ids) == self.stalls.get(start) or self.pause_mode is not None:
                time.sleep(POLL_S)
                continue
            time.sleep(self.token_interval_s)
            if len(ids) == self.breaks_after.get(start):
                del self.breaks_after[start]
                raise BrokenError
            if start + len(ids) == self.aborts_at:
                finish = "abort"
                break
            ids.append(token_at(start + len(ids)))
            versions.append(self.version)
            if self.stop_at is not None and start + len(ids) > self.stop_at:
                finish = "stop"
                break
            if len(ids) < limit and (interval == 1 or len(ids) % interval == 1):
                yield self._event(body, ids, num_sent, {"finish_reason": None})
                num_sent = len(ids)
        last = {"finish_reason": {"type": finish}, "weight_versions": _spans(versions)}
        yield self._event(body, ids, num_sent, {**last, **self.changes})

    def _event(
        self, body: dict[str, Any], ids: list[int], num_sent: int, fields: dict[str, Any]
    ) -> dict[str, Any]:
        start = len(body["input_ids"])
        temperature = body["sampling_params"]["temperature"]

        def row(token_id: int, position: int) -> list[Any]:
            is_broken = self.broken_at is not None and position >= self.broken_at
            return [None if is_broken else logprob_of(token_id, temperature), token_id, None]

        meta: dict[str, Any] = {"weight_version": self.version, "completion_tokens": len(ids)}
        if body["return_logprob"]:
            meta["output_token_logprobs"] = [
                row(token_id, start + index)
                for index, token_id in enumerate(ids[num_sent:], start=num_sent)
            ]
            if num_top := body.get("top_logprobs_num"):
                top = np.argsort(-LOGITS_V, kind="stable")[:num_top].tolist()
                meta["output_top_logprobs"] = [
                    [row(token_id, start + index) for token_id in top]
                    for index in range(num_sent, len(ids))
                ]
        if "logprob_start_len" in body:
            meta |= _scores(body, row)
        return {"output_ids": ids[num_sent:], "meta_info": {**meta, **fields}}


def _scores(body: dict[str, Any], row: Callable[[int, int], list[Any]]) -> dict[str, Any]:
    """Log-probs of the input from a position on; the one before has none."""
    start, num_top = body["logprob_start_len"], body.get("top_logprobs_num", 0)
    rows = [row(token_id, place) for place, token_id in enumerate(body["input_ids"])][start:]
    scores: dict[str, Any] = {"input_token_logprobs": [[None, *rows[0][1:]], *rows[1:]]}
    if num_top:
        order = np.argsort(-LOGITS_V, kind="stable")[:num_top]
        values = [logprob_of(token_id, 1.0) for token_id in order.tolist()]
        scores |= top_fields(*(np.tile(top, (len(rows) - 1, 1)) for top in (order, values)))
    return scores


def top_fields(ids_RK: np.ndarray, logprobs_RK: np.ndarray) -> dict[str, Any]:
    """Likeliest tokens of input positions, as ``return_flat_raw_top_logprobs_b64`` sends them."""
    fields: dict[str, Any] = {
        "input_top_logprobs_shape": list(ids_RK.shape),
        "input_top_logprobs_null_prefix": 1,
    }
    for name, array in (("idx", ids_RK.astype(np.int32)), ("val", logprobs_RK.astype(np.float32))):
        key = f"input_top_logprobs_{name}_flat_b64"
        fields |= {
            key: base64.b64encode(array.tobytes()).decode(),
            f"{key}_dtype": array.dtype.name,
        }
    return fields


def _spans(versions: list[str]) -> list[dict[str, Any]]:
    spans: list[dict[str, Any]] = []
    for version, tokens in groupby(versions):
        start = spans[-1]["end"] if spans else 0
        spans.append({"version": version, "start": start, "end": start + len(list(tokens))})
    return spans
