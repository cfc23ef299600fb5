r"""Finds the answer in a response.

It is the last ``\boxed{…}``; where there is none, the last ``<answer>…</answer>``; else what
follows the last ``####``, "answer is", "answer:" or "final answer" up to the end of its line.
"""

import re
from typing import NamedTuple

_BRACE = re.compile(
    r"(?P<boxed>\\{1,2}(?:boxed|fbox)[ \t]*\{)|\\.|(?P<open>\{)|(?P<close>\})", re.DOTALL
)
_FINAL_ANSWER = re.compile(
    r"####|\banswer[ \t]+is\b|\banswer\*{0,2}[ \t]*[:=]|\bfinal[ \t]+answer\*{0,2}[ \t]*\n",
    re.IGNORECASE,
)
_TAG_END, _TAG_START = "</answer>", "<answer>"


class ExtractedAnswer(NamedTuple):
    """The final answer of a response."""

    text: str
    boxed: bool
    r"""Whether it stood in ``\boxed{}`` or a tag, so that all of it is the answer."""


def extract_answer(response: str) -> ExtractedAnswer | None:
    r"""Find the final answer of a response, or None; linear in the response's length.

    The last ``\boxed{`` whose braces close counts; an empty one is not an answer.
    """
    boxed = last_boxed(response)
    if boxed is not None:
        return ExtractedAnswer(boxed, boxed=True) if boxed else None
    tag_end = response.rfind(_TAG_END)
    tag_start = response.rfind(_TAG_START, 0, tag_end) if tag_end >= 0 else -1
    if tag_start >= 0:
        tagged = response[tag_start + len(_TAG_START) : tag_end].strip()
        return ExtractedAnswer(tagged, boxed=True) if tagged else None
    end = None
    for match in _FINAL_ANSWER.finditer(response):
        end = match.end()
    if end is None:
        return None
    line = response[end:].lstrip(" \t\r\n:*").partition("\n")[0]
    # Markdown and sentence marks around the answer are not part of it.
    text = line.strip().strip("*").rstrip(".").strip()
    return ExtractedAnswer(text, boxed=False) if text else None


def last_boxed(text: str) -> str | None:
    r"""Content of the last ``\boxed{`` that closes; ``\{`` and ``\}`` are not braces."""
    last_start, content = -1, None
    open_braces: list[tuple[int, bool]] = []
    for match in _BRACE.finditer(text):
        if match["boxed"] or match["open"]:
            open_braces.append((match.end(), match["boxed"] is not None))
        elif match["close"] and open_braces:
            start, is_boxed = open_braces.pop()
            if is_boxed and start > last_start:
                last_start, content = start, slice(start, match.start())
    return None if content is None else text[content].strip()
