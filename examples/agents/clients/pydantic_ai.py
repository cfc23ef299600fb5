# requires: pydantic-ai-slim[openai]==2.68.0
"""An agent of pydantic-ai."""

from typing import Any

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


def add(a: float, b: float) -> float:
    """Add two numbers."""
    return a + b


async def play(task: dict[str, Any], base_url: str, api_key: str) -> str:
    """Return the policy's last turn."""
    provider = OpenAIProvider(base_url=base_url, api_key=api_key)
    agent = Agent(OpenAIChatModel("policy", provider=provider), tools=[add])
    return (await agent.run(task["messages"][-1]["content"])).output
