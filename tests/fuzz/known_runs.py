"""Known cases of bad input, continued: run directories, and files that are no regular ones."""

from __future__ import annotations

import json
import os
import shutil
from functools import partial
from typing import TYPE_CHECKING, Any

import yaml

from tests.fuzz import mutations as harm
from tests.fuzz.forks import Case
from tests.tools.report.made_runs import make_run

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

DUMP = "rollouts/step_000001.parquet"


def read_run(
    intact: Path,
    files: Path,
    *,
    change: Callable[[Path], None],
    command: str = "report",
    places: tuple[str, ...] = (),
    is_wrong: bool = True,
) -> Case:
    """Read a run directory that is changed."""
    run = make_run(files / "made")
    change(run)
    if command == "report":
        target = files / "page.html"
        return Case(["report", str(run), "--out", str(target)], places, is_wrong, target)
    if command == "plot":
        target = files / "picture.png"
        return Case(["plot", str(run), "--out", str(target)], places, is_wrong, target)
    given = command.format(intact=intact).split()
    return Case([*given, str(run)], places, is_wrong)


def written(name: str, content: bytes) -> Callable[[Path], None]:
    """Another content of a file."""

    def change(run: Path) -> None:
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_bytes(content)

    return change


def piped(name: str) -> Callable[[Path], None]:
    """A named pipe in place of a file; nobody writes into it."""

    def change(run: Path) -> None:
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)

    return change


def looped(name: str) -> Callable[[Path], None]:
    """A symbolic link to itself in place of a file."""

    def change(run: Path) -> None:
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(name)

    return change


def configured(*place: Any, value: Any) -> Callable[[Path], None]:
    """Another value in config.yaml, which then is of no version of the project."""

    def change(run: Path) -> None:
        path = run / "config.yaml"
        tree = harm.put(yaml.safe_load(path.read_text()), place, value)
        path.write_text(yaml.safe_dump({**tree, "former": 1}))

    return change


def measured(*rows: dict[str, float]) -> Callable[[Path], None]:
    """Other metrics."""
    return written("metrics.jsonl", "".join(f"{json.dumps(row)}\n" for row in rows).encode())


def no_regular_file(intact: Path, files: Path, *, arguments: list[str], name: str) -> Case:
    """A named pipe as the file of a command; ``{intact}`` and ``{files}`` are directories."""
    (files / name).parent.mkdir(exist_ok=True)
    os.mkfifo(files / name)
    given = [each.format(intact=intact, files=files) for each in arguments]
    return Case(given, (name.rpartition("/")[2], "named pipe"), is_wrong=True)


def with_pipe_beside(intact: Path, files: Path) -> Case:
    """Samples of which the settings are a named pipe."""
    shutil.copy(intact / "sums.jsonl", files / "sums.jsonl")
    given = ["eval", "--from", "{files}/sums.jsonl", "--out", "{files}/again"]
    return no_regular_file(intact, files, arguments=given, name="sums.settings.json")


def of_tokenizer(intact: Path, files: Path) -> Case:
    """A page with a tokenizer that is a named pipe."""
    make_run(files / "made")
    given = ["report", "{files}/made", "--tokenizer", "{files}/own"]
    return no_regular_file(intact, files, arguments=given, name="own/tokenizer.json")


def swept(intact: Path, files: Path, *, change: Callable[[Path], None], place: str) -> Case:
    """A sweep that finds a file in place of a run's configuration."""
    run = files / "sweep" / "a" / "seed1"
    run.mkdir(parents=True)
    change(run)
    settings = {
        "config": str(intact / "run.yaml"),
        "dir": str(files / "sweep"),
        "overrides": [
            f"eval.sets=[{{path: {intact / 'train.jsonl'}}}]",
            "eval.max_response_tokens=64",
        ],
        "variants": {"a": []},
        "seeds": [1],
        "jobs": 1,
    }
    (files / "sweep.yaml").write_text(yaml.safe_dump(settings))
    return Case(["sweep", str(files / "sweep.yaml")], ("a/seed1/config.yaml", place), is_wrong=True)


DEEP_YAML = b"[" * 20_000
ALIASED = b"a: &a\n  b: *a\n"

