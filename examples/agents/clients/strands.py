# requires: strands-agents[openai]==1.62.0
"""An agent of Strands."""

from typing import Any

from strands import Agent, tool
from strands.models.openai import OpenAIModel


@tool
def add(a: float, b: float) -> float:
    """Add two numbers."""
    return a + b


async def play(task: dict[str, Any], base_url: str, api_key: str) -> str:
    """Return the policy's last turn."""
    arguments = {"base_url": base_url, "api_key": api_key}
    model = OpenAIModel(client_args=arguments, model_id="policy")
    agent = Agent(model, tools=[add], callback_handler=None)
    return str(await agent.invoke_async(task["messages"][-1]["content"]))
