"""Takes the lock of run directories as commands do, and says what came of it.

    python -m tests.telemetry.lock_holder

Each line of standard input is a delay in seconds and a directory. A directory that it has got it
holds until the next line, for as long as a child of its own, which that line names, lives on.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from bapo_megatron.telemetry import run_lock


def main() -> None:
    run_lock._LIVE_S = 0.3
    for line in sys.stdin:
        delay_s, run_dir = line.split()
        time.sleep(float(delay_s))
        try:
            with run_lock.run_dir_locked(Path(run_dir), "train"):
                child_pid = os.fork()
                if not child_pid:
                    time.sleep(60)
                    os._exit(0)
                _say(f"holds {child_pid}")
                sys.stdin.readline()
        except ValueError as error:
            _say(str(error))


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
