"""The two-turn calculator as an agent: a program that uses the openai SDK."""

import re
from typing import Any

from openai import AsyncOpenAI, DefaultAioHttpClient

HTTP = DefaultAioHttpClient()  # one for all episodes; needs openai[aiohttp]
BOXED = re.compile(r"\\boxed\{(\d{1,4})\}")


async def play(task: dict[str, Any], base_url: str, api_key: str) -> dict[str, int | None]:
    """Have the policy add two columns; return the sum and what it should be."""
    digits = [int(digit) for digit in re.findall(r"\d", task["messages"][-1]["content"])]
    goal = 10 * (sum(digits) // 10 + sum(digits[1:])) + sum(digits) % 10
    messages, totals = list(task["messages"]), list[int]()
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=HTTP)
    while len(totals) < 2:
        completion = await client.chat.completions.create(model="policy", messages=messages)
        turn = completion.choices[0].message
        boxed = BOXED.findall(turn.content or "")
        if not boxed:
            return {"result": None, "goal": goal}
        totals.append(int(boxed[-1]))
        column = "+".join(map(str, [totals[0] // 10, *digits[1:]]))
        messages += [turn.model_dump(exclude_none=True), {"role": "user", "content": f"{column}=?"}]
    return {"result": 10 * totals[1] + totals[0] % 10, "goal": goal}


def score(state: dict[str, int | None] | None) -> float:
    """Reward the right sum; an episode that met a limit has no state."""
    return float(state is not None and state["result"] == state["goal"])
