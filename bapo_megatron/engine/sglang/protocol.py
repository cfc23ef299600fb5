"""SGLang's requests and answers; nothing here talks to a server.

An event of a stream has new tokens, the token count so far (``completion_tokens``) and the weights
version that the server holds when it sends the event. Only the last event says which version
sampled which token (``weight_versions``). A piece is passed on as soon as its version is certain:
versions only grow, so while all events have the version with which the request was sent, no other
one can have sampled their tokens. The first event with another version and all later ones are held
back until the last event. A log-prob that is null stands for NaN, and becomes NaN again here.

R = tokens of a piece, or scored tokens; K = likeliest tokens at a position.
"""

import base64
import contextlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from bapo_megatron.config.megatron import LoraConfig
from bapo_megatron.config.rollout import ServerConfig
from bapo_megatron.data.record import Completion, join
from bapo_megatron.data.staleness import spans_of
from bapo_megatron.data.token_columns import SAMPLER_TOP_IDS, SAMPLER_TOP_LOGPROBS
from bapo_megatron.engine.base import Capabilities, GenerateRequest, LoadReport, Scores
from bapo_megatron.engine.sglang.settings import ALGORITHMS, LORA_TARGETS, VERSION
from bapo_megatron.errors import RefusedError, RolloutError
from bapo_megatron.types import FinishReason, VersionSpan

_BEGIN = b"data: "


def stream_body(request: GenerateRequest) -> dict[str, Any]:
    """Return the body of a streaming request, without its id.

    It has every setting, so that no default of the server applies. Servers honour the seed only
    with ``--enable-deterministic-inference``.
    """
    sampling = request.sampling
    body: dict[str, Any] = {
        "input_ids": list(request.input_ids),
        "sampling_params": {
            "temperature": sampling.temperature,
            "max_new_tokens": sampling.max_new_tokens,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "sampling_seed": sampling.seed,
            "stream_interval": request.stream_tokens,
        },
        "return_logprob": request.return_logprobs,
        "stream": True,
    }
    if request.top_logprobs:
        body["top_logprobs_num"] = request.top_logprobs
    if request.routes_from is not None:
        body |= {"return_routed_experts": True, "routed_experts_start_len": request.routes_from}
    return body


