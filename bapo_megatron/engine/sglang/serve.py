"""The ``serve`` command: the SGLang servers of a rollout node, and nothing else."""

from __future__ import annotations

import contextlib
import logging
import secrets
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import torch

from bapo_megatron.engine.sglang.keys import ApiKeys
from bapo_megatron.engine.sglang.server import LOOPBACK, own_servers
from bapo_megatron.engine.supervisor import ServerSupervisor
from bapo_megatron.processes import run_async
from bapo_megatron.telemetry.console import ProgressLine

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bapo_megatron.config.schema import RunConfig


def serve(config: RunConfig, show: Callable[[str], None]) -> None:
    """Start ``rollout.server.count`` servers and keep them running until this process is ended.

    The keys are those in the environment (``ApiKeys``). If it has no admin key, one is made and
    kept in ``<run_dir>/admin_api_key``; likewise, for servers that other machines reach, the other
    one in ``<run_dir>/api_key``.

    Args:
        config: Model, servers and ``run_dir``, checked by ``Kind.serve``.
        show: Takes what a trainer needs to use the servers, once they are ready: a line for its
            command, and one for its environment for each key that was made here.

    Raises:
        RolloutError: A server died before it was ever ready, or a port is in use.
        OSError: ``run_dir`` cannot be written.
    """
    logging.basicConfig(format="%(asctime)s %(message)s")
    config.run_dir.mkdir(parents=True, exist_ok=True)
    keys, exports = ApiKeys.from_environment(), []
    needed = ["admin_api_key"] if config.rollout.server.host == LOOPBACK else list(asdict(keys))
    for name in needed:
        if not getattr(keys, name):
            path = config.run_dir.absolute() / name
            keys = replace(keys, **{name: _stored_key(path)})
            variable = ApiKeys.variable(admin=name == "admin_api_key")
            exports.append(f"export {variable}=$(cat '{path}')")

    def show_servers(addresses: list[str]) -> None:
        show(f"'rollout.servers=[{','.join(addresses)}]'")
        for export in exports:
            show(export)

    run_async(_serve(config, keys, show_servers))


async def _serve(config: RunConfig, keys: ApiKeys, on_ready: Callable[[list[str]], None]) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    servers = own_servers(config, device, keys, config.rollout.server.host)
    supervisor = ServerSupervisor(servers, config.rollout)
    try:
        supervisor.start()
        with ProgressLine() as progress:
            await supervisor.wait_ready(progress.update)
        on_ready([server.address for server in servers])
        await supervisor.watch()
    finally:
        await supervisor.close()


def _stored_key(path: Path) -> str:
    """Return the key in ``path``; make one that only its owner can read if there is none.

    Nodes that share the directory share the key.
    """
    if not path.exists():
        draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        draft.touch(mode=0o600, exist_ok=False)
        try:
            draft.write_text(secrets.token_hex(16) + "\n")
            with contextlib.suppress(FileExistsError):
                path.hardlink_to(draft)  # all of it, and never in place of another node's
        finally:
            draft.unlink()
    return path.read_text().strip()
