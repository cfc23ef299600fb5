"""Plays the tasks of any taskset of verifiers 0.4, here column_sums.py, with a streaming client.

In an interpreter of its own, whose packages never meet those of training::

    python3.12 -m venv /opt/verifiers && /opt/verifiers/bin/pip install verifiers==0.4.0
    export PYTHONPATH=$PWD/examples/agents
    /opt/verifiers/bin/python -m verifiers_taskset 2000 > train.jsonl
    bapo-megatron train config.yaml data.train.path=train.jsonl eval.sets=[] \
        rollout.agent=verifiers_taskset:play rollout.agent_python=/opt/verifiers/bin/python \
        rollout.agent_sandbox=null rollout.agent_sampling=override \
        "reward.functions=[{name: verifiers, function: 'verifiers_reward:score'}]"
"""

import json
import os
import sys
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from verifiers.v1.dialects.chat import message_to_wire

__all__ = ["StreamingHarness"]

HTTP = DefaultAsyncHttpxClient()  # one for all turns: making one takes 0.1 s
TASKSET = os.environ.get("VERIFIERS_TASKSET", "column_sums")


class StreamingHarness(vf.Harness[vf.HarnessConfig]):
    """Asks for one streamed turn in this process; verifiers' harnesses start one for each turn."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """Sample one turn."""
        system, prompt = self.resolve_prompt(data)
        if isinstance(prompt, str):
            messages: list[Any] = [{"role": "user", "content": prompt}]
        else:
            messages = [message_to_wire(message) for message in prompt or ()]
        if system:
            messages.insert(0, {"role": "system", "content": system})
        client = AsyncOpenAI(base_url=endpoint, api_key=secret, http_client=HTTP)
        chunks = await client.chat.completions.create(
            model=ctx.model, messages=messages, stream=True
        )
        async for _ in chunks:
            pass  # verifiers records the turn on its way
        return vf.ProgramResult(0, "", "")


def load() -> vf.Env:
    """Return the taskset's environment, with the harness above."""
    config = vf.resolve_env_config({"taskset": {"id": TASKSET}})
    agent = vf.AgentConfig(harness={"id": "verifiers_taskset"}, runtime=vf.SubprocessConfig())
    return vf.load_environment(config.model_copy(update={"agent": agent}))


async def play(task: dict[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
    """Play one episode; return its rewards."""
    os.environ[api_key] = api_key  # verifiers reads keys from variables
    client = vf.EvalClientConfig(base_url=base_url, api_key_var=api_key)
    context = vf.ModelContext(model="policy", client=client, sampling=vf.SamplingConfig())
    env = load()
    task_type = type(env.taskset).task_type()
    data = task_type.data_type().model_validate(task["row"]["task"])
    try:
        async with env.serving():
            episode = await env.run_episode(task_type(data, env.taskset.config.task), context)
    finally:
        del os.environ[api_key]
    if not episode.ok:
        raise RuntimeError(f"{episode.errors or [trace.errors for trace in episode.traces]}")
    [trace] = episode.traces
    return {"reward": trace.reward, "turns": trace.num_turns}


def main() -> None:
    """Print so many tasks as rows of training data."""
    for task in load().taskset.take(int(sys.argv[1])):
        row = {"prompt": task.data.prompt_text, "task": task.data.model_dump(mode="json")}
        sys.stdout.write(json.dumps({**row, "answer": "-"}) + "\n")


if __name__ == "__main__":
    main()
