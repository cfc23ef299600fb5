# requires: llama-index-llms-openai-like==0.8.1 llama-index-core==0.14.25
"""A function agent of LlamaIndex."""

from typing import Any

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai_like import OpenAILike


def add(a: float, b: float) -> float:
    """Add two numbers."""
    return a + b


async def play(task: dict[str, Any], base_url: str, api_key: str) -> str:
    """Return the policy's last turn."""
    place = {"model": "policy", "api_base": base_url, "api_key": api_key}
    kind = {"is_chat_model": True, "is_function_calling_model": True}
    agent = FunctionAgent(tools=[add], llm=OpenAILike(**place, **kind))
    return str(await agent.run(task["messages"][-1]["content"]))
