"""The sdist has what a build needs; its wheel works in an environment without the repository."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
from pathlib import Path
from typing import NamedTuple
from zipfile import ZipFile

import pytest

from bapo_megatron import __version__
from tests.launch import REPOSITORY
from tests.tools.report.made_runs import make_run

pytestmark = pytest.mark.exhaustive

LEFT_OUT = (".*", "build", "runs", "*.egg-info", "__pycache__", "*.so", "*.o")
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])('dist')"


LOOK = """
import torch, bapo_megatron
from bapo_megatron.ops.extension import build_info
print(bapo_megatron.__file__)
print(build_info()["version"], build_info()["git_commit"])
print(torch.ops.bapo.importance_ratio(torch.zeros(1), torch.zeros(1)).tolist())
"""


class Packages(NamedTuple):
    """What was built, and where the wheel is installed."""

    in_sdist: set[str]
    """Paths below the sdist's own folder."""
    in_wheel: set[str]
    programs: Path
    """``bin`` of the environment."""


def build(what: str, folder: Path) -> Path:
    """Build an sdist or a wheel of the sources in a folder, as pip without isolation does.

    Nothing is optimised, which would take twice as long.
    """
    compiler = folder.parent / "compiler"
    compiler.write_text(f'#!/bin/sh\nexec {os.environ.get("CXX", "c++")} "$@" -O0 -g0\n')
    compiler.chmod(0o700)
    result = subprocess.run(
        [sys.executable, "-c", BUILD, f"build_{what}"],
        cwd=folder,
        env={**os.environ, "BAPO_SKIP_CUDA_BUILD": "1", "CXX": str(compiler)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    (built,) = (folder / "dist").iterdir()
    return built


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Packages:
    """The sdist of this checkout, the wheel of this sdist, and an environment with this wheel.

    The environment has the dependencies of the one that runs the tests, but not this package.
    """
    folder = tmp_path_factory.mktemp("packages")
    shutil.copytree(REPOSITORY, folder / "checkout", ignore=shutil.ignore_patterns(*LEFT_OUT))
    with tarfile.open(build("sdist", folder / "checkout")) as sdist:
        sdist.extractall(folder, filter="data")
    (unpacked,) = folder.glob("bapo_megatron-*")
    in_sdist = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file()}
    wheel = build("wheel", unpacked)
    venv.create(folder / "fresh", symlinks=True)
    python = folder / "fresh" / "bin" / "python"
    (site_packages,) = (folder / "fresh" / "lib").glob("python*/site-packages")
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index"]
    result = subprocess.run([*pip, "--quiet", wheel], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return Packages(in_sdist, set(ZipFile(wheel).namelist()), python.parent)


def run(packages: Packages, folder: Path, *arguments: str) -> str:
    """Output of a program of the environment, run where nothing of the repository is found."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        [packages.programs / arguments[0], *arguments[1:]],
        cwd=folder,
        env={**inherited, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def files(*folders: str) -> set[str]:
    """The files below folders of the repository that are not build products."""
    return {
        str(path.relative_to(REPOSITORY))
        for folder in folders
        for path in (REPOSITORY / folder).rglob("*")
        if path.is_file() and path.suffix not in (".so", ".pyc", ".o")
    }


@pytest.mark.slow
def test_the_sdist_has_sources_configurations_tests_and_pages(packages: Packages) -> None:
    wanted = files("bapo_megatron", "csrc", "configs", "examples", "requirements", "tests", "docs")
    wanted |= {"LICENSE", "README.md", "Makefile", "mkdocs.yml", "pyproject.toml", "setup.py"}
    shards = {path for path in wanted if path.startswith("docs/study/")}
    assert {path for path in wanted - packages.in_sdist if not path.endswith(".parquet")} == set()
    assert not any(path.endswith(".parquet") for path in shards & packages.in_sdist)


@pytest.mark.slow
def test_the_wheel_has_the_package_its_extension_and_its_license(packages: Packages) -> None:
    assert files("bapo_megatron") <= packages.in_wheel
    beside = packages.in_wheel - files("bapo_megatron")
    (extension,) = (path for path in beside if path.startswith("bapo_megatron/"))
    assert extension == f"bapo_megatron/_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    assert f"bapo_megatron-{__version__}.dist-info/licenses/LICENSE" in beside
    assert {path.split("/")[0] for path in beside} == {
        "bapo_megatron",
        f"bapo_megatron-{__version__}.dist-info",
    }


@pytest.mark.slow
def test_the_installed_commands_run_without_the_repository(
    packages: Packages, tmp_path: Path
) -> None:
    where, *others = run(packages, tmp_path, "python", "-c", LOOK).splitlines()
    assert Path(where).is_relative_to(packages.programs.parent)
    assert others == [f"{__version__} unknown", "[1.0]"]
    run_dir = make_run(tmp_path / "made")
    run(packages, tmp_path, "bapo-megatron", "report", str(run_dir))
    assert (run_dir / "report.html").stat().st_size > 1_000_000
