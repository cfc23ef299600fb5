"""The answer of ``/generate`` as it arrives: events of a stream, checked and cut into pieces.

An event has the number of tokens so far (``completion_tokens``) and the weights version that the
server holds while it sends. Only the last event says which version sampled which token
(``weight_versions``). A piece is handed out as soon as that is certain: versions only grow, so as
long as all events name the version that the server had when the request was sent, no other one can
have sampled their tokens. The first event with another version and all after it are kept back until
the last one.

SGLang streams in two ways (``--incremental-streaming-output``): each event holds the new tokens, or
all tokens. In the second the lists may be longer than the event says, because tokens arrived after
it was composed; the surplus comes again.

R = tokens of one piece.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any

import numpy as np
import orjson

from bapo_megatron.data.staleness import spans_of
from bapo_megatron.engine.base import Completion, GenerateRequest, join
from bapo_megatron.errors import RefusedError
from bapo_megatron.types import FinishReason, VersionSpan

_MAX_EVENT_BYTES = 64 << 20
_END = b"[DONE]"


class EventReader:
    """Cuts a stream of server-sent events into their JSON values."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []
        self._num_bytes = 0

    def feed(self, chunk: bytes) -> Iterator[dict[str, Any]]:
        """Yield the events that end in ``chunk``.

        Raises:
            ValueError: It is no stream of events.
        """
        self._rest.append(chunk)
        self._num_bytes += len(chunk)
        if b"\n" in chunk:  # else nothing ends, and what came before is not searched again
            *lines, rest = b"".join(self._rest).split(b"\n\n")
            self._rest, self._num_bytes = [rest], len(rest)
            for line in lines:
                if not line.startswith(b"data: "):
                    raise ValueError(f"not an event of a stream: {line[:80]!r}")
                if (content := line[6:]) != _END:
                    yield orjson.loads(content)
        if self._num_bytes > _MAX_EVENT_BYTES:
            raise ValueError(f"an event of more than {_MAX_EVENT_BYTES} bytes")


@dataclass(slots=True)
class StreamParser:
    """Checks the events of one request."""

    request: GenerateRequest
    is_known: Callable[[int], bool]
    """Whether a weights version may have sampled."""
    is_incremental: bool
    """Whether each event holds the new tokens only."""
    num_retractions: int = 0
    """How often the server took the request out of its cache, pauses included."""
    is_finished: bool = False
    _num_tokens: int = 0
    _num_given: int = 0
    _held: list[Completion] = field(default_factory=list)

    def feed(self, event: dict[str, Any]) -> Completion | None:
        """Check one event.

        Returns:
            What it makes certain, if anything; with the last event all the rest, and the reason.

        Raises:
            RefusedError: The server refuses the request.
            ValueError: What is wrong with the event.
        """
        if "error" in event:
            raise _error(event["error"].get("code", 0), event["error"].get("message", event))
        meta = event["meta_info"]
        finish = meta["finish_reason"]
        # An abort that was asked for has this key, too, but no value.
        if finish is not None and finish.get("status_code") is not None:
            raise _error(finish["status_code"], finish.get("message", finish))
        part = self._new_tokens(event["output_ids"], meta)
        num_new = len(part.token_ids)
        self.num_retractions = int(meta.get("num_retractions", 0))
        self._num_tokens += num_new
        if finish is not None:
            return self._finish(part, meta, FinishReason(finish["type"]))
        version = int(meta["weight_version"])
        self._check_known(version)
        if self._held or version != self.request.version:
            self._held.append(part)
            return None
        self._num_given += num_new
        return replace(part, versions=(VersionSpan(version, num_new),)) if num_new else None

    def _finish(self, part: Completion, meta: dict[str, Any], reason: FinishReason) -> Completion:
        limit = self.request.sampling.max_new_tokens
        if reason is FinishReason.LENGTH and self._num_tokens < limit:
            raise RefusedError(
                f"cut off after {self._num_tokens} of {limit} tokens because the server's "
                "context or KV cache is too small; raise rollout.server.max_total_tokens"
            )
        versions = _parse_versions(meta, self._num_tokens)
        given = versions[: self._num_given]
        if (given != self.request.version).any() or (np.diff(versions) < 0).any():
            raise ValueError(f"weight versions {meta.get('weight_versions')} contradict the stream")
        for version in np.unique(versions).tolist():
            self._check_known(version)
        rest = join([*self._held, part], reason)
        self.is_finished = True
        return replace(rest, versions=spans_of(versions[self._num_given :]))

    def _check_known(self, version: int) -> None:
        if not self.is_known(version):
            raise ValueError(
                f"sampled with weights version {version}, which this run did not give it; it "
                "restarted, or another trainer uses it: give each run its own"
            )

    def _new_tokens(self, ids: list[int], meta: dict[str, Any]) -> Completion:
        """Return the tokens that the event adds, without their versions."""
        total = int(meta["completion_tokens"])
        num_new, limit = total - self._num_tokens, self.request.sampling.max_new_tokens
        if num_new < 0 or total > limit:
            raise ValueError(f"{total} tokens after {self._num_tokens} of {limit} tokens")
        start = 0 if self.is_incremental else self._num_tokens
        # Incremental events of an abort may repeat the last token and all log-probs behind the new
        # ones, if the request waited (again) for its turn: too long is fine, too short is not.
        token_ids = np.asarray(ids[start : start + num_new], dtype=np.int32)
        if len(token_ids) != num_new:
            raise ValueError(f"{len(ids)} token ids where {num_new} of {total} are new")
        if (token_ids < 0).any():
            raise ValueError(f"token id {token_ids.min()}")
        logprobs = np.empty(0, dtype=np.float32)
        if self.request.return_logprobs:
            rows = (meta.get("output_token_logprobs") or [])[start : start + num_new]
            logprobs = _parse_logprobs(rows, token_ids, self._num_tokens)
        return Completion(token_ids, logprobs, (), FinishReason.ABORT)


def _error(status: int, message: object) -> Exception:
    text = f"HTTP {int(status)}: {' '.join(str(message).split()).rstrip('.')}"
    if HTTPStatus.BAD_REQUEST <= status < HTTPStatus.INTERNAL_SERVER_ERROR:
        return RefusedError(f"{text}; correct the setting it names, or see the server's log")
    return ValueError(text)


def _parse_logprobs(rows: list[list[Any]], token_ids: np.ndarray, position: int) -> np.ndarray:
    """[R] float32 from rows ``[logprob, token id, text or null]``; ``position`` of the first."""
    given, ids = tuple(zip(*rows, strict=True))[:2] or ((), ())
    if list(ids) != token_ids.tolist():
        raise ValueError(
            f"log-probs of {len(rows)} tokens do not belong to its {len(token_ids)} tokens"
        )
    # NaN is null in JSON, and becomes NaN again here.
    logprobs = np.asarray(given, dtype=np.float32)
    unusable = np.flatnonzero(~np.isfinite(logprobs))
    if len(unusable):
        row = int(unusable[0])
        raise ValueError(
            f"log-prob {rows[row][0]} at response token {position + row} (id "
            f"{token_ids[row]}): the weights it was given, or its numerics, are broken"
        )
    return logprobs


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
