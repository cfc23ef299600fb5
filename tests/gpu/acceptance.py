"""Everything that must be seen on a real GPU, part by part: ``make gpu-acceptance``.

    python -m tests.gpu.acceptance all
    python -m tests.gpu.acceptance kernels > kernels.jsonl

Each part takes a few minutes on one GPU, prints a line of JSON per check (check, figure, target,
pass) on standard output and a table on standard error, and ends with 1 if a check failed. A part
for which something is missing here is skipped, and says what (skipped, why). Without a GPU the
command says so and ends with 3. ``needs`` lists the wheels that suffice beside torch.
"""

import argparse
import json
import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

WHEELS = Path(__file__).parents[2] / "requirements" / "gpu_acceptance.txt"
"""What is installed beside torch; behind each version the size of its wheel in MB."""

PARTS = {
    "build": "the extension for this GPU, and what doctor says: nvcc where it is built",
    "tests": "nothing; it is pytest -m gpu",
    "kernels": "Megatron-core's cross entropy beside ours; flash-attn's, Transformer Engine's and "
    "Liger's where they are installed",
    "sanitize": "compute-sanitizer of the CUDA toolkit",
    "model": "8 GB of disk for random models of 0.5B to 1.5B, and batches to train them on",
    "train": "what `model` wrote",
    "experts": "the same",
    "hybrid": "the same; with Transformer Engine also flash-linear-attention",
    "fp8": "the same; Transformer Engine, and a GPU with FP8",
    "profile": "what `model` wrote",
    "thin": "6 GB of disk for a model of four layers as wide as a 32B's",
    "ranks": "NCCL 2.30, preloaded where torch brings an older one (docs/gpu.md)",
    "ipc": "nothing",
    "sync": "as for `ranks`",
    "sglang": "SGLang and transformers",
}
"""What each part needs beside a GPU, in the order of ``all``."""
EXIT_NO_GPU = 3
HANG_S = 900
"""When a process is given up."""
_OPTIONS = ("dir", "device", "tokens", "columns", "rounds", "steps")


HOLDS = (">=", 1.0)
"""For a figure that is 1 where something holds, else 0."""

TARGETS = {
    "forward bandwidth share": (">=", 0.90),
    "backward bandwidth share": (">=", 0.90),
    "long rows forward bandwidth share": (">=", 0.85),
    "long rows backward bandwidth share": (">=", 0.85),
    "forward against Megatron-core": (">=", 10),
    "both against Megatron-core": (">=", 6),
    "forward against others": (">=", 1.0),
    "bound search us": ("<=", 50),
    "copy TB/s": (">=", 0),
    "copy share of the data sheet": (">=", 0.85),
    "long rows copy TB/s": (">=", 0),
    "long rows copy share of the data sheet": (">=", 0.85),
    "seconds": ("<=", 360),
    "peak over plan": ("<=", 1.10),
    "plan over peak": ("<=", 1.10),
    "gradient norm": ("<=", 1e30),
    "gradient norm difference": ("<=", 0.01),
    "norm difference of two ranks": ("<=", 1e-5),
    "norm difference of GPU and CPU": ("<=", 1e-5),
    "share of the peak": (">=", 0.40),
    "share of the peak, our layers": (">=", 0),
    "experts' share of the dense model's FLOP/s": (">=", 0.5),
    "experts' share of the dense model's FLOP/s on a CPU": (">=", 0),
    "grouped against one by one": (">=", 1.0),
    "grouped against one by one on a CPU": (">=", 0),
    "fp8 against bfloat16": (">=", 1.0),
    "time share": (">=", 0),
    "a layer's time over plan": ("<=", 1.15),
    "a layer's memory over plan": ("<=", 1.10),
    "plan over a layer's memory": ("<=", 1.10),
    "milliseconds of two layers": (">=", 0),
    "milliseconds of four layers": (">=", 0),
    "broadcast GB/s": (">=", 0),
    "seconds until a lost receiver is noticed": ("<=", 60),
    "mismatch of sampler and trainer": ("<=", 0.03),
    "difference after a weight sync": ("<=", 0.1),
    "accuracy gained": (">=", 0.1),
    "loss stage share": ("<=", 0.05),
    "loss stage share on a CPU": ("<=", 1),
    "released share": (">=", 0.95),
}
"""On one H100 or H200. Checks that are not here must hold."""


class SkipPartError(Exception):
    """A part cannot run here: what is missing, in one line."""


@dataclass(frozen=True, slots=True)
class Check:
    """One figure beside its target, or a part that was skipped."""

    name: str
    """A target's name, in which parentheses hold what was varied: ``gradient norm (plain)``; or the
    part."""
    figure: float = math.nan
    skipped: str = ""
    """Why, of a part."""

    @property
    def target(self) -> tuple[str, float]:
        """``>=`` or ``<=``, and what the figure must reach."""
        return TARGETS.get(self.name.partition(" (")[0], HOLDS)

    @property
    def passes(self) -> bool:
        """Whether it does; NaN reaches nothing, and what was skipped fails nothing."""
        if self.skipped:
            return True
        relation, value = self.target
        return self.figure >= value if relation == ">=" else self.figure <= value

    def line(self) -> str:
        if self.skipped:
            return json.dumps({"skipped": self.name, "why": self.skipped})
        fields = {"check": self.name, "figure": self.figure, "target": self.target_text()}
        return json.dumps({**fields, "pass": self.passes})

    def target_text(self) -> str:
        """Such as ``>= 0.9``."""
        return f"{self.target[0]} {self.target[1]:g}"


