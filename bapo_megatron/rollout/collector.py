"""The collector process: ``python -m bapo_megatron.rollout.collector FD``.

It owns the run's own servers, HTTP, the rollout buffer and the graders, so that hundreds of
requests never share an interpreter lock with a trainer rank. ``client.CollectorClient`` starts it
and calls it over the socket FD (``messages``, ``weight_sync.receive``; on the wire:
``runtime.calls``). It ends when the socket closes.

It only coordinates a weight sync: ``WeightReceiver`` answers the trainer's calls, pauses and
resumes ``BatchCollector`` (or ``ColocatedServers`` around it), and updates ``EnginePool.states``.
"""

import asyncio
import contextlib
import functools
import gc
import json
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from bapo_megatron.agent.proxy import Proxy
from bapo_megatron.agent.runner import AgentRunner
from bapo_megatron.config.evaluation import eval_reward
from bapo_megatron.config.reward import RewardConfig
from bapo_megatron.config.schema import RunConfig
from bapo_megatron.data.chat import ChatRenderer, load_tokenizer
from bapo_megatron.data.dump import dump_path, write_batch, write_texts
from bapo_megatron.data.overlap import find_overlaps
from bapo_megatron.data.prompts import PromptSet, load_train_sets, log_warnings
from bapo_megatron.data.routes import routes_path, write_routes
from bapo_megatron.data.stream import PromptMixture
from bapo_megatron.engine.base import START_VERSION, Backend
from bapo_megatron.engine.load import load_kind
from bapo_megatron.engine.supervisor import ServerSupervisor
from bapo_megatron.environment.load import load_environment
from bapo_megatron.errors import RolloutError, describe_os_error, first_cause
from bapo_megatron.evaluation.results import votes_pool
from bapo_megatron.evaluation.samples import load_sets
from bapo_megatron.reward.base import RewardError
from bapo_megatron.reward.composition import Rewards, Shaping
from bapo_megatron.rollout import messages
from bapo_megatron.rollout.agents import Agents
from bapo_megatron.rollout.batching import BatchCollector
from bapo_megatron.rollout.episodes import Interaction
from bapo_megatron.rollout.evaluation import Evaluator
from bapo_megatron.rollout.grading import Grader
from bapo_megatron.rollout.pool import EnginePool
from bapo_megatron.rollout.saved import read_saved, write_saved
from bapo_megatron.rollout.scheduling import BatchPlan, Scheduler, Selection
from bapo_megatron.rollout.scoring import TeacherPool, connect_teacher
from bapo_megatron.rollout.servers import ColocatedServers, Membership
from bapo_megatron.runtime import calls
from bapo_megatron.runtime.exits import exits_noticed
from bapo_megatron.runtime.gpus import count_gpus
from bapo_megatron.runtime.processes import (
    OWNER_PID_VARIABLE,
    PrivateDirectory,
    end_with_parent,
    write_stacks_on_signal,
)
from bapo_megatron.types import EvalResult, Prompt, RolloutBatch, SampleText
from bapo_megatron.weight_sync.receive import WeightReceiver

_LOG = logging.getLogger(__name__)
_MAX_MESSAGE_BYTES = 64 << 20
_MAX_SYNCS = 5
"""Weight syncs in a row, without a response in between, because all servers lost the weights."""


