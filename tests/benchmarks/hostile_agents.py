"""Plays honest episodes beside hostile ones, whose programs kill, forge, read and stay behind.

    python -m tests.benchmarks.hostile_agents --num 1000 --isolation episode

plays as many of each, all in sandboxes, and counts failures as a run does by default. Exits with 1
if an honest episode has another end or reward than alone, a hostile one a reward, or a process is
left.
"""

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bapo_megatron.agent.protocol import SamplingRules
from bapo_megatron.agent.proxy import Session, SessionLimits
from bapo_megatron.config.data import DataConfig
from bapo_megatron.config.rollout import EpisodesConfig
from bapo_megatron.data.chat import ChatRenderer
from bapo_megatron.data.record import Record
from bapo_megatron.environment.base import EnvironmentFailedError
from bapo_megatron.environment.load import SingleTurn
from bapo_megatron.rollout.agents import Agents
from bapo_megatron.rollout.episodes import Interaction
from bapo_megatron.types import Prompt
from examples.tiny.model import build_tokenizer
from tests.agent.boxes import boxed, workers
from tests.agent.episodes import Policy, agent_config
from tests.agent.test_attacks import ATTACKS, KILLS, task_of

HOSTILE = {**ATTACKS, **KILLS}
HONEST = "print(sum(range({number})))"


async def campaign(num: int, *, isolation: str = "episode", has_hostile: bool = True) -> Any:
    """Return what each honest episode returned, and how many hostile ones ended in which way."""
    config = agent_config(
        agent="boxed:speaks_and_runs", agent_limits={"isolation": isolation}, tool_format="none"
    )
    renderer = ChatRenderer(build_tokenizer(), DataConfig(), config)
    limits = {"agent_limits": {"isolation": isolation, "commands": 4, "episodes": 16}}
    ends = Counter[str]()
    async with boxed("function", "speaks_and_runs", **limits) as (runner, proxy):
        agents = Agents(runner, proxy, renderer, config, max_prompt_tokens=1000)
        interaction = Interaction(SingleTurn(), renderer, EpisodesConfig(), agents=agents)

        async def play(number: int, program: str) -> Any:
            policy = Policy(renderer, lambda call: f"{number}")
            session = Session(
                Record(), renderer, SamplingRules(1.0), SessionLimits(9, 99, 99), policy.sample
            )
            task = task_of(program)
            row = {**task["row"], "messages": [{"role": "user", "content": "1+1?"}]}
            prompt = Prompt(f"p:{number}", (1,), "", task["answer"], row=row)
            try:
                reason, value = await agents.play(session, prompt, number, lambda _: None)
            except EnvironmentFailedError as error:
                interaction.count_failure(error)  # raises if it ends the run
                return error.kind
            return [reason.value, value]

        async def attack(number: int, name: str) -> None:
            value = await play(number, HOSTILE[name])
            reward = 0 if isinstance(value, str) else value[1]["reward"]
            ends[f"{name}: {value if isinstance(value, str) else 'ended'}, reward {reward}"] += 1

        names = [list(HOSTILE)[n % len(HOSTILE)] for n in range(num * has_hostile)]
        honest = [play(n, HONEST.format(number=n)) for n in range(num)]
        hostile = [attack(n, name) for n, name in enumerate(names)]
        mixed = [job for pair in zip(hostile, honest, strict=False) for job in pair] or honest
        results = await asyncio.gather(*mixed)
    return results[1::2] if has_hostile else results, dict(ends)


def main(argv: Sequence[str] | None = None) -> int:
    """Play both, compare and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num", type=int, default=100, help="episodes of each kind")
    parser.add_argument("--isolation", choices=("episode", "worker"), default="episode")
    parser.add_argument("--out", type=Path, help="file for the report, JSON")
    options = parser.parse_args(argv)
    start_s = time.monotonic()
    alone, _ = asyncio.run(campaign(options.num, isolation=options.isolation, has_hostile=False))
    alone_s = time.monotonic() - start_s
    beside, ends = asyncio.run(campaign(options.num, isolation=options.isolation))
    report = {
        "honest": options.num,
        "honest_changed": sum(a != b for a, b in zip(alone, beside, strict=True)),
        "hostile": ends,
        "rewarded": sum(count for name, count in ends.items() if not name.endswith("reward 0")),
        "processes_left": len(workers()),
        "alone_s": round(alone_s, 1),
        "both_s": round(time.monotonic() - start_s - alone_s, 1),
    }
    text = json.dumps(report, indent=1)
    sys.stdout.write(text + "\n")
    if options.out is not None:
        options.out.write_text(text + "\n")
    return int(bool(report["honest_changed"] or report["rewarded"] or report["processes_left"]))


if __name__ == "__main__":
    sys.exit(main())