@dataclass(slots=True)
class StreamParser:
    """Parses and checks the events of one request."""

    request: GenerateRequest
    is_known: Callable[[int], bool]
    """Whether a weights version may have sampled."""
    num_retractions: int = 0
    """How often the server retracted the request, including pauses."""
    is_finished: bool = False
    _num_tokens: int = 0
    _num_recomputed: int = 0
    """Tokens that it had when it was last retracted, which the server then computed again."""
    _num_yielded: int = 0
    _held: list[Completion] = field(default_factory=list)

    def feed(self, sent: bytes) -> Completion | None:
        """Parse one event, as it was sent.

        Returns:
            The tokens that are now certain, if any; for the last event all the rest, with the
            finish reason.

        Raises:
            RefusedError: The server refuses the request.
            ValueError: The event is malformed.
        """
        if not sent.startswith(_BEGIN):
            raise ValueError(f"not an event of a stream: {sent[:80]!r}")
        content = sent.removeprefix(_BEGIN).strip()
        if content == b"[DONE]":
            return None
        event = orjson.loads(content)
        if "error" in event:
            raise _error(event["error"].get("code", 0), event["error"].get("message", event))
        meta = event["meta_info"]
        finish = meta["finish_reason"]
        # After an abort that was requested, the key is there without a value.
        if finish is not None and finish.get("status_code") is not None:
            raise _error(finish["status_code"], finish.get("message", finish))
        part = self._new_tokens(event["output_ids"], meta)
        num_new = len(part.token_ids)
        self._num_tokens += num_new
        if (num_retractions := int(meta.get("num_retractions", 0))) > self.num_retractions:
            self.num_retractions, self._num_recomputed = num_retractions, self._num_tokens
        if finish is not None:
            return self._finish(part, meta, FinishReason(finish["type"]))
        version = int(meta["weight_version"])
        self._check_known(version)
        if self._held or version != self.request.version:
            self._held.append(part)
            return None
        self._num_yielded += num_new
        return replace(part, versions=(VersionSpan(version, num_new),)) if num_new else None

    def _finish(self, part: Completion, meta: dict[str, Any], reason: FinishReason) -> Completion:
        limit = self.request.sampling.max_new_tokens
        if reason is FinishReason.LENGTH and self._num_tokens < limit:
            raise RefusedError(
                f"cut off after {self._num_tokens} of {limit} tokens because the server's "
                "context or KV cache is too small; raise rollout.server.max_total_tokens"
            )
        versions = _parse_versions(meta, self._num_tokens)
        yielded = versions[: self._num_yielded]
        if (yielded != self.request.version).any() or (np.diff(versions) < 0).any():
            raise ValueError(f"weight versions {meta.get('weight_versions')} contradict the stream")
        for version in np.unique(versions).tolist():
            self._check_known(version)
        rest = join([*self._held, part], reason)
        routes = self._parse_routes(meta, reason)
        self.is_finished = True
        return replace(rest, versions=spans_of(versions[self._num_yielded :]), routes=routes)

    def _parse_routes(self, meta: dict[str, Any], reason: FinishReason) -> np.ndarray | None:
        """See ``Completion.routes``; sent as base64 of int32.

        Tokens that were computed again after a retraction may have other experts than when they
        were sampled, which are unknown.
        """
        request, first = self.request, self.request.routes_from
        if first is None or not self._num_tokens:
            return None
        if reason is FinishReason.ABORT and "routed_experts" not in meta:
            return None  # aborted in the queue, after a retraction: the KV cache has nothing of it
        num_rows = len(request.input_ids) + self._num_tokens - 1 - first
        values = np.frombuffer(base64.b64decode(meta["routed_experts"]), "<i4")
        if not len(values) or len(values) % num_rows:
            raise ValueError(f"{len(values)} experts for {num_rows} tokens")
        routes = values.reshape(num_rows, -1).astype(np.int16)
        if self.num_retractions:
            routes[: len(request.input_ids) + self._num_recomputed - first] = -1
        return routes

    def _check_known(self, version: int) -> None:
        if not self.is_known(version):
            raise ValueError(
                f"sampled with weights version {version}, which this run did not give it; it "
                "restarted, or another trainer uses it: give each run its own"
            )

    def _new_tokens(self, ids: list[int], meta: dict[str, Any]) -> Completion:
        """Return the new tokens of an event, without versions."""
        total = int(meta["completion_tokens"])
        num_new, limit = total - self._num_tokens, self.request.sampling.max_new_tokens
        if num_new < 0 or total > limit:
            raise ValueError(f"{total} tokens after {self._num_tokens} of {limit} tokens")
        # After an abort, events may repeat the last token and log-prob behind the new ones, so more
        # than expected are fine, fewer are not.
        token_ids = np.asarray(ids[:num_new], dtype=np.int32)
        if len(token_ids) != num_new:
            raise ValueError(f"{len(ids)} token ids where {num_new} of {total} are new")
        if (token_ids < 0).any():
            raise ValueError(f"token id {token_ids.min()}")
        logprobs = np.empty(0, dtype=np.float32)
        if self.request.return_logprobs:
            rows = (meta.get("output_token_logprobs") or [])[:num_new]
            logprobs = _parse_logprobs(rows, token_ids, self._num_tokens)
        columns = {}
        if num_top := self.request.top_logprobs:
            rows = (meta.get("output_top_logprobs") or [])[:num_new]
            columns = _parse_likeliest(rows, (num_new, num_top), self._num_tokens)
        return Completion(token_ids, logprobs, (), FinishReason.ABORT, columns=columns)


def _error(status: int, message: object) -> Exception:
    text = f"HTTP {int(status)}: {' '.join(str(message).split()).rstrip('.')}"
    if HTTPStatus.BAD_REQUEST <= status < HTTPStatus.INTERNAL_SERVER_ERROR:
        return RefusedError(f"{text}; correct the setting it names, or see the server's log")
    return ValueError(text)


def _parse_logprobs(rows: list[list[Any]], token_ids: np.ndarray, position: int) -> np.ndarray:
    """[R] float32 from rows ``[logprob, token id, text or null]``, from ``position`` on."""
    values, ids = tuple(zip(*rows, strict=True))[:2] or ((), ())
    if list(ids) != token_ids.tolist():
        raise ValueError(
            f"log-probs of {len(rows)} tokens do not belong to its {len(token_ids)} tokens"
        )
    logprobs = np.asarray(values, dtype=np.float32)
    unusable = np.flatnonzero(~np.isfinite(logprobs))
    if len(unusable):
        row = int(unusable[0])
        raise ValueError(
            f"log-prob {rows[row][0]} at response token {position + row} (id "
            f"{token_ids[row]}): the weights it was given, or its numerics, are broken"
        )
    return logprobs


