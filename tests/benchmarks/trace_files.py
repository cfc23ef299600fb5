"""Counts the files of the package that an episode's tokens pass, from the prompt to the gradient.

    python -m tests.benchmarks.trace_files [plain|environment|agent] [--repo DIRECTORY]

Runs one step on the local engine; ``tracing/sitecustomize.py`` defines what counts. ``--repo`` is
another checkout, compiled, for a comparison. Its interpreter is this one.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.benchmarks.harness import REPOSITORY
from tests.engine.helpers import make_model_dir

PLAY = """
import json
from urllib.request import Request, urlopen


class Again:
    def start(self, task):
        return {}

    def step(self, state, turn):
        from bapo_megatron.environment.base import Step

        return Step(state, messages=[{"role": "user", "content": "again"}], is_done=turn.number > 1)


def play(task, base_url, api_key):
    messages = list(task["messages"])
    for _ in range(2):
        body = json.dumps({"model": "policy", "messages": messages}).encode()
        headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        with urlopen(Request(f"{base_url}/chat/completions", body, headers)) as reply:
            messages.append(json.load(reply)["choices"][0]["message"])
        messages.append({"role": "user", "content": "again"})


def length(response, answer, sample, row):
    return float(len(response) % 2)
"""
KINDS = {
    "plain": {},
    "environment": {"environment": "played:Again", "episodes": {"max_turns": 2}},
    "agent": {"agent": "played:play", "agent_sandbox": None},
}


def trace(kind: str, repository: Path, directory: Path) -> list[str]:
    """Return one line per file: its path in the package, and the function that shows it."""
    bapo = [sys.executable, "-m", "bapo_megatron"]
    paths = (Path(__file__).with_name("tracing"), directory)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    make_model_dir(directory / "model")
    rows = [{"prompt": f"{number} + 1 = ?", "answer": str(number + 1)} for number in range(16)]
    (directory / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "played.py").write_text(PLAY)
    settings = {
        "name": kind,
        "run_dir": str(directory / "run"),
        "model": {"path": str(directory / "model"), "dtype": "float32"},
        "data": {"train": {"path": str(directory / "train.jsonl")}, "max_prompt_tokens": 64},
        "rollout": {
            "engine": "local",
            "groups_per_step": 4,
            "samples_per_group": 4,
            "max_response_tokens": 24,
            **KINDS[kind],
        },
        "reward": {"functions": [{"name": "length", "function": "played:length"}], "workers": 1},
        "train": {"steps": 1, "max_tokens_per_micro_batch": 512},
        "optimizer": {"lr": 1e-4},
        "checkpoint": {"at_end": False},
    }
    (directory / "run.yaml").write_text(json.dumps(settings))  # JSON is YAML
    out = directory / "files"
    subprocess.run(
        [*bapo, "train", directory / "run.yaml"],
        cwd=repository,
        env={**environment, "TRACE_FILES_OUT": str(out)},
        check=True,
    )
    lines = {line.split()[0]: line for line in out.read_text().splitlines()}
    return sorted(lines.values())


def main() -> None:
    """Print the files and their number."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=KINDS, nargs="?", default="plain")
    parser.add_argument("--repo", type=Path, default=REPOSITORY)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        lines = trace(arguments.kind, arguments.repo, Path(directory))
    sys.stdout.write("\n".join([*lines, f"{len(lines)} files", ""]))


if __name__ == "__main__":
    main()
