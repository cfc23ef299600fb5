"""pydantic-monty: an interpreter of a subset of Python in Rust, without files, network and clock.

It needs no namespaces. Programs have no standard input, and of the standard library only what
Monty has itself; a crash ends a process of its pool, which is replaced.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from bapo_megatron.sandbox.base import Outcome, SandboxError, SandboxLostError

if TYPE_CHECKING:
    import pydantic_monty

    from bapo_megatron.config.sandbox import SandboxConfig
    from bapo_megatron.sandbox.base import Ending

_MAX_SESSIONS = 64
_GRACE_S = 1.0
"""After a limit of time, before the process is killed."""


class MontySandbox:
    """See ``base.Sandbox``."""

    def __init__(self, config: SandboxConfig) -> None:
        """Start a first process.

        Raises:
            SandboxError: pydantic-monty is not installed.
        """
        try:
            import pydantic_monty
        except ImportError as error:
            raise SandboxError(
                f"pydantic-monty is not installed ({error}); pip install pydantic-monty"
            ) from error
        self._config = config
        self._stack = contextlib.ExitStack()
        self._pool: pydantic_monty.Monty = self._stack.enter_context(
            pydantic_monty.Monty(
                max_processes=_MAX_SESSIONS,
                checkout_timeout=config.timeout_s + _GRACE_S,
                feed_duration_limit_grace=_GRACE_S,
            )
        )

    def run(self, program: str, stdin: str = "") -> Outcome:
        """See ``base.Sandbox.run``."""
        if stdin:
            raise SandboxError("programs have no standard input in monty; use bubblewrap")
        with contextlib.closing(self.session()) as session:
            return session.run(program)

    def session(self) -> _MontySession:
        """See ``base.Sandbox.session``."""
        return _MontySession(self._pool, self._config)

    def describe(self) -> str:
        """See ``base.Sandbox.describe``."""
        return f"an interpreter without system calls; memory {self._config.memory_limit_mb} MB"

    def close(self) -> None:
        """See ``base.Sandbox.close``."""
        self._stack.close()


class _MontySession:
    """See ``base.Session``."""

    def __init__(self, pool: pydantic_monty.Monty, config: SandboxConfig) -> None:
        self._config = config
        self._stack = contextlib.ExitStack()
        self.has_ended = False
        """See ``base.Session.has_ended``."""
        self._session = self._stack.enter_context(
            pool.checkout(
                limits={
                    "max_feed_duration_secs": config.timeout_s,
                    "max_memory": config.memory_limit_mb << 20,
                },
                script_name="<cell>",
            )
        )

    def run(self, cell: str, timeout_s: float | None = None) -> Outcome:
        """See ``base.Session.run``; the limit of time is always the configured one."""
        import pydantic_monty

        printed = pydantic_monty.CollectString(self._config.max_output_bytes)
        ending: Ending = "ok"
        shown = ""
        try:
            value = self._session.feed_run(cell, print_callback=printed)
            shown = "" if value is None else f"{value!r}\n"
        except pydantic_monty.MontyCrashedError as error:
            self.close()
            if not error.timed_out:
                # The same from outside as an allocation that its program asked for.
                raise SandboxLostError(
                    f"a process of pydantic-monty crashed ({error}); see the kernel's log",
                    Outcome("memory", printed.output),
                ) from error
            ending = "timeout"
        except pydantic_monty.MontyError as error:
            shown = f"{error.display() if hasattr(error, 'display') else error}\n"
            ending = _ending_of(str(error), self._config.max_output_bytes)
        if ending not in ("ok", "error"):
            self.close()
        return Outcome(ending, printed.output + shown)

    def close(self) -> None:
        """See ``base.Session.close``."""
        self.has_ended = True
        self._stack.close()


def _ending_of(message: str, max_output_bytes: int) -> Ending:
    """Tell limits from errors of the program: Monty raises both as Python's own errors."""
    if message.startswith("TimeoutError: feed time limit exceeded"):
        return "timeout"
    if not message.startswith("MemoryError: memory limit exceeded"):
        return "error"
    return "output" if message.endswith(f"> {max_output_bytes} bytes") else "memory"