def _parse_likeliest(
    rows: list[list[list[Any]]], shape: tuple[int, int], position: int
) -> dict[str, np.ndarray]:
    """Return the columns of rows of K ``[logprob, token id, text or null]``, likeliest first."""
    widths = {len(row or ()) for row in rows}
    if len(rows) != shape[0] or widths - {shape[1]}:
        raise ValueError(
            f"{sorted(widths)} likeliest tokens in {len(rows)} rows, expected {shape[1]} in "
            f"{shape[0]}"
        )
    entries = list(chain.from_iterable(rows))
    logprobs_RK = np.array([entry[0] for entry in entries], np.float32).reshape(shape)
    ids_RK = np.array([entry[1] for entry in entries], np.int32).reshape(shape)
    usable_R = (np.isfinite(logprobs_RK) & (ids_RK >= 0)).all(axis=1)
    if not usable_R.all():
        row = int(np.argmin(usable_R))
        raise ValueError(f"likeliest tokens {rows[row]} at response token {position + row}")
    return {SAMPLER_TOP_IDS: ids_RK, SAMPLER_TOP_LOGPROBS: logprobs_RK}


def _parse_versions(meta: dict[str, Any], num_tokens: int) -> np.ndarray:
    """[R] int64: the version that sampled each token."""
    everything = {"version": meta["weight_version"], "start": 0, "end": num_tokens}
    spans = meta.get("weight_versions") or [everything]
    versions = np.full(num_tokens, -1, dtype=np.int64)
    for span in spans:
        versions[span["start"] : span["end"]] = int(span["version"])
    if (versions < 0).any():
        raise ValueError(f"weight versions {spans} do not cover its {num_tokens} tokens")
    return versions


def score_body(token_ids: Sequence[int], start: int, top_k: int) -> dict[str, Any]:
    """Return a request for the log-probs of the input tokens from position ``start``.

    The KV cache serves at most the first ``start`` − 1 tokens: none after a weight sync, whose
    check scores from 1, because with ``in_flight: in_place`` the cache is of older weights.
    """
    body: dict[str, Any] = {
        "input_ids": list(token_ids),
        "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": start - 1,
    }
    if top_k:  # in base64: as JSON, the rows of a long response would take 20 MB
        names = ("return_flat_raw_top_logprobs", "return_flat_raw_top_logprobs_b64")
        body |= {"top_logprobs_num": top_k, **dict.fromkeys(names, True)}
    return body


def parse_scores(
    answer: dict[str, Any], token_ids: Sequence[int], start: int, top_k: int
) -> Scores:
    """Return the scores of the tokens from ``start``; ``ValueError`` if they are others'."""
    meta, expected = answer["meta_info"], token_ids[start - 1 :]
    rows = meta["input_token_logprobs"]
    # SGLang reports id 0 for the last id of the vocabulary, with the right log-prob.
    if len(rows) != len(expected) or any(
        row[1] not in (token_id, 0) for row, token_id in zip(rows, expected, strict=True)
    ):
        raise ValueError(
            f"log-probs of {len(rows)} input tokens do not belong to the {len(expected)} that "
            "were sent"
        )
    logprobs = np.array([row[0] for row in rows[1:]], dtype=np.float32)
    shape = (len(logprobs), top_k)
    if not top_k:
        return Scores(logprobs, np.empty(shape, np.int32), np.empty(shape, np.float32))
    top = Scores(logprobs, _parse_top(meta, "idx", shape), _parse_top(meta, "val", shape))
    if top.top_ids.size and top.top_ids.min() < 0:
        raise ValueError(f"token id {top.top_ids.min()} among the likeliest tokens")
    return top


def _parse_top(meta: dict[str, Any], name: str, shape: tuple[int, int]) -> np.ndarray:
    """Read ids (``idx``, int32) or log-probs (``val``, float32), [R, K], little-endian base64."""
    key, dtype = f"input_top_logprobs_{name}_flat_b64", {"idx": "int32", "val": "float32"}[name]
    # The position before ``start`` has no log-prob.
    expected = (1, list(shape), dtype)
    layout = tuple(
        meta[key]
        for key in ("input_top_logprobs_null_prefix", "input_top_logprobs_shape", f"{key}_dtype")
    )
    if layout != expected:
        raise ValueError(f"likeliest tokens as {layout}, expected {expected}")
    values = np.frombuffer(base64.b64decode(meta[key]), np.dtype(dtype).newbyteorder("<"))
    return values.reshape(shape).astype(dtype)


