"""The runs with a fault that docs/report.md practises on: each fault is what its name says."""

import asyncio
import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from bapo_megatron.engine.local.kind import LocalKind
from examples.faulty_runs import StaleKind, write_sets
from tests.engine.helpers import MakeConfig

TOKENS = [3, 20, 77, 4, 9]
LIMIT_S = 60.0


def test_one_data_set_has_the_answers_of_the_rows_below(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}+1=?", "answer": str(n + 1)} for n in range(6)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second = write_sets(tmp_path / "train.jsonl", tmp_path / "data")

    def answers(path: Path) -> dict[str, str]:
        read = [json.loads(line) for line in path.read_text().splitlines()]
        return {row["prompt"]: row["answer"] for row in read}

    assert answers(first) == {"0+1=?": "1", "1+1=?": "2", "2+1=?": "3"}
    assert answers(second) == {"3+1=?": "5", "4+1=?": "6", "5+1=?": "4"}


def test_a_stale_engine_has_the_version_of_a_push_and_the_weights_of_the_start(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config()
    pushed = tmp_path / "pushed"
    shutil.copytree(config.model.path, pushed)
    tensors = load_file(pushed / "model.safetensors")
    tensors["model.norm.weight"] *= 1.5
    save_file(tensors, pushed / "model.safetensors", metadata={"format": "pt"})

    async def scores(kind: LocalKind) -> tuple[str, list[float], list[float]]:
        backend = kind.open(config, "cpu", awaits_weights=False)
        engine = await backend.connect(*backend.addresses())
        before = (await engine.score(TOKENS, LIMIT_S)).logprobs.tolist()
        await engine.weights.load(pushed, version=3, timeout_s=LIMIT_S)
        after = (await engine.score(TOKENS, LIMIT_S)).logprobs.tolist()
        await engine.close()
        return await engine.version(), before, after

    version, before, after = asyncio.run(scores(StaleKind()))
    assert (version, after) == ("3", before)
    version, before, after = asyncio.run(scores(LocalKind()))
    assert version == "3"
    assert after != before
