"""``bapo-megatron`` with ``fake_train`` in the place of ``train``: program.py DIR ARGUMENTS…"""

from __future__ import annotations

import sys
from pathlib import Path

from bapo_megatron import cli
from bapo_megatron.tools.sweep.file import PlannedRun

FAKE = Path(__file__).parents[2] / "fakes" / "fake_train.py"


def main() -> None:
    outcomes = sys.argv.pop(1)

    def command(run: PlannedRun) -> list[str]:
        return [sys.executable, str(FAKE), outcomes, *run.arguments, "--resume"]

    PlannedRun.command = command  # type: ignore[method-assign]
    cli.main()


if __name__ == "__main__":
    main()
