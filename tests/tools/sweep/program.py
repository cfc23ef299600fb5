"""``bapo-megatron`` with ``fake_train`` in the place of ``train``: program.py DIR ARGUMENTS…"""

import sys
from collections.abc import Callable
from pathlib import Path

from bapo_megatron import cli
from bapo_megatron.tools.sweep.file import PlannedRun

FAKE = Path(__file__).parents[2] / "fakes" / "fake_train.py"


def main() -> None:
    PlannedRun.command = command_with(sys.argv.pop(1))  # type: ignore[method-assign]
    cli.main()


def command_with(outcomes: str) -> Callable[[PlannedRun], list[str]]:
    """The method of a run that returns its command."""
    return lambda run: [sys.executable, str(FAKE), outcomes, *run.arguments, "--resume"]


if __name__ == "__main__":
    main()
