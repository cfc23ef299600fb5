"""Trains beside agents whose programs kill, forge, read and stay behind.

    python -m tests.benchmarks.hostile_train --steps 8

trains the tiny model twice with one agent in sandboxes, at a learning rate of 1e-30, so that every
step samples from the same weights: once without programs, and once with a hostile one for every
other prompt. Exits with 1 if a response to the other prompts or its reward changes, a hostile
program raises its reward, or a process is left; a run that fails raises.
"""

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq

from examples.tiny.make import make_tiny
from tests.agent import agents
from tests.agent.test_attacks import task_of
from tests.benchmarks.demo_runs import train
from tests.benchmarks.hostile_agents import HOSTILE

SETTINGS = (
    "rollout.engine=local",
    "rollout.async_steps=0",
    "rollout.oversample_groups=0",  # the slowest groups are dropped otherwise
    "rollout.agent=boxed:speaks_and_runs",
    "rollout.agent_limits={isolation: episode, commands: 4, episodes: 16}",
    "rollout.agent_sandbox={memory_limit_mb: 1024}",
    "reward.functions=[{name: right, function: math}, {name: value, function: 'boxed:value'}]",
    "optimizer.lr=1e-30",
    "eval.sets=[]",
)
NAMES = list(HOSTILE)
_OF_AGENTS = r"\bbwrap\b|Runs agents|AGENT = os\.getppid"


def attack(line: int) -> str:
    """Return the attack on the prompt of a line, counted from 0; empty for none."""
    return "" if line % 2 else NAMES[line // 2 % len(NAMES)]


def responses(scratch: Path, name: str, steps: int, *, has_hostile: bool) -> list[dict[str, Any]]:
    """Train once; returns the rows of its dumps."""
    data = scratch / f"{name}-data/train.jsonl"
    data.parent.mkdir()
    with data.open("w") as file:
        for line, text in enumerate((scratch / "tiny/train.jsonl").open()):
            program = HOSTILE[attack(line)] if has_hostile and attack(line) else ""
            file.write(json.dumps({**json.loads(text), **task_of(program)["row"]}) + "\n")
    settings = [*SETTINGS, f"data.train.path={data}"]
    train(scratch / name, scratch / "tiny", steps, settings)
    dumps = sorted((scratch / name / "rollouts").glob("step_*.parquet"))
    return [{"step": dump.stem, **row} for dump in dumps for row in pq.read_table(dump).to_pylist()]


def compare(alone: list[dict[str, Any]], beside: list[dict[str, Any]]) -> dict[str, Any]:
    """Count what hostile programs changed, and how their episodes ended."""
    keys = ("prompt_id", "index", "response_token_ids", "behaviour_logprobs", "reward")
    counts, ends = Counter[str](honest=0, changed=0, gained=0), Counter[str]()
    for before, after in zip(alone, beside, strict=True):
        if name := attack(int(after["prompt_id"].rpartition(":")[2])):
            ends[f"{name}: {after['finish_reason']}"] += 1
            counts["gained"] += after["reward"] > before["reward"]
        else:
            counts["honest"] += 1
            counts["changed"] += any(before[key] != after[key] for key in keys)
    return {**counts, "hostile": ends.total(), "ends": dict(ends)}


def left() -> list[int]:
    """Return the processes that are agents' sandboxes, workers or programs, whoever's."""
    commands = {p.pid: " ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"])}
    return [pid for pid, text in commands.items() if re.search(_OF_AGENTS, text)]


def main(argv: Sequence[str] | None = None) -> int:
    """Train twice, compare and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=8, help="of 256 episodes")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        scratch.chmod(0o755)  # for the sandbox's user
        shutil.copyfile(agents.__file__, scratch / "boxed.py")
        os.environ["PYTHONPATH"] = f"{scratch}:{os.environ.get('PYTHONPATH', '')}"
        make_tiny(scratch / "tiny", 0)
        alone = responses(scratch, "alone", options.steps, has_hostile=False)
        beside = responses(scratch, "beside", options.steps, has_hostile=True)
        report = compare(alone, beside)
        report["left"] = left()
    sys.stdout.write(json.dumps(report, indent=1) + "\n")
    return int(bool(report["changed"] or report["gained"] or report["left"]))


if __name__ == "__main__":
    sys.exit(main())
