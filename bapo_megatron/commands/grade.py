"""``bapo-megatron grade``: one JSON line for each line of a file of responses, in order.

However long the file is, a bounded number of lines is held. Reading and writing happen in threads
that nothing waits for, so that a slow pipe delays neither an answer's time limit nor an interrupt.
"""

import asyncio
import functools
import io
import json
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import typer

from bapo_megatron.config.check import check_rewards
from bapo_megatron.config.load import ConfigError, load_config
from bapo_megatron.config.reward import RewardConfig
from bapo_megatron.data.rows import parse_answer
from bapo_megatron.processes import run_async
from bapo_megatron.reward.base import Response, RewardError, SampleFacts
from bapo_megatron.reward.composition import Rewards
from bapo_megatron.telemetry.console import ProgressLine

STANDARD_INPUT = Path("-")
"""The file that stands for standard input."""
CLOSED_PIPE = 141
"""Exit status when the reader of the output has ended, as after SIGPIPE."""

_LINES_PER_WORKER = 16
"""Lines to read ahead."""
_MAX_LINE_BYTES = 256 << 20
_CHUNK_BYTES = 1 << 16
_MAX_SHOWN = 60
_T = TypeVar("_T")


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
        typer.Argument(metavar="[KEY=VALUE]...", help="Dotted overrides: reward.workers=8"),
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


class GradeError(ValueError):
    """A line that cannot be graded; the message names file and line and says what to do."""


_Entry = asyncio.Task[bytes] | GradeError | None
"""A line that is being graded, one that cannot be, or the end."""


class _Line(NamedTuple):
    place: str
    """File and number, for messages."""
    content: bytes


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
    ahead: asyncio.Queue[_Entry] = asyncio.Queue(_LINES_PER_WORKER * config.workers)
    held: list[_Entry] = []  # taken from the queue before it was ready
    num_graded = 0
    async with Rewards(config) as rewards:
        await rewards.start()
        if rewards.group_names:
            raise RewardError(
                f"reward.functions: '{rewards.group_names[0]}' scores the responses to a prompt "
                "together, and lines are graded one by one; leave it out"
            )
        with _open(path) as stream:
            reading = asyncio.create_task(_read_ahead(path, stream, rewards, ahead))
            try:
                while (entry := held.pop() if held else await _next(ahead, reading)) is not None:
                    lines = [await _result(entry)]
                    while not held and not ahead.empty():
                        entry = ahead.get_nowait()
                        if _is_ready(entry):
                            lines.append(await _result(entry))
                        else:
                            held.append(entry)
                    await _in_thread(functools.partial(_write, output, b"".join(lines)))
                    num_graded += len(lines)
                    report(num_graded)
            finally:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
                while not ahead.empty():
                    held.append(ahead.get_nowait())
                rest = [entry for entry in held if isinstance(entry, asyncio.Task)]
                for task in rest:
                    task.cancel()
                await asyncio.gather(*rest, return_exceptions=True)


async def _next(ahead: asyncio.Queue[_Entry], reading: asyncio.Task[None]) -> _Entry:
    """The next line's entry; raises what ended the reading."""
    getting = asyncio.create_task(ahead.get())
    await asyncio.wait([getting, reading], return_when=asyncio.FIRST_COMPLETED)
    if not getting.done() and ahead.empty():
        getting.cancel()
        reading.result()
    return await getting


def _is_ready(entry: _Entry) -> bool:
    """Whether it has a result already."""
    return isinstance(entry, asyncio.Task) and entry.done() and entry.exception() is None


async def _result(entry: _Entry) -> bytes:
    assert entry is not None, "the end has no result"
    if isinstance(entry, GradeError):
        raise entry
    return await entry


