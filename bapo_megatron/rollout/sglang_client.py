"""Asynchronous client of one SGLang server: typed answers, every answer checked."""

from __future__ import annotations

import asyncio
import contextlib
import os
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import httpx

from bapo_megatron.rollout.base import RolloutError
from bapo_megatron.rollout.completion import SamplingSettings, parse_completion

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from bapo_megatron.rollout.completion import Completion

API_KEY_VARIABLE = "BAPO_MEGATRON_API_KEY"
"""Environment variable with the key of ``/generate`` for servers in ``rollout.servers``."""
ADMIN_API_KEY_VARIABLE = "BAPO_MEGATRON_ADMIN_API_KEY"
"""Environment variable with the key of control calls for servers in ``rollout.servers``."""

_MAX_ATTEMPTS = 4
_FIRST_BACKOFF_S = 0.25
_CONNECT_TIMEOUT_S = 10.0
# The server closes idle connections after 5 s; one that it is just closing must not be used.
_KEEPALIVE_EXPIRY_S = 3.0
_LONGEST_REASON = 300


@dataclass(frozen=True, slots=True)
class ApiKeys:
    """Keys of a server; empty where it wants none."""

    api_key: str = field(default="", repr=False)
    """For generation and information."""
    admin_api_key: str = field(default="", repr=False)
    """For control calls: abort, weight updates."""

    @classmethod
    def from_environment(cls) -> Self:
        """The keys of servers that somebody else started."""
        return cls(os.environ.get(API_KEY_VARIABLE, ""), os.environ.get(ADMIN_API_KEY_VARIABLE, ""))

    def headers(self, *, admin: bool) -> dict[str, str]:
        """The HTTP headers of one call; a server without an admin key takes the other one."""
        key = (self.admin_api_key or self.api_key) if admin else self.api_key
        return {"Authorization": f"Bearer {key}"} if key else {}


