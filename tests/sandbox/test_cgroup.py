"""Control groups of both versions, on folders that look like theirs."""

from pathlib import Path

import pytest

from bapo_megatron.sandbox.cgroup import create_cgroup, left_behind


def test_version_2_needs_a_parent_that_passes_both_controllers_on(tmp_path: Path) -> None:
    assert create_cgroup(3, 1 << 20, 5, mount=tmp_path) is None
    (tmp_path / "cgroup.subtree_control").write_text("cpu memory\n")
    assert create_cgroup(3, 1 << 20, 5, mount=tmp_path) is None
    (tmp_path / "cgroup.subtree_control").write_text("cpu memory pids\n")

    group = create_cgroup(3, 1 << 20, 5, mount=tmp_path)

    assert group is not None
    folder = tmp_path / "bapo_megatron_sandbox_3"
    assert {path.name: path.read_text() for path in folder.iterdir()} == {
        "memory.max": "1048576",
        "memory.swap.max": "0",
        "pids.max": "5",
    }
    assert list(left_behind(tmp_path)) == [3]
    group.add(77)
    assert (folder / "cgroup.procs").read_text() == "77"
    (folder / "memory.events").write_text("low 0\nhigh 0\nmax 9\noom 3\noom_kill 2\n")
    assert group.num_killed() == 2


def test_version_1_has_a_folder_for_each_controller(tmp_path: Path) -> None:
    for name in ("memory", "pids"):
        (tmp_path / name).mkdir()

    group = create_cgroup(0, 1 << 20, 5, mount=tmp_path)

    assert group is not None
    name = "bapo_megatron_sandbox_0"
    assert (tmp_path / "memory" / name / "memory.limit_in_bytes").read_text() == "1048576"
    assert (tmp_path / "pids" / name / "pids.max").read_text() == "5"
    (tmp_path / "memory" / name / "memory.oom_control").write_text("under_oom 0\noom_kill 1\n")
    assert group.num_killed() == 1


def test_a_user_who_cannot_write_gets_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cgroup.subtree_control").write_text("memory pids\n")

    def refuse(self: Path, *arguments: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert create_cgroup(0, 1 << 20, 5, mount=tmp_path) is None
