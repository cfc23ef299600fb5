"""Errors of the numeric tests beside their bounds, with the kernels of other processors.

    python -m tests.benchmarks.bench_tolerances --records DIR --out docs/benchmarks/NAME.md

runs the tests in every environment and keeps what they record in ``DIR``; environments that have
records there already are not run again.
"""

import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.benchmarks.harness import finish, machine, page, report_arguments, table
from tests.launch import REPOSITORY
from tests.tolerances import FILE

ENVIRONMENTS: dict[str, dict[str, str]] = {
    "as it is": {},
    "AVX2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "no vectors": {"ATEN_CPU_CAPABILITY": "default"},
    "MKL compatible": {"MKL_CBWR": "COMPATIBLE"},
    # Threads of ranks that share processors must not spin.
    "2 threads": {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"},
}
FOLDERS = ("tests/ops", "tests/policy", "tests/trainer")
"""Of the tests that compare float32 computations by ``assert_within``."""


def run_tests(name: str, records: Path) -> None:
    """Run the numeric tests in an environment, in ranks as well."""
    variables = {"OMP_NUM_THREADS": "1", FILE: str(records.absolute()), **ENVIRONMENTS[name]}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not sglang and not browser"]
    command += numeric_tests()
    subprocess.run(command, cwd=REPOSITORY, env=os.environ | variables, check=False)


def numeric_tests() -> list[str]:
    """Modules in which an error meets its bound, by themselves or by a helper."""
    paths = (path for folder in FOLDERS for path in (REPOSITORY / folder).rglob("test_*.py"))
    calls = ("assert_within", "assert_close(", "assert_token_results(", "assert_same_gradients")
    calls += ("check(",)
    found = [path for path in paths if any(call in path.read_text() for call in calls)]
    return sorted(str(path.relative_to(REPOSITORY)) for path in found)


def worst(records: Iterable[str]) -> dict[str, dict[str, Any]]:
    """By test, all its parameters together: the record of the smallest margin."""
    worst: dict[str, dict[str, Any]] = {}
    for line in records:
        record = json.loads(line)
        record["margin"] = record["bound"] / record["error"] if record["error"] else float("inf")
        test, _, _ = record["test"].partition("[")
        if test not in worst or record["margin"] < worst[test]["margin"]:
            worst[test] = record
    return worst


def _markdown(report: dict[str, Any]) -> str:
    margins: dict[str, dict[str, float]] = defaultdict(dict)
    first: dict[str, dict[str, Any]] = {}
    for name, records in report["environments"].items():
        for test, record in records.items():
            margins[test][name] = record["margin"]
            first.setdefault(test, record)
    rows = [
        [
            test.removeprefix("tests/").replace("::", ": ").replace("_", " "),
            f"{first[test]['error']:.1e}",
            f"{first[test]['bound']:.1e}",
            *(
                f"{of_test[name]:.1f}" if name in of_test else "–"
                for name in report["environments"]
            ),
        ]
        for test, of_test in sorted(margins.items(), key=lambda item: min(item[1].values()))
    ]
    head = ["test", "error", "bound", *report["environments"]]
    settings = [
        f"- {name}: " + (" ".join(f"`{n}={v}`" for n, v in ENVIRONMENTS[name].items()) or "–")
        for name in report["environments"]
    ]
    return page(
        "Rounding errors and their bounds",
        report["machine"],
        "Bounds come from float64 and from the errors of an independent float32 computation in the "
        "same environment (tests/tolerances.py). Error and bound are those of the smallest margin "
        "among a test's comparisons as it is; then that margin in each environment.",
        settings,
        table(head, rows),
    )


def main() -> None:
    parser = report_arguments(__doc__ or "")
    parser.add_argument("--records", type=Path, required=True, help="folder of what tests record")
    options = parser.parse_args()
    options.records.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"machine": machine(), "environments": {}}
    for name in ENVIRONMENTS:
        records = options.records / f"{name.replace(' ', '_')}.jsonl"
        if not records.exists():
            run_tests(name, records)
        report["environments"][name] = worst(records.read_text().splitlines())
    finish(options.out, _markdown(report), report)


if __name__ == "__main__":
    main()