RUNS: dict[str, Any] = {
    **{
        f"config.yaml {what}, in {command}": partial(
            read_run,
            change=written("config.yaml", content),
            command=command,
            places=("config.yaml",),
        )
        for what, content in (("nested deeply", DEEP_YAML), ("of recursive aliases", ALIASED))
        for command in ("report", "plot", "samples show")
    },
    **{
        f"{key} of {str(value)[:9]}, in {command}": partial(
            read_run,
            change=configured("algorithm", key, value=value),
            command=command,
            is_wrong=False,
        )
        for key, values in (
            ("advantage", (5, "nothing", ["a"])),
            ("baseline_shift", (None, "x", float("nan"), 10**400)),
            ("updates_per_batch", (None, [1], "x", 10**12)),
        )
        for value in values
        for command in ("report", "samples show")
    },
    "interval with one end": partial(
        read_run,
        change=measured({"step": 1, "eval/a/avg_at_k": 0.5, "eval/a/avg_at_k_low": 0.1}),
        is_wrong=False,
    ),
    **{
        f"data.train.path of {url}": partial(
            read_run, change=configured("data", "train", "path", value=url), is_wrong=False
        )
        for url in ("http://h:abc/x", "http://[::1")
    },
    **{
        f"rewards of 1e308, in {command}": partial(
            read_run,
            change=measured({"step": 1, "reward/mean": 1e308}, {"step": 2, "reward/mean": -1e308}),
            command=command,
            places=("metrics.jsonl:1", "1e+150"),
        )
        for command in ("report", "plot")
    },
    "set named $x^$, in plot": partial(
        read_run,
        change=measured({"step": 1, "eval/$x^$/avg_at_k": 0.5}),
        command="plot",
        is_wrong=False,
    ),
    **{
        f"{name} that is a named pipe, in {command}": partial(
            read_run, change=piped(name), command=command, places=(name, "named pipe")
        )
        for name, command in (
            ("config.yaml", "report"),
            ("config.yaml", "samples show"),
            ("metrics.jsonl", "plot"),
            ("starts.jsonl", "report"),
            (DUMP, "samples show"),
            ("rollouts/texts/step_000001.parquet", "report"),
            ("tokens/step_000001_update_000.parquet", "report"),
        )
    },
    "results of an evaluation that are a named pipe": partial(
        read_run,
        change=lambda run: (piped("eval/start.json")(run), written("eval/step_6.json", b"[]")(run)),
        places=("eval/start.json", "named pipe"),
    ),
    **{
        f"results without a set, in {command.split()[0]}": partial(
            read_run,
            change=lambda run: [
                written(f"eval/{name}.json", b"[]")(run) for name in ("start", "step_6")
            ],
            command=command,
            places=("eval/st", "must have sets"),
        )
        for command in ("report", "compare {intact}/eval.json")
    },
    "bounds of a named pipe": partial(
        no_regular_file, arguments=["bounds", "{files}/t.npz"], name="t.npz"
    ),
    "servers_file that is a named pipe": partial(
        no_regular_file,
        arguments=[
            *("generate", "{intact}/run.yaml", "--steps", "1", "rollout.engine=sglang"),
            "rollout.servers_file={files}/servers",
        ],
        name="servers",
    ),
    "settings of samples that are a named pipe": with_pipe_beside,
    "tokenizer that is a named pipe": of_tokenizer,
    "run of a sweep whose configuration is a named pipe": partial(
        swept, change=piped("config.yaml"), place="named pipe"
    ),
    "run of a sweep whose configuration is a symbolic link to itself": partial(
        swept, change=looped("config.yaml"), place="symbolic link"
    ),
    "run of a sweep whose configuration is nested deeply": partial(
        swept, change=written("config.yaml", DEEP_YAML), place="exceeded maximum nesting depth"
    ),
    "run of a sweep whose configuration has recursive aliases": partial(
        swept, change=written("config.yaml", ALIASED), place="aliases"
    ),
    "starts.jsonl that is a symbolic link to itself": partial(
        read_run, change=looped("starts.jsonl"), places=("starts.jsonl",)
    ),
}