async def _read_ahead(
    path: Path, stream: io.FileIO, rewards: Rewards, ahead: asyncio.Queue[_Entry]
) -> None:
    """Start grading line after line; the queue's size bounds how many."""
    try:
        async for line in _lines(path, stream):
            task = asyncio.create_task(_grade_one(rewards, _parse(line)))
            # The first failure ends the command; asyncio would log the others at its end.
            task.add_done_callback(lambda task: task.cancelled() or task.exception())
            await ahead.put(task)
    except GradeError as error:
        await ahead.put(error)  # the results before it come first
    else:
        await ahead.put(None)


async def _grade_one(rewards: Rewards, response: Response) -> bytes:
    score = await rewards.score(response)
    shown: dict[str, Any] = {
        "score": score.reward,
        "extracted": score.extracted,
        "reason": score.reason,
    }
    if len(score.components) > 1:
        shown["components"] = dict(score.components)
    if score.metrics:
        shown["metrics"] = dict(score.metrics)
    line = json.dumps(shown, ensure_ascii=False) + "\n"
    return line.encode(errors="backslashreplace")


async def _lines(path: Path, stream: io.FileIO) -> AsyncIterator[_Line]:
    """The lines that are not blank, as soon as they can be read."""
    name = "standard input" if path == STANDARD_INPUT else str(path)
    number, rest = 0, b""
    while chunk := await _in_thread(lambda: stream.read(_CHUNK_BYTES)):
        *whole, rest = (rest + chunk).split(b"\n")
        for content in whole:
            number += 1
            if content.strip():
                yield _Line(f"{name}:{number}", content)
        if len(rest) > _MAX_LINE_BYTES:
            raise GradeError(
                f"{name}:{number + 1}: longer than {_MAX_LINE_BYTES >> 20} MB; give one JSON "
                "object per line"
            )
    if rest.strip():
        yield _Line(f"{name}:{number + 1}", rest)


def _parse(line: _Line) -> Response:
    try:
        record = json.loads(line.content)
    except (ValueError, RecursionError) as error:
        reason = str(error).partition("\n")[0][:_MAX_SHOWN]
        raise GradeError(f"{line.place}: no JSON ({reason}); correct the line") from error
    if not isinstance(record, dict):
        raise GradeError(
            f"{line.place}: must be a JSON object with 'response' and 'answer', got "
            f"{type(record).__name__}; correct the line"
        )
    for field in ("response", "answer"):
        if field not in record:
            raise GradeError(
                f"{line.place}: field '{field}' is missing (fields: "
                f"{', '.join(list(record)[:8]) or 'none'}); add it"
            )
    response, finish_reason = record["response"], record.get("finish_reason", "stop")
    if not isinstance(response, str):
        raise GradeError(
            f"{line.place}: field 'response' must be a text, got {type(response).__name__}; "
            "correct the line"
        )
    try:
        answer = parse_answer(record["answer"])
    except ValueError as error:
        raise GradeError(f"{line.place}: field 'answer' {error}; correct the line") from error
    num_tokens = record.get("num_tokens", 0)
    facts = SampleFacts(
        finish_reason=str(finish_reason),
        num_tokens=num_tokens if isinstance(num_tokens, int) else 0,
    )
    row = {name: value for name, value in record.items() if name not in ("response", "answer")}
    return Response(response, answer, facts, row)


def _open(path: Path) -> io.FileIO:
    """Without a buffer: its lock would be held by a thread that still reads at the end."""
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
    while rest:
        rest = rest[os.write(output, rest) :]


async def _in_thread(function: Callable[[], _T]) -> _T:
    """Run a function that may block; where this is cancelled, nobody waits for its thread."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[_T] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if outcome.done():
            return
        if error is None:
            outcome.set_result(result)
        else:
            outcome.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = function()
        except BaseException as raised:  # noqa: BLE001 - raised again where it is waited for
            error = raised
        try:
            loop.call_soon_threadsafe(settle, result, error)
        except RuntimeError:
            return  # the loop has ended meanwhile

    threading.Thread(target=run, daemon=True).start()
    return await outcome


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
