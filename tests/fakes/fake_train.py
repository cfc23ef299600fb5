"""Stands in for ``python -m bapo_megatron train`` in a sweep; needs the standard library alone.

    fake_train.py DIR CONFIG KEY=VALUE … --resume

Makes three steps and an evaluation, which is ``DIR/<n>.json`` with n = 3 + 2 · seed for the
objective ``bapo`` and 2 + seed for any other. ``DIR/fails`` and ``DIR/waits`` name runs, one per
line, that fail after a step, or make one step and wait for a signal.
"""

import json
import shutil
import signal
import sys
import time
from pathlib import Path


def main() -> None:
    files, settings = Path(sys.argv[1]), dict(a.partition("=")[::2] for a in sys.argv[3:-1])
    assert sys.argv[-1] == "--resume"
    run_dir = Path(json.loads(settings["run_dir"]))
    label, seed = f"{run_dir.parent.name}/{run_dir.name}", int(settings["seed"])
    metrics = run_dir / "metrics.jsonl"
    done = metrics.read_text().count("\n") if metrics.exists() else 0
    with metrics.open("a") as stream:
        for step in range(done + 1, 4):
            print(json.dumps({"step": step, "reward/mean": step / 3, "seed": seed}), file=stream)
            stream.flush()
            if label in _listed(files / "fails"):
                sys.exit("some warning\nbapo-megatron: model.path: 'x' is broken; repair it\nbye")
            if label in _listed(files / "waits"):
                _wait(run_dir)
    num_right = 3 + 2 * seed if settings["algorithm.objective"] == "bapo" else 2 + seed
    (run_dir / "eval").mkdir(exist_ok=True)
    shutil.copy(files / f"{seed}-{num_right}.json", run_dir / "eval" / "step_000003.json")
    (run_dir / "summary.json").write_text("{}")


def _wait(run_dir: Path) -> None:
    """Save, and end by SIGTERM; ``stubborn`` in the run's name takes no notice."""
    if run_dir.parent.name == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: _save(run_dir))
    (run_dir / "waiting").touch()
    time.sleep(600)


def _save(run_dir: Path) -> None:
    (run_dir / "saved").touch()
    sys.exit(0)


def _listed(file: Path) -> list[str]:
    return file.read_text().split() if file.exists() else []


if __name__ == "__main__":
    main()
