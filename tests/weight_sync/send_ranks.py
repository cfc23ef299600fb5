"""What the ranks of test_send.py do, with a collector that answers by a script."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from bapo_megatron.config.rollout import WeightSyncConfig
from bapo_megatron.config.schema import OpsConfig
from bapo_megatron.errors import RolloutError
from bapo_megatron.runtime.distributed import barrier
from bapo_megatron.trainer.recompute import ProbeScorer
from bapo_megatron.weight_sync import carriers, send
from bapo_megatron.weight_sync.messages import (
    BEGIN,
    LOAD,
    PROBE,
    RESUME,
    TAKE,
    Load,
    Opened,
)
from bapo_megatron.weight_sync.send import WeightSync
from tests.distributed_launch import joined
from tests.weight_sync.ranks import build_policy, layout_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from bapo_megatron.runtime.calls import Call

MEGABYTE = 60_000
"""The model has 340 kB: several buckets."""


PAUSE_S = 0.25
"""What the stub reports for every push."""


class ScriptedSource:
    """A ``Caller`` without a collector."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.versions: list[int] = []
        self.failing_take = -1
        """Which ``take``, counted from 0, fails."""
        self.begin_error = self.load_error = self.resume_error = ""
        self.loaded: list[str] = []
        """The files that servers were told to load."""
        self.num_ranks: tuple[int, ...] = ()

    def start(self, call: Call[Any, Any], request: Any, /) -> Callable[[], Any]:
        name = call.name.removeprefix("weights.")
        number = self.calls.count(name)
        self.calls.append(name)
        if call is BEGIN:
            self.versions.append(request)
            return self._begin
        if call is RESUME:
            return self._resume
        if call is LOAD:
            return lambda: self._load(request)
        if call is PROBE:
            return lambda: ()  # no server is new
        fails = call is TAKE and number == self.failing_take
        return lambda: "server 1 is gone" if fails else None

    def _begin(self) -> Opened:
        if self.begin_error:
            raise RolloutError(self.begin_error)
        gpus = ((),) * len(self.num_ranks)
        return Opened(addresses=(), num_ranks=self.num_ranks, gpus=gpus, share_group=False)

    def _load(self, request: Load) -> None:
        self.loaded = sorted(path.name for path in request.model_dir.glob("*.safetensors"))
        if self.load_error:
            raise RolloutError(self.load_error)

    def _resume(self) -> float:
        if self.resume_error:
            raise RolloutError(self.resume_error)
        return PAUSE_S


def push_by_script(model_dir: Path, directory: Path) -> dict[str, Any]:
    """Several pushes; returns what each left behind, by name."""
    send._BYTES_PER_MB = MEGABYTE
    config = WeightSyncConfig(method="tensor", bucket_mb=1)
    found: dict[str, Any] = {}
    with joined(tensor=2) as groups:
        policy = build_policy(model_dir, groups)
        scorer = ProbeScorer(policy, OpsConfig(), layout_of(policy, groups))
        sync = WeightSync(config, directory, scorer.score, policy.groups.device)
        source = ScriptedSource() if groups.rank == 0 else None

        def push(name: str, *, again: bool = False) -> None:
            report, error = None, ""
            try:
                report = sync.push(policy, source, again=again)
            except RolloutError as caught:
                error = str(caught)
            calls = Counter(source.calls) if source is not None else Counter()
            found[name] = (report, error, calls)
            if source is not None:
                source.calls.clear()

        push("first")
        push("same version")
        push("same version again", again=True)
        policy.num_updates += 1
        if source is not None:
            source.failing_take = 2
        push("one fails")
        if source is not None:
            found["loaded"] = source.loaded
            found["weights left"] = (directory / "weights").exists()
            source.load_error = "no such directory"
        policy.num_updates += 1
        push("one fails, and no server sees the directory")
        export = mock.patch.object(policy, "export_hf", side_effect=OSError("disk full"))
        policy.num_updates += 1
        with export:
            push("one fails, and the disk is full")
        policy.num_updates += 1
        if source is not None:
            source.failing_take, source.begin_error = -1, "no server left"
        push("none left")
        if source is not None:
            source.begin_error = ""
            found["versions"] = source.versions
        push("after it")
        policy.num_updates += 1
        if source is not None:
            source.resume_error = "it cannot go on"
        push("cannot go on")
        if source is not None:
            source.resume_error, source.num_ranks = "", (1,)
        full = RuntimeError("unable to write to file </torch_1>: No space left on device (28)")
        with mock.patch.object(carriers, "shared_memory_payload", side_effect=full):
            push("no shared memory")
        barrier(groups)
    return found
