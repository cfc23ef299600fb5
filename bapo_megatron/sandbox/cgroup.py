"""A control group that limits the memory and processes of one sandbox.

Of version 2, a group beside this process's or below the root, where the parent passes the
controllers on; of version 1, one below this process's in each hierarchy.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

_MOUNT = Path("/sys/fs/cgroup")
_CONTROLLERS = ("memory", "pids")
_PREFIX = "bapo_megatron_sandbox_"


@dataclass(frozen=True, slots=True)
class Cgroup:
    """An empty group; ``add`` processes that have not started the program yet."""

    folders: tuple[Path, ...]
    """One in version 2, one for each of ``_CONTROLLERS`` in version 1."""

    def add(self, pid: int) -> None:
        """Move a process into the group; later children are born in it."""
        for folder in self.folders:
            (folder / "cgroup.procs").write_text(str(pid))

    def num_killed(self) -> int:
        """Return how many of its processes the kernel has killed for memory."""
        for name in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(FileNotFoundError):
                counts = dict(map(str.split, (self.folders[0] / name).read_text().splitlines()))
                return int(counts.get("oom_kill", 0))
        return 0

    def remove(self) -> None:
        """Remove the group, which must be empty."""
        for folder in self.folders:
            with contextlib.suppress(FileNotFoundError):
                folder.rmdir()


def create_cgroup(
    number: int, memory_bytes: int, processes: int, mount: Path = _MOUNT
) -> Cgroup | None:
    """Create the group of slot ``number``, in place of one that a killed process left.

    Returns None where this user cannot create a group with both limits.
    """
    for parents in _parents(mount):
        group = Cgroup(tuple(parent / f"{_PREFIX}{number}" for parent in parents))
        try:
            group.remove()
            for folder in group.folders:
                folder.mkdir()
            memory, pids = group.folders[0], group.folders[-1]
            if len(group.folders) == 1:
                (memory / "memory.max").write_text(str(memory_bytes))
                (memory / "memory.swap.max").write_text("0")
            else:
                (memory / "memory.limit_in_bytes").write_text(str(memory_bytes))
                with contextlib.suppress(FileNotFoundError):  # a kernel that does not count swap
                    (memory / "memory.memsw.limit_in_bytes").write_text(str(memory_bytes))
            (pids / "pids.max").write_text(str(processes))
        except OSError:
            with contextlib.suppress(OSError):
                group.remove()
            continue
        return group
    return None


def left_behind(mount: Path = _MOUNT) -> dict[int, list[Path]]:
    """Return the groups of each slot, whether it is in use or its process was killed."""
    groups: dict[int, list[Path]] = {}
    for folder in (folder for parents in _parents(mount) for folder in parents):
        for group in folder.glob(f"{_PREFIX}*"):
            groups.setdefault(int(group.name.removeprefix(_PREFIX)), []).append(group)
    return groups


def _parents(mount: Path) -> list[tuple[Path, ...]]:
    """Return the groups in which one may be created: a folder, or one for each controller."""
    paths: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            paths |= dict.fromkeys(controllers.split(","), path)
    if all((mount / name).is_dir() for name in _CONTROLLERS):
        below = tuple(mount / name / paths.get(name, "/").lstrip("/") for name in _CONTROLLERS)
        return [below, tuple(mount / name for name in _CONTROLLERS)]
    current = mount / paths.get("", "/").lstrip("/")
    candidates = dict.fromkeys((current, current.parent, mount))
    return [(folder,) for folder in candidates if _passes_on(folder)]


def _passes_on(folder: Path) -> bool:
    try:
        return set(_CONTROLLERS) <= set((folder / "cgroup.subtree_control").read_text().split())
    except OSError:
        return False
