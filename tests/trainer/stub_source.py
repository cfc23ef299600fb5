"""A source of batches for a run without servers: dumps, and whatever a script wants to happen."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bapo_megatron.data.dump import read_encoded
from bapo_megatron.weight_sync.receive import Opened, Resumed
from tests.evaluation.results import result

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bapo_megatron.runtime.calls import Call
    from bapo_megatron.types import EncodedBatch, EvalResult

PAUSE_S = 0.25
"""What the stub reports for every weight sync."""


@dataclass
class StubSource:
    """A ``RolloutSource`` without servers."""

    dumps: Path
    on_collect: dict[int, Callable[[StubSource], bool]] = field(default_factory=dict)
    """By step: called before its batch is given; True if it lacks weights this time."""
    calls: list[str] = field(default_factory=list)
    num_samples: int = 0
    """Part of the state; grows with every collection, also with one that fails."""
    right: dict[int, int] = field(default_factory=dict)
    """By step: how many of eight problems an evaluation finds solved."""
    at: Callable[[str], bool] = lambda _: False
    """Told what begins; returns whether that is interrupted."""
    loses_weights_in: int = 0
    """Step whose evaluation beside the next one finds no server with its weights any more."""

    def collect(self, step: int) -> EncodedBatch | None:
        self.calls.append("collect")
        self.num_samples += 100
        if self.at(f"rollout {step}"):
            return None
        if step in self.on_collect and self.on_collect[step](self):
            return None
        return read_encoded(self.dumps / f"step_{step:06d}.parquet")

    @property
    def weights(self) -> StubSource:
        return self

    def start(self, call: Call[Any, Any], request: Any, /) -> Callable[[], Any]:
        name = call.name.removeprefix("weights.")
        self.calls.append(name)
        self.at(name)
        answers: dict[str, Any] = {
            "probe": (),  # no server is new
            "begin": Opened(addresses=(), num_ranks=(), gpus=(), share_group=False),
            "resume": Resumed(pause_s=PAUSE_S, difference=None),
        }
        return lambda: answers.get(name)

    def wait_ready(self) -> None: ...

    def release_memory(self) -> None: ...

    def begin_evaluation(self, step: int) -> None:
        self.calls.append(f"begin evaluation {step}")

    def evaluate(self, step: int, *, resume: bool) -> list[EvalResult] | None:
        self.calls.append(f"evaluate {step}{' again' * resume}")
        if self.at(f"evaluation {step}"):
            return None
        if f"begin evaluation {step}" in self.calls and step == self.loses_weights_in:
            return None
        if step not in self.right:
            return []
        answers = ["2"] * self.right[step] + ["3"] * (8 - self.right[step])
        return [result({f"sums:{row}": [answer] for row, answer in enumerate(answers)})]

    def save(self, path: Path) -> Callable[[], None]:
        self.at("save")
        path.write_text(json.dumps({"num_samples": self.num_samples}))
        return lambda: None

    def restore(self, path: Path) -> None:
        self.num_samples = json.loads(path.read_text())["num_samples"]

    def close(self) -> None:
        self.calls.append("close")
