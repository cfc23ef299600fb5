"""``bapo-megatron grade``: score a file of responses, one JSON line per input line, in order.

Memory holds a bounded number of lines, however long the file is. Reads and writes run in daemon
threads, so that a slow pipe delays neither a grading time limit nor an interrupt.
"""

import asyncio
import io
import json
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import Field

from bapo_megatron.config.check import check_rewards
from bapo_megatron.config.load import load_config
from bapo_megatron.config.reward import RewardConfig
from bapo_megatron.data.rows import parse_answer
from bapo_megatron.errors import first_cause
from bapo_megatron.reward.base import Response, RewardError, SampleFacts
from bapo_megatron.reward.composition import Rewards
from bapo_megatron.reward.rows import check_row
from bapo_megatron.runtime.calls import decode
from bapo_megatron.runtime.files import MAX_LINE_BYTES, naming, open_regular, parse_json
from bapo_megatron.runtime.processes import CLOSED_PIPE, run_async
from bapo_megatron.types import FinishReason

_LINES_PER_WORKER = 16
"""Lines to read ahead."""
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class _Line:
    """The validated fields of a line; all others form the prompt's row."""

    response: str
    answer: Any
    finish_reason: FinishReason = FinishReason.STOP
    num_tokens: Annotated[int, Field(strict=True, ge=0)] = 0


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
    """Score the responses in FILE with the trainer's code; print a JSON line for each, in order."""
    rewards = _reward_config(config, overrides or [])
    try:
        run_async(grade_file(file, rewards, output=sys.stdout.fileno()))
    except BrokenPipeError:
        raise typer.Exit(CLOSED_PIPE) from None


async def grade_file(path: Path, config: RewardConfig, *, output: int) -> None:
    """Grade the JSON lines of a file, or of standard input (``-``), without shaping.

    ``output`` is the file descriptor of the results; each is written as soon as it and those before
    it are graded.

    Raises:
        ValueError: A line is not of this form; those before it have been written.
        RewardError: A reward function failed, cannot be loaded, or scores whole groups.
        OSError: The file cannot be read, or the output is closed.
    """
    room = asyncio.Semaphore(_LINES_PER_WORKER * config.workers)

    async def grade(
        rewards: Rewards, place: str, line: bytes, before: asyncio.Task[None] | None
    ) -> None:
        try:
            result = await _score(rewards, _parse(place, line, config))
        finally:
            if before is not None:
                await before
        await _in_thread("standard output", lambda: _write(output, result))
        room.release()

    async with Rewards(config) as rewards:
        await rewards.start()
        if rewards.group_names:
            raise RewardError(
                f"reward.functions: '{rewards.group_names[0]}' scores the responses to a prompt "
                "together, and lines are graded one by one; leave it out"
            )
        try:
            async with asyncio.TaskGroup() as tasks:
                last = None
                try:
                    async for place, line in _lines(path):
                        await room.acquire()
                        last = tasks.create_task(grade(rewards, place, line, last))
                except (ValueError, OSError):
                    if last is not None:
                        await last
                    raise
        except ExceptionGroup as errors:
            raise first_cause(errors) from errors


async def _score(rewards: Rewards, response: Response) -> bytes:
    score = await rewards.score(response)
    fields = {
        "score": score.reward,
        "extracted": score.extracted,
        "reason": score.reason,
        "components": dict(score.components),
        "metrics": dict(score.metrics),
    }
    text = json.dumps(fields, ensure_ascii=False) + "\n"
    return text.encode(errors="backslashreplace")


async def _lines(path: Path) -> AsyncIterator[tuple[str, bytes]]:
    """The lines that are not blank, with their places, as soon as they can be read."""
    name, number, rest = str(path), 0, b""
    # Unbuffered: a thread that still reads at exit would hold the buffer's lock.
    if path != Path("-"):
        stream = open_regular(path).detach()
    elif sys.stdin is not None:
        name, stream = "standard input", io.FileIO(sys.stdin.fileno(), closefd=False)
    else:
        raise ValueError("standard input: closed; give a file of JSON lines")
    with stream:
        while chunk := await _in_thread(name, lambda: stream.read(_CHUNK_BYTES)):
            *whole, rest = (rest + chunk).split(b"\n")
            for line in whole:
                number += 1
                if line.strip():
                    yield f"{name}:{number}", line
            if len(rest) > MAX_LINE_BYTES:
                raise ValueError(
                    f"{name}:{number + 1}: longer than {MAX_LINE_BYTES >> 20} MB; give one JSON "
                    "object per line"
                )
    if rest.strip():
        yield f"{name}:{number + 1}", rest


def _parse(place: str, line: bytes, config: RewardConfig) -> Response:
    try:
        record = parse_json(line)
        fields = decode(_Line, record)
        try:
            answer = parse_answer(fields.answer)
        except ValueError as error:
            raise ValueError(f"'answer' {error}") from error
        row = {name: value for name, value in record.items() if name not in ("response", "answer")}
        check_row(config, answer, row)
    except ValueError as error:
        raise ValueError(f"{place}: {error}; correct the line") from error
    facts = SampleFacts(finish_reason=fields.finish_reason.value, num_tokens=fields.num_tokens)
    return Response(fields.response, answer, facts, row)


def _write(output: int, content: bytes) -> None:
    while content:
        content = content[os.write(output, content) :]


async def _in_thread[T](name: str, function: Callable[[], T]) -> T:
    """Run a blocking file operation in a daemon thread, which a cancellation does not wait for."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # so that a cancellation does not cancel it

    def run() -> None:
        try:
            with naming(Path(name)):
                future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - raised again by the await
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(future)


def _reward_config(config: Path | None, overrides: list[str]) -> RewardConfig:
    if config is None and overrides:
        raise typer.BadParameter(f"override '{overrides[0]}': give --config, the file of a run")
    if config is None:
        return RewardConfig()
    rewards = load_config(config, overrides).reward
    check_rewards(rewards.functions)
    return rewards
