"""Three short runs on the demo's task, each with a fault that its page shows (docs/report.md).

make demo
python -m examples.faulty_runs runs/demo-tiny-seed0 runs/faults
python -m bapo_megatron report runs/faults/answers

| run     | fault                                                                        |
|---------|------------------------------------------------------------------------------|
| answers | in one of two data sets every problem has the answer of the row below it    |
| engine  | accepts every weight sync and its version, but keeps its first weights      |
| rate    | a learning rate 20 times the demo's                                         |

Each is one process on the local engine, repeats bit for bit, and takes a minute or two on a CPU.
"""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from bapo_megatron.engine.local.kind import LocalKind

STEPS = 24
RUNS = {
    "answers": (),
    # A sync by disk names the directory to load, which StaleKind replaces.
    "engine": ("rollout.engine=examples.faulty_runs:StaleKind", "rollout.weight_sync.method=disk"),
    "rate": ("optimizer.lr=2.0e-3",),
}
"""What each run changes in configs/demo.yaml."""


class StaleKind(LocalKind):
    """The local engine, with weights that stay behind."""

    def open(self, config: Any, device: str, *, awaits_weights: bool) -> Any:
        """See ``EngineKind``."""
        backend = super().open(config, device, awaits_weights=awaits_weights)
        return _Changed(backend, connect=_connect(backend, config.model.path))


class _Changed:
    """An object with some attributes replaced."""

    def __init__(self, inner: Any, **changes: Any) -> None:
        self._inner = inner
        self.__dict__.update(changes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _connect(backend: Any, first: Path) -> Any:
    async def connect(address: str) -> _Changed:
        engine = await backend.connect(address)

        async def load(model_dir: Path, *, version: int, timeout_s: float) -> None:
            await engine.weights.load(first, version=version, timeout_s=timeout_s)

        return _Changed(engine, weights=_Changed(engine.weights, load=load))

    return connect


def write_sets(train: Path, folder: Path) -> list[Path]:
    """Divide the demo's problems into halves; those of the second get the next one's answer."""
    rows = [json.loads(line) for line in train.read_text(encoding="utf-8").splitlines()]
    good, bad = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    answers = [row["answer"] for row in bad]
    shifted = zip(bad, [*answers[1:], answers[0]], strict=True)
    sets = {"first": good, "second": [{**row, "answer": answer} for row, answer in shifted]}
    folder.mkdir(parents=True, exist_ok=True)
    for name, kept in sets.items():
        text = "".join(json.dumps(row) + "\n" for row in kept)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return [folder / f"{name}.jsonl" for name in sets]


def train(name: str, demo: Path, folder: Path, steps: int) -> None:
    """Make one run; an earlier one is replaced."""
    run_dir = folder / name
    shutil.rmtree(run_dir, ignore_errors=True)
    data = f"data.train.path={demo}/train.jsonl"
    if name == "answers":
        sets = write_sets(demo / "train.jsonl", folder / "data")
        data = f"data.train=[{', '.join(f'{{path: {path}}}' for path in sets)}]"
    arguments = [
        *(sys.executable, "-m", "bapo_megatron", "train", "configs/demo.yaml"),
        *(f"run_dir={run_dir}", f"model.path={demo}/model", data, f"train.steps={steps}"),
        f"eval.sets=[{{path: {demo}/heldout.jsonl, name: heldout}}]",
        *("rollout.engine=local", "parallel.tensor=1", "rollout.async_steps=0"),
        *("algorithm.updates_per_batch=4", "eval.max_prompts=128", "checkpoint.at_end=false"),
        *RUNS[name],
    ]
    subprocess.run(arguments, check=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("demo", type=Path, help="what examples.tiny wrote")
    parser.add_argument("folder", type=Path, help="for the runs")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--only", choices=RUNS, action="append", help="make this run, not all")
    options = parser.parse_args()
    for name in options.only or RUNS:
        train(name, options.demo, options.folder, options.steps)
