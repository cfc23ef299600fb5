"""Which commit and versions a run says that it ran."""

import subprocess
import sys
from typing import Any

import pytest
import torch

from bapo_megatron import __version__
from bapo_megatron.runtime import versions
from bapo_megatron.runtime.versions import Software, commit_of, nccl_version, own_software


def test_the_commit_is_that_of_the_checkout_and_says_whether_files_were_changed(tmp_path) -> None:
    def git(*arguments: str) -> str:
        settings = ("user.name=a", "user.email=a@example.org", "commit.gpgsign=false")
        options = [word for setting in settings for word in ("-c", setting)]
        command = ["git", *options, "-C", str(tmp_path), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init")
    file = tmp_path / "code.py"
    file.write_text("x = 1\n")
    git("add", ".")
    git("commit", "-m", "first")
    git("tag", "-a", "v1", "-m", "a tag is no commit")
    commit = git("rev-parse", "--short=12", "HEAD")

    assert len(commit) == 12
    assert commit_of(tmp_path) == commit
    (tmp_path / "notes.txt").write_text("untracked\n")
    assert commit_of(tmp_path) == commit
    file.write_text("x = 2\n")
    assert commit_of(tmp_path) == f"{commit}-dirty"
    # An environment inside somebody's checkout has not its commit.
    (tmp_path / "site-packages").mkdir()
    assert commit_of(tmp_path / "site-packages") is None


def test_versions_are_those_that_the_packages_have_of_themselves() -> None:
    software = own_software().versions
    assert software["bapo-megatron"] == __version__
    assert software["python"] == "{}.{}.{}".format(*sys.version_info)
    assert torch.__version__.startswith(software["torch"])  # one may name its CUDA: 2.14.1+cu130
    assert software.get("cuda") == torch.version.cuda
    assert software["megatron-core"] == "0.19.2"


def test_the_cuda_of_a_build_is_read_without_importing_it(tmp_path, monkeypatch) -> None:
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError")
    (package / "version.py").write_text(
        "from typing import Optional\n__all__ = ['debug', 'cuda']\n"
        "__version__ = '2.10.0'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"
    )
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.syspath_prepend(tmp_path)
    assert versions._torch_cuda() == "13.0"


def test_software_is_two_lines_for_people() -> None:
    software = Software(None, {"bapo-megatron": "0.1.0", "python": "3.11.7"})
    assert software.lines() == ["commit unknown", "bapo-megatron 0.1.0, python 3.11.7"]


@pytest.mark.parametrize(("number", "version"), [(22703, "2.27.3"), (23007, "2.30.7")])
def test_the_version_of_nccl_is_the_loaded_library_s(
    number: int, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Library:
        def ncclGetVersion(self, value: Any) -> None:
            value._obj.value = number

    monkeypatch.setattr("ctypes.CDLL", lambda name, mode: {"libnccl.so.2": Library()}[name])
    assert nccl_version() == version
