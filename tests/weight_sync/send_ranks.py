"""What the ranks of test_send.py do, with a collector that answers by a script."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from bapo_megatron.config.rollout import WeightSyncConfig
from bapo_megatron.config.schema import OpsConfig
from bapo_megatron.errors import RolloutError
from bapo_megatron.runtime.calls import Call
from bapo_megatron.runtime.distributed import barrier
from bapo_megatron.trainer.recompute import score_probes
from bapo_megatron.weight_sync import send
from bapo_megatron.weight_sync.receive import BEGIN, PROBE, RECEIVE, RESUME, Opened, Resumed
from bapo_megatron.weight_sync.send import WeightSync
from tests.distributed_launch import joined
from tests.weight_sync.ranks import build_policy, shape_of

MEGABYTE = 60_000
"""The model has 340 kB: several buckets."""
PAUSE_S = 0.25
"""What the stub reports for every weight sync."""


class ScriptedSource:
    """A ``Caller`` without a collector."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.versions: list[int] = []
        self.failing_receive = -1
        """Which ``receive``, counted from 0, fails."""
        self.begin_error = self.resume_error = ""
        self.num_ranks: tuple[int, ...] = ()

    def start(self, call: Call[Any, Any], request: Any, /) -> Callable[[], Any]:
        name = call.name.removeprefix("weights.")
        number = self.calls.count(name)
        self.calls.append(name)
        if call is BEGIN:
            self.versions.append(request)
            return lambda: self._begin(is_first=number == 0)
        if call is RESUME:
            return self._resume
        if call is PROBE:
            return lambda: ()  # no server is new
        fails = call is RECEIVE and number == self.failing_receive
        return lambda: "server 1 is gone" if fails else None

    def _begin(self, *, is_first: bool) -> Opened:
        if self.begin_error and (self.failing_receive < 0 or not is_first):
            raise RolloutError(self.begin_error)
        gpus = ((),) * len(self.num_ranks)
        return Opened(addresses=(), num_ranks=self.num_ranks, gpus=gpus, share_group=False)

    def _resume(self) -> Resumed:
        if self.resume_error:
            raise RolloutError(self.resume_error)
        return Resumed(pause_s=PAUSE_S, difference=None)


def sync_by_script(model_dir: Path, directory: Path) -> dict[str, Any]:
    """Several weight syncs; returns what each left behind, by name."""
    send._BYTES_PER_MB = MEGABYTE
    config = WeightSyncConfig(method="tensor", bucket_mb=1)
    outcomes: dict[str, Any] = {}
    with joined(tensor=2) as groups:
        state = build_policy(model_dir, groups)
        score = partial(score_probes, state.model, OpsConfig(), shape_of(state, groups))
        sync = WeightSync(config, directory, score, state.model.groups.device)
        source = ScriptedSource() if groups.rank == 0 else None

        def run(name: str, *, again: bool = False, **script: Any) -> None:
            report, error = None, ""
            if source is not None:
                vars(source).update(script)
            try:
                report = sync.sync(state, source, again=again)
            except RolloutError as caught:
                error = str(caught)
            calls = Counter(source.calls) if source is not None else Counter()
            outcomes[name] = (report, error, calls)
            if source is not None:
                source.calls.clear()

        run("first")
        run("same version")
        run("same version again", again=True)
        state.num_updates += 1
        run("one fails", failing_receive=2)
        state.num_updates += 1
        run("none left", failing_receive=-1, begin_error="no server left")
        run("none left after a failure", failing_receive=0, begin_error="no server left")
        run("after it", failing_receive=-1, begin_error="")
        state.num_updates += 1
        run("cannot go on", resume_error="it cannot go on")
        full = RuntimeError("unable to write to file </torch_1>: No space left on device (28)")
        with mock.patch.object(send, "shared_memory_payload", side_effect=full):
            run("no shared memory", resume_error="", num_ranks=(1,))
        if source is not None:
            outcomes["versions"] = source.versions
        disk = WeightSync(WeightSyncConfig(method="disk"), directory, score, groups.device)
        with mock.patch.object(state.model, "export_hf", wraps=state.model.export_hf) as export:
            for again in (False, True):
                disk.sync(state, source, again=again)
        outcomes["exports"] = export.call_count
        barrier(groups)
    return outcomes
