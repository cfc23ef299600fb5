# requires: dspy==3.4.1
"""ReAct of dspy, which writes the whole trajectory into each prompt."""

from typing import Any

import dspy

dspy.configure_cache(enable_disk_cache=False, enable_memory_cache=False)


def add(a: float, b: float) -> float:
    """Add two numbers."""
    return a + b


async def play(task: dict[str, Any], base_url: str, api_key: str) -> str:
    """Return the policy's last turn."""
    model = dspy.LM("openai/policy", api_base=base_url, api_key=api_key)
    with dspy.context(lm=model):
        react = dspy.ReAct("question -> answer", tools=[add], max_iters=6)
        return (await react.acall(question=task["messages"][-1]["content"])).answer
