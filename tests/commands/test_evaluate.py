"""The commands ``eval`` and ``compare``, as a user starts them."""

import dataclasses
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import typer

from bapo_megatron import cli
from bapo_megatron.commands.evaluate import evaluate_model, regrade
from bapo_megatron.config.data import DataConfig
from bapo_megatron.config.load import load_config
from bapo_megatron.config.schema import RunConfig
from bapo_megatron.data.chat import ChatRenderer, load_tokenizer
from bapo_megatron.evaluation.samples import (
    EvalSample,
    ResultsError,
    fingerprint,
    iterate_samples,
    load_sets,
    settings_of,
    write_settings,
)
from tests.evaluation.results import sample
from tests.launch import run, start
from tests.reward.own_functions import EVEN_LENGTH
from tests.rollout.forked_collector import forked_collectors
from tests.trainer.chaos import wait_for

WRITTEN = [
    sample(f"sums.jsonl:{row}", index, answer=str(row), response=response, reward=0.0)
    for row, responses in enumerate(
        [
            (r"\boxed{0}", r"\boxed{0.0}", "no idea", r"\boxed{3}"),
            (r"\boxed{\frac{2}{2}}", r"\boxed{7}", r"\boxed{7}", r"\boxed{7.0}"),
        ]
    )
    for index, response in enumerate(responses)
]
"""Graded 0, which the present code does not: of four, two and one are right."""


@pytest.fixture
def samples_file(tmp_path: Path) -> Path:
    path = tmp_path / "sums.jsonl"
    path.write_bytes(b"".join(entry.to_line() for entry in WRITTEN))
    return path


