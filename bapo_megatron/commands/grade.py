"""``bapo-megatron grade``: one JSON line for each line of a file of responses, in order.

However long the file is, a bounded number of lines is held. Reading and writing happen in threads
that nothing waits for, so that a slow pipe delays neither an answer's time limit nor an interrupt.
"""

import asyncio
import io
import json
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from bapo_megatron.config.check import check_rewards
from bapo_megatron.config.load import ConfigError, load_config
from bapo_megatron.config.reward import RewardConfig
from bapo_megatron.data.rows import parse_answer
from bapo_megatron.reward.base import Response, RewardError, SampleFacts
from bapo_megatron.reward.composition import Rewards
from bapo_megatron.runtime.calls import shown_value
from bapo_megatron.runtime.files import MAX_LINE_BYTES, naming, parse_json
from bapo_megatron.runtime.processes import CLOSED_PIPE, run_async
from bapo_megatron.telemetry.console import ProgressLine
from bapo_megatron.types import FinishReason

STANDARD_INPUT = Path("-")
"""The file that stands for standard input."""

_LINES_PER_WORKER = 16
"""Lines to read ahead."""
_CHUNK_BYTES = 1 << 16


class GradeError(ValueError):
    """A line that cannot be graded; the message names file and line and says what to do."""


def command(
    file: Annotated[
        Path, typer.Argument(help="JSON lines with response and answer; - is standard input.")
    ],
    config: Annotated[
        Path | None,
        typer.Option(help="YAML file of a run, for its reward section; default: math answers."),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Dotted overrides: reward.workers=8"),
    ] = None,
) -> None:
    """Score the responses in FILE by the code that trains; print a JSON line for each, in order."""
    rewards = _reward_config(config, overrides or [])
    # Results on the same terminal would be in its way.
    shows_progress = sys.stderr.isatty() and not sys.stdout.isatty()
    try:
        with ProgressLine() if shows_progress else nullcontext() as progress:

            def report(num_graded: int) -> None:
                if progress is not None:
                    progress.update(f"{num_graded} responses graded")

            run_async(grade_file(file, rewards, output=sys.stdout.fileno(), report=report))
    except BrokenPipeError:
        raise typer.Exit(CLOSED_PIPE) from None


async def grade_file(
    path: Path, config: RewardConfig, *, output: int, report: Callable[[int], None]
) -> None:
    """Grade every line of a file.

    Args:
        path: JSON lines with ``response`` and ``answer``; ``-`` is standard input.
        config: Functions and limits; shaping is left out, as in evaluations.
        output: Descriptor that gets a JSON line for each line, as soon as it and those before are
            graded.
        report: Gets the number of graded lines, now and then.

    Raises:
        GradeError: A line is not of this form; those before it have been written.
        RewardError: A reward function failed, cannot be loaded, or scores whole groups.
        OSError: The file cannot be read, or the output is closed.
    """
    room = asyncio.Semaphore(_LINES_PER_WORKER * config.workers)
    ahead: asyncio.Queue[asyncio.Task[Any]] = asyncio.Queue()
    results = _Results(output, report)

    async def read(stream: io.FileIO, rewards: Rewards) -> None:
        async for place, line in _lines(path, stream):
            await room.acquire()
            ahead.put_nowait(asyncio.create_task(_grade_one(rewards, place, line)))

    async with Rewards(config) as rewards:
        await rewards.start()
        _refuse_groups(rewards)
        with _open(path) as stream:
            reading: asyncio.Task[Any] = asyncio.create_task(read(stream, rewards))
            reading.add_done_callback(ahead.put_nowait)  # behind the last line
            task = reading
            try:
                while (task := await ahead.get()) is not reading:
                    room.release()
                    if results.waiting and (not task.done() or task.exception()):
                        await results.write()
                    results.waiting.append(await task)
                    if ahead.empty():
                        await results.write()
                if results.waiting:
                    await results.write()
                await reading
            finally:
                rest = [reading, task, *(ahead.get_nowait() for _ in range(ahead.qsize()))]
                for each in rest:
                    each.cancel()
                await asyncio.gather(*rest, return_exceptions=True)


def _refuse_groups(rewards: Rewards) -> None:
    if rewards.group_names:
        raise RewardError(
            f"reward.functions: '{rewards.group_names[0]}' scores the responses to a prompt "
            "together, and lines are graded one by one; leave it out"
        )


@dataclass(eq=False)
class _Results:
    """Lines for the output, in order."""

    output: int
    report: Callable[[int], None]
    waiting: list[bytes] = field(default_factory=list)
    num_written: int = 0

    async def write(self) -> None:
        content = b"".join(self.waiting)
        await _in_thread(lambda: _write(self.output, content))
        self.num_written += len(self.waiting)
        self.waiting.clear()
        self.report(self.num_written)


