"""The account of a kill campaign finds what a run could do wrong; its order repeats by the seed."""

import json
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bapo_megatron.data.dump import write_batch
from bapo_megatron.rollout.buffer import PendingGroup, RolloutBuffer
from bapo_megatron.rollout.saved import SavedRollout, write_saved
from bapo_megatron.types import Group, Prompt, RolloutBatch, VersionSpan
from tests.benchmarks import kill_campaign
from tests.benchmarks.kill_account import Shape, audit, different_files
from tests.data.samples import make_sample
from tests.rollout.calls import end
from tests.rollout.saved_files import AT_START

SHAPE = Shape(groups_per_step=2, samples_per_group=2, num_prompts=3)
UPDATES = 2


def _group(group_id: int, version: int) -> Group:
    samples = [make_sample(3, 4, group_id, index) for index in range(SHAPE.samples_per_group)]
    prompt_id = f"train.jsonl:{group_id % SHAPE.num_prompts}"
    prompt = replace(samples[0].prompt, prompt_id=prompt_id)
    for sample in samples:
        sample.prompt = prompt
        sample.versions = (VersionSpan(version, 4),)
    return Group(group_id, tuple(samples))


def _write_run(
    run_dir: Path, batches: dict[int, tuple[int, ...]], waiting: tuple[int, ...]
) -> Path:
    """Write steps of the groups in ``batches``, and a checkpoint after the last of them."""
    rows = []
    for step, groups in batches.items():
        version = UPDATES * (step - 1)
        batch = RolloutBatch(step, version, tuple(_group(group, version) for group in groups))
        write_batch(run_dir / "rollouts" / f"step_{step:06d}.parquet", batch)
        row = {"step": step, "train/updates": UPDATES, "rollout/lost_requests": 1}
        rows.append(row | {"reward/mean": 0.5, "rollout/response_tokens_mean": 4.0})
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    buffer = RolloutBuffer()
    buffer.next_group_id = max(waiting) + 1
    buffer.num_trained = sum(map(len, batches.values()))
    for group_id in waiting:
        samples = _group(group_id, 0).samples
        tokens = samples[0].prompt
        prompt = Prompt(tokens.prompt_id, tuple(tokens.token_ids.tolist()), "", "", tokens.source)
        buffer.groups[group_id] = group = PendingGroup.start(group_id, prompt, len(samples))
        for episode, sample in zip(group.episodes, samples, strict=True):
            end(episode, sample.response_token_ids)
    checkpoints = run_dir / "checkpoints"
    (checkpoints / f"step_{len(batches)}").mkdir(parents=True)
    path = checkpoints / f"step_{len(batches)}" / "rollout.parquet"
    write_saved(path, SavedRollout(AT_START, buffer))
    (checkpoints / "latest").write_text(f"step_{len(batches)}")
    return run_dir


@pytest.fixture(scope="module")
def good_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Groups 0 to 7, of which 4 and 7 wait; groups finish in any order."""
    root = tmp_path_factory.mktemp("good")
    return _write_run(root, {1: (1, 0), 2: (2, 5), 3: (3, 6)}, waiting=(4, 7))


def test_a_run_without_a_loss_has_no_problems(good_run: Path) -> None:
    account = audit(good_run, SHAPE)
    assert account.problems == []
    assert (account.num_steps, account.num_drawn, account.num_trained) == (3, 8, 6)
    assert (account.num_waiting, account.num_lost_requests) == (2, 3)


def _column(
    step: int, name: str, change: Callable[[list[Any]], list[Any]]
) -> Callable[[Path], None]:
    """Change the values of a column of a dump."""

    def apply(run_dir: Path) -> None:
        path = run_dir / f"rollouts/step_{step:06d}.parquet"
        table = pq.read_table(path)
        index = table.schema.get_field_index(name)
        field = table.schema.field(name)
        values = pa.array(change(table[name].to_pylist()), field.type)
        pq.write_table(table.set_column(index, field, values), path)

    return apply


def _metrics(change: Callable[[str], str]) -> Callable[[Path], None]:
    def apply(run_dir: Path) -> None:
        path = run_dir / "metrics.jsonl"
        path.write_text(change(path.read_text()))

    return apply


def _lose_a_sample(run_dir: Path) -> None:
    path = run_dir / "rollouts/step_000001.parquet"
    pq.write_table(pq.read_table(path).slice(1), path)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (_column(3, "group_id", lambda _: [2, 2, 6, 6]), "groups [2]: trained more than once"),
        (_column(3, "group_id", lambda _: [2, 2, 6, 6]), "groups [3]: lost"),
        (
            _column(3, "group_id", lambda _: [4, 4, 6, 6]),
            "groups [4]: trained, and still in the buffer",
        ),
        (_lose_a_sample, "step_000001: groups of [1, 2] samples"),
        (
            _column(2, "behaviour_logprobs", lambda rows: [rows[0][1:], *rows[1:]]),
            "step_000002: sample 0 of group 2: tokens, log-probs and versions differ in number",
        ),
        (
            _column(2, "versions", lambda rows: [[3], *rows[1:]]),
            "step_000002: sample 0 of group 2: versions [3] in a batch of version 2",
        ),
        (
            _metrics(lambda text: text.replace('mean": 0.5', 'mean": 0.25', 1)),
            "step_000001: its reward/mean is not that of metrics.jsonl",
        ),
        (
            _metrics(lambda text: text.partition("\n")[0] + "\n" + text),
            "metrics.jsonl: not one row per step",
        ),
        (
            lambda run: (run / "rollouts/step_000002.parquet").unlink(),
            "rollouts/: not one dump per step",
        ),
        (
            _column(3, "prompt_id", lambda rows: ["train.jsonl:1", "train.jsonl:1", *rows[2:]]),
            "epoch 2: 2 of 3 prompts",
        ),
        (
            _metrics(lambda text: text.replace('updates": 2', 'updates": 1', 1)),
            "step_000002: version 2 after 1 updates",
        ),
    ],
)
def test_the_account_names_what_is_wrong(
    good_run: Path, tmp_path: Path, change: Callable[[Path], None], problem: str
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(good_run, run_dir)
    change(run_dir)
    assert problem in audit(run_dir, SHAPE).problems


def test_weights_that_differ_in_one_bit_are_named(tmp_path: Path) -> None:
    contents = {"a": b"\x00\x01", "b": b"\x00\x03", "c": b"\x00\x01"}
    for name, content in contents.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(content)
    assert different_files(tmp_path / "a", tmp_path / "b") == ["model.safetensors"]
    assert different_files(tmp_path / "a", tmp_path / "c") == []


def test_a_campaign_strikes_with_every_fault_before_it_repeats_one() -> None:
    kinds = [kind for kind in kill_campaign.KINDS if kind.victim != "owner"]
    plan = kill_campaign.plan(kinds, 2 * len(kinds) + 3, seed=1)
    assert Counter(plan[: len(kinds)]) == Counter(plan[len(kinds) : -3]) == Counter(kinds)
    assert len(plan) == 2 * len(kinds) + 3
    assert plan == kill_campaign.plan(kinds, len(plan), seed=1)
    assert plan != kill_campaign.plan(kinds, len(plan), seed=2)