@pytest.mark.slow
def test_samples_are_graded_again_without_server_and_configuration(
    samples_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "again"
    result = run(["eval", "--from", str(samples_file), "--out", str(out)])
    assert result.returncode == 0, result.stderr
    assert "regraded 8 samples, 3 rewards changed" in result.stderr
    (scored,) = json.loads((out / "eval.json").read_text())
    assert (scored["name"], scored["missing_answers"]) == ("sums", 1)
    values = {score["name"]: score["value"] for score in scored["scores"]}
    # "0" and "0.0" are two votes for 0; three for 7 win the second problem.
    assert (values["avg@4"], values["maj@4"]) == (0.375, 0.5)
    assert [problem["votes"] for problem in scored["problems"]] == [[0, 0, -1, 1], [0, 1, 1, 1]]
    assert "avg@4" in result.stdout
    assert "| sums | maj@4 | 50.00% |" in (out / "eval.md").read_text()
    regraded = list(iterate_samples(out / "sums.jsonl"))
    assert [entry.reward for entry in regraded] == [1, 1, 0, 0, 1, 0, 0, 0]
    assert regraded[1].extracted == "0.0"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eval"], "give CONFIG"),
        (["eval", "--out", "x"], "--out needs --from"),
        (["eval", "--from", "FILE", "--resume"], "nothing to --resume"),
        (["eval", "--from", "/no/such.jsonl"], "/no/such.jsonl: no such file"),
        (["eval", "--from", "CUT"], "cut.jsonl: 1 of 8 samples are missing"),
        (["eval", "--from", "FILE", "--out", "HERE"], "--out: would replace"),
        (["eval", "--from", "FILE", "--from", "FILE"], "--from: must be different sets, got sums"),
        (["compare", "FILE", "/no/such/eval.json"], "holds no results that this version reads"),
        (["compare", "/no/such/eval.json", "FILE"], "/no/such/eval.json: no such file"),
    ],
)
def test_what_a_user_gets_wrong_is_one_line(
    samples_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    cut = tmp_path / "cut.jsonl"
    cut.write_bytes(b"".join(entry.to_line() for entry in WRITTEN[:-1]))
    paths = {"FILE": samples_file, "CUT": cut, "HERE": tmp_path}
    typed = [str(paths.get(argument, argument)) for argument in arguments]
    with pytest.raises((OSError, ValueError, typer.BadParameter)) as caught:
        cli.app(typed, standalone_mode=False)
    assert cli._report(caught.value) != 0
    written = capsys.readouterr().err
    (line,) = [line for line in written.splitlines() if line.startswith("bapo-megatron:")]
    assert message in line
    assert "Traceback" not in written


@pytest.mark.parametrize(
    ("entry", "named"),
    [
        ({"function": "beside:grade"}, "beside:grade"),
        ({"url": "https://judge.example"}, "https://judge.example"),
    ],
)
def test_samples_alone_run_no_code_and_send_nothing_to_a_service(
    samples_file: Path, entry: dict[str, str], named: str
) -> None:
    functions = [{"name": "math", "function": "math"}, {"name": "own", **entry}]
    settings = {"num_prompts": 2, "samples_per_prompt": 4, "reward": {"functions": functions}}
    write_settings(samples_file, settings)
    with pytest.raises(ResultsError, match=rf"sums\.settings\.json: .*\[1\] is {named}"):
        regrade([samples_file], None, None)


def test_samples_that_are_there_are_neither_replaced_nor_mixed_with_others(
    random_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "sums.jsonl").write_text('{"prompt": "1+1=?", "answer": "2"}\n')
    config = RunConfig.model_validate(
        {
            "name": "sums",
            "run_dir": tmp_path / "run",
            "model": {"path": random_model},
            "rollout": {"servers": ["http://127.0.0.1:1"]},
            "eval": {"sets": [{"path": tmp_path / "sums.jsonl"}], "max_response_tokens": 99},
        }
    )
    samples = tmp_path / "run" / "eval" / "sums.jsonl"
    samples.parent.mkdir(parents=True)
    samples.write_bytes(sample("sums.jsonl:0").to_line())
    with pytest.raises(ResultsError, match="holds samples of an earlier evaluation"):
        evaluate_model(config)
    resumed = config.model_copy(update={"resume": True})
    with pytest.raises(ResultsError, match=r"sums.settings.json: is missing"):
        evaluate_model(resumed)
    weights = f"{random_model.name} (bfloat16, files {fingerprint(random_model)})"
    renderer = ChatRenderer(load_tokenizer(random_model), DataConfig())
    (eval_set,) = load_sets(config, renderer)
    write_settings(samples, settings_of(eval_set, config, weights))
    (scored,) = evaluate_model(resumed)  # nothing is missing: no server is asked
    assert scored.avg_at_k == 1.0
    hotter = resumed.model_copy(update={"eval": config.eval.model_copy(update={"temperature": 1})})
    with pytest.raises(ResultsError, match=r"made with temperature 0\.6"):
        evaluate_model(hotter)


YEARS = (24, 25)
NUM_PROMPTS = 6
"""Prompts of each set."""
NUM_SAMPLES = len(YEARS) * NUM_PROMPTS * 4
MAX_TOKENS = 40


@pytest.fixture(scope="module")
def aime(
    tmp_path_factory: pytest.TempPathFactory, shared_data: Path, random_model: Path
) -> Callable[[str, Path], list[str]]:
    """CONFIG and overrides: a part of AIME 2024 and 2025, 4 samples each, of a random model.

    Few responses at a time, so that they do not end together.
    """
    path = tmp_path_factory.mktemp("aime") / "aime.yaml"
    column = "answer_column: reward_model.ground_truth"
    sets = [f"{{path: {shared_data}/aime{year}.parquet, {column}}}" for year in YEARS]
    path.write_text(
        f"name: aime\nrun_dir: {path.parent}/unused\n"
        f"model: {{path: {random_model}, dtype: float32}}\n"
        "data: {max_prompt_tokens: 2000}\n"
        "rollout:\n"
        "  local: {max_rows: 8}\n"
        f"reward: {{workers: 1, functions: [{json.dumps(EVEN_LENGTH)}]}}\n"
        f"eval:\n  sets: [{', '.join(sets)}]\n"
        f"  max_prompts: {NUM_PROMPTS}\n  samples_per_prompt: 4\n"
        f"  temperature: 0.6\n  max_response_tokens: {MAX_TOKENS}\n"
    )

    def arguments(engine: str, run_dir: Path) -> list[str]:
        return [str(path), f"rollout.engine={engine}", f"run_dir={run_dir}"]

    return arguments


def _evaluate(config: str, *overrides: str) -> None:
    """Evaluate with a fork as the collector, whose start is cheap."""
    with forked_collectors():
        evaluate_model(load_config(Path(config), overrides))


def _lines(run_dir: Path) -> list[bytes]:
    """Whole lines of all sets."""
    paths = sorted((run_dir / "eval").glob("*.jsonl"))
    return [line for path in paths for line in path.read_bytes().split(b"\n")[:-1]]


def _samples(run_dir: Path, year: int) -> list[EvalSample]:
    """All samples of a set in one order, without times."""
    samples = iterate_samples(run_dir / "eval" / f"aime{year}.jsonl")
    return sorted(
        (dataclasses.replace(s, elapsed_s=0.0) for s in samples), key=lambda sample: sample.key
    )


@pytest.mark.slow
@pytest.mark.exhaustive
def test_an_evaluation_that_is_killed_goes_on_to_what_it_would_have_been(
    aime: Callable[[str, Path], list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    started: list[subprocess.Popen[str]],
) -> None:
    run_dir, uninterrupted = tmp_path / "run", tmp_path / "uninterrupted"
    process = start(["eval", *aime("local", run_dir)])
    started.append(process)
    wait_for(process, lambda: len(_lines(run_dir)) >= NUM_SAMPLES // 8, "an eighth of the samples")
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    _, err = process.communicate()
    assert f"total: {NUM_SAMPLES:,} samples, at most {NUM_SAMPLES * MAX_TOKENS:,} tokens" in err
    assert not psutil.wait_procs(children, timeout=30)[1]
    before = _lines(run_dir)
    assert NUM_SAMPLES // 8 <= len(before) < NUM_SAMPLES
    with (run_dir / "eval" / "aime24.jsonl").open("ab") as torn:
        torn.write(before[0][:100])

    _evaluate(*aime("local", run_dir), "resume=true")
    assert f"total: {NUM_SAMPLES - len(before)} samples" in capsys.readouterr().err
    after = _lines(run_dir)
    assert len(after) == NUM_SAMPLES
    assert set(before) <= set(after)
    _evaluate(*aime("local", uninterrupted))
    for year in YEARS:
        samples = _samples(run_dir, year)
        assert [sample.key for sample in samples] == sorted(
            (f"aime{year}.parquet:{row}", index) for row in range(NUM_PROMPTS) for index in range(4)
        )
        # The rest was computed in other batches: a last bit may differ, nearly never a token.
        pairs = zip(samples, _samples(uninterrupted, year), strict=True)
        assert sum(one != other for one, other in pairs) <= 1
    results = json.loads((run_dir / "eval.json").read_text())
    assert [entry["name"] for entry in results] == ["aime24", "aime25"]
    for entry in results:
        assert (entry["num_prompts"], entry["samples_per_prompt"]) == (NUM_PROMPTS, 4)
        names = [score["name"] for score in entry["scores"]]
        assert names == ["avg@4", "pass@1", "pass@4"]  # the reward returns only a number
        assert entry["wall_s"] > 0

    # Everything is there: whatever the engine, it is not needed, and the results are the same.
    nobody = "rollout.servers=['http://127.0.0.1:1']"
    again = run(["eval", *aime("sglang", run_dir), "--resume", nobody])
    assert again.returncode == 0, again.stderr
    assert "pass@4" in again.stdout
    assert json.loads((run_dir / "eval.json").read_text()) == results
