# requires: openai==3.57.0
"""The openai SDK, responses."""

import json
from typing import Any

import openai

PARAMETERS = {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}}
TOOLS: Any = [{"type": "function", "name": "add", "parameters": PARAMETERS, "strict": False}]


async def play(task: dict[str, Any], base_url: str, api_key: str) -> str:
    """Return the policy's last turn."""
    items: list[Any] = list(task["messages"])
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        while True:
            response = await client.responses.create(model="policy", input=items, tools=TOOLS)
            items += response.output
            calls = [item for item in response.output if item.type == "function_call"]
            if not calls:
                return response.output_text
            for call in calls:
                result = {"output": str(sum(json.loads(call.arguments).values()))}
                items.append({"type": "function_call_output", "call_id": call.call_id, **result})
