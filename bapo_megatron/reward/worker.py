"""One grader process: reads requests from its standard input, writes scores to its output.

Each message is one line of JSON. The parent (``pool.RewardPool``) kills the process when an answer
takes too long, so nothing here needs a clock. It ends when its input closes or its parent dies.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import signal
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, BinaryIO

from bapo_megatron.parent import end_with_parent

if TYPE_CHECKING:
    from bapo_megatron.reward.functions import LoadedFunction

_LONGEST_ERROR = 500


def main(function_names: list[str], parent_pid: int, memory_limit_bytes: int) -> None:
    """Grade until the input ends.

    Args:
        function_names: As ``functions.load`` takes them.
        parent_pid: Process whose death ends this one.
        memory_limit_bytes: Limit of the address space; past it the function sees MemoryError.
    """
    # Ctrl-C reaches the whole process group; the parent decides when graders end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(signal.SIGKILL)
    if os.getppid() != parent_pid:
        return
    resource.setrlimit(resource.RLIMIT_AS, (memory_limit_bytes, memory_limit_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    # Whatever a reward function prints goes to the terminal, not between the messages.
    output = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # A function that reads must not take the next request.
    requests = os.fdopen(os.dup(sys.stdin.fileno()), "rb")
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123 - a device
        os.dup2(nothing.fileno(), sys.stdin.fileno())

    functions = _load_all(function_names, output)
    if functions is None:
        return
    _send(output, {"ready": True})
    loop = asyncio.new_event_loop()
    for line in requests:
        output.write(_answer(functions, loop, line))


def _load_all(names: list[str], output: BinaryIO) -> dict[str, LoadedFunction] | None:
    """Every function by its name; none, and the parent is told, where one cannot be loaded."""
    from bapo_megatron.names import LoadError
    from bapo_megatron.reward.functions import load

    functions = {}
    for name in names:
        try:
            functions[name] = load(name)
        except MemoryError:
            _send(output, {"error": f"'{name}' needs more memory than it may have; raise "
                           "reward.memory_limit_mb"})  # fmt: skip
            return None
        except LoadError as error:
            _send(output, {"error": f"'{name}' {error}"})
            return None
    return functions


def _answer(
    functions: dict[str, LoadedFunction], loop: asyncio.AbstractEventLoop, line: bytes
) -> bytes:
    """The encoded reply to a request, or the error of a faulty reward function."""
    from bapo_megatron.reward.base import SampleFacts

    request = json.loads(line)
    try:
        if "pattern" in request:
            return _encoded({"matches": _matches(request["pattern"], request["text"])})
        score = functions[request["function"]](
            loop,
            request["text"],
            request["answer"],
            SampleFacts(**request["sample"]),
            request["row"],
        )
        return _encoded(asdict(score))
    except MemoryError:
        return _encoded(
            {"limit": True}
        )  # the parent ends this process: its heap is not to be trusted
    except Exception as error:  # noqa: BLE001 - sent to the parent, which raises it
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return _encoded({"error": text[:_LONGEST_ERROR]})


def _matches(pattern: str | None, text: str) -> bool:
    if pattern is not None:
        return re.search(pattern, text) is not None
    from bapo_megatron.reward.extraction import has_closed_box

    return has_closed_box(text)


def _send(output: BinaryIO, message: dict[str, Any]) -> None:
    output.write(_encoded(message))


def _encoded(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
