"""The collector process: ``python -m bapo_megatron.rollout.collector FD``.

It owns the run's own servers, HTTP, the rollout buffer and the graders, so that hundreds of
requests never share an interpreter lock with a trainer rank. ``collector_client.CollectorClient``
starts it and calls it over the socket FD (``messages``, ``weight_sync.messages``; on the wire:
``calls``). It ends when the socket closes.

Ends a run whose servers fail again and again before anything is finished.

A prompt that crashes its server is sent again after each restart, once the trainer has pushed the
weights; without a limit that goes on for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import resource
import socket
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from bapo_megatron.calls import (
    Answers,
    Failure,
    Notice,
    Progress,
    Result,
    decode_request,
    encode,
)
from bapo_megatron.config.evaluation import eval_reward
from bapo_megatron.data.chat import load_tokenizer, make_renderer
from bapo_megatron.data.overlap import log_overlaps
from bapo_megatron.data.prompts import load_train_sets, log_warnings
from bapo_megatron.data.stream import PromptMixture
from bapo_megatron.engine.load import load_kind
from bapo_megatron.engine.supervisor import ServerSupervisor
from bapo_megatron.environment.load import load_environment
from bapo_megatron.errors import RolloutError
from bapo_megatron.evaluation.settings import load_sets
from bapo_megatron.evaluation.summary import votes_pool
from bapo_megatron.processes import OWNER_PID_VARIABLE
from bapo_megatron.reward.base import RewardError
from bapo_megatron.reward.composition import Rewards
from bapo_megatron.reward.shaping import Shaping
from bapo_megatron.rollout.batching import BatchCollector
from bapo_megatron.rollout.colocated import ColocatedServers
from bapo_megatron.rollout.episodes import Interaction
from bapo_megatron.rollout.evaluation import Evaluator
from bapo_megatron.rollout.grading import Grader
from bapo_megatron.rollout.messages import (
    COLLECT,
    CONNECT,
    EVALUATE,
    OPEN,
    RELEASE_MEMORY,
    RESTORE,
    STATE,
    SYNC_WEIGHTS,
    BatchFile,
    Collect,
    Collected,
    Connect,
    Evaluate,
    Evaluated,
    GetState,
    Open,
    ReleaseMemory,
    SourceState,
    SyncWeights,
    first_cause,
)
from bapo_megatron.rollout.pool import EnginePool
from bapo_megatron.rollout.replay import write_samples, write_timeline
from bapo_megatron.rollout.selection import BatchPlan
from bapo_megatron.rollout.timeline import NullTimeline, Timeline
from bapo_megatron.weight_sync.messages import Load, Resume
from bapo_megatron.weight_sync.receive import WeightReceiver

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bapo_megatron.calls import Reply, Request
    from bapo_megatron.config.reward import RewardConfig
    from bapo_megatron.config.schema import RunConfig
    from bapo_megatron.engine.base import Backend
    from bapo_megatron.environment.base import Environment
    from bapo_megatron.rollout.pooled_engine import PooledEngine
    from bapo_megatron.types import Prompt, RolloutBatch, SampleText


MOST_PUSHES = 5
"""In a row, of weights that servers have lost, without a result in between."""


class PushLimit:
    """Counts how often the trainer is asked for weights that it has pushed before."""

    def __init__(self) -> None:
        self._num_pushes = 0
        self._num_results = -1

    def count(self, num_results: int, servers: str, logs: str) -> None:
        """The trainer is asked once more.

        Args:
            num_results: Responses, also of evaluations, that were finished since the start.
            servers: Which servers there are, and why they lack the weights, for people.
            logs: Where they say why they failed.

        Raises:
            RolloutError: It was asked ``MOST_PUSHES`` times since the last result.
        """
        if num_results != self._num_results:
            self._num_pushes, self._num_results = 0, num_results
        if self._num_pushes == MOST_PUSHES:
            raise RolloutError(
                f"the weights were pushed {MOST_PUSHES} times in a row, and each time every server "
                f"failed before anything was finished: {servers}; a prompt or a setting seems to "
                f"crash them: see {logs}, correct it (rollout.server, data) and continue with "
                "resume=true"
            )
        self._num_pushes += 1


_LOG = logging.getLogger(__name__)
_LONGEST_MESSAGE_BYTES = 4 << 30
"""Limit of one line: a restored buffer of unfinished samples can be large."""

_OWNER_POLL_S = 1.0
_NEEDS_POLL_S = 0.5
_NUM_PROBE_PROMPTS = 4


class Collector:
    """Answers the calls of one client."""

    def __init__(self, send: Callable[[Reply], None]) -> None:
        """Wait for ``open``.

        Args:
            send: Takes a message for the client.
        """
        self._send = send
        self.answers = Answers()
        """The calls that can be answered: those of a weight sync after ``connect``."""
        self.answers.bind(OPEN, self.open)
        self.answers.bind(CONNECT, self.connect)
        self.answers.bind(SYNC_WEIGHTS, self.sync_weights)
        self.answers.bind(COLLECT, self.collect)
        self.answers.bind(RELEASE_MEMORY, self.release_memory)
        self.answers.bind(EVALUATE, self.evaluate)
        self.answers.bind(STATE, self.state)
        self.answers.bind(RESTORE, self.restore)
        self.timeline: Timeline = NullTimeline()
        """Has every call as a slice, and every request."""
        self._stack = contextlib.AsyncExitStack()
        self._backend: Backend
        self._supervisor: ServerSupervisor | None = None
        self._colocated: ColocatedServers | None = None
        self._pool: EnginePool | None = None
        self._config: RunConfig
        self._probe_prompts: tuple[Prompt, ...] = ()
        self._batches: BatchCollector | None = None
        self._evaluator: Evaluator
        self._pushes = PushLimit()
        self._weights: WeightReceiver[PooledEngine]
        self._wire_dir: Path

    async def close(self) -> None:
        """End graders and servers, close connections, remove temporary files."""
        await self._stack.aclose()

    async def open(self, request: Open) -> None:
        """Start the servers, unless others are configured, and load tokenizer and prompts.

        Raises:
            RolloutError: The port of a server is in use, or the environment cannot be loaded.
            RewardError: A reward function cannot be loaded.
            ValueError: A data row or the tokenizer cannot be used.
            OSError: A file cannot be read.
        """
        self._config = run = request.config
        for_training = request.for_training
        # First, because a reward function that cannot be loaded should cost no server's start.
        rewards = eval_rewards = await self._start_rewards(eval_reward(run.reward, run.eval))
        if for_training and run.eval.functions is not None:
            rewards = await self._start_rewards(run.reward)
        if run.eval.sets:
            eval_rewards.require_single()
        environment = await self._start_environment()  # first for the same reason
        if run.rollout.timeline:
            self.timeline = Timeline()
        self._backend = load_kind(run.rollout.engine).open(run, request.device)
        if self._backend.servers:  # early, because they take longest
            self._supervisor = ServerSupervisor(self._backend.servers, run.rollout)
            self._stack.push_async_callback(self._supervisor.close)
            self._supervisor.start()
        self._wire_dir = Path(
            self._stack.enter_context(tempfile.TemporaryDirectory(prefix="bapo-megatron-"))
        )
        tokenizer = load_tokenizer(run.model.path, run.data.chat_template)
        renderer = make_renderer(tokenizer, run.data)
        limits = run.rollout.episodes
        grader = Grader(
            tokenizer,
            rewards,
            Shaping(run.reward, run.rollout.max_response_tokens, rewards.pool),
            sees_groups=rewards.sees_groups,
        )
        train_sets = load_train_sets(run.data, renderer) if for_training else []
        log_warnings(train_sets)
        if for_training:
            self._probe_prompts = train_sets[0].prompts[:_NUM_PROBE_PROMPTS]
            stream = PromptMixture(train_sets, run.seed, run.data.shuffle)
            plan = BatchPlan(run.seed, run.train.steps, run.algorithm.updates_per_batch)
            self._batches = BatchCollector(
                Interaction(environment, renderer, limits),
                grader,
                stream,
                run.rollout,
                run.replay,
                plan,
                self._report,
            )
        sets = load_sets(run.eval, renderer, run.data.max_prompt_tokens, warns=for_training)
        log_overlaps(train_sets, [(each.name, each.prompts) for each in sets])
        votes = await self._stack.enter_async_context(votes_pool(run.reward))
        self._evaluator = Evaluator(
            Interaction(environment, renderer, limits),  # its own: each counts its errors
            Grader(tokenizer, eval_rewards),
            votes,
            sets,
            run,
            self._report,
        )

    async def _start_rewards(self, config: RewardConfig) -> Rewards:
        rewards = await self._stack.enter_async_context(Rewards(config))
        await rewards.start()
        return rewards

    async def _start_environment(self) -> Environment:
        rollout = self._config.rollout
        environment = load_environment(rollout.environment, rollout.episodes)
        self._stack.push_async_callback(environment.close)
        await environment.open()
        return environment

    async def connect(self, request: Connect) -> None:
        """Reach every engine, and check it before training.

        Raises:
            RolloutError: A server does not start or answer, or an engine cannot be used.
        """
        rollout = self._config.rollout
        if self._supervisor is not None:
            await self._supervisor.wait_ready(self._report)
        engines = await self._backend.connect()
        self._pool = EnginePool(engines, rollout, request.version, self.timeline)
        self._stack.push_async_callback(self._pool.close)
        if self._batches is not None:
            self._batches.attach(self._pool)
            self._stack.push_async_callback(self._batches.close)
        contexts = [prompt.token_ids for prompt in self._probe_prompts]
        await self._pool.states.wait_for_engines(contexts)
        if rollout.colocated:
            assert self._supervisor is not None, "colocated servers are the run's own"
            self._colocated = ColocatedServers(
                self._supervisor, self._pool, self._batches, rollout.weight_sync.timeout_s
            )
        self._weights = WeightReceiver(
            self._pool.states, rollout, self._colocated or self._batches, contexts
        )
        self._weights.bind_to(self.answers)
        self._stack.push_async_callback(self._weights.close)

    async def sync_weights(self, request: SyncWeights) -> None:
        """Load new weights into every server.

        Raises:
            RolloutError: No server could load them.
        """
        await self._weights.load(Load(model_dir=request.model_dir, version=request.version))
        await self._weights.resume(Resume())

    async def collect(self, request: Collect) -> Collected:
        """Collect a batch into a file.

        Raises:
            RolloutError: Generation failed, or the file cannot be written, or servers lose the
                weights again and again.
        """
        assert self._batches is not None, "opened for training"
        if await self._batches.collect(request.step, self._hand_over) is None:
            self._count_push()
            return Collected(batch=None)
        path, keep = self._batch_path(request.step), self._config.rollout.dump
        return Collected(batch=BatchFile(path=path, keep=keep))

    async def release_memory(self, _: ReleaseMemory) -> None:
        """Have colocated servers give their memory away until the next weight sync.

        Raises:
            RolloutError: One of them is busy.
        """
        assert self._colocated is not None, "rollout.colocated"
        await self._colocated.release()

    async def evaluate(self, request: Evaluate) -> Evaluated:
        """Score the evaluation sets.

        Raises:
            RolloutError: Generation failed, or a file cannot be written.
        """
        assert self._pool is not None, "connect comes first"
        if self._batches is not None:
            await self._batches.wait_for_ahead()
        num_lost = self._pool.num_lost_requests
        evaluation = asyncio.create_task(
            self._evaluator.evaluate(
                self._pool, request.moment, request.weights, resume=request.resume
            )
        )
        try:
            while not evaluation.done():
                if self._pool.needs_weights:
                    self._count_push()
                    return Evaluated(results=None)
                await asyncio.wait([evaluation], timeout=_NEEDS_POLL_S)
            return Evaluated(results=tuple(evaluation.result()))
        finally:
            evaluation.cancel()
            await asyncio.gather(evaluation, return_exceptions=True)
            if self._batches is not None:
                self._batches.leave_out_lost(self._pool.num_lost_requests - num_lost)

    async def state(self, _: GetState) -> SourceState:
        """Tell data position and buffer."""
        assert self._batches is not None, "opened for training"
        await self._batches.wait_for_ahead()
        return SourceState(values=self._batches.state())

    async def restore(self, state: SourceState) -> None:
        """Continue from a ``state``.

        Raises:
            ValueError: It does not fit data and settings.
        """
        assert self._batches is not None, "opened for training"
        self._batches.restore(state.values)

    def _count_push(self) -> None:
        """The trainer is asked for the newest weights, because no server holds them any more.

        Raises:
            RolloutError: It was asked too often, without a result in between.
        """
        assert self._pool is not None, "connect comes first"
        num_samples = 0 if self._batches is None else self._batches.finished_samples
        own = () if self._supervisor is None else self._supervisor.servers
        logs = ", ".join(str(server.log_path) for server in own) or "their logs"
        num_samples += self._evaluator.num_samples
        self._pushes.count(num_samples, self._pool.states.describe(), logs)

    def lost_servers(self, error: BaseException) -> str:
        """What belongs behind ``error``: why own servers do not come back, if that is its cause."""
        if self._supervisor is None or not isinstance(error, RolloutError):
            return ""
        failures = self._supervisor.describe_failures()
        return f"\n{failures}" if failures and failures not in str(error) else ""

    async def _hand_over(self, batch: RolloutBatch, texts: Sequence[SampleText]) -> None:
        """Write a batch where the trainer finds it, and what else belongs to its step."""
        kept_texts = texts if self._config.rollout.dump else None
        await write_samples(self._batch_path(batch.step), batch, kept_texts)
        if self._config.rollout.timeline:
            content = self.timeline.render()
            self.timeline.clear()  # at once: what ends during the write belongs to the next file
            path = self._config.run_dir / "timeline" / f"step_{batch.step:06d}.json"
            await write_timeline(path, batch.step, content)
        if self._colocated is not None:
            await self._colocated.release()

    def _batch_path(self, step: int) -> Path:
        keep = self._config.rollout.dump
        folder = self._config.run_dir / "rollouts" if keep else self._wire_dir
        return folder / f"step_{step:06d}.parquet"

    def _report(self, text: str) -> None:
        self._send(Progress(text))


class _WarningsToClient(logging.Handler):
    """Shows warnings where the user looks, not only in the collector's log."""

    def __init__(self, send: Callable[[Reply], None]) -> None:
        super().__init__(logging.WARNING)
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        self._send(Notice(record.getMessage()))


