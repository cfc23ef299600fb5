"""Opens the sandbox that ``SandboxConfig.kind`` names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bapo_megatron.sandbox.base import SandboxError
from bapo_megatron.sandbox.bubblewrap import BubblewrapSandbox

if TYPE_CHECKING:
    from bapo_megatron.config.sandbox import SandboxConfig
    from bapo_megatron.sandbox.base import Sandbox


def open_sandbox(config: SandboxConfig) -> Sandbox:
    """Open the sandbox and run a program of one line in it.

    Raises:
        SandboxError: It does not work here.
    """
    if config.kind == "monty":
        from bapo_megatron.sandbox.monty import MontySandbox

        sandbox: Sandbox = MontySandbox(config)
    else:
        sandbox = BubblewrapSandbox(config)
    try:
        outcome = sandbox.run("print(6 * 7)")
        if (outcome.ending, outcome.stdout) != ("ok", "42\n"):
            said = (outcome.stderr or outcome.stdout).strip().splitlines()[-1:] or ["nothing"]
            raise SandboxError(
                f"the sandbox {config.kind} must print 42 for 'print(6 * 7)', got "
                f"'{outcome.ending}' and {said[0]:.200}; check its memory_limit_mb, timeout_s and "
                "python"
            )
    except BaseException:
        sandbox.close()
        raise
    return sandbox
