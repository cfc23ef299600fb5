"""The policy of the clients' episodes: a script that adds three numbers with tools.

Its next turn follows from the sums that the prompt holds, in whatever form a client writes them.
"""

import json
import re

STYLES = ("plain", "text", "reasoning", "late reasoning", "two calls", "floats")
_BEFORE = {
    "text": " I add two — é 😀 \n\n",
    "reasoning": "<think>\nTwo at a time.\n</think>\n\n",
    "late reasoning": "Well.\n<think>\nTwo at a time.\n</think>\nSo:\n",
}
_QUESTION = re.compile(r"(\d{4}) \+ (\d{4}) \+ (\d{4})")


def question(first: int, second: int, third: int) -> str:
    """Return the user's message; each number has four digits, each sum five."""
    return f"What is {first} + {second} + {third}? Add two numbers at a time with a tool."


def next_turn(prompt: str, style: str) -> str:
    """Return the turn after a prompt."""
    first, second, third = map(int, _QUESTION.findall(prompt)[-1])
    half, total = first + second, first + second + third
    before = _BEFORE.get(style, "")
    if str(total) in prompt:
        return before + _last(prompt, total)
    pair = (half, third) if str(half) in prompt else (first, second)
    pairs = [pair, (second, third)] if style == "two calls" and pair[0] == first else [pair]
    if "next_tool_args" in prompt:  # dspy's form
        fields = {"next_thought": before or "Add.", "next_tool_name": "add"}
        return _fields(**fields, next_tool_args=json.dumps(dict(zip("ab", pair, strict=True))))
    return before + "\n".join(_addition(prompt, style, pair) for pair in pairs)


def _addition(prompt: str, style: str, pair: tuple[int, int]) -> str:
    if '"name": "bash"' in prompt:
        return _call("bash", command=f"echo $(({pair[0]} + {pair[1]}))")
    kind = float if style == "floats" else int
    [name, *_] = re.findall(r'"name": "([\w-]*add)"', prompt)  # some add a prefix
    return _call(name, a=kind(pair[0]), b=kind(pair[1]))


def _last(prompt: str, total: int) -> str:
    text = f"The sum is {total}."
    if '"name": "bash"' in prompt:
        mark = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
        return _call("bash", command=f"echo {mark}; echo {total}")
    if '"name": "final_answer"' in prompt:
        return _call("final_answer", answer=text)
    if "next_tool_args" in prompt:
        return _fields(next_thought="Done.", next_tool_name="finish", next_tool_args="{}")
    if "[[ ## answer ## ]]" in prompt:
        return _fields(reasoning="Added.", answer=text)
    return text


def _call(name: str, **arguments: object) -> str:
    content = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{content}\n</tool_call>"


def _fields(**fields: str) -> str:
    texts = [f"[[ ## {name} ## ]]\n{text}\n" for name, text in fields.items()]
    return "\n".join([*texts, "[[ ## completed ## ]]"])
