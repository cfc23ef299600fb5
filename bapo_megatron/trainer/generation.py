"""Rank 0's rollout source as all ranks use it: batches, evaluations, and pushes of weights.

Rank 0 asks the source and tells the others what to do next. Nobody waits for a server inside a
collective that has a time limit, and a run that is to stop is not kept waiting.
"""

from collections.abc import Callable

import torch

from bapo_megatron.config.schema import RunConfig
from bapo_megatron.data.columns import DumpError
from bapo_megatron.data.dump import decode_batch
from bapo_megatron.errors import RolloutError, StoppedError
from bapo_megatron.policy.megatron_policy import MegatronPolicy
from bapo_megatron.rollout.messages import RolloutSource
from bapo_megatron.runtime.distributed import (
    ProcessGroups,
    any_rank,
    barrier,
    broadcast_answer,
    broadcast_buffer,
)
from bapo_megatron.telemetry.console import Pulse
from bapo_megatron.trainer.stopping import Stopping
from bapo_megatron.types import EncodedBatch, EvalResult, RolloutBatch
from bapo_megatron.weight_sync.send import SyncReport, WeightSync

# What rank 0 has all ranks do next; the first byte of what it broadcasts.
_BATCH, _DONE, _PUSH_WEIGHTS, _FAILED, _STOPPED = b"B", b"D", b"W", b"F", b"S"

_MAX_SILENCE_S = 5.0
"""Rank 0 tells the others at least this often that it still waits for its source, and learns
whether one of them was asked to stop."""


class Generation:
    """What generates for a training run, on one rank; all but ``close`` are collectives."""

    def __init__(
        self,
        config: RunConfig,
        groups: ProcessGroups,
        policy: MegatronPolicy,
        source: RolloutSource | None,
        sync: WeightSync,
        stopping: Stopping,
        pulse: Pulse,
    ) -> None:
        """Ask nothing yet; ``source`` is given on rank 0 only."""
        self.source = source
        self.failure: RolloutError | OSError | StoppedError | None = None
        """Why the run ends as soon as everything is saved; known to all ranks, and nothing is
        asked any more."""
        self.pushes: list[SyncReport] = []
        """On rank 0."""
        self.has_servers = config.replay.dumps is None
        """Not a replay."""
        self._is_colocated = config.rollout.colocated
        self._groups, self._policy, self._sync = groups, policy, sync
        self._stopping, self._pulse = stopping, pulse
        self._wait_on_s = min(_MAX_SILENCE_S, config.parallel.timeout_s / 4)

    def wait_ready(self) -> None:
        """Wait until what generates can be given weights."""

        def wait(source: RolloutSource) -> bytes:
            source.wait_ready()
            return _DONE

        self._ask(wait)

    def next_batch(self, step: int) -> RolloutBatch | None:
        """Collect the batch of ``step`` on rank 0 and give it to every rank, in the bytes it has.

        Where no server holds the newest weights any more, all ranks push them again. None: see
        ``failure``.
        """
        own: EncodedBatch | None = None

        def collect(source: RolloutSource) -> bytes:
            nonlocal own
            own = source.collect(step)
            return _PUSH_WEIGHTS if own is None else _BATCH + own.name.encode()

        while self.failure is None:
            kind, name = self._ask(collect)
            if kind == _BATCH:
                content = broadcast_buffer(None if own is None else own.content, self._groups)
                try:
                    return self._decode(EncodedBatch(name.decode(), content), step)
                except DumpError as error:  # on all ranks alike
                    self.failure = RolloutError(str(error))
            if kind == _PUSH_WEIGHTS:
                self.push_weights(again=True)
        return None

    def _decode(self, encoded: EncodedBatch, step: int) -> RolloutBatch:
        batch = decode_batch(encoded, self._policy.hf.vocab_size)
        if batch.step != step:
            raise DumpError(
                f"{encoded.name}: holds step {batch.step}, not {step}; give the file its name back"
            )
        return batch

    def push_weights(self, *, again: bool = False) -> None:
        """Give the current weights to the servers, if there are any; see ``failure``.

        With ``again`` servers get them also where they have them already.
        """
        if not self.has_servers or self.failure is not None:
            return
        if self._is_colocated:
            # What the allocator of any rank keeps is missing where servers take their memory again.
            torch.cuda.empty_cache()
            barrier(self._groups)
            again = True  # released weights are lost, whether or not there are newer ones
        try:
            collector = None if self.source is None else self.source.weights
            report = self._sync.push(self._policy, collector, again=again)
        except (RolloutError, OSError) as error:
            self.failure = error
        else:
            if report is not None:
                self.pushes.append(report)

    def begin_evaluation(self, step: int) -> bool:
        """Have the evaluation run beside the next batch; return whether it does."""

        def begin(source: RolloutSource) -> bytes:
            source.begin_evaluation(step)
            return _DONE

        return self.failure is None and self._ask(begin)[0] == _DONE

    def evaluate(self, step: int, *, resume: bool = False, pushes: bool = True) -> list[EvalResult]:
        """Evaluate on rank 0, which gets the results.

        Where no server holds the weights any more, all ranks push them, or, without ``pushes``, it
        is given up.
        """
        found: list[EvalResult] = []

        def evaluate(source: RolloutSource) -> bytes:
            results = source.evaluate(step, resume=resume)
            found.extend(results or [])
            return _PUSH_WEIGHTS if results is None else _DONE

        while self.failure is None and self._ask(evaluate)[0] == _PUSH_WEIGHTS and pushes:
            self.push_weights(again=True)
        return found

    def agree_to_stop(self) -> StoppedError | None:
        """Return why the run is to stop, if any rank knows."""
        if self.source is None:
            self._pulse.beat()
        return self._stopping.agree(lambda flag: any_rank(flag, self._groups.control))

    def close(self) -> None:
        """Stop what generates, leave the weights' group, delete weights pushed by disk.

        The order matters: servers that are gone cannot hold rank 0 in a collective.
        """
        if self.source is not None:
            self.source.close()
            self._sync.close()

    def _ask(self, ask: Callable[[RolloutSource], bytes]) -> tuple[bytes, bytes]:
        """Return what all ranks do next, and what belongs to it, from the source of rank 0."""
        source, answer = self.source, None
        if source is not None:

            def answer() -> bytes:
                try:
                    reply = ask(source) if self._stopping.error() is None else _PUSH_WEIGHTS
                    # A call that was interrupted returns as if weights were missing.
                    if reply == _PUSH_WEIGHTS and (stopped := self._stopping.error()) is not None:
                        raise stopped
                    return reply
                except (RolloutError, StoppedError) as error:
                    self.failure = error
                    kind = _FAILED if isinstance(error, RolloutError) else _STOPPED
                    return kind + str(error).encode()

        message = broadcast_answer(answer, self._groups, self._wait_on_s, self.agree_to_stop)
        kind, content = message[:1], message[1:]
        if kind == _FAILED and self.failure is None:
            self.failure = RolloutError(f"rank 0: {content.decode()}")
        if kind == _STOPPED and self.failure is None:
            self.failure = StoppedError(content.decode())
        return kind, content
