"""A process that generates problems of reasoning-gym, for ``rows.read_rows``.

    python -m bapo_megatron.data.gym PARENT_PID < request > rows

The request is the JSON of a set's tasks, size and seed. Each row is one line of JSON: ``question``,
``answer`` and ``gym``, which is what the task's scorer needs (``reward.gym``). An error is one line
on standard error, and the exit status 1.

Problem i is a function of the tasks, the seed and whether the set is held out: tasks take turns by
their weights, and each generates its problems in order, by the seeds from ``seed`` · 2^20 on, so
that two seeds have none in common. A problem is held out if the hash of its question says so:
sets for training have the others, whatever seeds and options are.
"""

import contextlib
import dataclasses
import difflib
import hashlib
import importlib.metadata
import json
import os
import random
import signal
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from bapo_megatron.runtime.names import shown
from bapo_megatron.runtime.processes import end_with_parent

_HELD_OUT_SHARE = 8
"""One problem in so many is held out."""
_CHUNK = 1000
"""Problems of one generator, whose ``size`` some tasks depend on."""
_SEEDS = 1 << 20
_MAX_TRIES = 100
"""A task that needs more tries per problem has too few different ones."""


def rows(
    tasks: list[dict[str, Any]], size: int, seed: int, *, is_held_out: bool
) -> Iterator[dict[str, Any]]:
    """Yield ``size`` rows of ``tasks``, the values of ``GymTaskConfig``s.

    Raises:
        ValueError: A task is unknown, refuses its options, or has too few problems.
    """
    total = sum(task["weight"] for task in tasks)
    problems = [_problems(task["name"], task["options"], seed, is_held_out) for task in tasks]
    counts = [0] * len(tasks)
    for number in range(1, size + 1):
        lacking = [
            task["weight"] * number / total - count
            for task, count in zip(tasks, counts, strict=True)
        ]
        turn = lacking.index(max(lacking))
        counts[turn] += 1
        yield next(problems[turn])


def _problems(
    name: str, options: Mapping[str, Any], seed: int, is_held_out: bool
) -> Iterator[dict[str, Any]]:
    """Problems of one task without end, until its seeds are used up."""
    num_kept = 0
    for index in range(_SEEDS):
        if index % _CHUNK == 0:
            task = open_task(name, options, seed=seed * _SEEDS + index, size=_CHUNK)
        if index >= _MAX_TRIES * (num_kept + 1):
            break
        random.seed(seed * _SEEDS + index)  # a few tasks use it
        entry = task[index % _CHUNK]
        digest = hashlib.sha256(entry["question"].encode()).digest()
        if (digest[0] % _HELD_OUT_SHARE == 0) != is_held_out:
            continue
        num_kept += 1
        # Names and options travel with a problem, since a scorer may read its configuration.
        gym = {"name": name, "options": dict(options), "metadata": entry["metadata"]}
        yield {"question": entry["question"], "answer": entry["answer"], "gym": gym}
    kind = "evaluation" if is_held_out else "training"
    raise ValueError(
        f"'{name}' has only {num_kept} problems for {kind}; give other options, or a smaller size"
    )


def open_task(name: str, options: Mapping[str, Any], **fields: int) -> Any:
    """Create a task of reasoning-gym.

    Raises:
        ValueError: There is no such task, it refuses its options, or reasoning-gym is not
            installed.
    """
    try:
        from reasoning_gym import create_dataset
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ValueError(
            f"reasoning-gym cannot be imported ({error}); pip install 'bapo-megatron[gym]'"
        ) from error
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=1)
        remedy = f"did you mean '{near[0]}'?" if near else "see reasoning-gym's gallery"
        version = importlib.metadata.version("reasoning-gym")
        raise ValueError(f"'{name}' is no task of reasoning-gym {version}; {remedy}")
    known = [field.name for field in dataclasses.fields(DATASETS[name][1])]
    for option in options:
        if option not in known:
            near = difflib.get_close_matches(option, known, n=1)
            remedy = f"did you mean '{near[0]}'?" if near else f"it has {', '.join(known)}"
            raise ValueError(f"'{name}' has no option '{option}'; {remedy}")
    try:
        return create_dataset(name, **options, **fields)
    except Exception as error:
        raise ValueError(
            f"'{name}' refuses its options {json.dumps(dict(options))}: {shown(error)}"
        ) from error


def main() -> None:
    """Answer one request."""
    end_with_parent(signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):
        return
    request = json.load(sys.stdin)
    output = sys.stdout
    try:
        with contextlib.redirect_stdout(sys.stderr):  # tasks print
            for row in rows(**request):
                output.write(json.dumps(row, default=str) + "\n")
    except ValueError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
