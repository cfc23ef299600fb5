"""Which checkpoint a resumed run continues from, and that it destroys no complete one."""

import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from bapo_megatron.policy.checkpoint_files import (
    BestCheckpoint,
    CheckpointError,
    begin_at,
    name_best,
)
from bapo_megatron.telemetry.sinks import read_metrics
from bapo_megatron.trainer import checkpointing
from bapo_megatron.trainer.checkpointing import Checkpoints
from bapo_megatron.trainer.opening import (
    choose_checkpoint,
    claim_run_dir,
    how_to_continue,
    note_save,
)
from tests.config.files import run_config
from tests.launch import run
from tests.policy.small_checkpoints import content_of, save_small


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Checkpoints of steps 8, 10 and 12, of which ``latest`` names the last."""
    for step in (8, 10, 12):
        save_small(tmp_path / "checkpoints", step)
    return tmp_path / "checkpoints"


def _refusal(run_dir: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        choose_checkpoint(run_dir)
    return str(caught.value)


def _leave_dangling(latest: Path) -> None:
    latest.unlink()
    latest.symlink_to("gone")


@pytest.mark.parametrize(
    "change",
    [
        Path.unlink,
        _leave_dangling,
        lambda latest: latest.write_bytes(b""),
        lambda latest: latest.write_bytes(b"\xff\n\x00"),
        lambda latest: latest.write_text("../step_8"),
        lambda latest: latest.write_text("step_14\n"),
    ],
)
def test_where_latest_names_nothing_the_newest_complete_checkpoint_continues(
    root: Path, change: Callable[[Path], object]
) -> None:
    (root / "step_12" / "state.json").unlink()
    (root / "step_12").rename(root / "step_13")
    save_small(root, 12)
    change(root / "latest")
    checkpoint, said = choose_checkpoint(root.parent)
    assert checkpoint == root / "step_12"
    assert said.startswith(f"{root}/latest: ")
    assert "\n" not in said
    begin_at(root, checkpoint)
    assert (root / "latest").read_text() == "step_12\n"
    assert choose_checkpoint(root.parent) == (root / "step_12", "")
    save_small(root, 14)
    names = sorted(path.name for path in root.iterdir())
    assert names == ["abandoned_1", "latest", "step_10", "step_12", "step_14", "step_8"]


def test_a_checkpoint_that_was_being_replaced_when_the_run_was_killed_counts(root: Path) -> None:
    (root / "step_12").rename(root / ".step_12.replaced.tmp")
    (root / "latest").unlink()
    checkpoint, said = choose_checkpoint(root.parent)
    assert checkpoint == root / ".step_12.replaced.tmp"
    assert "/latest: missing; continuing from step_12" in said
    assert begin_at(root, checkpoint) == ""
    assert (root / "latest").read_text() == "step_12\n"


def test_where_no_checkpoint_is_complete_one_line_says_what_the_newest_lacks(root: Path) -> None:
    (root / "latest").unlink()
    (root / "step_12" / "state.json").unlink()
    (root / "step_10" / "rng_0.pt").unlink()
    (root / "step_8" / "__0_0.distcp").write_bytes(b"Weights of step 8")
    line = _refusal(root.parent)
    assert line.startswith(f"{root}/latest: missing; ")
    assert "step_12: state.json is missing" in line


def test_a_latest_beside_which_there_is_no_checkpoint_is_refused(root: Path) -> None:
    for step in (8, 10, 12):
        shutil.rmtree(root / f"step_{step}")
    assert _refusal(root.parent).startswith(f"{root}/latest: names step_12, ")


@pytest.mark.parametrize(
    ("latest", "damaged", "remedy"),
    [
        (12, (12,), "write step_10 into "),
        (12, (12, 10), "write step_8 into "),
        (10, (10,), "write step_8 into "),
        (8, (8,), "write step_12 into "),
        (12, (12, 10, 8), "restore it from a copy"),
    ],
)
def test_the_remedy_for_a_damaged_checkpoint_names_one_that_is_complete(
    root: Path, latest: int, damaged: tuple[int, ...], remedy: str
) -> None:
    (root / "latest").write_text(f"step_{latest}\n")
    for step in damaged:
        (root / f"step_{step}" / "state.json").unlink()
    line = _refusal(root.parent)
    assert line.startswith(f"{root}/step_{latest}: damaged, state.json is missing; {remedy}")
    assert how_to_continue(root.parent) == f"; {line}"


def test_checksums_decide_unless_who_loads_the_checkpoint_checks_it(root: Path) -> None:
    (root / "step_12" / "rng_0.pt").write_bytes(b"Random state of step 12")
    assert "step_12: damaged, rng_0.pt " in _refusal(root.parent)
    assert choose_checkpoint(root.parent, checks_latest=False) == (root / "step_12", "")


def test_another_format_is_no_damage(root: Path) -> None:
    path = root / "step_12" / "state.json"
    path.write_text(path.read_text().replace('"format": 7', '"format": 8'))
    assert _refusal(root.parent).startswith(f"{path}: format 8, ")


def _save_and_lose(run_dir: Path) -> None:
    note_save(run_dir, save_small(run_dir / "checkpoints", 4))
    note_save(run_dir, save_small(run_dir / "checkpoints", 6))
    shutil.rmtree(run_dir / "checkpoints")


@pytest.mark.parametrize(
    ("write", "evidence"),
    [
        (_save_and_lose, "saved names 'step_6'"),
        (lambda run_dir: (run_dir / "saved").touch(), "saved names ''"),
        (
            lambda run_dir: (run_dir / "saved").write_bytes(b"\xff\n\x00"),
            "saved names '\ufffd \\x00'",
        ),
        (lambda run_dir: (run_dir / "summary.json").write_text("{}"), "summary.json"),
    ],
)
def test_a_run_that_has_saved_does_not_start_anew_where_its_checkpoints_are_gone(
    tmp_path: Path, write: Callable[[Path], object], evidence: str
) -> None:
    write(tmp_path)
    line = _refusal(tmp_path)
    assert line.startswith(f"{tmp_path}/checkpoints: no checkpoint, but ")
    assert evidence in line
    claim_run_dir(run_config(tmp_path, resume=True))
    with pytest.raises(ValueError, match="already holds a run"):
        claim_run_dir(run_config(tmp_path))


def test_a_run_that_ended_before_its_first_save_starts_at_step_1(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    (tmp_path / "checkpoints" / ".step_2.tmp").mkdir(parents=True)
    checkpoint, said = choose_checkpoint(tmp_path)
    assert (checkpoint, "step 1" in said) == (None, True)
    assert "--resume starts at step 1" in how_to_continue(tmp_path)


def test_a_file_that_cannot_be_read_is_an_error_that_all_ranks_can_raise(tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    assert _refusal(tmp_path).startswith(f"{tmp_path}/saved: ")


def test_newer_checkpoints_move_aside_whole_when_a_run_continues_from_an_older_one(
    root: Path,
) -> None:
    newer = {step: content_of(root / f"step_{step}") for step in (10, 12)}
    (root / "latest").write_text("step_8\n")
    checkpoint, said = choose_checkpoint(root.parent)
    assert (checkpoint, said) == (root / "step_8", "")
    moved = begin_at(root, root / "step_8")
    assert moved.startswith(f"moved step_10, step_12 to {root}/abandoned_1, ")
    for step in (9, 10):
        save_small(root, step, keep_last=1)
    assert sorted(path.name for path in root.iterdir()) == ["abandoned_1", "latest", "step_10"]
    for step, content in newer.items():
        assert content_of(root / "abandoned_1" / f"step_{step}") == content


def test_every_time_newer_checkpoints_move_to_a_directory_of_their_own(root: Path) -> None:
    (root / ".step_12.replaced.tmp").mkdir()
    (root / "step_10").rename(root / ".step_10.replaced.tmp")
    begin_at(root, root / "step_8")
    save_small(root, 9)
    assert begin_at(root, root / "step_8").startswith(f"moved step_9 to {root}/abandoned_2, ")
    moved = sorted(str(path.relative_to(root)) for path in root.glob("abandoned_*/*"))
    assert moved == [
        "abandoned_1/step_10",
        "abandoned_1/step_12",
        "abandoned_1/step_12.replaced",
        "abandoned_2/step_9",
    ]


@pytest.mark.parametrize(
    "name", ["step_12/", "step_1x/", ".step_3.replaced.tmp/", "latest", "abandoned_1/"]
)
def test_a_new_run_refuses_a_directory_that_holds_anything_of_a_checkpoint(
    tmp_path: Path, name: str
) -> None:
    path = tmp_path / "checkpoints" / name
    path.parent.mkdir()
    path.mkdir() if name.endswith("/") else path.symlink_to("gone")
    with pytest.raises(ValueError, match="already holds a run"):
        claim_run_dir(run_config(tmp_path))


def test_a_new_run_may_begin_where_an_earlier_one_was_killed_before_it_had_saved(
    tmp_path: Path,
) -> None:
    (tmp_path / "checkpoints" / ".step_2.tmp").mkdir(parents=True)
    (tmp_path / "metrics.jsonl").touch()
    claim_run_dir(run_config(tmp_path))


def test_nothing_moves_where_the_checkpoint_cannot_be_loaded(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "latest").write_text("step_8\n")
    name_best(root, BestCheckpoint("step_10", "eval/sums/avg_at_k", 0.5))
    before = {path: path.lstat().st_mtime_ns for path in (root, *root.rglob("*"))}

    def fail(directory: Path, *_: object, **__: object) -> NoReturn:
        raise CheckpointError(f"{directory}: of another model")

    monkeypatch.setattr(checkpointing, "load_checkpoint", fail)
    monkeypatch.setattr(checkpointing, "fail_together", lambda *_: nullcontext())
    monkeypatch.setattr(checkpointing, "broadcast_bytes", lambda name, _: name)
    state: Any = SimpleNamespace(model=SimpleNamespace(groups=SimpleNamespace(rank=0)))
    source: Any = None  # is not restored
    with pytest.raises(CheckpointError, match=r"/step_8: of another model$"):
        Checkpoints(run_config(root.parent), state, source).load()
    assert {path: path.lstat().st_mtime_ns for path in (root, *root.rglob("*"))} == before


def test_a_step_without_the_score_is_not_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checkpointing, "any_rank", lambda flag, _: flag)
    monkeypatch.setattr(checkpointing, "fail_together", lambda _: nullcontext())
    config = run_config(tmp_path)
    section = config.checkpoint.model_copy(update={"best": "eval/sums/maj_at_k"})
    state: Any = SimpleNamespace(model=SimpleNamespace(groups=SimpleNamespace(control=None)))
    checkpoints = Checkpoints(config.model_copy(update={"checkpoint": section}), state, None)
    checkpoints.end_step(3)
    checkpoints.name_if_best({})  # an abandoned evaluation
    assert capsys.readouterr().err == ""
    checkpoints.name_if_best({"eval/sums/avg_at_k": 0.5})
    assert checkpoints.progress.best is None
    assert capsys.readouterr().err == (
        "checkpoint.best: step 3 cannot be the best, since its evaluation has no "
        "eval/sums/maj_at_k (docs/evaluation.md); choose another score\n"
    )
    checkpoints.name_if_best({"eval/sums/maj_at_k": 0.5})
    assert checkpoints.progress.best == BestCheckpoint("step_3", "eval/sums/maj_at_k", 0.5)


@pytest.mark.exhaustive
@pytest.mark.distributed
def test_a_run_whose_latest_is_gone_continues_and_a_finished_one_says_that_no_step_is_left(
    replay_config: Path, many_dumps: Path, tmp_path: Path
) -> None:
    run_dir, root = tmp_path / "run", tmp_path / "run" / "checkpoints"
    settings = ("optimizer.schedule=constant", "checkpoint.every_steps=2", "checkpoint.keep_last=3")
    arguments = ["train", str(replay_config), f"run_dir={run_dir}", f"replay={many_dumps}"]
    stderr = []
    for steps in (6, 7, 7, 6):
        resume = ["--resume"] if stderr else []
        result = run([*arguments, *settings, f"train.steps={steps}", *resume])
        assert result.returncode == 0, result.stderr
        stderr.append(result.stderr)
        (root / "latest").unlink()
        if not resume:
            name_best(root, BestCheckpoint("step_4", "eval/sums/avg_at_k", 0.5))
    assert [row["step"] for row in read_metrics(run_dir / "metrics.jsonl")] == list(range(1, 8))
    assert sorted(path.name for path in root.iterdir()) == ["best", "step_4", "step_6", "step_7"]
    for text, step, rest in (
        (stderr[1], 6, ""),
        (stderr[2], 7, "; train.steps is 7: none is left, raise it to train on"),
        (stderr[3], 7, "; train.steps is 6: none is left, raise it to train on"),
    ):
        news = f"latest: missing; continuing from step_{step}, the newest complete checkpoint\n"
        assert f"{news}resumed from {root}/step_{step}: {step} steps done{rest}\n" in text
