"""The ``grade`` command, as a user starts it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from bapo_megatron.commands.grade import GradeError, grade_file
from bapo_megatron.config.reward import RewardConfig
from bapo_megatron.reward.base import RewardError
from bapo_megatron.runtime.processes import run_async
from tests.launch import REPOSITORY, run

pytestmark = pytest.mark.slow

GRADE = [sys.executable, "-m", "bapo_megatron", "grade"]
HANGING = r"\boxed{\prod_{k=1}^{10^9} (k+x)}"


def line_of(response, answer, **others):
    return json.dumps({"response": response, "answer": answer, **others}) + "\n"


@pytest.fixture
def config(tmp_path):
    """A run with rewards of its own; nothing but its reward section counts."""
    path = tmp_path / "run.yaml"
    path.write_text(
        f"name: x\nrun_dir: {tmp_path}\nmodel: {{path: none}}\n"
        "reward:\n"
        "  workers: 1\n"
        "  overlong: {buffer_tokens: 4}\n"
        "  functions:\n"
        "    - {name: facts, function: 'tests.reward.own_functions:everything'}\n"
        "    - {name: math, function: math, weight: 2}\n"
    )
    return path


def test_a_function_that_scores_whole_groups_is_refused(tmp_path):
    path = tmp_path / "responses.jsonl"
    path.write_text(line_of("x", "y"))
    functions = [{"name": "rank", "function": "tests.reward.own_functions:OfGroups.rank"}]
    rewards = RewardConfig.model_validate({"functions": functions, "workers": 1})

    with pytest.raises(
        RewardError, match=r"reward\.functions: 'rank' scores the responses to a pr"
    ):
        run_async(grade_file(path, rewards, output=1, report=print))


def test_every_line_gets_a_line_in_order(tmp_path):
    path = tmp_path / "responses.jsonl"
    path.write_text(
        line_of(r"\boxed{1/2}", "0.5")
        + line_of(r"\boxed{3}", 4, more=[1])
        + "\n"
        + line_of("I cannot say", "4")
        + line_of("#### 7", "48 / 2 is 24\n#### 7")
        + line_of(r"\boxed{(x+1)^2}", ["1", "x^2+2x+1"])
    )

    done = run(["grade", str(path)])

    assert (done.returncode, done.stderr) == (0, "")
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        {"score": 1.0, "extracted": "1/2", "reason": "equal_number"},
        {"score": 0.0, "extracted": "3", "reason": "different"},
        {"score": 0.0, "extracted": "", "reason": "no_answer"},
        {"score": 1.0, "extracted": "7", "reason": "equal_text"},
        {"score": 1.0, "extracted": "(x+1)^2", "reason": "equal_value"},
    ]


def test_a_configuration_gives_the_rewards_of_its_run_without_shaping(tmp_path, config):
    path = tmp_path / "responses.jsonl"
    path.write_text(line_of(r"\boxed{2}", "2", level=5, finish_reason="length", num_tokens=9))

    done = run(["grade", str(path), "--config", str(config), "reward.timeout_s=7"])

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "score": 2.25,
        "extracted": "length True",
        "reason": "\\boxed{2} 2   ",
        "components": {"facts": 0.25, "math": 1.0},
        "metrics": {"facts/level": 5.0, "facts/tokens": 9.0},
    }


def test_a_bad_line_is_one_line_with_its_number_after_the_results_before_it():
    done = subprocess.run(
        [*GRADE, "-"],
        input=line_of(r"\boxed{1}", "1") + '{"response": "x"}\n',
        capture_output=True,
        text=True,
        timeout=60,
        cwd=REPOSITORY,
        check=False,
    )

    assert done.returncode == 1
    assert json.loads(done.stdout)["score"] == 1.0
    assert done.stderr == (
        "bapo-megatron: standard input:2: field 'answer' is missing (fields: response); add it\n"
    )


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (b"{", "not valid JSON ("),
        (b"[" * 100_000, "not valid JSON ("),
        (b"\xff", "not UTF-8 ("),
        (b'{"response": "x", "answer": 1, "num_tokens": "9"}', "field 'num_tokens' must be a num"),
        (
            b'{"response": "x", "answer": 1, "finish_reason": 3}',
            "field 'finish_reason' must be",
        ),
        (
            b'{"response": "x", "answer": 1, "finish_reason": ["stop"]}',
            "field 'finish_reason' must be",
        ),
        (b"[1]", "must be a JSON object with 'response' and 'answer', got list"),
        (b"{}", "field 'response' is missing (fields: none); add it"),
        (b'{"response": 1, "answer": "x"}', "field 'response' must be a text, got int"),
        (b'{"response": "x", "answer": null}', "field 'answer' must be a text, a number or a list"),
        (b'{"response": "x", "answer": " "}', "field 'answer' must be an answer, got an empty"),
    ],
)
def test_every_fault_of_a_line_is_told_with_its_number(tmp_path, bad, message):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b"\n" + bad + b"\n")
    output = os.open(os.devnull, os.O_WRONLY)

    with pytest.raises(GradeError) as raised:
        run_async(grade_file(path, RewardConfig(), output=output, report=lambda n: None))

    os.close(output)
    assert str(raised.value).startswith(f"{path}:2: {message}")
    assert "\n" not in str(raised.value)


def test_a_file_or_function_that_is_not_there_is_one_line(tmp_path, config):
    missing = run(["grade", str(tmp_path / "none.jsonl")])
    assert missing.returncode == 1
    assert "none.jsonl: cannot be read (No such file or directory)" in missing.stderr

    config.write_text(config.read_text().replace(":everything", ":nothing"))
    unknown = run(["grade", "-", "--config", str(config)])
    assert unknown.returncode == 1
    assert unknown.stderr == (
        "bapo-megatron: reward function 'tests.reward.own_functions:nothing' module "
        "tests.reward.own_functions has no 'nothing'; name one of its functions\n"
    )


def test_a_service_that_is_not_there_is_one_line_however_many_responses_wait(tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text(
        f"name: x\nrun_dir: {tmp_path}\nmodel: {{path: none}}\n"
        "reward: {functions: [{name: s, url: 'http://127.0.0.1:9/s', http: {patience_s: 0.1}}]}\n"
    )
    path = tmp_path / "responses.jsonl"
    path.write_text(line_of("3", "3") * 60)

    done = run(["grade", str(path), "--config", str(config)])

    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "gave no scores for" in done.stderr


def test_results_come_while_the_input_is_still_open_and_a_closed_pipe_ends_it():
    grading = subprocess.Popen(
        [*GRADE, "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=REPOSITORY,
    )
    try:
        grading.stdin.write(line_of(r"\boxed{1}", "1").encode())
        grading.stdin.flush()
        assert json.loads(grading.stdout.readline())["score"] == 1.0
        grading.stdout.close()
        grading.stdin.write(line_of(r"\boxed{1}", "1").encode() * 3)
        grading.stdin.flush()
        assert grading.wait(20) == 141
        assert grading.stderr.read() == b""
    finally:
        grading.kill()
        grading.wait()
        grading.stdin.close()
        grading.stderr.close()


def test_an_interrupt_ends_it_and_its_workers_at_once(config):
    limit_s = 120
    grading = subprocess.Popen(
        [*GRADE, "-", "--config", str(config), f"reward.timeout_s={limit_s}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=REPOSITORY,
    )
    try:
        grading.stdin.write(
            (line_of(r"\boxed{1}", "1", level=1) + line_of(HANGING, "1", level=1)).encode()
        )
        grading.stdin.flush()
        assert grading.stdout.readline()
        workers = psutil.Process(grading.pid).children()
        assert workers
        start_s = time.monotonic()
        os.kill(grading.pid, signal.SIGINT)
        assert grading.wait(60) == 130
        assert time.monotonic() - start_s < limit_s / 4
        assert grading.stderr.read() == b"bapo-megatron: interrupted\n"
        assert psutil.wait_procs(workers, timeout=5)[1] == []
    finally:
        grading.kill()
        grading.wait()
        for stream in (grading.stdin, grading.stdout, grading.stderr):
            stream.close()


def test_a_large_file_is_graded_in_bounded_memory(tmp_path):
    path = tmp_path / "large.jsonl"
    line = line_of("x" * 20_000 + r"\boxed{3}", "3")
    with path.open("w") as stream:
        for _ in range(1500):  # 30 MB
            stream.write(line)
    program = (
        "import resource, sys\n"
        "from bapo_megatron import cli\n"
        "sys.argv = ['bapo-megatron', 'grade', sys.argv[1]]\n"
        "try:\n"
        "    cli.main()\n"
        "finally:\n"
        "    peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "    print(f'peak {peak_kb // 1024}', file=sys.stderr)\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", program, str(path)],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=REPOSITORY,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.count('"score": 1.0') == 1500
    # Imports are some 150 MB; holding the file and its results would be more than 30 MB on top.
    small = subprocess.run(
        [sys.executable, "-c", program, os.devnull],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=REPOSITORY,
        check=False,
    )
    peaks = [int(result.stderr.split("peak ")[1]) for result in (done, small)]
    assert peaks[0] - peaks[1] < 25