def table(checks: list[Check]) -> str:
    """The summary, for people."""
    rows = [("check", "figure", "target", "")]
    for check in checks:
        if check.skipped:
            rows.append((check.name, "", "", f"skipped: {check.skipped}"))
        else:
            verdict = "pass" if check.passes else "FAIL"
            rows.append((check.name, f"{check.figure:.4g}", check.target_text(), verdict))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def run(
    part: str, options: argparse.Namespace, work: Callable[..., Iterator[Check]]
) -> list[Check]:
    """Run a part here; if it raises, that is a failed check."""
    checks = []

    def add(check: Check) -> None:
        checks.append(check)
        print(check.line(), flush=True)  # noqa: T201

    start_s = time.perf_counter()
    try:
        for check in work(options):
            add(check)
    except SkipPartError as reason:
        add(Check(part, skipped=str(reason)))
        return checks
    except Exception as error:  # noqa: BLE001 - the time is a check, too
        print(f"{part}: {type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201
        add(Check(f"{part} ended without an error", 0.0))
    add(Check(f"seconds ({part})", time.perf_counter() - start_s))
    return checks


def run_apart(parts: list[str], options: argparse.Namespace) -> list[Check]:
    """Run each part in a process of its own, so that a fault of one on the GPU ends no other.

    A part that hangs is killed after ``HANG_S``, with its own children.
    """
    from bapo_megatron.runtime.processes import end_group

    arguments = [f"--{name}={getattr(options, name)}" for name in _OPTIONS]
    done = []
    for part in parts:
        command = [sys.executable, "-m", "tests.gpu.acceptance", part, *arguments]
        command += ["--sizes", *options.sizes, "--overrides", *options.overrides]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, start_new_session=True
        ) as process:
            limit = threading.Timer(HANG_S, _give_up, (part, process))
            limit.start()
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    is_check = line.startswith("{")  # a library may print what it likes
                    print(line, end="", file=sys.stdout if is_check else sys.stderr, flush=True)
                    if is_check:
                        fields = json.loads(line)
                        done.append(
                            Check(fields["skipped"], skipped=fields["why"])
                            if "skipped" in fields
                            else Check(fields["check"], fields["figure"])
                        )
                process.wait()
            finally:
                limit.cancel()
                end_group(process)
        if process.returncode not in (0, 1):
            done.append(Check(f"{part} ended without an error", 0.0))
            print(done[-1].line(), flush=True)  # noqa: T201
    return done


def _give_up(part: str, process: subprocess.Popen[str]) -> None:
    from bapo_megatron.runtime.processes import end_group

    print(f"{part}: given up after {HANG_S:g} s", file=sys.stderr)  # noqa: T201
    end_group(process)


def needs() -> str:
    """What each part needs, then the wheels that all of them need together."""
    parts = [f"{part}: {what}" for part, what in PARTS.items()]
    wheels = [line for line in WHEELS.read_text().splitlines() if "==" in line]
    install = f"pip install --no-deps -r requirements/{WHEELS.name}"
    return "\n".join([*parts, "", *wheels, install])


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.acceptance", description=__doc__)
    parser.add_argument("part", choices=[*PARTS, "needs", "all"])
    parser.add_argument("--dir", type=Path, default=Path("runs/gpu-acceptance"))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: for tests")
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--columns", type=int, default=19008, help="152,064 over 8 ranks")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=12, help="of the demo with SGLang")
    parser.add_argument("--overrides", nargs="*", default=[], help="key=value, the same")
    sizes = ["0.5B", "1.5B", "0.8B experts", "0.5B hybrid"]
    parser.add_argument("--sizes", nargs="+", default=sizes)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.part == "needs":
        print(needs())  # noqa: T201
        return 0
    try:
        import torch
    except ImportError as error:
        line = f"no torch ({error}): nothing was checked; install it as docs/gpu.md says"
        print(line, file=sys.stderr)  # noqa: T201
        return EXIT_NO_GPU
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: nothing was checked", file=sys.stderr)  # noqa: T201
        return EXIT_NO_GPU
    if options.part == "all":
        from bapo_megatron.runtime.processes import end_by_exception

        end_by_exception()  # so that the part that runs ends, too
        checks = run_apart(list(PARTS), options)
    else:
        from bapo_megatron.policy.megatron_import import import_megatron

        import_megatron()
        from tests.gpu import parts

        checks = run(options.part, options, getattr(parts, options.part))
    print(table(checks), file=sys.stderr)  # noqa: T201
    return 0 if checks and all(check.passes for check in checks) else 1


if __name__ == "__main__":
    from tests.gpu import acceptance  # whose classes the parts import, too

    sys.exit(acceptance.main())
