"""Known cases of command lines, and all known cases."""

from __future__ import annotations

import os
import shutil
from functools import partial
from typing import TYPE_CHECKING, Any

import yaml

from tests.fuzz.forks import Case
from tests.fuzz.known import DUMPS, EVALUATIONS, FILES, MODELS, model, option, put_at, samples
from tests.fuzz.known_runs import RUNS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def command(
    intact: Path,
    files: Path,
    *,
    given: str,
    place: str,
    make: Callable[[Path, Path], Any] = lambda intact, files: None,
    target: str = "",
) -> Case:
    """A command in the directory of the case's files, which ``make`` makes.

    Words are divided by spaces; ``{intact}`` in them stands for that directory.
    """
    make(intact, files)
    words = [word.replace("{intact}", str(intact)) for word in given.split(" ")]
    return Case(words, (place,), True, files / target if target else None)


def graded(intact: Path, files: Path, *, content: str, place: str = "responses.jsonl:1") -> Case:
    """Grade one line."""
    (files / "responses.jsonl").write_text(content + "\n")
    return Case(["grade", "responses.jsonl"], (place,), is_wrong=True)


def _answer(answer: str) -> partial[Case]:
    return partial(graded, content=f'{{"response": "1", "answer": {answer}}}', place="'answer'")


def _loop(intact: Path, files: Path) -> None:
    (files / "x").symlink_to("x")


def _model(*, file: str, kind: Callable[[Path], Any]) -> Callable[[Path, Path], None]:
    """A model of which one file is made anew."""

    def make(intact: Path, files: Path) -> None:
        shutil.copytree(intact / "model", files / "model")
        (files / "model" / file).unlink(missing_ok=True)
        kind(files / "model" / file)

    return make


def _grid(intact: Path, files: Path) -> None:
    values = list(range(399))
    grid = {"rollout.temperature": values, "seed": values, "optimizer.lr": values}
    given = {"config": str(intact / "run.yaml"), "dir": "sweep", "grid": grid, "seeds": [0]}
    (files / "sweep.yaml").write_text(yaml.safe_dump(given))


def _link(path: Path) -> None:
    path.symlink_to(path.name)


_INIT = "--model {intact}/model --data {intact}/train.jsonl"
COMMANDS: dict[str, Any] = {
    **{
        f"link to itself: {given.split(' ')[0]}": partial(
            command, given=given, place="x", make=_loop
        )
        for given in (
            f"init x {_INIT} --gpus 1",
            "make-tiny x",
            "convert {intact}/model x",
            "eval --from {intact}/sums.jsonl --out x",
        )
    },
    **{
        f"{file} by {kind.__name__.strip('_')}": partial(
            command,
            given="convert model target",
            place=file,
            make=_model(file=file, kind=kind),
            target="target",
        )
        for file in ("tokenizer_config.json", "chat_template.jinja", "generation_config.json")
        for kind in (os.mkdir, os.mkfifo, _link)
    },
    **{
        ascii(given): partial(command, given=given, place=place)
        for given, place in (
            ("plan {intact}/run.yaml --gpus 1000000000000000000", "--gpus"),
            ("plan {intact}/run.yaml parallel.context=1000000000000", "parallel"),
            ("plan {intact}/run.yaml --gpu-memory inf", "--gpu-memory"),
            ("plan {intact}/run.yaml --gpu-memory nan", "--gpu-memory"),
            ("plan {intact}/run.yaml --rollout-tokens-per-s inf", "--rollout-tokens-per-s"),
            (f"init x {_INIT} --gpus 1000000000000", "--gpus"),
            (f"init x {_INIT} --gpus 1 --node-gpus {10**30}", "--node-gpus"),
            (f"init n\udcff\udcfew {_INIT} --gpus 1", r"n\xff\xfew"),
            ("eval --from r\udcff.jsonl --out o", r"r\xff.jsonl"),
            (f"make-tiny x --seed {10**30}", "--seed"),
            ("make-tiny /proc/x", "/proc/x"),
            ("make-tiny /dev/null/x", "/dev/null/x"),
            ("convert {intact}/model .", "name"),
            ("config {intact}/run.yaml reward.workers=100000000", "reward.workers"),
            ("config {intact}/run.yaml reward.memory_limit_mb=9007199254740992", "memory_limit"),
        )
    },
    "sweep of 399³ runs": partial(command, given="sweep sweep.yaml", place="grid", make=_grid),
    "workers in the settings of samples": partial(
        samples,
        file="sums.settings.json",
        change=put_at("reward", value={"workers": 10**9}),
        place="'workers'",
    ),
    **{
        f"pattern {pattern[:9]}": partial(
            option, given=f'reward.format={{reward: 1, pattern: "{pattern}"}}', place="pattern"
        )
        for pattern in ("a{99999999999}", "(" * 3000 + ")" * 3000)
    },
    **{
        f"rope of two meanings: {name} {value}": partial(
            model,
            file="config.json",
            change=put_at(name, value=value),
            place=name,
        )
        for name, value in (
            ("rope_theta", float("nan")),
            ("rope_theta", 5.0),
            ("rope_scaling", {"type": "x"}),
            ("rope_scaling", []),
        )
    },
    "finish reason that is a list": partial(
        graded,
        content='{"response": "1", "answer": "1", "finish_reason": ["stop"]}',
        place="finish_reason",
    ),
    "answer in 900 lists": _answer("[" * 900 + '"1"' + "]" * 900),
    "answer in two lists": _answer('[["1"]]'),
    "answer that ends in ####": _answer('"x #### "'),
    "line of 66 MiB": partial(graded, content='{"response": "' + "a" * (66 << 20) + '"}'),
}

KNOWN = {**DUMPS, **MODELS, **FILES, **EVALUATIONS, **COMMANDS, **RUNS}
"""By name, what makes the case from the directories of intact and of its own files."""
