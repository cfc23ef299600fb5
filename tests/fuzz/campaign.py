"""The campaign: seeded cases of every kind, each in a fork of this process.

    python -m tests.fuzz.campaign --cases 2400 --seed 0

The known cases come first. Prints a line for each fault, then totals as JSON; the exit status is 1
if there was any.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.fuzz.forks import Ended

_MAKING_S = 300.0


def main() -> None:
    """Run the campaign that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=2400)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="*", default=[])
    parser.add_argument("--out", type=Path, help="gets every case as a line of JSON")
    given = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", NO_COLOR="1")
    from tests.fuzz.forks import load_commands

    load_commands()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as scratch:
        root = Path(scratch)
        make(root)
        began_s, ended = time.monotonic(), []
        for each in _run_all(root, given):
            ended.append(each)
            if each.fault:
                _say(f"{each.fault}: {each.name}: {each.command[:400]}\n    {each.line[:600]}")
            if given.out:
                with given.out.open("a") as lines:
                    lines.write(json.dumps(vars(each)) + "\n")
    faults = Counter(each.fault for each in ended if each.fault)
    wall_s = round(time.monotonic() - began_s, 1)
    slowest = max(ended, key=lambda each: each.took_s)
    totals = {"cases": len(ended), "faults": dict(faults), "wall_s": wall_s}
    _say(json.dumps({**totals, "slowest": [slowest.name, round(slowest.took_s, 1)]}))
    sys.exit(bool(faults))


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def make(root: Path) -> None:
    """Make the intact files under ``root``, in a fork."""
    from tests.fuzz.forks import in_fork
    from tests.fuzz.intact import make_intact

    (root / "intact").mkdir()
    status = in_fork(functools.partial(make_intact, root / "intact"), root / "making", _MAKING_S)
    assert status == 0, (root / "making.2").read_text()


def _run_all(root: Path, given: argparse.Namespace) -> Iterator[Ended]:
    from tests.fuzz.forks import run_case
    from tests.fuzz.kinds import KINDS
    from tests.fuzz.known_commands import KNOWN

    known = {} if given.first or given.kinds else KNOWN
    for number, (name, make_known) in enumerate(known.items()):
        yield run_case(
            name, functools.partial(make_known, root / "intact"), root / f"known_{number}"
        )
    names = given.kinds or list(KINDS)
    weights = [KINDS[name][1] for name in names]
    for number in range(given.first, given.first + given.cases):
        rng = Random(f"{given.seed}:{number}")
        kind = rng.choices(names, weights)[0]
        work = functools.partial(KINDS[kind][0], root / "intact", rng=rng)
        yield run_case(f"{kind} {number}", work, root / f"case_{number}")


if __name__ == "__main__":
    main()
