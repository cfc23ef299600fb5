"""Bounds of rounding errors: from float64 of the same computation, not from one processor.

Kernels of other processors, or other numbers of threads, add in another order. What is safe on all
of them is a multiple of an error that an independent float32 computation makes in the same
environment, or a bound of the analysis of the sum. With ``BAPO_TOLERANCES`` set to a file, every
comparison appends a line with its error and its bound; ``tests.benchmarks.bench_tolerances`` makes
a table of them.
"""

import json
import os
from pathlib import Path
from typing import SupportsFloat

import torch

HEADROOM = 32.0
"""Bound over the error of one order of float32 sums: another order errs up to 8 times as much (5.5
was seen), and four remain to spare."""
EPS = torch.finfo(torch.float32).eps
FILE = "BAPO_TOLERANCES"


def assert_within(error: SupportsFloat, bound: SupportsFloat, what: object = "") -> None:
    """The error is at most the bound; both are recorded. NaN is beyond every bound."""
    record(float(error), float(bound), what)
    assert float(error) <= float(bound), f"{what}: error {error:.3g}, bound {bound:.3g}"


def sum_bound(num_terms: int, magnitude: SupportsFloat = 1.0) -> float:
    """γₙ = n ε: how far a float32 sum may be off in any order, if its terms' sizes sum to this."""
    return num_terms * EPS * float(magnitude)


def record(error: float, bound: float, what: object = "") -> None:
    """Append one comparison of the running test to the file that the environment names."""
    if FILE in os.environ:
        test, _, _ = os.environ["PYTEST_CURRENT_TEST"].rpartition(" (")
        line = {"test": test, "what": str(what), "error": error, "bound": bound}
        with Path(os.environ[FILE]).open("a") as file:
            file.write(json.dumps(line) + "\n")
