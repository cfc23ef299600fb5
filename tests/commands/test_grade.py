"""The ``grade`` command, as a user starts it."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import typer

from bapo_megatron import cli
from bapo_megatron.commands.grade import _parse, grade_file
from bapo_megatron.config.reward import RewardConfig
from bapo_megatron.reward.base import RewardError
from bapo_megatron.runtime.processes import run_async
from tests.launch import REPOSITORY, run
from tests.reward.own_functions import EVEN_LENGTH

pytestmark = pytest.mark.slow

HANGING = r"\boxed{\prod_{k=1}^{10^9} (k+x)}"


def line_of(response, answer, **others):
    return json.dumps({"response": response, "answer": answer, **others}) + "\n"


@pytest.fixture
def responses(tmp_path):
    """The file of lines to grade."""
    return tmp_path / "responses.jsonl"


def write_config(tmp_path, *functions):
    """A run with rewards of its own; nothing but its reward section counts."""
    path = tmp_path / "run.yaml"
    reward = {"workers": 1, "overlong": {"buffer_tokens": 4}, "functions": functions}
    run = {"name": "x", "run_dir": str(tmp_path), "model": {"path": "none"}, "reward": reward}
    path.write_text(json.dumps(run))
    return path


@pytest.fixture
def config(tmp_path):
    facts = {"name": "facts", "function": "tests.reward.own_functions:everything"}
    return write_config(tmp_path, facts, {"name": "math", "function": "math", "weight": 2})


@contextlib.contextmanager
def grading_from_pipe(*arguments: str) -> Iterator[Any]:
    """Start it with open pipes."""
    program = [sys.executable, "-m", "bapo_megatron", "grade", "-", *arguments]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(program, cwd=REPOSITORY, text=True, bufsize=1, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def grade_here(responses: Path, functions: Any = (EVEN_LENGTH,)) -> None:
    """Grade a file in this process to the file ``results`` beside it."""
    rewards = RewardConfig.model_validate({"functions": functions, "workers": 1})
    with responses.with_name("results").open("w") as results:
        run_async(grade_file(responses, rewards, output=results.fileno()))


def test_a_function_that_scores_whole_groups_is_refused(responses):
    responses.write_text(line_of("x", "y"))
    functions = [{"name": "rank", "function": "tests.reward.own_functions:OfGroups.rank"}]

    with pytest.raises(RewardError, match=r"reward\.functions: 'rank' "):
        grade_here(responses, functions)


def test_every_line_gets_a_line_in_order(responses):
    responses.write_text(
        line_of(r"\boxed{1/2}", "0.5")
        + line_of(r"\boxed{3}", 4, more=[1])
        + "\n"
        + line_of("I cannot say", "4")
        + line_of("#### 7", "48 / 2 is 24\n#### 7")
        + line_of(r"\boxed{(x+1)^2}", ["1", "x^2+2x+1"]).rstrip()
    )

    done = run(["grade", str(responses)])

    assert (done.returncode, done.stderr) == (0, "")
    scores = [list(json.loads(line).values()) for line in done.stdout.splitlines()]
    assert scores == [
        [1.0, "1/2", "equal_number", {"math": 1.0}, {}],
        [0.0, "3", "different", {"math": 0.0}, {}],
        [0.0, "", "no_answer", {"math": 0.0}, {}],
        [1.0, "7", "equal_text", {"math": 1.0}, {}],
        [1.0, "(x+1)^2", "equal_value", {"math": 1.0}, {}],
    ]


def test_a_configuration_gives_the_rewards_of_its_run_without_shaping(responses, config):
    responses.write_text(line_of(r"\boxed{2}", "2", level=5, finish_reason="length", num_tokens=9))

    done = run(["grade", str(responses), "--config", str(config), "reward.timeout_s=7"])

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "score": 2.25,
        "extracted": "length True",
        "reason": "\\boxed{2} 2   ",
        "components": {"facts": 0.25, "math": 1.0},
        "metrics": {"facts/level": 5.0, "facts/tokens": 9.0},
    }


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (b"{", "not valid JSON"),
        (b"[1]", "must be an object"),
        (b"{}", "'response' is missing"),
        (b'{"response": "x"}', "'answer' is missing"),
        (b'{"response": 1, "answer": "x"}', "'response' must"),
        (b'{"response": "x", "answer": null}', "'answer' must"),
        (b'{"response": "x", "answer": " "}', "'answer' must"),
        (b'{"response": "x", "answer": 1, "num_tokens": -1}', "'num_tokens' must"),
        (b'{"response": "x", "answer": 1, "finish_reason": ["stop"]}', "'finish_reason' must"),
        (b'{"response": "x", "answer": "2"}', "gym: it scores rows of sets with gym only"),
    ],
)
def test_a_fault_of_a_line_is_named(bad, message):
    config = RewardConfig.model_validate({"functions": [{"name": "gym", "function": "gym"}]})
    with pytest.raises(ValueError, match=rf"^responses:3: {re.escape(message)}") as raised:
        _parse("responses:3", bad, config)

    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("rest", "message"),
    [(b"x" * (5 << 20), "2: longer than 3 MB"), (b"\n{\n", "3: not valid JSON")],
    ids=["endless", "invalid"],
)
def test_results_before_a_fault_come_and_a_line_without_an_end_does_not_fill_memory(
    responses, monkeypatch, rest, message
):
    monkeypatch.setattr("bapo_megatron.commands.grade.MAX_LINE_BYTES", 3 << 20)
    responses.write_bytes(line_of("even", "1").encode() + rest)

    with pytest.raises(ValueError, match=rf"responses\.jsonl:{message}"):
        grade_here(responses)

    assert json.loads(responses.with_name("results").read_text())["score"] == 1.0


def test_a_large_file_is_graded_in_bounded_memory(responses):
    responses.write_text(line_of("x" * 20_000, "3") * 1500)  # 30 MB
    tracemalloc.start()
    try:
        grade_here(responses)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert responses.with_name("results").read_text().count('"score": 1.0') == 1500
    assert peak_bytes < 15_000_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["NONE"], "bapo-megatron: NONE: no such file"),
        (["-", "--config", "RUN"], "'tests.reward.own_functions:nothing'"),
        (["-", "reward.workers=2"], "override 'reward.workers=2': give --config"),
    ],
)
def test_a_file_or_function_that_is_not_there_is_one_line(tmp_path, capfd, arguments, message):
    path = write_config(tmp_path, {"name": "no", "function": "tests.reward.own_functions:nothing"})
    typed = [str(path) if argument == "RUN" else argument for argument in arguments]

    with pytest.raises((OSError, ValueError, RewardError, typer.BadParameter)) as caught:
        cli.app(["grade", *typed], standalone_mode=False)

    assert cli._report(caught.value) != 0
    complaint = capfd.readouterr().err
    assert message in complaint
    assert complaint.count("\n") == 1


def test_results_come_while_the_input_is_still_open_and_a_closed_pipe_ends_it(tmp_path):
    config = write_config(tmp_path, EVEN_LENGTH)  # whose worker starts at once
    with grading_from_pipe("--config", str(config)) as grading:
        grading.stdin.write(line_of("even", "1"))
        assert json.loads(grading.stdout.readline())["score"] == 1.0
        grading.stdout.close()
        grading.stdin.write(line_of("even", "1") * 3)
        assert grading.wait(20) == 141
        assert grading.stderr.read() == ""


def test_an_interrupt_ends_it_and_its_workers_at_once(config):
    limit_s = 120
    with grading_from_pipe("--config", str(config), f"reward.timeout_s={limit_s}") as grading:
        lines = [line_of(response, "1", level=1) for response in (r"\boxed{1}", HANGING)]
        grading.stdin.writelines(lines)
        assert grading.stdout.readline()
        workers = psutil.Process(grading.pid).children()
        assert workers
        start_s = time.monotonic()
        os.kill(grading.pid, signal.SIGINT)
        assert grading.wait(60) == 130
        assert time.monotonic() - start_s < limit_s / 4
        assert grading.stderr.read() == "bapo-megatron: interrupted\n"
        assert psutil.wait_procs(workers, timeout=30)[1] == []