class Collector:
    """Answers the calls of one client, each by the method of that name.

    Rollout and reward errors, ``ValueError`` and ``OSError`` reach the client as one line.
    """

    def __init__(self, send: Callable[[calls.Reply], None]) -> None:
        self._send = send
        self.answers = calls.Answers()
        """Calls and their methods; those of a weight sync are added by ``connect``."""
        self.answers.bind(messages.OPEN, self.open)
        self.answers.bind(messages.CONNECT, self.connect)
        self.answers.bind(messages.COLLECT, self.collect)
        self.answers.bind(messages.RELEASE_MEMORY, self.release_memory)
        self.answers.bind(messages.BEGIN_EVALUATION, self.begin_evaluation)
        self.answers.bind(messages.EVALUATE, self.evaluate)
        self.answers.bind(messages.SAVE, self.save)
        self.answers.bind(messages.SAVED, self.saved)
        self.answers.bind(messages.RESTORE, self.restore)
        self._stack = contextlib.AsyncExitStack()
        self._config: RunConfig
        self._has_weights: bool
        """Whether engines start with the weights of ``model.path``."""
        self._backend: Backend
        self._supervisor: ServerSupervisor | None = None
        self._colocated: ColocatedServers | None = None
        self._pool: EnginePool
        self._teacher: TeacherPool | None = None
        self._probe_prompts: tuple[Prompt, ...] = ()
        self._batches: BatchCollector
        """Idle if only evaluations run."""
        self._evaluator: Evaluator
        self._wire_dir: Path
        self._writing: asyncio.Task[None] | None = None
        """Writes the newest state."""
        self._num_syncs = 0
        self._num_ended = -1

    async def answer(self, request: calls.Request) -> calls.Result | calls.Failure:
        """Answer a call; an error that the user can act on becomes one line."""
        try:
            return calls.Result(request.id, await self.answers.answer(request))
        except Exception as error:
            cause = first_cause(error)
            if not isinstance(cause, RolloutError | RewardError | ValueError | OSError):
                raise
            # The traceback goes to the log, one line to the client. Logging survives a full disk.
            _LOG.info("call '%s' failed", request.call, exc_info=True)
            text = str(cause) or f"{type(cause).__name__}; the end of collector.log says where"
            if isinstance(cause, OSError) and cause.strerror:
                text = f"{cause.filename or 'the collector'}: {describe_os_error(cause)}"
            if self._supervisor is not None and isinstance(cause, RolloutError):
                failures = self._supervisor.describe_failures()
                text += f"\n{failures}" if failures and failures not in text else ""
            return calls.Failure(request.id, text)

    def interrupt(self) -> None:
        """End ``collect`` and ``evaluate`` at once, current and later calls."""
        self._evaluator.is_interrupted = self._batches.is_interrupted = True

    async def close(self) -> None:
        """Stop graders and servers, close connections, remove temporary files."""
        await self._stack.aclose()

    async def open(self, request: messages.Open) -> None:
        """Answer ``messages.OPEN``."""
        self._config = run = request.config
        # First, so that a broken reward function or environment is reported before any server
        # starts.
        rewards = eval_rewards = await self._start_rewards(eval_reward(run.reward, run.eval))
        if request.for_training and run.eval.functions is not None:
            rewards = await self._start_rewards(run.reward)
        if run.eval.sets:
            eval_rewards.require_single()
        episodes = run.rollout.episodes
        environment = load_environment(run.rollout)
        self._stack.push_async_callback(environment.close)
        await environment.open()
        self._has_weights = run.rollout.starts_servers and not request.awaits_weights
        self._start_servers(request)  # early, because servers take longest
        wire_dir = PrivateDirectory()
        self._stack.callback(wire_dir.close)
        self._wire_dir = wire_dir.path
        tokenizer = load_tokenizer(run.model.path, run.data.chat_template)
        renderer = ChatRenderer(tokenizer, run.data, run.rollout)
        train_sets: list[PromptSet] = []
        if request.for_training:
            train_sets = load_train_sets(run.data, renderer, run.reward)
        log_warnings(train_sets, renderer.warnings())
        self._probe_prompts = train_sets[0].prompts[:4] if train_sets else ()
        agents = eval_agents = None
        if run.rollout.agent is not None:
            proxy = Proxy()
            self._stack.push_async_callback(proxy.close)
            await proxy.open(has_port=run.rollout.agent_sandbox is None)
            if request.for_training:
                agents = await self._start_agents(proxy, renderer)
            if run.eval.sets:  # others, so that neither waits for the other's commands
                eval_agents = await self._start_agents(proxy, renderer)
        shaping = Shaping(run.reward, run.rollout.max_response_tokens, rewards.pool)
        distillation = run.algorithm.distillation
        if request.for_training and distillation.has_engine:
            self._teacher = TeacherPool(distillation, run.rollout, renderer.vocab_size)
        sees_groups = bool(rewards.group_names)
        plan = BatchPlan(run.seed, run.train.steps, run.algorithm.updates_per_batch)
        self._batches = BatchCollector(
            Scheduler(
                Selection(run.rollout, run.replay, plan),
                PromptMixture(train_sets, run.seed, run.data.shuffle),
                sees_groups=sees_groups,
                wants_routes=run.algorithm.router_replay == "rollout",
                top_logprobs=run.algorithm.centering.top_k,
            ),
            Interaction(environment, renderer, episodes, agents=agents),
            Grader(renderer, rewards, shaping, sees_groups=sees_groups, teacher=self._teacher),
            self._report,
        )
        sets = load_sets(run, renderer, warns=request.for_training)
        for overlap in find_overlaps(train_sets, [(s.name, s.prompts) for s in sets]):
            _LOG.warning("%s", overlap.warning())
        self._evaluator = Evaluator(
            # Not shared: each counts its errors.
            Interaction(environment, renderer, episodes, agents=eval_agents),
            Grader(renderer, eval_rewards),
            await self._stack.enter_async_context(votes_pool(run.reward)),
            sets,
            run,
            self._report,
        )

    async def _start_rewards(self, config: RewardConfig) -> Rewards:
        rewards = await self._stack.enter_async_context(Rewards(config))
        await rewards.start()
        return rewards

    async def _start_agents(self, proxy: Proxy, renderer: ChatRenderer) -> Agents:
        rollout, limit = self._config.rollout, self._config.data.max_prompt_tokens
        runner = AgentRunner(rollout, proxy)
        self._stack.push_async_callback(runner.close)
        await runner.open()
        return Agents(runner, proxy, renderer, rollout, limit)

    def _start_servers(self, request: messages.Open) -> None:
        self._backend = load_kind(self._config.rollout.engine).open(
            self._config, _device(), awaits_weights=request.awaits_weights
        )
        if self._backend.servers:
            rollout = self._config.rollout
            self._supervisor = ServerSupervisor(self._backend.servers, rollout, rollout.min_servers)
            self._stack.push_async_callback(self._supervisor.close)
            self._supervisor.start()

    async def connect(self, _: None) -> None:
        """Answer ``messages.CONNECT``."""
        rollout = self._config.rollout
        if self._teacher is not None:
            self._stack.push_async_callback(self._teacher.close)
            await self._teacher.start(await connect_teacher(self._config, _device()), self._report)
        if self._supervisor is not None:
            await self._supervisor.wait_ready(self._report)
        engines = [await self._backend.connect(address) for address in self._backend.addresses()]
        version = START_VERSION if self._has_weights else None
        self._pool = EnginePool(engines, rollout, version)
        states = self._pool.states
        self._stack.push_async_callback(states.close)
        self._stack.push_async_callback(self._evaluator.close)
        if self._config.eval.overlap and self._pool.stepper is not None:
            raise RolloutError(
                f"eval.overlap: must be false with rollout.engine={rollout.engine}, whose decode "
                "steps belong to the rollout or to the evaluation; leave it out"
            )
        self._batches.attach(self._pool)
        measuring = asyncio.create_task(self._batches.loop_lag.measure())
        self._stack.callback(measuring.cancel)
        self._stack.push_async_callback(self._batches.close)
        contexts = [prompt.token_ids for prompt in self._probe_prompts]
        if rollout.colocated:
            assert self._supervisor is not None, "colocated servers are the run's own"
            self._colocated = ColocatedServers(
                self._supervisor, self._pool, self._batches, rollout.weight_sync.timeout_s
            )
        generation = self._colocated or self._batches
        weights = WeightReceiver(states, rollout, generation, contexts)
        weights.bind_to(self.answers)
        self._stack.push_async_callback(weights.close)
        if rollout.servers_file is not None:
            interval_s = rollout.health.interval_s
            states.news.run(Membership(self._backend, self._pool, weights, interval_s).follow())
        await states.wait_for_engines(self._report)

    async def collect(self, step: int) -> Path | None:
        """Answer ``messages.COLLECT``."""
        gc.collect()  # see ``collect_garbage_rarely``
        if await self._batches.collect(step, self._hand_over) is None:
            self._count_sync()
            return None
        return self._batch_path(step)

    async def release_memory(self, _: None) -> None:
        """Answer ``messages.RELEASE_MEMORY``."""
        assert self._colocated is not None, "rollout.colocated"
        await self._colocated.release()

    async def begin_evaluation(self, request: messages.Evaluate) -> None:
        """Answer ``messages.BEGIN_EVALUATION``."""
        self._evaluator.begin(self._pool, request)

    async def evaluate(self, request: messages.Evaluate) -> list[EvalResult] | None:
        """Answer ``messages.EVALUATE``."""
        await self._batches.wait_for_ahead()
        results = await self._evaluator.complete(self._pool, request)
        if results is None:
            self._count_sync()
        return results

    async def save(self, path: Path) -> None:
        """Answer ``messages.SAVE``; write in a thread, so that generation continues."""
        await self._batches.wait_for_ahead()
        if self._writing is not None:  # the previous checkpoint failed
            await asyncio.wait([self._writing])
        writing = asyncio.to_thread(write_saved, path, self._batches.state())
        self._writing = asyncio.create_task(writing)

    async def saved(self, _: None) -> str:
        """Answer ``messages.SAVED``."""
        assert self._writing is not None, "save comes first"
        try:
            await self._writing
        except OSError as error:
            return str(error)
        return ""

    async def restore(self, path: Path) -> None:
        """Answer ``messages.RESTORE``."""
        self._batches.restore(await asyncio.to_thread(read_saved, path))

    def _count_sync(self) -> None:
        """Count losses of the weights on all servers; raise if a prompt seems to crash them."""
        if self._evaluator.is_interrupted:
            return
        if self._pool.num_ended != self._num_ended:
            self._num_syncs, self._num_ended = 0, self._pool.num_ended
        if self._num_syncs == _MAX_SYNCS:
            raise RolloutError(
                f"{_MAX_SYNCS} weight syncs in a row, each followed by the failure of every server "
                f"before any response ended: {self._pool.states.describe()}; a prompt or a setting "
                "seems to crash them: see their logs, correct it (rollout.server, data) and "
                "continue with resume=true"
            )
        self._num_syncs += 1

    async def _hand_over(self, batch: RolloutBatch, texts: Sequence[SampleText]) -> None:
        """Write a batch for the trainer, in a thread; release GPU memory for training."""
        path, rollout = self._batch_path(batch.step), self._config.rollout
        rollouts = self._config.run_dir / "rollouts"
        if rollout.dump:  # first, so that every dump has its texts
            await asyncio.to_thread(write_texts, path, batch.step, texts)
        if self._batches.scheduler.wants_routes:
            # Read by ranks on all nodes, so never in ``_wire_dir``.
            await asyncio.to_thread(
                write_routes, routes_path(rollouts, batch.step), batch.sequences
            )
        await asyncio.to_thread(write_batch, path, batch)
        with contextlib.suppress(OSError):  # the next step tries again
            if rollout.dump and rollout.keep_dumps:
                await asyncio.to_thread(remove_dumps, rollouts, batch.step - rollout.keep_dumps)
            elif not rollout.dump:
                await asyncio.to_thread(_remove_steps, rollouts / "routes", batch.step - 1)
        if self._colocated is not None:
            await self._evaluator.finish()  # needs the servers
            await self._colocated.release()

    def _batch_path(self, step: int) -> Path:
        rollouts = self._config.run_dir / "rollouts"
        return dump_path(rollouts if self._config.rollout.dump else self._wire_dir, step)

    def _report(self, text: str) -> None:
        self._send(calls.Progress(text))


