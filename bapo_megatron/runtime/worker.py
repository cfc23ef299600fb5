"""A worker process: reads requests from standard input, writes replies to standard output.

Each message is one line of JSON. The first is ``{"ready": facts}``, or ``{"error": "…"}`` if the
handler cannot be built. A request is ``{"id": n, "request": …}``, and its reply has the same id and

    "result": …      what the handler returned
    "error": "…"     it raised an error, or SystemExit. The first traceback for each line of user
                     code goes to standard error
    "memory": true   it exceeded the memory limit; the parent kills the process

A child that the handler forks has neither pipe, and ends when it returns from the handler.

The parent (``workers.WorkerPool``) kills the process if its start or a request takes too long. It
exits when its input closes or its parent dies.
"""

import asyncio
import importlib
import inspect
import os
import resource
import signal
import sys
import traceback

# Imported by name: a user's module may replace attributes of ``json``.
from json import dumps, loads
from typing import Any, BinaryIO, Protocol

from bapo_megatron.runtime.names import LoadError, raised_at, shown, with_place
from bapo_megatron.runtime.processes import end_with_parent, forks_ended, write_stacks_on_signal

_MAX_ERROR = 500


class Handler(Protocol):
    """Answers the requests of one worker."""

    @property
    def facts(self) -> Any:
        """A JSON value for the parent, sent once the worker is ready."""

    def name(self, request: Any) -> str:
        """The called function, for messages: ``reward function 'my_rewards:length'``."""

    def answer(self, request: Any) -> Any:
        """Reply to a request, both JSON values; an error is sent to the parent as one line."""


def main(name: str, arguments: list[Any], parent_pid: int, memory_limit_bytes: int) -> None:
    """Answer requests until the input closes or the parent ends.

    ``name`` is ``module:function`` of this package: called with ``arguments``, JSON values, it
    builds the ``Handler``, or raises ``LoadError``. Beyond the address-space limit the handler gets
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

    # A handler's prints go to standard error, not between the messages.
    output = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # A handler that reads standard input must not get the next request.
    requests = os.fdopen(os.dup(sys.stdin.fileno()), "rb")
    _detach(sys.stdin.fileno())

    _detach_in_children(output, requests)
    try:
        with forks_ended(lambda error: _report_fork(", ".join(map(str, arguments)), error)):
            module, _, function = name.partition(":")
            handler: Handler = getattr(importlib.import_module(module), function)(*arguments)
    except LoadError as error:
        _send(output, _encoded({"error": str(error)}))
        return
    _send(output, _encoded({"ready": handler.facts}))
    shown_places: set[str] = set()
    for line in requests:
        _send(output, _reply(handler, loads(line), shown_places))


def _reply(handler: Handler, message: dict[str, Any], shown_places: set[str]) -> bytes:
    """Return the reply to a request; print a traceback for each new place of an error."""
    number, request = message["id"], message["request"]
    try:
        with forks_ended(lambda error: _report_fork(handler.name(request), error)):
            result = handler.answer(request)
        return _encoded({"id": number, "result": result})
    except MemoryError:
        # The parent kills this process: its heap cannot be trusted.
        return _encoded({"id": number, "memory": True})
    except (Exception, SystemExit) as error:  # noqa: BLE001 - sent to the parent
        place = raised_at(error)
        if place is not None and place not in shown_places:  # thousands may fail there
            shown_places.add(place)
            traceback.print_exception(error)
        return _encoded({"id": number, "error": with_place(shown(error, _MAX_ERROR), error)})


def _report_fork(name: str, error: BaseException | None) -> None:
    if error is not None:
        traceback.print_exception(error)
    sys.stderr.write(
        f"{name}: a process that it forked came back from the call and was ended; end it with "
        "os._exit, or start a program with subprocess\n"
    )


def _detach_in_children(*pipes: BinaryIO) -> None:
    """Keep forked children from reading requests and from replying."""
    attached = list(pipes)

    def detach() -> None:
        while attached:  # in a child's own children these descriptors are other files
            _detach(attached.pop().fileno())

    os.register_at_fork(after_in_child=detach)


def _detach(descriptor: int) -> None:
    """Redirect a descriptor to /dev/null."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, descriptor, inheritable=descriptor < 3)
    os.close(null)


def settled(result: Any, loop: asyncio.AbstractEventLoop) -> Any:
    """Return a user function's result, awaited if it is awaitable."""

    async def wait() -> Any:
        return await result

    return loop.run_until_complete(wait()) if inspect.isawaitable(result) else result


def _encoded(message: dict[str, Any]) -> bytes:
    return dumps(message).encode() + b"\n"


def _send(output: BinaryIO, line: bytes) -> None:
    output.write(line)
    output.flush()


if __name__ == "__main__":
    main(sys.argv[1], loads(sys.argv[2]), *map(int, sys.argv[3:]))
