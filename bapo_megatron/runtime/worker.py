"""One worker process: reads requests from its standard input, writes replies to its output.

Each message is one line of JSON. The first is ``{"ready": facts}``, or ``{"error": "…"}`` if the
handler cannot be built. A request is ``{"id": n, "request": …}``, and its reply has the same id and

    "result": …      what the handler returned
    "error": "…"     it raised an error, or SystemExit. The first traceback of each line of a user's
                     code goes to standard error
    "memory": true   it exceeded the memory limit; the parent ends the process

and, where children that the worker forked came back from the handler, ``"forked": ["…"]``, the
names of their requests. Such a child is ended: it has neither pipe, so it cannot reply.

The parent (``workers.WorkerPool``) kills the process when a request takes too long, so only the
import of a user's module needs a clock here. The process ends when its input closes or its parent
dies.
"""

import asyncio
import importlib
import inspect
import mmap
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager

# By name: a user's module may replace what ``json`` has.
from json import dumps, loads
from types import FrameType
from typing import Any, BinaryIO, NoReturn, Protocol

from bapo_megatron.runtime.names import LoadError, raised_at, shown, with_place
from bapo_megatron.runtime.processes import end_with_parent, forks_ended, write_stacks_on_signal

_MAX_ERROR = 500
_MAX_NAME_BYTES = 4096  # PIPE_BUF


class Handler(Protocol):
    """Answers the requests of one worker."""

    @property
    def facts(self) -> Any:
        """What the parent learns when the worker is ready: a JSON value."""

    def name(self, request: Any) -> str:
        """What a request calls, for messages: ``reward function 'my_rewards:length'``."""

    def answer(self, request: Any) -> Any:
        """Reply to a request, both JSON values; an error is sent to the parent as one line."""


def main(
    name: str, arguments: list[Any], parent_pid: int, memory_limit_bytes: int, load_limit_s: int
) -> None:
    """Answer until the input ends, or the parent.

    ``name`` is ``module:function`` of this package: with ``arguments``, JSON values, it builds the
    ``Handler`` within ``load_limit_s``, or raises ``LoadError``. Past the limit of the address
    space the handler sees MemoryError.
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
    _detach(sys.stdin.fileno())

    children = _ForkedChildren(output, requests)
    try:
        with children.ended(lambda: ", ".join(map(str, arguments))):
            handler = _load(name, arguments, load_limit_s)
    except LoadError as error:
        _send(output, _encoded({"error": str(error)}))
        return
    _send(output, _encoded({"ready": handler.facts}))
    shown_places: set[str] = set()
    for line in requests:
        message = loads(line)
        reply = _reply(handler, message, children, shown_places)
        _send(output, children.reported_in(reply))


def _load(name: str, arguments: list[Any], limit_s: int) -> Handler:
    """Build the handler; an import that takes too long is a TimeoutError of the user's module."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise TimeoutError(f"took longer than {limit_s} s")

    module, _, function = name.partition(":")
    build: Callable[..., Handler] = getattr(importlib.import_module(module), function)
    signal.signal(signal.SIGALRM, stop)
    signal.alarm(limit_s)
    try:
        return build(*arguments)
    finally:
        signal.alarm(0)
        if signal.getsignal(signal.SIGALRM) is stop:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)


def _reply(
    handler: Handler,
    message: dict[str, Any],
    children: "_ForkedChildren",
    shown_places: set[str],
) -> bytes:
    """Return the line that answers a request; print a traceback for each new place of an error."""
    number, request = message["id"], message["request"]
    try:
        with children.ended(lambda: handler.name(request)):
            result = handler.answer(request)
        return _encoded({"id": number, "result": result})
    except MemoryError:
        # The parent ends this process: its heap is not to be trusted.
        return _encoded({"id": number, "memory": True})
    except (Exception, SystemExit) as error:  # noqa: BLE001 - sent to the parent
        place = raised_at(error)
        if place is not None and place not in shown_places:  # thousands may fail there
            shown_places.add(place)
            traceback.print_exception(error)
        return _encoded({"id": number, "error": with_place(shown(error, _MAX_ERROR), error)})


class _ForkedChildren:
    """Processes that the handler's code forks from this one, and that come back from it.

    Without this they would go on as the worker: read requests and reply to them.
    """

    def __init__(self, *pipes: BinaryIO) -> None:
        # A write of this size is not mixed with another child's.
        self._names, self._says_name = os.pipe2(os.O_CLOEXEC)
        self._has_names = mmap.mmap(-1, 1)  # shared with the children; faster than asking the pipe
        attached = list(pipes)

        def detach() -> None:
            while attached:  # a child's own children have other files under these numbers
                _detach(attached.pop().fileno())

        os.register_at_fork(after_in_child=detach)

    def ended(self, name: Callable[[], str]) -> AbstractContextManager[None]:
        """End a forked child where it leaves the block, and let the worker know the name.

        One that leaves it by SystemExit was meant to end, and has no name.
        """

        def report(error: BaseException | None) -> None:
            if error is not None:
                traceback.print_exception(error)
            self._report(name())

        return forks_ended(report)

    def _report(self, name: str) -> None:
        if not self._has_names[0]:  # one is enough
            os.write(self._says_name, name.encode()[: _MAX_NAME_BYTES - 1] + b"\n")
            self._has_names[0] = 1

    def reported_in(self, reply: bytes) -> bytes:
        """Add the names of requests whose children came back, if there are any, to a reply."""
        if not self._has_names[0]:
            return reply
        forked = os.read(self._names, _MAX_NAME_BYTES).decode(errors="replace").splitlines()
        return _encoded({**loads(reply), "forked": forked})


def _detach(descriptor: int) -> None:
    """Make a descriptor one of /dev/null, where reads end and writes are lost."""
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, descriptor, inheritable=descriptor < 3)
    os.close(nothing)


def settled(result: Any, loop: asyncio.AbstractEventLoop) -> Any:
    """Return what a user's function returned; run it to its end first if it is awaitable."""

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
