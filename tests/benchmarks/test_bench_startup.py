"""The benchmark of start-up, with one library and one command."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.benchmarks import bench_startup
from tests.benchmarks.main_call import run_main
from tests.trainer.dumps import make_random_model

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow


def test_train_asks_a_server_and_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_random_model(tmp_path / "model")
    rows = [json.dumps({"prompt": f"{n}+1=?", "answer": str(n + 1)}) + "\n" for n in range(32)]
    (tmp_path / "train.jsonl").write_text("".join(rows))
    monkeypatch.setattr(bench_startup, "LIBRARIES", {"import torch": "import json"})
    monkeypatch.setattr(bench_startup, "COMMANDS", {})
    out = tmp_path / "report"
    run_main("bench_startup", str(tmp_path), "--rounds=1", f"--out={out}")
    (section,) = json.loads(out.with_suffix(".json").read_text())["sections"]
    seconds = {timing["name"]: timing["median_s"] for timing in section["timings"]}
    assert list(seconds) == ["import torch", "train, first request"]
    assert 0 < seconds["import torch"] < seconds["train, first request"]
