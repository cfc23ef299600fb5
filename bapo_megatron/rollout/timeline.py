"""Every request of a step as a timeline for chrome://tracing or https://ui.perfetto.dev.

A request waits in the queue, is sent to a server, which first reads its tokens (prefill) and then
samples (decode). One that is lost with its server goes back to the queue. The file has a row of
lanes for the queue and for each server; what overlaps lies on different lanes.
"""

import heapq
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

_STEP_ROW = "step"
_QUEUE_ROW = "queue"
_UNREMARKABLE = ("stop", "length", "sent", "running", "done")
"""Ends that leave a slice's name as it is; others are shown, since colours go by name."""


@dataclass(slots=True)
class _Slice:
    """A named stretch of time."""

    name: str
    start_s: float
    args: dict[str, Any]
    end_s: float = math.inf
    """Infinite while it is open."""


@dataclass(slots=True)
class _Block:
    """Adjacent slices that share a lane of a row, such as the prefill and decode of a request."""

    row: str
    slices: list[_Slice]

    @property
    def span_s(self) -> tuple[float, float]:
        return self.slices[0].start_s, self.slices[-1].end_s

    def end(self, now_s: float, reason: str, **args: Any) -> None:
        """End the open slice."""
        last = self.slices[-1]
        assert last.end_s == math.inf, f"{last.name} has ended before"
        last.end_s = now_s
        last.args |= {"end": reason, **args}
        if reason not in _UNREMARKABLE:
            last.name += f", {reason}"


class Timeline:
    """Records since the last ``clear``; its memory grows with the requests of that time only."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, *, is_kept: bool = True
    ) -> None:
        """Count time from now on ``clock``; keep nothing unless ``is_kept``."""
        self.clock = clock
        self.blocks: list[_Block] = []
        self._is_kept = is_kept
        self._origin_s = clock()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Record the block as a slice of the row ``step``: a pause, a weight sync."""
        block = self.begin(_STEP_ROW, name)
        try:
            yield
        except BaseException:
            block.end(self.clock(), "failed")
            raise
        block.end(self.clock(), "done")

    def begin(self, row: str, name: str, **args: Any) -> _Block:
        """Record a block from now on."""
        block = _Block(row, [_Slice(name, self.clock(), args)])
        if self._is_kept:
            self.blocks.append(block)
        return block

    def clear(self) -> None:
        """Forget what has ended; what goes on is in the next file too, from its beginning."""
        self.blocks = [block for block in self.blocks if block.span_s[1] == math.inf]

    def render(self) -> str:
        """Everything since ``clear`` as a file of Chrome trace events.

        Times count from the creation of the timeline; what goes on is drawn until now.
        """
        trace = {"displayTimeUnit": "ms", "traceEvents": list(self._events())}
        return json.dumps(trace, separators=(",", ":")) + "\n"

    def _events(self) -> Iterator[dict[str, Any]]:
        now_s = self.clock()
        rows: dict[str, list[_Block]] = {_STEP_ROW: [], _QUEUE_ROW: []}
        for block in sorted(self.blocks, key=lambda block: block.span_s):
            rows.setdefault(block.row, []).append(block)
        servers = sorted(row for row in rows if row not in (_STEP_ROW, _QUEUE_ROW))
        for number, row in enumerate((_STEP_ROW, _QUEUE_ROW, *servers), start=1):
            for name, key, value in (
                ("process_name", "name", row),
                ("process_sort_index", "sort_index", number),
            ):
                yield {"ph": "M", "name": name, "pid": number, "args": {key: value}}
            spans = (block.span_s for block in rows[row])
            lanes = allocate_lanes((start_s, min(end_s, now_s)) for start_s, end_s in spans)
            for block, lane in zip(rows[row], lanes, strict=True):
                for part in block.slices:
                    start_us = self._to_us(part.start_s)
                    yield {
                        "ph": "X",
                        "name": part.name,
                        "pid": number,
                        "tid": lane,
                        "ts": start_us,
                        # Both ends are rounded, so that neighbours touch and never overlap.
                        "dur": self._to_us(min(part.end_s, now_s)) - start_us,
                        "args": {**part.args, "end": part.args.get("end", "running")},
                    }

    def _to_us(self, time_s: float) -> int:
        return round((time_s - self._origin_s) * 1e6)


@dataclass
class RequestTrace:
    """Takes what happens to one request, from its creation in the queue on."""

    timeline: Timeline
    label: str

    def __post_init__(self) -> None:
        self._block = self.timeline.begin(_QUEUE_ROW, "queued", label=self.label)

    def sent(self, server: str, prefix_tokens: int) -> None:
        """The request left the queue, with the tokens that its response has already."""
        self._block.end(self.timeline.clock(), "sent")
        name = "prefill (resumed)" if prefix_tokens else "prefill"
        args = {"label": self.label, "prefix_tokens": prefix_tokens}
        self._block = self.timeline.begin(server, name, **args)

    def first_tokens(self, cached_tokens: int) -> None:
        """The first sampled tokens came; ``cached_tokens`` of the input were in the cache."""
        now_s = self.timeline.clock()
        self._block.end(now_s, "done", cached_tokens=cached_tokens)
        self._block.slices.append(_Slice("decode", now_s, {"label": self.label}))

    def ended(self, reason: str, num_tokens: int) -> None:
        """The request ended, in whichever phase, ``num_tokens`` after it was last sent.

        ``lost`` with its server, or ``drained``, it waits in the queue again and may be ``sent``
        once more.
        """
        self._block.end(self.timeline.clock(), reason, tokens=num_tokens)
        if reason in ("lost", "drained"):
            self._block = self.timeline.begin(_QUEUE_ROW, "queued", label=self.label)


def allocate_lanes(intervals: Iterable[tuple[float, float]]) -> Iterator[int]:
    """Give each interval the lowest lane that is free, from 0; touching ends do not overlap.

    The intervals, start and end of each, come in order of their starts.
    """
    busy: list[tuple[float, int]] = []
    free: list[int] = []
    for start, end in intervals:
        while busy and busy[0][0] <= start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lane = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (end, lane))
        yield lane
