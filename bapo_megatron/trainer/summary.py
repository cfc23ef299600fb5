"""The closing table of a run and ``summary.json`` with the same numbers."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bapo_megatron.files import atomic_write_text


@dataclass(frozen=True, slots=True)
class RunSummary:
    """What a run did; the keys of ``summary.json``."""

    name: str
    seed: int
    steps: int
    """Training steps of the whole run, earlier tries included."""
    updates: int
    """Optimizer updates, without skipped ones."""
    accuracy_before: float | None
    """avg@k of the first evaluation set at the start of this run; None without an evaluation."""
    accuracy_after: float | None
    """The same at the end."""
    answer_found_before: float | None
    """Share of samples with a well-formed answer, right or wrong, at the start."""
    answer_found_after: float | None
    """The same at the end."""
    num_prompts: int
    """Prompts of the first evaluation set."""
    generated_tokens: int
    """Response tokens generated for training, in a replay: by the earlier run."""
    generated_tokens_per_s: float | None
    """Response tokens per second while batches were collected; None in a replay."""
    search_moved_share: float | None
    """Share of bound searches that did not end at ``start``; None where nothing was searched."""
    phase_s: dict[str, float]
    """Wall time by phase, in seconds."""

    def write(self, path: Path) -> None:
        """Write JSON, atomically."""
        atomic_write_text(path, json.dumps(asdict(self), indent=2) + "\n")

    def print(self, console: Console) -> None:
        """Print the table."""
        table = Table(title=f"{self.name}, seed {self.seed}", show_header=False)
        table.add_column("what")
        table.add_column("value", justify="right")
        if self.accuracy_before is not None and self.accuracy_after is not None:
            table.add_row("held-out prompts", str(self.num_prompts))
            table.add_row("accuracy before", f"{self.accuracy_before:.1%}")
            table.add_row("accuracy after", f"[bold]{self.accuracy_after:.1%}[/bold]")
        if self.answer_found_before is not None and self.answer_found_after is not None:
            table.add_row("well-formed answers before", f"{self.answer_found_before:.1%}")
            table.add_row("well-formed answers after", f"{self.answer_found_after:.1%}")
        table.add_row("steps (optimizer updates)", f"{self.steps} ({self.updates})")
        if self.search_moved_share is not None:
            table.add_row("searches that moved a bound", f"{self.search_moved_share:.0%}")
        if self.generated_tokens_per_s is not None:
            table.add_row("generated tokens/s", f"{self.generated_tokens_per_s:,.0f}")
        for name, seconds in self.phase_s.items():
            table.add_row(f"time: {name.replace('_', ' ')}", f"{seconds:.1f} s")
        console.print(table)
