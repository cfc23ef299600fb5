"""The ``data show`` command with a rollout dump: what policy and environment wrote, by turns."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from rich.console import Group
from rich.panel import Panel
from rich.text import Text

from bapo_megatron.data.dump import DumpError, read_batch, read_texts, texts_path
from bapo_megatron.data.show import fenced

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from bapo_megatron.types import Sample, SampleText

_CONTROL_PICTURES = {
    **{code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"},
    0x7F: 0x2421,
    **dict.fromkeys(range(0x80, 0xA0), 0xFFFD),
}
"""What is shown for characters that a terminal would obey."""


@dataclass(frozen=True, slots=True)
class ShownPart:
    """What one of them wrote before it was the other's turn."""

    author: str
    """``policy`` or ``environment``."""
    num_tokens: int
    text: str | None
    """Without special tokens; None where the dump has no texts."""


@dataclass(frozen=True, slots=True)
class ShownSample:
    """One response."""

    group_id: int
    index: int
    prompt_id: str
    source: str
    finish_reason: str
    reward: float
    reward_components: dict[str, float]
    versions: tuple[tuple[int, int], ...]
    """(weights version, sampled tokens)."""
    sampled_tokens: int
    written_tokens: int
    prompt: str | None
    answer: str | None
    parts: tuple[ShownPart, ...]

    def title(self) -> str:
        """Which sample it is, and how it ended."""
        place = f"group {self.group_id} · sample {self.index} · {self.prompt_id}"
        return f"{place} · {self.finish_reason} · reward {self.reward:g}"

    def facts(self) -> list[str]:
        """What is known besides the texts, one line each."""
        components = (f"{name} {value:g}" for name, value in self.reward_components.items())
        versions = (f"{version} ({num_tokens})" for version, num_tokens in self.versions)
        return [
            f"reward components: {' · '.join(components) or 'none'}",
            f"weights versions (tokens): {' · '.join(versions) or 'none'}",
            f"tokens: {self.sampled_tokens:,} sampled, {self.written_tokens:,} written",
            *([] if self.answer is None else [f"answer: {self.answer}"]),
        ]

    def blocks(self) -> list[tuple[str, str | None]]:
        """Headings with their texts: the prompt, then the parts."""
        found: list[tuple[str, str | None]] = []
        if self.prompt is not None:
            found.append(("prompt", self.prompt))
        for number, part in enumerate(self.parts):
            turn = f"turn {1 + number // 2} · " if part.author == "policy" else ""
            found.append((f"{turn}{part.author} · {part.num_tokens:,} tokens", part.text))
        return found


@dataclass(frozen=True, slots=True)
class DumpReport:
    """What ``data show`` prints of a dump."""

    path: str
    step: int
    version: int
    num_groups: int
    num_samples: int
    has_texts: bool
    samples: tuple[ShownSample, ...]
    """The first ones."""

    def to_json(self) -> str:
        """Everything, as one JSON object."""
        return json.dumps(asdict(self), indent=2, ensure_ascii=False)

    def print(self, console: Console) -> None:
        """Panels on a terminal, else Markdown."""
        about = f"step {self.step} · version {self.version} · {self.num_groups:,} groups"
        lines = [f"{self.path} · {about} · {self.num_samples:,} samples"]
        if not self.has_texts:
            lines.append("No texts beside the dump: numbers of tokens only.")
        if not console.is_terminal:
            console.out("\n\n".join(lines), highlight=False)
            for sample in self.samples:
                console.out(_markdown(sample), highlight=False)
            return
        console.print(_text("\n".join(lines)), highlight=False)
        for sample in self.samples:
            console.print(_panel(sample), highlight=False)


def inspect_dump(path: Path, num_samples: int) -> DumpReport:
    """Read a dump, and the texts beside it where there are some.

    Args:
        path: The dump.
        num_samples: How many samples to show.

    Raises:
        DumpError: It is no intact dump, or its texts are not its own.
        OSError: It cannot be read.
    """
    batch = read_batch(path)
    has_texts = texts_path(path).exists()
    texts = {(t.group_id, t.index): t for t in read_texts(path)} if has_texts else {}
    first = batch.samples[:num_samples]
    return DumpReport(
        path=str(path),
        step=batch.step,
        version=batch.version,
        num_groups=len(batch.groups),
        num_samples=len(batch.samples),
        has_texts=has_texts,
        samples=tuple(_shown(s, texts.get((s.group_id, s.index)), path) for s in first),
    )


def _shown(sample: Sample, text: SampleText | None, path: Path) -> ShownSample:
    lengths = [len(part) for part in sample.segments()]
    written: tuple[str | None, ...] = (None,) * len(lengths)
    if text is not None:
        written = text.turns or (text.response_text,)
        if len(written) != len(lengths):
            raise DumpError(
                f"{texts_path(path)}: sample {sample.index} of group {sample.group_id} has "
                f"{len(written)} texts, its tokens are of {len(lengths)} parts; give the dump that "
                "the texts were written with"
            )
    authors = ("policy", "environment")
    return ShownSample(
        group_id=sample.group_id,
        index=sample.index,
        prompt_id=sample.prompt.prompt_id,
        source=sample.prompt.source,
        finish_reason=sample.finish_reason.value,
        reward=sample.reward,
        reward_components=sample.reward_components,
        versions=tuple((span.version, span.num_tokens) for span in sample.versions),
        sampled_tokens=sample.num_sampled,
        written_tokens=sample.num_written,
        prompt=None if text is None else text.prompt_text,
        answer=None if text is None else text.answer,
        parts=tuple(
            ShownPart(authors[number % 2], length, part)
            for number, (length, part) in enumerate(zip(lengths, written, strict=True))
        ),
    )


def _markdown(sample: ShownSample) -> str:
    lines = ["", f"### {sample.title()}", "", *(f"- {fact}" for fact in sample.facts())]
    for heading, text in sample.blocks():
        lines += (
            ["", f"**{heading}**"] if text is None else ["", f"**{heading}**", "", fenced(text)]
        )
    return "\n".join(lines)


def _panel(sample: ShownSample) -> Panel:
    content = [_text(fact, "dim") for fact in sample.facts()]
    for heading, text in sample.blocks():
        style = "cyan" if heading.startswith("environment") else ""
        content.append(_text(f"\n{heading}", "bold"))
        if text is not None:
            content.append(_text(text, style))
    return Panel(Group(*content), title=_text(sample.title()), title_align="left")


def _text(text: str, style: str = "") -> Text:
    """Shown as it is: neither markup nor control sequences."""
    return Text(text.translate(_CONTROL_PICTURES), style)
