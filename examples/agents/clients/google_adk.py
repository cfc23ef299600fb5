# requires: google-adk==2.13.0 litellm==1.110.2
"""An agent of Google's ADK, through litellm."""

from typing import Any

from google.adk.agents import LlmAgent
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner


def add(a: float, b: float) -> float:
    """Add two numbers."""
    return a + b


async def play(task: dict[str, Any], base_url: str, api_key: str) -> str:
    """Return the policy's last turn."""
    model = LiteLlm("openai/policy", api_base=base_url, api_key=api_key)
    runner = InMemoryRunner(LlmAgent(name="adder", model=model, tools=[add]), app_name="adder")
    events = await runner.run_debug(task["messages"][-1]["content"], quiet=True)
    return events[-1].content.parts[-1].text