async def serve(connection: socket.socket) -> None:
    """Answer calls, one after the other, until the client is gone."""
    reader, writer = await asyncio.open_connection(sock=connection, limit=_LONGEST_MESSAGE_BYTES)
    send = functools.partial(_send, writer)
    logging.getLogger().addHandler(_WarningsToClient(send))
    collector = Collector(send)
    calls: asyncio.Queue[Request] = asyncio.Queue()
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


def _send(writer: asyncio.StreamWriter, message: Reply) -> None:
    if not writer.is_closing():  # else asyncio would warn, and the warning would be sent
        writer.write(encode(message))


async def _read_calls(reader: asyncio.StreamReader, calls: asyncio.Queue[Request]) -> None:
    with contextlib.suppress(ConnectionError):
        while line := await reader.readline():
            calls.put_nowait(decode_request(line))


async def _wait_for_owner_to_go() -> None:
    """A process that the owner forked may hold the socket; its own death is seen here."""
    owner_pid = int(os.environ[OWNER_PID_VARIABLE])
    while os.getppid() == owner_pid:
        await asyncio.sleep(_OWNER_POLL_S)


async def _answer_calls(
    collector: Collector,
    calls: asyncio.Queue[Request],
    writer: asyncio.StreamWriter,
    send: Callable[[Reply], None],
) -> None:
    while True:
        request = await calls.get()
        try:
            with collector.timeline.span(request.call):
                result = await collector.answers.answer(request)
        except Exception as error:
            cause = first_cause(error)
            if not isinstance(cause, RolloutError | RewardError | ValueError | OSError):
                raise
            # Into the log only, the client gets the line. Logging survives a full disk.
            _LOG.info("call '%s' failed", request.call, exc_info=True)
            text = str(cause) or f"{type(cause).__name__}; the end of collector.log says where"
            send(Failure(request.id, f"{text}{collector.lost_servers(cause)}"))
        else:
            send(Result(request.id, result))
        with contextlib.suppress(ConnectionError):  # the client is gone: ``serve`` ends
            await writer.drain()


def main(file_descriptor: int) -> None:
    """Run the collector on an open socket."""
    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s", level=logging.INFO)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))  # a socket per request
    asyncio.run(serve(socket.socket(fileno=file_descriptor)))


if __name__ == "__main__":
    main(int(sys.argv[1]))
