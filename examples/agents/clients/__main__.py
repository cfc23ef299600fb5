"""Plays every client of this folder and prints what each did (docs/agents.md).

python -m examples.agents.clients [NAME …] [--install]

A client's first line pins its packages; ``--install`` puts them into an environment of their own.
A script in place of a model answers with tool calls; workers, proxy and record are those of runs.
"""

import argparse
import asyncio
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bapo_megatron.agent.proxy import Proxy
from bapo_megatron.agent.runner import AgentRunner
from bapo_megatron.data.chat import ChatRenderer
from bapo_megatron.rollout.agents import Agents
from examples.agents.clients._episodes import Report, play_styles
from tests.agent.episodes import agent_config, make_renderer
from tests.data.test_tools import HERMES
from tests.fakes.byte_tokenizer import save_byte_tokenizer

CLIENTS = {
    path.stem: path for path in sorted(Path(__file__).parent.iterdir()) if path.name[0] != "_"
}
HEADS = "client", "version", "right", "calls", "forks", "sequences", "tokens", "refused"
_MAX_PROMPT_TOKENS = 50_000


def required(path: Path) -> list[str]:
    """Return the packages that a client's first line pins."""
    return path.read_text().partition("\n")[0].partition("requires:")[2].split()


def version(path: Path) -> str:
    """Return the version of the first of them."""
    return re.split("==|(?<!^)@", (required(path) or ["=="])[0])[1] or "–"


def installed(path: Path, folder: Path, *, installs: bool) -> Path | None:
    """Return the environment of a client, made first if asked for; None if it needs none."""
    packages = required(path)
    if not packages:
        return None
    environment = folder.absolute() / packages[0].replace("/", "_")
    mark = environment / "installed.txt"
    if mark.exists() and mark.read_text().split() == packages:
        return environment
    if not installs:
        sys.exit(f"{path.name}: needs {' '.join(packages)} in {environment}; add --install")
    shutil.rmtree(environment, ignore_errors=True)
    environment.mkdir(parents=True)
    if path.suffix == ".mjs":
        subprocess.run(["npm", "install", "--silent", *packages], check=True, cwd=environment)
    else:
        subprocess.run([sys.executable, "-m", "venv", environment], check=True)
        subprocess.run([environment / "bin/pip", "install", "-q", *packages], check=True)
    mark.write_text(" ".join(packages))
    return environment


async def play(path: Path, renderer: ChatRenderer, environment: Path | None) -> tuple[Report, str]:
    """Play a client; return its report, and what was refused until sampling was overridden."""
    agent: Any = f"{__spec__.parent}.{path.stem}:play"
    python = Path(sys.executable)
    if path.suffix == ".sh":
        agent = ["bash", str(path)]
    elif path.suffix == ".mjs":  # it finds its packages beside it
        assert environment is not None
        agent = ["node", shutil.copy(path, environment)]
    elif environment is not None:
        python = environment / "bin/python"
    report = await _play(renderer, agent, python, "refuse")
    if not report.refusal:
        return report, ""
    return await _play(renderer, agent, python, "override"), report.refusal


async def _play(renderer: ChatRenderer, agent: Any, python: Path, sampling: str) -> Report:
    limits = {"timeout_s": 60}
    config = agent_config(
        agent=agent, agent_python=python, agent_sampling=sampling, agent_limits=limits
    )
    proxy = Proxy()
    runner = AgentRunner(config, proxy)
    await proxy.open(has_port=True)
    try:
        await runner.open()
        return await play_styles(Agents(runner, proxy, renderer, config, _MAX_PROMPT_TOKENS))
    finally:
        await runner.close()
        await proxy.close()


def _print_row(*cells: str) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Print a row for each client, then what failed."""
    parser = argparse.ArgumentParser("examples.agents.clients", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="clients; by default all")
    parser.add_argument("--install", action="store_true", help="install what they require first")
    parser.add_argument("--environments", type=Path, default=Path("runs/clients"), metavar="DIR")
    asked = parser.parse_args()
    if unknown := set(asked.names) - set(CLIENTS):
        parser.error(f"no client '{unknown.pop()}'; use one of {', '.join(CLIENTS)}")
    chosen = [CLIENTS[name] for name in asked.names or CLIENTS]
    notes = list[str]()
    places = {path: installed(path, asked.environments, installs=asked.install) for path in chosen}
    _print_row(*HEADS)
    _print_row(*("---" for _ in HEADS))
    with tempfile.TemporaryDirectory() as folder:
        save_byte_tokenizer(Path(folder), HERMES)
        renderer = make_renderer(Path(folder))
        for path, environment in places.items():
            report, refusal = asyncio.run(play(path, renderer, environment))
            name = re.sub(r"^HTTP \d+: ", "", refusal).partition(":")[0]
            _print_row(path.stem, version(path), *report.cells(), name or "none")
            notes += [f"{path.stem}: {text}" for text in (refusal, *report.failures) if text]
    print("", *notes, sep="\n")


if __name__ == "__main__":
    main()