def _device() -> str:
    return "cuda" if count_gpus() else "cpu"


def remove_dumps(directory: Path, last_step: int) -> None:
    """Remove the dumps of steps up to ``last_step``, each before its texts and routes."""
    for folder in (directory, directory / "texts", directory / "routes"):
        _remove_steps(folder, last_step)


def _remove_steps(folder: Path, last_step: int) -> None:
    for path in folder.glob("step_*.*"):
        step = path.stem.removeprefix("step_")
        is_ours = path.suffix in (".parquet", ".safetensors") and step.isdecimal()
        if is_ours and int(step) <= last_step:
            path.unlink()


class _WarningsToClient(logging.Handler):
    """Sends warnings to the client, whose output the user sees."""

    def __init__(self, send: Callable[[calls.Reply], None]) -> None:
        super().__init__(logging.WARNING)
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        self._send(calls.Notice(record.getMessage()))


async def serve(connection: socket.socket) -> None:
    """Answer calls, one at a time, until the client is gone."""
    reader, writer = await asyncio.open_connection(sock=connection, limit=_MAX_MESSAGE_BYTES)
    send = functools.partial(_send, writer)
    logging.getLogger().addHandler(_WarningsToClient(send))
    collector = Collector(send)
    requests: asyncio.Queue[calls.Request] = asyncio.Queue()

    async def read_requests() -> None:
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                request = calls.decode(calls.Request, json.loads(line))
                if request.call == messages.INTERRUPT.name:
                    collector.interrupt()
                else:
                    requests.put_nowait(request)

    async def answer_requests() -> None:
        while True:
            send(await collector.answer(await requests.get()))
            with contextlib.suppress(ConnectionError):  # the client is gone
                await writer.drain()

    try:
        async with asyncio.TaskGroup() as tasks:
            answering = tasks.create_task(answer_requests())
            await read_requests()
            answering.cancel()
    finally:
        await collector.close()


