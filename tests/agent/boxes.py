"""Runners of agents, in sandboxes or not, that leave nothing behind."""

import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil

from bapo_megatron.agent.proxy import Proxy
from bapo_megatron.agent.runner import AgentRunner
from tests.agent.episodes import agent_config
from tests.sandbox.host import PYTHON, require_bubblewrap


@contextlib.asynccontextmanager
async def opened(**rollout: Any) -> AsyncIterator[tuple[AgentRunner, Proxy]]:
    before, proxy = workers(), Proxy()
    config = agent_config(**rollout)
    runner = AgentRunner(config, proxy)
    await proxy.open(has_port=config.agent_sandbox is None)
    try:
        await runner.open()
        yield runner, proxy
    finally:
        await runner.close()
        await proxy.close()
    assert set(workers()) <= set(before)


def workers() -> list[psutil.Process]:
    """Agents' workers, sandboxed or not, among the processes that other tests have started."""
    alive = [c for c in psutil.Process().children() if c.status() != psutil.STATUS_ZOMBIE]
    return [
        c for c in alive if any("Runs agents" in word or "bwrap" in word for word in c.cmdline())
    ]


@contextlib.asynccontextmanager
async def boxed(kind: str, name: str, **rollout: Any) -> AsyncIterator[tuple[AgentRunner, Proxy]]:
    """Run a function of ``agents``, or a command that calls it, in sandboxes."""
    require_bubblewrap()
    is_command = kind == "command"
    agent: Any = [PYTHON, "-m", "boxed", name] if is_command else f"boxed:{name}"
    with tempfile.TemporaryDirectory() as folder:  # others cannot enter pytest's
        Path(folder).chmod(0o755)
        shutil.copyfile(Path(__file__).with_name("agents.py"), Path(folder, "boxed.py"))
        with contextlib.chdir(folder):
            box = {"memory_limit_mb": 1024}
            async with opened(agent=agent, agent_sandbox=box, **rollout) as opened_ones:
                yield opened_ones
