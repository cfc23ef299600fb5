"""One grader process: reads requests from its standard input, writes scores to its output.

Each message is one line of JSON. The parent (``pool.RewardPool``) kills the process when an answer
takes too long, so nothing here needs a clock. It ends when its input closes or its parent dies.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, BinaryIO

from bapo_megatron.parent import end_with_parent

if TYPE_CHECKING:
    from bapo_megatron.reward.base import RewardFunction

_LONGEST_ERROR = 500


def main(function_name: str, parent_pid: int, memory_limit_bytes: int) -> None:
    """Grade until the input ends.

    Args:
        function_name: A key of ``registry.REWARD_FUNCTIONS``.
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

    from bapo_megatron.reward.registry import REWARD_FUNCTIONS

    function = REWARD_FUNCTIONS[function_name]
    _send(output, {"ready": True})
    for line in sys.stdin.buffer:
        _send(output, _grade(function, line))


def _grade(function: RewardFunction, line: bytes) -> dict[str, object]:
    """The score as a message, or the error of a faulty reward function."""
    request = json.loads(line)
    try:
        return asdict(function(request["response_text"], request["answer"]))
    except MemoryError:
        os._exit(1)  # the parent reports it like a time-out; the heap is not to be trusted
    except Exception as error:  # noqa: BLE001 - sent to the parent, which raises it
        return {"error": f"{type(error).__name__}: {error}"[:_LONGEST_ERROR]}


def _send(output: BinaryIO, message: dict[str, object]) -> None:
    output.write(json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
