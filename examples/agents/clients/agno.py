# requires: agno==3.1.10 openai==3.57.0
"""An agent of agno."""

from typing import Any

from agno.agent import Agent
from agno.models.openai.like import OpenAILike


def add(a: float, b: float) -> float:
    """Add two numbers."""
    return a + b


async def play(task: dict[str, Any], base_url: str, api_key: str) -> str:
    """Return the policy's last turn."""
    model = OpenAILike(id="policy", base_url=base_url, api_key=api_key)
    agent = Agent(model=model, tools=[add], telemetry=False)
    return (await agent.arun(task["messages"][-1]["content"])).content
