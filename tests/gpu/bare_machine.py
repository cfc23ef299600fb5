"""Parts of the acceptance on the CPU with the listed wheels alone; a process of its own.

python -m tests.gpu.bare_machine DIRECTORY
"""

import contextlib
import importlib.metadata
import io
import json
import re
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from tests.gpu import acceptance

PARTS = ["model", "train", "experts", "hybrid", "fp8", "profile", "thin", "ranks"]
PARTS += ["kernels", "ipc", "sync"]
TINY = ["--device=cpu", "--tokens=64", "--columns=24", "--rounds=2"]
TINY += ["--sizes", "tiny", "tiny experts", "tiny hybrid"]


def listed() -> dict[str, str]:
    """The versions that ``acceptance needs`` lists."""
    lines = [line.partition("#")[0] for line in acceptance.WHEELS.read_text().splitlines()]
    return {
        _normal(name): version.strip()
        for name, _, version in (line.partition("==") for line in lines if line)
    }


def hide_other_packages() -> None:
    """Make unimportable what is neither listed, nor torch or what that requires, nor ours."""
    visible = listed().keys() | {"bapo-megatron"} | _with_requirements("torch")
    hidden = {
        module
        for module, owners in importlib.metadata.packages_distributions().items()
        if not visible & set(map(_normal, owners))
    }

    class Finder(PathFinder):  # it also finds entry points: torch 2.14's gloo is one
        @classmethod
        def find_spec(cls, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
            if name.partition(".")[0] in hidden:
                return None
            return super().find_spec(name, path, target)

    sys.meta_path[sys.meta_path.index(PathFinder)] = Finder


def _with_requirements(name: str) -> set[str]:
    requirements = map(Requirement, importlib.metadata.requires(name) or [])
    required = [
        _normal(requirement.name)
        for requirement in requirements
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    ]
    return {name}.union(*map(_with_requirements, required))


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def main(directory: Path) -> None:
    """Print exit status, lines and table of each part."""
    hide_other_packages()
    results = {}
    for part in PARTS:
        lines, table = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(lines), contextlib.redirect_stderr(table):
            status = acceptance.main([part, f"--dir={directory}", *TINY])
        results[part] = (status, lines.getvalue(), table.getvalue())
    print(json.dumps(results))  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]))
