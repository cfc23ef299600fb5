"""Intact input for every command, made once by the commands and writers themselves."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from bapo_megatron.data.dump import write_texts
from bapo_megatron.data.token_dump import TOKEN_COLUMNS, write_token_dump
from bapo_megatron.evaluation.results import write_results
from bapo_megatron.evaluation.samples import write_settings
from bapo_megatron.types import SampleText
from tests.evaluation.results import result, sample
from tests.policy.tiny_models import load_reference
from tests.tools.report.made_runs import make_run
from tests.trainer.dumps import make_random_model, replay_settings, write_dumps

ROWS = [
    {"prompt": f"{a}+{b}=?", "answer": str(a + b), "level": a} for a in range(3) for b in range(3)
]
SETTINGS: dict[str, Any] = {
    "name": "sums",
    "weights": "model (float32, files 0)",
    "prompts": "0123456789abcdef",
    "num_prompts": 2,
    "samples_per_prompt": 2,
    "temperature": 0.6,
    "top_p": 1.0,
    "top_k": -1,
    "max_response_tokens": 16,
    "reward": {"functions": [{"name": "math", "function": "math", "weight": 1.0}]},
    "seed": 0,
    "environment": None,
    "max_turns": None,
}


def make_intact(root: Path) -> None:
    """Fill ``root``; its files are the ``intact`` ones of all cases."""
    model = make_random_model(root / "model", num_hidden_layers=2)
    load_reference("qwen2", model).save_pretrained(root / "sharded", max_shard_size="100KB")
    for path in model.glob("tokenizer*"):
        shutil.copy(path, root / "sharded")
    (root / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (root / "train.json").write_text(json.dumps(ROWS))
    pq.write_table(pa.Table.from_pylist(ROWS), root / "train.parquet")
    dumps = write_dumps(root / "dumps", model, steps=1, groups=2, samples_per_group=2)
    _make_texts(dumps / "step_000001.parquet")
    replay = replay_settings(model, dumps, root / "run")
    replay["train"]["steps"] = 1
    replay["optimizer"] = {"lr": 1e-3}
    (root / "replay.yaml").write_text(yaml.safe_dump(replay))
    settings = {
        "name": "run",
        "run_dir": str(root / "runs" / "new"),
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"train": {"path": str(root / "train.jsonl")}, "max_prompt_tokens": 64},
        "rollout": {"max_response_tokens": 64, "engine": "local"},
    }
    (root / "base.yaml").write_text(yaml.safe_dump(settings))
    child = {"inherit": "base.yaml", "seed": 3, "reward": {"workers": 1}, "eval": {"k_values": [1]}}
    (root / "run.yaml").write_text(yaml.safe_dump(child))
    sets = f"eval.sets=[{{path: {root}/train.jsonl}}]"
    sweep = {"config": str(root / "run.yaml"), "dir": "sweep", "seeds": [1]}
    runs = {"overrides": [sets, "eval.max_response_tokens=64"], "variants": {"a": []}, "jobs": 1}
    (root / "sweep.yaml").write_text(yaml.safe_dump({**sweep, **runs}))
    grid = {key: list(range(399)) for key in ("rollout.temperature", "seed", "optimizer.lr")}
    (root / "grid.yaml").write_text(json.dumps({**sweep, "grid": grid}))
    samples = [sample(f"a:{p}", i, answer=str(p)) for p in range(2) for i in range(2)]
    (root / "sums.jsonl").write_bytes(b"".join(line.to_line() for line in samples))
    write_settings(root / "sums.jsonl", SETTINGS)
    write_results([result({"a:0": ["2", "3"]}, settings=SETTINGS)], root / "eval.json")
    graded = [{"response": r"\boxed{2}", "answer": "2"}, {"response": "no", "answer": 3}]
    (root / "responses.jsonl").write_text("".join(json.dumps(row) + "\n" for row in graded))
    tokens = {name: np.ones(3) for name in TOKEN_COLUMNS}
    write_token_dump(root / "tokens.parquet", tokens | {"logprob": np.log([2.0, 0.75, 9.0])})
    make_run(root / "made")
    for arguments in (
        ["train", str(root / "replay.yaml"), "log.console=false"],
        ["convert", str(model), str(root / "checkpoint")],
    ):
        _run(arguments)


def _make_texts(dump: Path) -> None:
    texts = [SampleText(g, i, "1+1=?", "2", r"\boxed{2}") for g in range(2) for i in range(2)]
    write_texts(dump, 1, texts)


def _run(arguments: list[str]) -> None:
    from bapo_megatron import cli

    sys.argv = ["bapo-megatron", *arguments]
    try:
        cli.main()
    except SystemExit as end:
        if end.code:
            raise RuntimeError(f"{arguments} ended with {end.code}") from end
