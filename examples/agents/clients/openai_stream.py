# requires: openai==3.57.0
"""The openai SDK, streamed chat completions."""

import json
from typing import Any

import openai

NUMBERS = {"a": {"type": "number"}, "b": {"type": "number"}}
ADD = {"name": "add", "parameters": {"type": "object", "properties": NUMBERS}, "strict": True}


async def play(task: dict[str, Any], base_url: str, api_key: str) -> str:
    """Return the policy's last turn."""
    asked: Any = {
        "model": "policy",
        "messages": list(task["messages"]),
        "tools": [{"type": "function", "function": ADD}],
    }
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        while True:
            async with client.chat.completions.stream(**asked) as stream:
                turn = (await stream.get_final_completion()).choices[0].message
            asked["messages"].append(turn)
            if not turn.tool_calls:
                return turn.content or ""
            for call in turn.tool_calls:
                result = str(sum(json.loads(call.function.arguments).values()))
                answer = {"role": "tool", "tool_call_id": call.id, "content": result}
                asked["messages"].append(answer)
