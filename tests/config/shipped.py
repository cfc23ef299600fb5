"""The files in configs/, for every test that loops over them."""

import json
from pathlib import Path
from typing import Any

from bapo_megatron.config.load import load_config
from bapo_megatron.config.schema import RunConfig

FOLDER = Path(__file__).parents[2] / "configs"

FRAGMENTS = {
    "base": ("name=x", "run_dir=runs/x", "model.path=models/x"),
    "paper": ("name=x", "model.path=models/x"),
}
"""Files that others inherit and that are no runs, with what makes them complete."""

NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))
ADAPTERS = "r1-distill-qwen-7b-8k-lora"
ASYNC_RUNS = [name for name in NAMES if name.endswith("-async")]
PAPER_RUNS = [
    name
    for name in NAMES
    if name.startswith(("r1-", "bp-", "octothinker-")) and name not in (ADAPTERS, *ASYNC_RUNS)
]
CLUSTER_RUNS = [*PAPER_RUNS, *ASYNC_RUNS, ADAPTERS, "qwen3-30b-a3b-32k", "qwen3.5-27b-32k"]
MODELS = Path(__file__).parents[1] / "tools" / "planning" / "models"
"""config.json of the models that the runs on clusters start from, as published; OctoThinker's is
that of Llama 3.2 3B, from which it was trained."""


def load_shipped(name: str) -> RunConfig:
    """The resolved configuration of ``configs/<name>.yaml``."""
    return load_config(FOLDER / f"{name}.yaml", FRAGMENTS.get(name, ()))


def hf_config_file(config: RunConfig) -> Path:
    """config.json of the model of one of the runs on clusters."""
    return MODELS / f"{config.model.path.name.lower().removesuffix('-long-zero')}.json"


def hf_config(config: RunConfig) -> dict[str, Any]:
    """What ``hf_config_file`` holds."""
    fields: dict[str, Any] = json.loads(hf_config_file(config).read_text())
    return fields


def write_inputs(config: RunConfig) -> None:
    """Put what a run of the paper reads under the current directory: all but the contents."""
    config.model.path.mkdir(parents=True)
    (config.model.path / "config.json").write_text(json.dumps(hf_config(config)))
    Path("data").mkdir()
    for path in (
        config.model.path / "model.safetensors",
        config.model.path / "tokenizer_config.json",
        Path("data/skywork-or1-math.parquet"),
        Path("data/aime24.parquet"),
        Path("data/aime25.parquet"),
    ):
        path.touch()
