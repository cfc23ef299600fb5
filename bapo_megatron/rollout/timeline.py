"""Every request of a step as a timeline for chrome://tracing or https://ui.perfetto.dev.

A request waits in the queue, is sent to a server, which first reads its tokens (prefill) and then
samples (decode). One that is lost with its server goes back to the queue. The file has a row of
lanes for the queue and for each server; what overlaps lies on different lanes.
"""

from __future__ import annotations

import heapq
import json
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
    """A named stretch of time; an open one has no end."""

    name: str
    start_s: float
    args: dict[str, Any]
    end_s: float | None = None

    def end(self, now_s: float, reason: str, **args: Any) -> None:
        assert self.end_s is None, f"{self.name} has ended before"
        self.end_s = now_s
        self.args |= {"end": reason, **args}
        if reason not in _UNREMARKABLE:
            self.name += f", {reason}"


@dataclass(slots=True)
class _Block:
    """Adjacent slices that share a lane of a row, such as the prefill and decode of a request."""

    row: str
    slices: list[_Slice]

    def span_s(self, now_s: float) -> tuple[float, float]:
        """Start of the first slice and end of the last; ``now_s`` if that is open."""
        end_s = self.slices[-1].end_s
        return self.slices[0].start_s, now_s if end_s is None else end_s


class RequestTrace:
    """Takes what happens to one request, from its creation in the queue on."""

    _block: _Block

    def __init__(self, timeline: Timeline, label: str, sampled_tokens: int) -> None:
        self._timeline = timeline
        self._label = label
        self._sampled_tokens = sampled_tokens
        self._wait()

    def sent(self, server: str, prefix_tokens: int) -> None:
        """The request left the queue, with the tokens that lost servers have sampled for it."""
        self._timeline._close(self._block, "sent")
        resumed_at = self._sampled_tokens + prefix_tokens
        name = "prefill (resumed)" if resumed_at else "prefill"
        self._block = self._timeline._open(
            server, name, label=self._label, prefix_tokens=resumed_at
        )

    def first_tokens(self, cached_tokens: int) -> None:
        """The first sampled tokens came; so many tokens of the input were in the cache."""
        now_s = self._timeline._clock()
        self._block.slices[-1].end(now_s, "done", cached_tokens=cached_tokens)
        self._block.slices.append(_Slice("decode", now_s, {"label": self._label}))

    def ended(self, reason: str, num_tokens: int) -> None:
        """The request ended, where it was, with so many tokens since it was sent.

        ``lost`` with its server, it waits in the queue again and may be ``sent`` once more.
        """
        self._timeline._close(self._block, reason, tokens=num_tokens)
        if reason == "lost":
            self._wait()

    def _wait(self) -> None:
        self._block = self._timeline._open(_QUEUE_ROW, "queued", label=self._label)


class Timeline:
    """Records since the last ``clear``; its memory grows with the requests of that time only."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, *, is_kept: bool = True
    ) -> None:
        """Start at time 0 of ``clock``; keep nothing unless ``is_kept``."""
        self._is_kept = is_kept
        self._clock = clock
        self._origin_s = clock()
        self._closed: list[_Block] = []
        self._opened: dict[int, _Block] = {}
        """By ``id``, so that a block is removed without a search; in order."""

    def request(self, label: str, sampled_tokens: int = 0) -> RequestTrace:
        """A request enters the queue; its input ends with tokens of an earlier one, if any."""
        return RequestTrace(self, label, sampled_tokens)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Record the block as a slice of the row ``step``: a pause, a weight sync."""
        block = self._open(_STEP_ROW, name)
        try:
            yield
        except BaseException:
            self._close(block, "failed")
            raise
        self._close(block, "done")

    def clear(self) -> None:
        """Forget what has ended; what goes on is in the next file too, from its beginning."""
        self._closed.clear()

    def render(self) -> str:
        """Everything since ``clear`` as a file of Chrome trace events, times since the beginning.

        What goes on is drawn until now.
        """
        trace = {"displayTimeUnit": "ms", "traceEvents": list(self._events())}
        return json.dumps(trace, separators=(",", ":")) + "\n"

    def _events(self) -> Iterator[dict[str, Any]]:
        now_s = self._clock()
        rows: dict[str, list[_Block]] = {_STEP_ROW: [], _QUEUE_ROW: []}
        blocks = [*self._closed, *self._opened.values()]
        for block in sorted(blocks, key=lambda block: block.span_s(now_s)):
            rows.setdefault(block.row, []).append(block)
        servers = sorted(row for row in rows if row not in (_STEP_ROW, _QUEUE_ROW))
        for number, row in enumerate((_STEP_ROW, _QUEUE_ROW, *servers), start=1):
            yield _metadata("process_name", number, {"name": row})
            yield _metadata("process_sort_index", number, {"sort_index": number})
            lanes = allocate_lanes(block.span_s(now_s) for block in rows[row])
            for block, lane in zip(rows[row], lanes, strict=True):
                for part in block.slices:
                    yield self._event(part, number, lane, now_s)

    def _event(self, part: _Slice, process: int, lane: int, now_s: float) -> dict[str, Any]:
        start_us = self._to_us(part.start_s)
        end_us = self._to_us(now_s if part.end_s is None else part.end_s)
        return {
            "ph": "X",
            "name": part.name,
            "pid": process,
            "tid": lane,
            "ts": start_us,
            # Both ends are rounded, so that neighbours touch and never overlap.
            "dur": end_us - start_us,
            "args": part.args if part.end_s is not None else part.args | {"end": "running"},
        }

    def _to_us(self, time_s: float) -> int:
        return round((time_s - self._origin_s) * 1e6)

    def _open(self, row: str, name: str, **args: Any) -> _Block:
        block = _Block(row, [_Slice(name, self._clock(), args)])
        if self._is_kept:
            self._opened[id(block)] = block
        return block

    def _close(self, block: _Block, reason: str, **args: Any) -> None:
        block.slices[-1].end(self._clock(), reason, **args)
        if self._is_kept:
            self._closed.append(self._opened.pop(id(block)))


def allocate_lanes(intervals: Iterable[tuple[float, float]]) -> list[int]:
    """Give each interval the lowest lane that is free, from 0; touching ends do not overlap.

    The intervals, start and end of each, come in order of their starts.
    """
    busy: list[tuple[float, int]] = []
    free: list[int] = []
    num_lanes = 0
    lanes = []
    for start, end in intervals:
        while busy and busy[0][0] <= start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if not free:
            heapq.heappush(free, num_lanes)
            num_lanes += 1
        lane = heapq.heappop(free)
        heapq.heappush(busy, (end, lane))
        lanes.append(lane)
    return lanes


def _metadata(name: str, process: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": process, "args": args}
