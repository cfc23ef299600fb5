"""The collector process: ``python -m bapo_megatron.rollout.collector FD``.

It owns HTTP, the rollout buffer and the graders, so that hundreds of requests never share an
interpreter lock with a trainer rank. ``collector_client.CollectorClient`` starts it and talks to it
over the socket FD, one JSON object per line:

    → {"id": 1, "call": "collect", "arguments": {"step": 0}}
    ← {"progress": "rollout 0: 3/8 groups, 1200 tokens/s"}
    ← {"id": 1, "result": {"path": "…/step_000000.parquet", "keep": true}}

or ``{"id": 1, "error": "one line that says what to do"}``. It ends when the socket closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bapo_megatron.config.schema import RunConfig
from bapo_megatron.data.chat import ChatRenderer, load_tokenizer
from bapo_megatron.data.dump import write_batch
from bapo_megatron.data.prompts import PromptStream, load_prompts
from bapo_megatron.reward.base import RewardError
from bapo_megatron.reward.pool import RewardPool
from bapo_megatron.rollout.base import RolloutError
from bapo_megatron.rollout.engine_pool import EnginePool
from bapo_megatron.rollout.evaluation import EvalSet, Evaluator
from bapo_megatron.rollout.generation import BatchCollector
from bapo_megatron.rollout.grading import Grader
from bapo_megatron.rollout.processes import OWNER_PID_VARIABLE
from bapo_megatron.rollout.sglang_client import ApiKeys

if TYPE_CHECKING:
    from collections.abc import Callable

    from bapo_megatron.types import Prompt, RolloutBatch

_LOG = logging.getLogger(__name__)
_LONGEST_MESSAGE_BYTES = 4 << 30
"""Limit of one line: a restored buffer of unfinished samples can be large."""

_OWNER_POLL_S = 1.0
_NUM_PROBE_PROMPTS = 4


class Collector:
    """Answers the calls of one client; each public method is a call."""

    def __init__(self, send: Callable[[dict[str, Any]], None]) -> None:
        """Wait for ``open``.

        Args:
            send: Takes a message for the client.
        """
        self._send = send
        self._stack = contextlib.AsyncExitStack()
        self._pool: EnginePool | None = None
        self._config: RunConfig
        self._probe_prompts: tuple[Prompt, ...] = ()
        self._batches: BatchCollector | None = None
        self._evaluator: Evaluator
        self._wire_dir: Path

    async def close(self) -> None:
        """End the graders, close connections, remove temporary files."""
        await self._stack.aclose()

    async def open(self, config: dict[str, Any], for_training: bool) -> None:
        """Load tokenizer and prompts.

        Args:
            config: The run's configuration as JSON values.
            for_training: Whether batches will be asked for, or evaluations only.

        Raises:
            ValueError: A data row or the tokenizer cannot be used.
            OSError: A file cannot be read.
        """
        self._config = run = RunConfig.model_validate(config)
        self._wire_dir = Path(
            self._stack.enter_context(tempfile.TemporaryDirectory(prefix="bapo-megatron-"))
        )
        tokenizer = load_tokenizer(run.model.path)
        renderer = ChatRenderer(tokenizer, run.data.system_prompt, run.data.prompt_suffix)
        rewards = RewardPool(run.reward.workers, run.reward.timeout_s)
        grader = Grader(tokenizer, await self._stack.enter_async_context(rewards))
        if for_training:
            assert run.data.train is not None, "check_config requires data.train without replay"
            prompts = load_prompts(run.data.train, renderer, run.data.max_prompt_tokens)
            self._probe_prompts = tuple(prompts[:_NUM_PROBE_PROMPTS])
            stream = PromptStream(prompts, run.seed, run.data.shuffle)
            self._batches = BatchCollector(grader, stream, run.rollout, self._report)
        sets = [
            EvalSet(
                dataset.name or dataset.path.stem,
                tuple(
                    load_prompts(dataset, renderer, run.data.max_prompt_tokens)[
                        : run.eval.max_prompts
                    ]
                ),
            )
            for dataset in run.eval.sets
        ]
        self._evaluator = Evaluator(grader, sets, run.eval, run.run_dir / "eval", self._report)

    async def connect(
        self, addresses: list[str], api_key: str, admin_api_key: str, version: int | None
    ) -> None:
        """Reach every server and probe its temperature convention before training.

        Args:
            addresses: The servers.
            api_key: See ``ApiKeys``.
            admin_api_key: See ``ApiKeys``.
            version: Weights version that they hold, if it is known.

        Raises:
            RolloutError: A server does not answer, or follows another convention.
        """
        rollout = self._config.rollout
        self._pool = EnginePool(addresses, ApiKeys(api_key, admin_api_key), rollout, version)
        self._stack.push_async_callback(self._pool.close)
        contexts = [prompt.token_ids for prompt in self._probe_prompts]
        await self._pool.check(rollout.temperature, contexts)

    async def sync_weights(self, model_dir: str, version: int) -> None:
        """Load new weights into every server.

        Raises:
            RolloutError: A server could not load them.
        """
        assert self._pool is not None, "connect comes first"
        await self._pool.sync_weights(Path(model_dir), version)

    async def collect(self, step: int) -> dict[str, Any]:
        """Collect a batch into a file.

        Returns:
            ``path``, and whether to ``keep`` it after reading.

        Raises:
            RolloutError: Generation failed, or the file cannot be written.
        """
        assert self._pool is not None, "connect comes first"
        assert self._batches is not None, "opened for training"
        batch = await self._batches.collect(self._pool, step)
        keep = self._config.rollout.dump
        folder = self._config.run_dir / "rollouts" if keep else self._wire_dir
        return {"path": str(_write(folder, batch)), "keep": keep}

    async def evaluate(self, step: int) -> list[dict[str, Any]]:
        """Score the evaluation sets; each entry holds the fields of an ``EvalResult``."""
        assert self._pool is not None, "connect comes first"
        return [asdict(result) for result in await self._evaluator.evaluate(self._pool, step)]

    async def state(self) -> dict[str, Any]:
        """Data position and buffer as JSON values."""
        assert self._batches is not None, "opened for training"
        return self._batches.state()

    async def restore(self, state: dict[str, Any]) -> None:
        """Continue from a ``state``.

        Raises:
            ValueError: It does not fit data and settings.
        """
        assert self._batches is not None, "opened for training"
        self._batches.restore(state)

    def _report(self, text: str) -> None:
        self._send({"progress": text})


def _write(folder: Path, batch: RolloutBatch) -> Path:
    path = folder / f"step_{batch.step:06d}.parquet"
    try:
        write_batch(path, batch)
    except OSError as error:
        raise RolloutError(
            f"cannot write the samples of step {batch.step} to {path}: {error.strerror}; free "
            "space, or set rollout.dump=false to keep only the newest batch in the temporary "
            "directory"
        ) from error
    return path


class _WarningsToClient(logging.Handler):
    """Shows warnings where the user looks, not only in the collector's log."""

    def __init__(self, send: Callable[[dict[str, Any]], None]) -> None:
        super().__init__(logging.WARNING)
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        self._send({"warning": record.getMessage()})


