"""One worker process: reads requests from its standard input, writes replies to its output.

Each message is one line of JSON. The first is ``{"ready": facts}``, then each request gets one of

    {"result": …}    what the handler returned
    {"error": "…"}   it raised an error; instead of ``ready``: the handler cannot be built. The
                     first traceback of each line of a user's code goes to standard error
    {"memory": true} it exceeded the memory limit; the parent ends the process

The parent (``workers.WorkerPool``) kills the process when a request takes too long, so nothing here
needs a clock. It ends when its input closes or its parent dies.
"""

import asyncio
import importlib
import inspect
import json
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO, Protocol

from bapo_megatron.names import LoadError, raised_at, shown, with_place
from bapo_megatron.processes import end_with_parent, write_stacks_on_signal

_MAX_ERROR = 500


class Handler(Protocol):
    """Answers the requests of one worker."""

    @property
    def facts(self) -> Any:
        """What the parent learns when the worker is ready: a JSON value."""

    def answer(self, request: Any) -> Any:
        """Reply to a request, both JSON values; an error is sent to the parent as one line."""


def main(name: str, arguments: list[Any], parent_pid: int, memory_limit_bytes: int) -> None:
    """Answer until the input ends, or the parent.

    ``name`` is ``module:function`` of this package: with ``arguments``, JSON values, it builds the
    ``Handler``, or raises ``LoadError``. Past the limit of the address space the handler sees
    MemoryError.
    """
    # Ctrl-C reaches the whole process group; the parent decides when workers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    write_stacks_on_signal()
    end_with_parent(signal.SIGKILL)
    if os.getppid() != parent_pid:
        return
    resource.setrlimit(resource.RLIMIT_AS, (memory_limit_bytes, memory_limit_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    # Whatever a handler prints goes to the terminal, not between the messages.
    output = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # A handler that reads must not take the next request.
    requests = os.fdopen(os.dup(sys.stdin.fileno()), "rb")
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123 - a device
        os.dup2(nothing.fileno(), sys.stdin.fileno())

    module, _, function = name.partition(":")
    build: Callable[..., Handler] = getattr(importlib.import_module(module), function)
    try:
        handler = build(*arguments)
    except LoadError as error:
        _send(output, _encoded({"error": str(error)}))
        return
    _send(output, _encoded({"ready": handler.facts}))
    shown_places: set[str] = set()
    for line in requests:
        request = json.loads(line)
        try:  # not around the sending: a part of a line must not be followed by another one
            reply = _encoded({"result": handler.answer(request)})
        except MemoryError:
            # The parent ends this process: its heap is not to be trusted.
            reply = _encoded({"memory": True})
        except Exception as error:  # noqa: BLE001 - sent to the parent
            reply = _encoded({"error": with_place(shown(error, _MAX_ERROR), error)})
            place = raised_at(error)
            if place is not None and place not in shown_places:  # thousands may fail there
                shown_places.add(place)
                traceback.print_exception(error)
        _send(output, reply)


def settled(result: Any, loop: asyncio.AbstractEventLoop) -> Any:
    """Return what a user's function returned; run it to its end first if it is awaitable."""

    async def wait() -> Any:
        return await result

    return loop.run_until_complete(wait()) if inspect.isawaitable(result) else result


def _encoded(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _send(output: BinaryIO, line: bytes) -> None:
    output.write(line)
    output.flush()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
