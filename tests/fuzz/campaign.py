"""A campaign of bad input: seeded cases of every kind, each in a fork of this process.

    make fuzz
    python -m tests.fuzz.campaign --cases 2400 --seed 0

The known cases come first; the tests run them alone (``--cases 0``). Prints a line for each fault,
then totals as JSON; the exit status is 1 if there was any.
"""

import argparse
import functools
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random

from tests.fuzz.forks import Outcome

_SETUP_S = 300.0


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=2400)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="gets every case as a line of JSON")
    options = parser.parse_args(arguments)
    os.environ.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", NO_COLOR="1")
    from tests.fuzz.forks import load_commands

    load_commands()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as scratch:
        root = Path(scratch)
        _make_intact(root)
        start_s, outcomes = time.monotonic(), []
        for outcome in _run_all(root, options):
            outcomes.append(outcome)
            if outcome.fault:
                _print(f"{outcome.fault}: {outcome.name}: {outcome.command[:400]}")
                _print(f"    {outcome.line[:600]}")
            if options.out:
                with options.out.open("a") as lines:
                    lines.write(json.dumps(vars(outcome)) + "\n")
    faults = Counter(outcome.fault for outcome in outcomes if outcome.fault)
    slowest = max(outcomes, key=lambda outcome: outcome.duration_s)
    totals = {
        "cases": len(outcomes),
        "faults": dict(faults),
        "wall_s": round(time.monotonic() - start_s, 1),
        "slowest": [slowest.name, round(slowest.duration_s, 1)],
    }
    _print(json.dumps(totals))
    sys.exit(bool(faults))


def _print(text: str) -> None:
    print(text, flush=True)  # noqa: T201


def _make_intact(root: Path) -> None:
    """Make the intact files under ``root``, in a fork."""
    from tests.fuzz.forks import in_fork
    from tests.fuzz.intact import make_intact

    (root / "intact").mkdir()
    status = in_fork(functools.partial(make_intact, root / "intact"), root / "making", _SETUP_S)
    assert status == 0, (root / "making.2").read_text()


def _run_all(root: Path, options: argparse.Namespace) -> Iterator[Outcome]:
    from tests.fuzz.forks import run_case
    from tests.fuzz.kinds import KINDS
    from tests.fuzz.known import KNOWN

    known = {} if options.first else KNOWN
    for number, (name, case) in enumerate(known.items()):
        yield run_case(name, case.make, root, f"known_{number}")
    weights = [weight for _, weight in KINDS.values()]
    for number in range(options.first, options.first + options.cases):
        rng = Random(f"{options.seed}:{number}")
        kind = rng.choices(list(KINDS), weights)[0]
        yield run_case(
            f"{kind} {number}",
            functools.partial(KINDS[kind][0], rng=rng),
            root,
            f"case_{number}",
        )


if __name__ == "__main__":
    main()
