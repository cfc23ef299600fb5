"""Configuration of the sandbox in which programs of the policy run (docs/security.md)."""

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from bapo_megatron.config.section import MAX_MEMORY_MB, AbsolutePath, Section

MAX_PROCESSES = 1024


class BubblewrapConfig(Section):
    """What processes in bubblewrap's namespaces may use."""

    memory_limit_mb: int = Field(512, ge=64, le=MAX_MEMORY_MB)
    """Memory limit of all processes of a program together if this user can create a cgroup;
    otherwise of each process's address space, so that together they may use ``processes`` times as
    much."""
    processes: int = Field(16, ge=1, le=MAX_PROCESSES)
    """Maximum number of processes and threads."""
    files_mb: int = Field(64, ge=1, le=MAX_MEMORY_MB)
    """Size of ``/tmp``, the only directory for large files; it is in memory."""
    python: AbsolutePath = Path("/usr/bin/python3")
    """The interpreter, 3.9 or later, below ``/usr`` or one of ``read_only``. An
    unprivileged user must be able to read it: not in a home directory."""
    read_only: tuple[AbsolutePath, ...] = ()
    """Further directories that programs may read, such as a virtual environment's."""

    @model_validator(mode="after")
    def _python_can_be_read(self) -> Self:
        places = (Path("/usr"), *self.read_only)
        if not any(self.python.is_relative_to(place) for place in places):
            raise ValueError(
                f"python must be below /usr or a directory of read_only, got {self.python}; add "
                "its directory to read_only"
            )
        return self


class SandboxConfig(BubblewrapConfig):
    """Where programs of the policy run, and their limits."""

    timeout_s: float = Field(5.0, gt=0)
    """Time limit of a program, or of a cell of several that share their variables."""
    max_output_bytes: int = Field(1 << 20, ge=1, le=1 << 26)
    """A program that writes more to standard output or error is ended."""
