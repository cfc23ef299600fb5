# requires: crewai==1.15.30
"""An agent of CrewAI."""

from typing import Any

from crewai import LLM, Agent
from crewai.tools import tool


@tool
def add(a: float, b: float) -> float:
    """Add two numbers."""
    return a + b


async def play(task: dict[str, Any], base_url: str, api_key: str) -> str:
    """Return the policy's last turn."""
    model = LLM("openai/policy", base_url=base_url, api_key=api_key)
    agent = Agent(role="adder", goal="Add.", backstory="", llm=model, tools=[add])
    return (await agent.kickoff_async(task["messages"][-1]["content"])).raw