def parse_info(
    address: str, info: Mapping[str, Any], nccl_settings: Mapping[str, str], gpus: tuple[int, ...]
) -> Capabilities:
    """Return the properties of a server from its ``/server_info``.

    Raises:
        RolloutError: It cannot be used as it was started.
        KeyError: The answer comes from another program.
    """
    version = str(info["version"])
    if (numbers := _numbers(version)) and numbers < _numbers(VERSION):  # "main" has none
        raise RolloutError(f"{address}: runs SGLang {version}, needs at least {VERSION}; update it")
    if not info["incremental_streaming_output"]:
        raise RolloutError(
            f"{address}: resends the whole response with every piece; start it with "
            "--incremental-streaming-output"
        )
    num_stages, num_copies = int(info["pp_size"]), int(info["dp_size"])
    # SGLang includes only the tensor ranks of one stage in a group; others get no weights.
    reaches_all = num_stages == num_copies == 1
    return Capabilities(
        num_ranks=int(info["tp_size"]) * num_stages * num_copies,
        methods=frozenset({"disk", "broadcast", "tensor"} if reaches_all else {"disk"}),
        cache_tokens=int(info["max_total_num_tokens"]) * num_copies,
        # SGLang lowers it to the recurrent states that it has memory for.
        max_requests=sum(
            int(state["effective_max_running_requests_per_dp"]) for state in info["internal_states"]
        ),
        gpus=gpus,
        nccl_settings=nccl_settings,
    )


def _numbers(version: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", version)[:3]]


def parse_load(answer: dict[str, Any]) -> LoadReport:
    """Return the load over all ranks."""
    ranks = answer["loads"]
    lengths = [
        float(rank["speculative"]["accept_length"]) for rank in ranks if "speculative" in rank
    ]
    return LoadReport(
        running=sum(int(rank["num_running_reqs"]) for rank in ranks),
        waiting=sum(int(rank["num_waiting_reqs"]) for rank in ranks),
        cache_used_share=max(float(rank["token_usage"]) for rank in ranks),
        acceptance_length=min(lengths, default=None),
    )


def check_sampling(address: str, info: Mapping[str, Any], server: ServerConfig) -> None:
    """Raise a ``RolloutError`` if a server speculates or quantizes otherwise than ``server``."""
    speculative = server.speculative
    is_on = speculative.method != "none"
    expected = {
        "speculative_algorithm": ALGORITHMS[speculative.method],
        "speculative_num_draft_tokens": speculative.draft_tokens + 1 if is_on else None,
        "speculative_accept_threshold_single": 1.0,
        "speculative_accept_threshold_acc": 1.0,
        "quantization": None if server.quantization == "none" else server.quantization,
    }
    for name, value in expected.items():
        if info[name] != value:
            raise RolloutError(
                f"{address}: must have {name} {value} by rollout.server, got {info[name]}, with "
                "which its log-probs were not checked; start it with serve and this configuration"
            )


def check_adapters(address: str, info: Mapping[str, Any], lora: LoraConfig | None) -> None:
    """Raise a ``RolloutError`` if a server takes adapters and should not, or the reverse.

    One with adapters keeps the base, which merged weights would replace.
    """
    is_on, targets = bool(info["enable_lora"]), info["lora_target_modules"] or ()
    if lora is None:
        expected, remedy, is_right = "no --enable-lora", "without it", not is_on
    else:
        expected, remedy = f"--enable-lora, rank {lora.rank}", "with serve and this configuration"
        wanted = {*(lora.targets or LORA_TARGETS)}
        is_right = is_on and info["max_lora_rank"] >= lora.rank and wanted <= {*targets}
        is_right &= info["dp_size"] == info["pp_size"] == 1 and info["load_format"] != "dummy"
    names = ("enable_lora", "max_lora_rank", "load_format", "dp_size", "pp_size")
    if not is_right:
        raise RolloutError(
            f"{address}: must have {expected} by model.lora and rollout.weight_sync.adapters, got "
            f"{', '.join(f'{name} {info[name]}' for name in names)}, targets {targets}; start it "
            f"{remedy}"
        )


def check_architecture(address: str, served: Sequence[str] | None, model_dir: Path) -> None:
    """Raise a ``RolloutError`` if a server's architecture is not that of ``model_dir``."""
    expected = None  # a file system error is not the server's fault
    with contextlib.suppress(OSError, ValueError):
        expected = json.loads((model_dir / "config.json").read_bytes()).get("architectures")
    if None not in (expected, served) and expected != served:
        raise RolloutError(
            f"{address}: serves another model than model.path: architectures must be {expected}, "
            f"got {served}; start it with '{model_dir}', or take it off the list of servers"
        )
