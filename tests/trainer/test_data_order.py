"""Which prompts a run draws does not depend on its ranks, nor on interruptions."""

from __future__ import annotations

import json
from itertools import islice
from typing import TYPE_CHECKING

import pytest

from bapo_megatron.config.data import DataConfig
from bapo_megatron.data.chat import ChatRenderer, load_tokenizer
from bapo_megatron.data.prompts import load_train_sets
from bapo_megatron.data.stream import PromptMixture
from tests.distributed_launch import run_ranks
from tests.fakes.fake_sglang import FakeSglang
from tests.trainer import mixture_runs

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.distributed
def test_a_mixture_is_drawn_in_one_order_on_any_ranks_and_over_a_resumption(
    random_model: Path, tmp_path: Path
) -> None:
    for name, size in (("a", 5), ("b", 3)):
        rows = [{"prompt": f"{name}{n}+1=?", "answer": str(n)} for n in range(size)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = [{"path": str(tmp_path / "a.jsonl"), "weight": 2}, {"path": str(tmp_path / "b.jsonl")}]
    with FakeSglang(stop_at=24) as server:
        config = mixture_runs.settings(random_model, data, server.address, tmp_path / "run")
        run_ranks(mixture_runs.two_ranks, 2, config)
        run_ranks(mixture_runs.one_rank, 1, config)

    sets = load_train_sets(
        DataConfig.model_validate({"train": data}),
        ChatRenderer(load_tokenizer(random_model), DataConfig()),
    )
    drawn = [p.prompt_id for p in islice(PromptMixture(sets, seed=11, shuffle=True), 60)]
    trained = mixture_runs.prompts_by_group(tmp_path / "run")
    assert len(trained) == 3 * mixture_runs.GROUPS_PER_STEP
    assert trained == {group_id: drawn[group_id] for group_id in trained}
