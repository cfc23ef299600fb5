"""Becomes a command that gets SIGTERM when the process that started it is gone.

    python -m bapo_megatron.tools.sweep.owned PROGRAM ARGUMENTS…

The kernel sends it, even if the owner (``processes.OWNER_PID_VARIABLE``) was killed; ``train`` then
saves and ends.
"""

import os
import signal
import sys

from bapo_megatron.runtime.processes import OWNER_PID_VARIABLE, end_with_parent


def main() -> None:
    """Replace this process by the command."""
    end_with_parent(signal.SIGTERM)
    if os.getppid() == int(os.environ[OWNER_PID_VARIABLE]):
        os.execv(sys.argv[1], sys.argv[1:])  # keeps the parent-death signal


if __name__ == "__main__":
    main()
