"""Columns that a batch comes with, and references that a run or a replay does not need yet."""

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bapo_megatron.data.token_columns import (
    REFERENCE,
    TEACHER,
    TEACHER_TOP_IDS,
    TEACHER_TOP_LOGPROBS,
)
from bapo_megatron.trainer import scorers
from bapo_megatron.trainer.scorers import FrozenScorer, GivenColumns, ReferenceUpdater
from bapo_megatron.trainer.split import SplitUpdate
from bapo_megatron.types import Group, RolloutBatch
from tests.data.samples import make_sample


def batch_of(*columns: dict[str, np.ndarray]) -> RolloutBatch:
    samples = [make_sample(2, 3, index=index) for index in range(len(columns))]
    for sample, values in zip(samples, columns, strict=True):
        sample.columns = values
    return RolloutBatch(step=1, version=0, groups=(Group(0, tuple(samples)),))


FULL, NONE = np.array([-1, -2, -3], np.float32), np.full(3, np.nan, np.float32)


class NeededError(Exception):
    """The model is needed."""


def unavailable(*_: object) -> Any:
    raise NeededError


@pytest.mark.parametrize(
    ("values", "computed", "is_needed"),
    [
        ((FULL, FULL), (0, 1), False),
        ((FULL, NONE), (0,), False),
        # A run that only measured left out what has no advantage; one that trains with it does not.
        ((FULL, NONE), (0, 1), True),
        ((FULL, np.array([np.nan, -2, -3], np.float32)), (0, 1), False),
    ],
)
def test_a_reference_is_needed_where_a_computed_response_has_no_value(
    values: tuple[np.ndarray, ...], computed: tuple[int, ...], is_needed: bool
) -> None:
    scorer = FrozenScorer(REFERENCE, unavailable, unavailable)
    batch = batch_of(*({REFERENCE: column} for column in values))
    splits = (SplitUpdate({}, (0, 1), computed=computed),)
    with pytest.raises(NeededError) if is_needed else contextlib.nullcontext():
        assert scorer.score(splits, batch) == splits


TOP = {
    TEACHER: FULL,
    TEACHER_TOP_IDS: np.ones((3, 2), np.int32),
    TEACHER_TOP_LOGPROBS: -np.ones((3, 2), np.float32),
}
EMPTY = {**TOP, TEACHER_TOP_IDS: np.ones((3, 0), np.int32)}


@pytest.mark.parametrize(
    ("columns", "lacks"),
    [
        ((TOP, TOP), None),
        (({TEACHER: FULL}, {TEACHER: FULL}), TEACHER_TOP_IDS),
        ((TOP, EMPTY), TEACHER_TOP_IDS),
        (({}, {}), TEACHER),
        ((TOP, {**TOP, TEACHER: NONE}), TEACHER),
    ],
)
def test_a_replay_without_the_teacher_s_columns_ends_in_one_line(
    columns: tuple[dict[str, np.ndarray], ...], lacks: str | None
) -> None:
    scorer = GivenColumns((TEACHER, TEACHER_TOP_IDS, TEACHER_TOP_LOGPROBS), top_k=2)
    splits = (SplitUpdate({}, (0, 1), computed=(0, 1)),)
    if lacks is None:
        assert scorer.score(splits, batch_of(*columns)) == splits
        return
    with pytest.raises(ValueError, match=f"^step 1: the batch has no {lacks} of each ") as caught:
        scorer.score(splits, batch_of(*columns))
    assert "\n" not in str(caught.value)


def test_a_replay_with_another_number_of_likeliest_tokens_names_both() -> None:
    scorer = GivenColumns((TEACHER, TEACHER_TOP_IDS, TEACHER_TOP_LOGPROBS), top_k=3)
    splits = (SplitUpdate({}, (0, 1), computed=(0, 1)),)
    with pytest.raises(
        ValueError, match=r"teacher_top_ids has 2 likeliest tokens, got .*distillation.top_k = 3"
    ):
        scorer.score(splits, batch_of(TOP, TOP))


class Policy:
    """Exports an empty directory."""

    groups = type("Groups", (), {"rank": 0})

    def export_hf(self, directory: Path) -> None:
        directory.mkdir(parents=True)


class Loads:
    """A frozen model that notes what it loads."""

    model = None

    def __init__(self) -> None:
        self.loaded: list[str] = []

    def load(self, directory: Path) -> None:
        self.loaded.append(directory.name)


@pytest.fixture
def follows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ReferenceUpdater:
    """The reference of every step, with a model that is not built yet."""
    monkeypatch.setattr(scorers, "fail_together", lambda groups: contextlib.nullcontext())
    model: Any = Loads()
    policy: Any = Policy()
    scorer = FrozenScorer(REFERENCE, lambda: model, lambda built: model)
    return ReferenceUpdater(policy, scorer, tmp_path / "reference", 1, tmp_path / "checkpoints")


def test_a_reference_that_is_not_needed_is_not_built_and_is_the_newest_when_it_is(
    follows: ReferenceUpdater,
) -> None:
    follows.after_step(1)
    follows.after_step(2)
    assert follows.reference._frozen is None
    frozen: Any = follows.reference.frozen
    assert frozen.loaded == ["step_000002"]
    follows.after_step(3)
    follows.restore(3)
    assert frozen.loaded == ["step_000002", "step_000003", "step_000003"]
    with pytest.raises(ValueError, match=r"/reference/step_000004: missing, .* restore it"):
        follows.restore(4)


def test_the_reference_of_a_checkpoint_that_is_still_written_is_kept(
    follows: ReferenceUpdater, tmp_path: Path
) -> None:
    def kept() -> list[str]:
        return sorted(path.name for path in (tmp_path / "reference").iterdir())

    follows.after_step(1)
    writing = tmp_path / "checkpoints" / ".step_1.tmp"
    writing.mkdir(parents=True)
    follows.after_step(2)
    assert kept() == ["step_000001", "step_000002"]
    writing.rename(writing.with_name("step_1"))  # published at the end of step 2
    follows.after_step(3)
    assert kept() == ["step_000001", "step_000002", "step_000003"]
    (tmp_path / "checkpoints" / "step_1").rename(tmp_path / "checkpoints" / "step_3")
    follows.after_step(4)
    assert kept() == ["step_000003", "step_000004"]