async def serve(connection: socket.socket) -> None:
    """Answer calls, one after the other, until the client is gone."""
    reader, writer = await asyncio.open_connection(sock=connection, limit=_LONGEST_MESSAGE_BYTES)

    def send(message: dict[str, Any]) -> None:
        writer.write(json.dumps(message).encode() + b"\n")

    logging.getLogger().addHandler(_WarningsToClient(send))
    collector = Collector(send)
    calls: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    tasks = [
        asyncio.create_task(_read_calls(reader, calls)),
        asyncio.create_task(_wait_for_owner_to_go()),
        asyncio.create_task(_answer_calls(collector, calls, writer, send)),
    ]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await collector.close()


async def _read_calls(reader: asyncio.StreamReader, calls: asyncio.Queue[dict[str, Any]]) -> None:
    with contextlib.suppress(ConnectionError):
        while line := await reader.readline():
            calls.put_nowait(json.loads(line))


async def _wait_for_owner_to_go() -> None:
    """A process that the owner forked may hold the socket; its own death is seen here."""
    owner_pid = int(os.environ[OWNER_PID_VARIABLE])
    while os.getppid() == owner_pid:
        await asyncio.sleep(_OWNER_POLL_S)


async def _answer_calls(
    collector: Collector,
    calls: asyncio.Queue[dict[str, Any]],
    writer: asyncio.StreamWriter,
    send: Callable[[dict[str, Any]], None],
) -> None:
    while True:
        call = await calls.get()
        try:
            result = await getattr(collector, call["call"])(**call["arguments"])
        except Exception as error:
            cause = _first_cause(error)
            if not isinstance(cause, RolloutError | RewardError | ValueError | OSError):
                raise
            # Into the log only, the client gets the line. Logging survives a full disk.
            _LOG.info("call '%s' failed", call["call"], exc_info=True)
            send({"id": call["id"], "error": str(cause)})
        else:
            send({"id": call["id"], "result": result})
        await writer.drain()


def _first_cause(error: BaseException) -> BaseException:
    """The first error of nested task groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def main(file_descriptor: int) -> None:
    """Run the collector on an open socket."""
    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s", level=logging.INFO)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    asyncio.run(serve(socket.socket(fileno=file_descriptor)))


if __name__ == "__main__":
    main(int(sys.argv[1]))