class SglangClient:
    """One server; belongs to the event loop that uses it."""

    def __init__(
        self, address: str, keys: ApiKeys, *, request_timeout_s: float, max_connections: int
    ) -> None:
        """Prepare the connection pool; nothing is sent.

        Args:
            address: ``http://host:port``.
            keys: Keys of the server.
            request_timeout_s: Longest time without an answer.
            max_connections: Connections that are kept.
        """
        self.address = address.rstrip("/")
        self._keys = keys
        self._timeout_s = request_timeout_s
        self._in_flight: set[str] = set()
        # Generation waits for as long as it takes; control calls must never queue behind it.
        self._generate_http = self._make_http(max_connections)
        self._control_http = self._make_http(None)

    def _make_http(self, max_connections: int | None) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=self.address,
            timeout=httpx.Timeout(self._timeout_s, connect=_CONNECT_TIMEOUT_S, pool=None),
            limits=httpx.Limits(
                max_connections=max_connections, keepalive_expiry=_KEEPALIVE_EXPIRY_S
            ),
            trust_env=False,  # a proxy must not stand between trainer and server
        )

    @property
    def num_in_flight(self) -> int:
        """Requests that were sent and not answered."""
        return len(self._in_flight)

    async def close(self) -> None:
        """Close every connection; the server aborts what it was still generating for them."""
        await self._generate_http.aclose()
        await self._control_http.aclose()

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling: SamplingSettings,
        *,
        label: str,
        return_logprobs: bool = True,
    ) -> Completion:
        """Sample one completion.

        A lost connection is retried under a new request id: a repeated one would be answered
        without tokens.

        Args:
            input_ids: Prompt, and what was sampled before.
            sampling: How to sample.
            label: Names the request in errors.
            return_logprobs: Whether log-probs are wanted.

        Raises:
            RolloutError: The server refuses, does not answer, or answers inconsistently.
        """
        answer = await self._generate(
            {
                "input_ids": list(input_ids),
                "sampling_params": sampling.to_json_dict(),
                "return_logprob": return_logprobs,
            },
            label,
        )
        with self._checked(label):
            return parse_completion(answer, sampling.max_new_tokens, return_logprobs)

    async def next_token_logprobs(
        self,
        input_ids: Sequence[int],
        temperature: float,
        *,
        token_ids: Sequence[int] = (),
        num_top: int = 0,
    ) -> dict[int, float]:
        """Log-probs of some tokens at the position after ``input_ids``, as the server reports them.

        Args:
            input_ids: Context.
            temperature: Sampling temperature of the request.
            token_ids: Tokens that are wanted in any case.
            num_top: The most likely tokens that are wanted besides.

        Returns:
            Log-prob by token id; the token that was sampled is among them.

        Raises:
            RolloutError: As ``generate``.
        """
        label = "probe of the temperature convention"
        answer = await self._generate(
            {
                "input_ids": list(input_ids),
                "sampling_params": SamplingSettings(temperature, 1).to_json_dict(),
                "return_logprob": True,
                "top_logprobs_num": num_top,
                "token_ids_logprob": list(token_ids) or None,
            },
            label,
        )
        with self._checked(label):
            meta = answer["meta_info"]
            rows = [meta["output_token_logprobs"][0]]
            rows += meta["output_top_logprobs"][0] if num_top else []
            rows += meta["output_token_ids_logprobs"][0] if token_ids else []
            return {int(token_id): float(logprob) for logprob, token_id, *_ in rows}

    async def abort(self) -> None:
        """Ask the server to end every request in flight; their answers then hold what there is.

        The server forgets an abort of a request that it has not seen yet, so repeat the call until
        ``num_in_flight`` is 0. Requests of other clients are left alone.
        """
        await asyncio.gather(
            *(self._control("/abort_request", {"rid": rid}) for rid in self._in_flight)
        )

    async def update_weights(self, model_dir: Path, version: int) -> None:
        """Load the weights in ``model_dir`` as ``version`` and check that the server says so.

        Raises:
            RolloutError: It could not load them, or reports another version.
        """
        await self._control(
            "/update_weights_from_disk",
            {
                "model_path": str(model_dir.absolute()),
                "weight_version": str(version),
                "flush_cache": True,
                "abort_all_requests": False,
            },
        )
        reported = await self.version()
        if reported != str(version):
            raise RolloutError(
                f"{self.address}: loaded weights version {version} but reports '{reported}'; "
                "let no one else update this server"
            )

    async def version(self) -> str:
        """The weights version that the server reports; free text until a trainer set it."""
        info = await self._send(self._control_http, "GET", "/model_info", None, admin=False)
        with self._checked("/model_info"):
            return str(info["weight_version"])

    async def _generate(self, body: dict[str, Any], label: str) -> dict[str, Any]:
        """Send to ``/generate`` under a new request id for each attempt."""
        for attempt in range(_MAX_ATTEMPTS):
            # Equally long: the server aborts by prefix, "r1" would take "r10" along.
            rid = uuid.uuid4().hex
            self._in_flight.add(rid)
            try:
                answer: dict[str, Any] = await self._send_once(
                    self._generate_http, "POST", "/generate", {**body, "rid": rid}, admin=False
                )
                return answer
            except RolloutError as error:
                raise RolloutError(f"{error} (request: {label})") from error
            except httpx.TransportError as error:
                await self._before_retry(attempt, error, label)
            finally:
                self._in_flight.discard(rid)
        raise AssertionError("the last attempt raises")

    async def _control(self, path: str, body: dict[str, Any]) -> Any:
        """Send a control call; all of them may be repeated."""
        return await self._send(self._control_http, "POST", path, body, admin=True)

    async def _send(
        self,
        http: httpx.AsyncClient,
        method: str,
        path: str,
        body: dict[str, Any] | None,
        *,
        admin: bool,
    ) -> Any:
        for attempt in range(_MAX_ATTEMPTS):
            try:
                return await self._send_once(http, method, path, body, admin=admin)
            except httpx.TransportError as error:
                await self._before_retry(attempt, error, path)
        raise AssertionError("the last attempt raises")

    async def _send_once(
        self,
        http: httpx.AsyncClient,
        method: str,
        path: str,
        body: dict[str, Any] | None,
        *,
        admin: bool,
    ) -> Any:
        reply = await http.request(method, path, json=body, headers=self._keys.headers(admin=admin))
        if reply.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            variable = ADMIN_API_KEY_VARIABLE if admin else API_KEY_VARIABLE
            raise RolloutError(
                f"{self.address}{path}: the key was refused (HTTP {reply.status_code}); "
                f"set {variable} to the server's key"
            )
        if reply.status_code != httpx.codes.OK:
            raise RolloutError(
                f"{self.address}{path}: HTTP {reply.status_code}: {_reason(reply)}; "
                "correct the setting it names, or see the server's log"
            )
        if not reply.content:
            return None
        with self._checked(path):
            return reply.json()

    async def _before_retry(self, attempt: int, error: httpx.TransportError, label: str) -> None:
        """Wait before the next attempt, or raise after the last one."""
        if isinstance(error, httpx.ReadTimeout):
            raise RolloutError(
                f"{self.address}: no answer within {self._timeout_s:g} s ({label}); raise "
                "rollout.request_timeout_s, or look for a stuck server in its log"
            ) from error
        if attempt + 1 == _MAX_ATTEMPTS:
            reason = str(error) or type(error).__name__
            raise RolloutError(
                f"{self.address}: no connection ({reason}; {_MAX_ATTEMPTS} attempts; {label}); "
                "start the server again, or correct rollout.servers"
            ) from error
        await asyncio.sleep(_FIRST_BACKOFF_S * 2**attempt)

    @contextlib.contextmanager
    def _checked(self, label: str) -> Iterator[None]:
        """Name server and request when an answer does not have the documented form."""
        try:
            yield
        except (KeyError, IndexError, TypeError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}" if isinstance(error, KeyError) else error
            raise RolloutError(
                f"{self.address}: unusable answer ({label}): {reason}; use an SGLang version that "
                "this project supports, or see the server's log"
            ) from error


def _reason(reply: httpx.Response) -> str:
    """The server's own words, on one line."""
    try:
        content = reply.json()
    except ValueError:
        content = reply.text
    if isinstance(content, dict):
        content = content.get("error", content.get("message", content.get("detail", content)))
    if isinstance(content, dict):
        content = content.get("message", content)
    return " ".join(str(content).split())[:_LONGEST_REASON].rstrip(".")
