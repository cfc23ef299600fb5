# requires: openai-agents==0.24.0
"""An agent of openai-agents, chat completions."""

from typing import Any

from openai import AsyncOpenAI

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled

set_tracing_disabled(True)


@function_tool
def add(a: float, b: float) -> float:
    """Add two numbers."""
    return a + b


async def play(task: dict[str, Any], base_url: str, api_key: str) -> str:
    """Return the policy's last turn."""
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    model = OpenAIChatCompletionsModel("policy", client)
    agent = Agent("adder", model=model, tools=[add])
    return (await Runner.run(agent, task["messages"])).final_output
