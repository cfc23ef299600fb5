"""The set-up script says in one line what is missing, before it installs anything."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

NEEDS_NVCC = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc, no GPU")

REPOSITORY = Path(__file__).resolve().parent.parent


def _make_setup(tmp_path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    # Under `make test` this process has make's own flags; the make started here would obey them.
    inherited = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS")}
    return subprocess.run(
        ["make", "--no-print-directory", "setup", f"VENV={tmp_path / 'venv'}"],
        cwd=REPOSITORY,
        env={**inherited, **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (
            {"PYTHON": "/no/such/python"},
            "setup: /no/such/python does not run or is not Python 3.11",
        ),
        ({"CXX": "/no/such/compiler"}, "setup: no C++ compiler (/no/such/compiler) was found"),
    ],
)
def test_what_is_missing_is_named_in_one_line(
    tmp_path: Path, variables: dict[str, str], expected: str
) -> None:
    result = _make_setup(tmp_path, **variables)
    assert result.returncode != 0
    assert result.stderr.splitlines()[0].startswith(expected)
    assert not (tmp_path / "venv").exists()


def build(folder: Path, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Build the extension in a folder, with these environment variables."""
    return subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "-t", folder, "-b", folder],
        cwd=REPOSITORY,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"BAPO_SKIP_CUDA_BUILD": "yes"}, "BAPO_SKIP_CUDA_BUILD must be 0 or 1, got 'yes'"),
        (
            {"BAPO_SKIP_CUDA_BUILD": "1", "BAPO_FORCE_CUDA_BUILD": "1"},
            "BAPO_SKIP_CUDA_BUILD and BAPO_FORCE_CUDA_BUILD are both 1; unset one of them",
        ),
        ({"MAX_JOBS": "many"}, "MAX_JOBS must be a number from 1 on, got 'many'"),
        (
            {"CXX": "/no/such/c++", "CC": "/no/such/cc"},
            "bapo_megatron needs a C++17 compiler (GCC >= 9 or Clang >= 11) and found none",
        ),
        pytest.param(
            {"BAPO_CUDA_ARCHS": "8.0"},
            "BAPO_CUDA_ARCHS must look like 80;90;100",
            marks=NEEDS_NVCC,
        ),
        pytest.param(
            {"BAPO_CUDA_ARCHS": "30"},
            "cannot compile for compute capability 30; it knows",
            marks=NEEDS_NVCC,
        ),
    ],
)
def test_a_build_that_cannot_be_made_says_why_in_one_line(
    tmp_path: Path, variables: dict[str, str], expected: str
) -> None:
    result = build(tmp_path, variables)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith("error: ")
    assert expected in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("strict", ["0", "1"])
def test_warnings_of_nvcc_fail_only_a_build_that_asks_for_it(tmp_path: Path, strict: str) -> None:
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(
        '#!/bin/sh\n[ "$1" != --list-gpu-arch ] || exec echo compute_90\n'
        f'echo "$@" >> {tmp_path}/calls\nexit 1\n'
    )
    nvcc.chmod(0o755)
    variables = {"CUDA_HOME": str(tmp_path), "BAPO_CUDA_ARCHS": "90", "BAPO_STRICT_BUILD": strict}
    result = build(tmp_path, variables)
    assert "nvcc failed on csrc/cuda/" in result.stderr
    calls = (tmp_path / "calls").read_text()
    assert "compute_90" in calls
    assert ("--Werror all-warnings" in calls) == (strict == "1")


def test_a_python_without_venv_is_named(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    # It runs and has the right version, but cannot import venv.
    bare.write_text('#!/bin/sh\ncase "$2" in *venv*) exit 1 ;; esac\nexit 0\n')
    bare.chmod(0o755)
    result = _make_setup(tmp_path, PYTHON=str(bare))
    assert result.returncode != 0
    assert "has no venv module; install it" in result.stderr.splitlines()[0]


def test_the_containerfile_runs_scripts_that_are_in_its_context() -> None:
    text = (REPOSITORY / "Containerfile").read_text()
    (base,) = re.findall(r"^FROM (\S+)$", text, re.MULTILINE)
    assert re.fullmatch(r"python:3\.1[12]-slim", base)
    assert "\nCOPY --chown=bapo . .\n" in text
    left_out = (REPOSITORY / ".dockerignore").read_text().split("\n")
    scripts = re.findall(r"(?:requirements|examples)/\S+\.sh", text)
    assert scripts == ["examples/demo.sh", "requirements/install.sh"]
    for script in scripts:
        assert os.access(REPOSITORY / script, os.X_OK)
        assert script.split("/")[0] not in left_out
