"""The files in shared memory that a killed server would leave for ever.

Standard library only: the launcher imports this.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

_PATTERNS = ("sglang_loads_*", "sem.mp-*")
"""SGLang's load metrics, and semaphores of Python's multiprocessing."""
_MAPPED_INODE = re.compile(r" (\d+) +/dev/shm/")


def unlink_shared_files(group_id: int) -> None:
    """Take the names of a server's files in /dev/shm away; call it before its group is killed.

    The names do not tell whose they are, so what the group's processes have mapped is looked at:
    the inodes, since a semaphore is mapped before it gets its name. The processes lose nothing: a
    mapped file lives on without its name.

    Args:
        group_id: A group whose processes share these files with no other.
    """
    inodes: set[int] = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # it ended meanwhile
            if os.getpgid(int(entry.name)) == group_id:
                inodes.update(map(int, _MAPPED_INODE.findall((entry / "maps").read_text())))
    for pattern in _PATTERNS:
        for path in Path("/dev/shm").glob(pattern):
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_ino in inodes:
                    path.unlink()