async def _grade_one(rewards: Rewards, place: str, line: bytes) -> bytes:
    score = await rewards.score(_parse(place, line))
    shown: dict[str, Any] = {
        "score": score.reward,
        "extracted": score.extracted,
        "reason": score.reason,
    }
    if len(score.components) > 1:
        shown["components"] = dict(score.components)
    if score.metrics:
        shown["metrics"] = dict(score.metrics)
    text = json.dumps(shown, ensure_ascii=False) + "\n"
    return text.encode(errors="backslashreplace")


async def _lines(path: Path, stream: io.FileIO) -> AsyncIterator[tuple[str, bytes]]:
    """The lines that are not blank, with their places, as soon as they can be read."""
    name = "standard input" if path == STANDARD_INPUT else str(path)
    number, rest = 0, bytearray()

    def read() -> bytes | None:
        with naming(Path(name)):
            return stream.read(_CHUNK_BYTES)

    while chunk := await _in_thread(read):
        rest += chunk  # in place: a long line is not copied with each chunk
        if b"\n" in chunk:
            *whole, rest = rest.split(b"\n")
            for content in whole:
                number += 1
                if content.strip():
                    yield f"{name}:{number}", bytes(content)
        if len(rest) > MAX_LINE_BYTES:
            raise GradeError(
                f"{name}:{number + 1}: longer than {MAX_LINE_BYTES >> 20} MB; give one JSON "
                "object per line"
            )
    if rest.strip():
        yield f"{name}:{number + 1}", bytes(rest)


def _parse(place: str, line: bytes) -> Response:
    try:
        record = parse_json(line)
    except ValueError as error:
        raise GradeError(f"{place}: {error}; correct the line") from error
    if not isinstance(record, dict):
        raise GradeError(
            f"{place}: must be a JSON object with 'response' and 'answer', got "
            f"{type(record).__name__}; correct the line"
        )
    for required in ("response", "answer"):
        if required not in record:
            names = ", ".join(list(record)[:8]) or "none"
            raise GradeError(f"{place}: field '{required}' is missing (fields: {names}); add it")
    row = {name: value for name, value in record.items() if name not in ("response", "answer")}
    response, num_tokens = record["response"], record.get("num_tokens", 0)
    finish_reason = record.get("finish_reason", "stop")
    if not isinstance(response, str):
        raise GradeError(
            f"{place}: field 'response' must be a text, got {type(response).__name__}; correct "
            "the line"
        )
    if type(num_tokens) is not int or num_tokens < 0:
        raise GradeError(
            f"{place}: field 'num_tokens' must be a number of tokens, got "
            f"{shown_value(num_tokens)}; correct the line"
        )
    if finish_reason not in list(FinishReason):
        raise GradeError(
            f"{place}: field 'finish_reason' must be one of {', '.join(FinishReason)}, got "
            f"{shown_value(finish_reason)}; correct the line"
        )
    try:
        answer = parse_answer(record["answer"])
    except ValueError as error:
        raise GradeError(f"{place}: field 'answer' {error}; correct the line") from error
    facts = SampleFacts(finish_reason=finish_reason, num_tokens=num_tokens)
    return Response(response, answer, facts, row)


def _open(path: Path) -> io.FileIO:
    """Without a buffer: its lock would be held by a thread that still reads at the end."""
    if path == STANDARD_INPUT and sys.stdin is None:
        raise GradeError("standard input: closed; give a file of JSON lines")
    try:
        if path == STANDARD_INPUT:
            return io.FileIO(sys.stdin.fileno(), closefd=False)
        return io.FileIO(path)
    except OSError as error:
        raise GradeError(
            f"{path}: cannot be read ({error.strerror}); give a file of JSON lines, or -"
        ) from error


def _write(output: int, content: bytes) -> None:
    rest = memoryview(content)
    with naming(Path("standard output")):
        while rest:
            rest = rest[os.write(output, rest) :]


async def _in_thread[T](function: Callable[[], T]) -> T:
    """Run a function that may block; where this is cancelled, nobody waits for its thread."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # a cancellation leaves it to the thread

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(future)


def _reward_config(config: Path | None, overrides: list[str]) -> RewardConfig:
    if config is None:
        if overrides:
            raise ConfigError(
                f"override '{overrides[0]}': needs --config, whose reward section it changes; give "
                "the file of a run"
            )
        return RewardConfig()
    rewards = load_config(config, overrides).reward
    check_rewards(rewards.functions)
    return rewards