def _send(writer: asyncio.StreamWriter, message: calls.Reply) -> None:
    if not writer.is_closing():  # else asyncio would warn, and the warning would be sent
        writer.write(calls.encode(message))


def collect_garbage_rarely() -> None:
    """Keep garbage collection out of the event loop; call ``gc.collect`` between batches.

    By default full collections take up to 1.5 s each (docs/benchmarks/connections_cpu_202611.md).
    """
    gc.freeze()
    gc.set_threshold(50_000, 50, 50)


def main(file_descriptor: int) -> None:
    """Run the collector on an open socket."""
    write_stacks_on_signal()
    # A signal, because forks of a killed owner may still hold the socket open.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    end_with_parent(signal.SIGINT)
    if os.getppid() != int(os.environ[OWNER_PID_VARIABLE]):
        return
    _, max_files = resource.getrlimit(resource.RLIMIT_NOFILE)  # a request needs a connection
    resource.setrlimit(resource.RLIMIT_NOFILE, (max_files, max_files))
    collect_garbage_rarely()
    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s", level=logging.INFO)
    for number in (signal.SIGTERM, signal.SIGUSR1):  # sent to a whole Slurm step
        signal.signal(number, lambda *_: None)
    with exits_noticed(_LOG.error):
        asyncio.run(serve(socket.socket(fileno=file_descriptor)))


if __name__ == "__main__":
    main(int(sys.argv[1]))
