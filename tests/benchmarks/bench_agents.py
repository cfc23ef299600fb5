"""The cost of agents: a call through the proxy, 1,000 episodes at once, and the calculator twice.

python -m tests.benchmarks.bench_agents --out docs/benchmarks/agents_cpu_202611
"""

import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

from bapo_megatron.agent.protocol import SamplingRules
from bapo_megatron.agent.proxy import Proxy, Session, SessionLimits
from bapo_megatron.agent.runner import AgentRunner
from bapo_megatron.config.data import DataConfig
from bapo_megatron.data.chat import ChatRenderer
from bapo_megatron.data.record import Record
from examples.tiny.model import build_tokenizer
from tests.agent.episodes import Policy, agent_config, open_session
from tests.benchmarks.bench_episodes import SCORE, SETTINGS, make_taught
from tests.benchmarks.demo_runs import train
from tests.benchmarks.harness import finish, machine, page, report_arguments, table

AGENT = "examples.agents.calculator"
OTHER = ("rollout.environment=", "rollout.episodes.max_turns", "reward.functions")
AGENT_SETTINGS = (
    *(setting for setting in SETTINGS if not setting.startswith(OTHER)),
    f"rollout.agent={AGENT}:play",
    "rollout.agent_sandbox=null",
    f"reward.functions=[{{name: total, function: '{AGENT}:score'}}]",
)
NUM_CALLS, NUM_EPISODES, NUM_TURNS, TURN_S = 2000, 1000, 3, 0.2


def make_renderer() -> ChatRenderer:
    return ChatRenderer(build_tokenizer(), DataConfig(), agent_config(tool_format="none"))


async def call_overhead() -> dict[str, float]:
    """Time of a call of ten turns' conversations, with a policy that answers at once."""
    renderer = make_renderer()
    policy = Policy(renderer, lambda call: "1+1=2")
    times_s, cpu_s = [], time.process_time()
    async with (
        open_session(renderer, policy.sample, limits=SessionLimits(NUM_CALLS, 10**9, 10**9)) as (
            _,
            url,
            key,
        ),
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as http,
    ):
        messages: list[dict[str, Any]] = []
        for number in range(NUM_CALLS):
            if number % 10 == 0:
                messages = [{"role": "user", "content": f"{number}+1=?"}]
            start_s = time.perf_counter()
            async with http.post(f"{url}/chat/completions", json={"messages": messages}) as reply:
                answer = await reply.json()
            times_s.append(time.perf_counter() - start_s)
            messages += [answer["choices"][0]["message"], {"role": "user", "content": "1+2=?"}]
    return {
        "median_ms": 1e3 * statistics.median(times_s),
        "p95_ms": 1e3 * statistics.quantiles(times_s, n=20)[-1],
        "cpu_ms": 1e3 * (time.process_time() - cpu_s) / NUM_CALLS,
    }


async def many_episodes() -> dict[str, float]:
    """Wall time of episodes that all run at once, in one worker, with turns of ``TURN_S``."""
    renderer, proxy = make_renderer(), Proxy()
    config = agent_config(
        agent="tests.benchmarks.bench_agents:turns",
        tool_format="none",
        agent_limits={"episodes": NUM_EPISODES},
    )
    runner = AgentRunner(config, proxy)
    await proxy.open(has_port=True)
    await runner.open()
    policy, num_running, most = Policy(renderer, lambda call: "1+1=2"), 0, 0

    async def sample(call: Any) -> None:
        nonlocal num_running, most
        num_running += 1
        most = max(most, num_running)
        await asyncio.sleep(TURN_S)
        await policy.sample(call)
        num_running -= 1

    async def play(number: int) -> Any:
        limits = SessionLimits(10, 10**6, 10**6)
        session = Session(Record(), renderer, SamplingRules(1.0), limits, sample)
        task = {"prompt_id": "p", "messages": [{"role": "user", "content": f"{number}+1=?"}]}
        with proxy.admitted(session) as key:
            value = await runner.run(task, key, lambda _: None)
        await session.close()
        assert value == NUM_TURNS
        assert len(session.record.calls) == NUM_TURNS

    start_s = time.perf_counter()
    await asyncio.gather(*map(play, range(NUM_EPISODES)))
    wall_s = time.perf_counter() - start_s
    await runner.close()
    await proxy.close()
    return {"wall_s": wall_s, "calls_per_s": NUM_EPISODES * NUM_TURNS / wall_s, "most": most}


_HTTP: list[aiohttp.ClientSession] = []


async def turns(task: dict[str, Any], base_url: str, api_key: str) -> int:
    """A coroutine agent with one HTTP client for all episodes of its process."""
    if not _HTTP:
        connector = aiohttp.TCPConnector(limit=0)
        _HTTP.append(aiohttp.ClientSession(connector=connector))
    messages, headers = task["messages"], {"Authorization": f"Bearer {api_key}"}
    url = f"{base_url}/chat/completions"
    for _ in range(NUM_TURNS):
        async with _HTTP[0].post(url, json={"messages": messages}, headers=headers) as reply:
            message = (await reply.json())["choices"][0]["message"]
        messages = [*messages, message, {"role": "user", "content": "1+2=?"}]
    return NUM_TURNS


def train_both(scratch: Path, seed: int, steps: int) -> dict[str, Any]:
    """Train the environment and the agent from one model: score and seconds of each."""
    tiny = make_taught(scratch, seed)
    outcome: dict[str, Any] = {"seed": seed}
    for name, settings in (("environment", SETTINGS), ("agent", AGENT_SETTINGS)):
        start_s = time.perf_counter()
        rows = train(scratch / f"{name}{seed}", tiny, steps, [f"seed={seed}", *settings])
        scores = [row[SCORE] for row in rows if SCORE in row]
        steps_s = [row["time/step_s"] for row in rows if "time/step_s" in row]
        outcome[name] = {
            "before": scores[0],
            "after": scores[-1],
            "wall_s": time.perf_counter() - start_s,
            "step_s": statistics.median(steps_s) if steps_s else None,
        }
        sys.stderr.write(f"seed {seed}, {name}: {outcome[name]}\n")
    return outcome


def markdown(report: dict[str, Any]) -> str:
    call, many = report["call"], report["many"]
    rows = [
        (
            pair["seed"],
            name,
            f"{pair[name]['before']:.1%}",
            f"{pair[name]['after']:.1%}",
            f"{pair[name]['wall_s']:.0f}",
        )
        for pair in report["pairs"]
        for name in ("environment", "agent")
    ]
    return page(
        "Agents",
        report["machine"],
        f"A call through the proxy, with an engine that answers at once: median "
        f"{call['median_ms']:.2f} ms, 95 % {call['p95_ms']:.2f} ms, {call['cpu_ms']:.2f} ms of CPU "
        f"with its client. {NUM_EPISODES} episodes of {NUM_TURNS} turns of {TURN_S} s in one "
        f"worker: {many['wall_s']:.1f} s, up to {many['most']} turns at once.",
        "The calculator of docs/extending.md as an environment, and as an agent with the SDK:",
        table(("seed", "kind", "before", "after", "seconds"), rows),
    )


def main() -> None:
    parser = report_arguments(__doc__ or "", needs_out=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    report: dict[str, Any] = {
        "machine": machine(),
        "steps": options.steps,
        "call": asyncio.run(call_overhead()),
        "many": asyncio.run(many_episodes()),
    }
    with tempfile.TemporaryDirectory() as scratch:
        report["pairs"] = [
            train_both(Path(scratch), seed, options.steps) for seed in range(options.seeds)
        ]
    finish(options.out, markdown(report), report)


if __name__ == "__main__":
    main()
