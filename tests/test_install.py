"""The set-up script says in one line what is missing, before it installs anything."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

NEEDS_NVCC = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc, no GPU")

REPOSITORY = Path(__file__).resolve().parent.parent


def test_make_sets_up_with_the_python_that_it_is_given(tmp_path: Path) -> None:
    # Under `make test` this process has make's own flags; the make started here would obey them.
    inherited = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS")}
    result = subprocess.run(
        ["make", "--no-print-directory", "setup", f"VENV={tmp_path / 'venv'}"],
        cwd=REPOSITORY,
        env={**inherited, "PYTHON": "/no/such/python"},
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode != 0
    assert result.stderr.startswith("setup: /no/such/python does not run or is not Python 3.12")
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
        ({"MAX_JOBS": "many"}, "MAX_JOBS must be a whole number >= 1, got 'many'"),
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


SHIM = "#!/bin/sh\necho pyenv: python3.12: command not found\nexit 127\n"
OLD = "import sys; sys.version_info = (3, 11, 7)"
NO_VENV = "import sys; sys.modules['venv'] = None"
NO_HEADERS = "import sysconfig; sysconfig.get_path = lambda name: '/no/such/folder'"
NONE_FOUND = (
    "setup: no Python 3.12 was found; install one (uv python install 3.12, or pyenv install 3.12) "
    "or set PYTHON="
)


class Pythons:
    """A machine on whose PATH there is nothing but what set-up needs beside Python."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bin = folder, folder / "bin"
        self.bin.mkdir()
        for tool in ("bash", "dirname", "sh", "uname"):
            (self.bin / tool).symlink_to(shutil.which(tool) or "")
        self.script("bin/c++", "#!/bin/sh\n")

    def script(self, place: str, text: str) -> Path:
        path = self.folder / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
        return path

    def add(self, place: str, defect: str = "") -> Path:
        """A Python 3.12, with a defect of Python code, whose version is its place."""
        program = f'exec {sys.executable} -c "{defect}\n$2"'
        cases = f"-c) {program} ;;\n--version) echo {place} ;;\n*) exit 9 ;;"
        return self.script(place, f'#!/bin/sh\ncase "$1" in\n{cases}\nesac\n')

    def set_up(self, *python: Path, **variables: str) -> list[str]:
        """What set-up says; it ends where it would create the environment."""
        result = subprocess.run(
            ["bash", REPOSITORY / "requirements" / "install.sh", self.folder / "venv", *python],
            env={"PATH": str(self.bin), "HOME": str(self.folder), **variables},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert result.returncode == (9 if result.stdout else 1)
        return [
            line.rpartition(" with ")[2] for line in (result.stdout + result.stderr).split("\n")
        ]


@pytest.fixture
def pythons(tmp_path: Path) -> Pythons:
    """Its python3.12 is a shim that runs nothing, its python3 is a Python 3.11."""
    machine = Pythons(tmp_path)
    machine.script("bin/python3.12", SHIM)
    machine.add("bin/python3", OLD)
    return machine


@pytest.mark.parametrize(
    ("place", "variables"),
    [
        ("bin/python3.12", {}),
        ("bin/python3", {}),
        (".pyenv/versions/3.12.1/bin/python", {}),
        ("elsewhere/versions/3.12.11/bin/python", {"PYENV_ROOT": "elsewhere"}),
        ("from-uv", {}),
    ],
)
def test_a_python_is_found_wherever_it_is(
    pythons: Pythons, place: str, variables: dict[str, str]
) -> None:
    interpreter = pythons.add(place)
    if place == "from-uv":
        answer = f'[ "$*" = "python find --system 3.12" ] && echo {interpreter}'
        pythons.script("bin/uv", f"#!/bin/sh\n{answer}\n")
    folders = {name: str(pythons.folder / folder) for name, folder in variables.items()}
    assert pythons.set_up(**folders) == [place, ""]


def test_without_any_python_set_up_says_how_to_get_one(pythons: Pythons) -> None:
    assert pythons.set_up() == [NONE_FOUND, ""]
    pythons.script("bin/uv", "#!/bin/sh\necho error: no interpreter found >&2\nexit 2\n")
    assert pythons.set_up() == [NONE_FOUND, ""]


@pytest.mark.parametrize(
    ("defect", "message"),
    [
        (NO_VENV, "has no venv module; install it (Ubuntu: apt-get install python3.12-venv)"),
        (
            NO_HEADERS,
            "has no headers (Python.h); install them (Ubuntu: apt-get install python3.12-dev)",
        ),
    ],
)
def test_an_incomplete_python_is_named_unless_there_is_another(
    pythons: Pythons, defect: str, message: str
) -> None:
    pythons.add("bin/python3.12", defect)
    assert pythons.set_up() == [f"setup: python3.12 {message}", ""]
    complete = pythons.add(".pyenv/versions/3.12.1/bin/python")
    assert pythons.set_up() == [".pyenv/versions/3.12.1/bin/python", ""]
    incomplete = pythons.folder / "bin" / "python3.12"
    assert pythons.set_up(incomplete) == [f"setup: {incomplete} {message}", ""]
    assert pythons.set_up(complete) == [".pyenv/versions/3.12.1/bin/python", ""]


def test_a_missing_compiler_and_an_environment_of_another_python_are_named(
    pythons: Pythons,
) -> None:
    pythons.add("bin/python3.12")
    (line, _) = pythons.set_up(CXX="/no/such/compiler")
    assert line.startswith("setup: no C++ compiler (/no/such/compiler) was found")
    pythons.add("venv/bin/python", OLD)
    venv = pythons.folder / "venv"
    message = f"setup: {venv} is not of Python 3.12; remove it, then run this again"
    assert pythons.set_up() == [message, ""]


def test_the_containerfile_runs_scripts_that_are_in_its_context() -> None:
    text = (REPOSITORY / "Containerfile").read_text()
    (base,) = re.findall(r"^FROM (\S+)$", text, re.MULTILINE)
    assert re.fullmatch(r"python:3\.12-slim", base)
    assert "\nCOPY --chown=bapo . .\n" in text
    left_out = (REPOSITORY / ".dockerignore").read_text().split("\n")
    scripts = re.findall(r"(?:requirements|examples)/\S+\.sh", text)
    assert scripts == ["examples/demo.sh", "requirements/install.sh"]
    for script in scripts:
        assert os.access(REPOSITORY / script, os.X_OK)
        assert script.split("/")[0] not in left_out


def test_the_gpu_image_installs_what_the_other_files_name_and_every_wheel_by_checksum() -> None:
    folder = REPOSITORY / "requirements"
    lines = (folder / "gpu_image.txt").read_text().splitlines()
    pins = [re.fullmatch(r"(\S+)==(\S+) --hash=sha256:[0-9a-f]{64}", line) for line in lines[2:]]
    versions = {pin[1].lower().replace("_", "-"): pin[2] for pin in pins if pin is not None}
    assert len(versions) == len(lines) - 2 > 200
    named = (folder / "gpu.txt").read_text() + (folder / "install.sh").read_text()
    for name in ("sglang", "megatron-core", "torch", "torchvision", "math-verify"):
        assert set(re.findall(rf"\b{name}(?:\[.*?\])?==([\d.]+)", named)) <= {versions[name]}
    text = (REPOSITORY / "Containerfile.gpu").read_text()
    (engine,) = re.findall(r"transformer-engine-torch==(\S+)", text)
    assert f"transformer-engine=={engine}" in (folder / "beside.sh").read_text()
    assert versions["transformer-engine"] == versions["transformer-engine-cu13"] == engine
    assert 'BAPO_FORCE_CUDA_BUILD=1 BAPO_CUDA_ARCHS="90;100"' in text
    assert (
        'BAPO_FORCE_CUDA_BUILD=1 BAPO_CUDA_ARCHS="90;100"' in (folder / "gpu_image.sh").read_text()
    )
