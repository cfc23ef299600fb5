"""The commands ``eval`` and ``compare``, as a user starts them."""

import json
from pathlib import Path
from unittest import mock

import pytest
import typer

from bapo_megatron import cli
from bapo_megatron.commands.evaluate import evaluate_model, regrade
from bapo_megatron.config.data import DataConfig
from bapo_megatron.config.schema import RunConfig
from bapo_megatron.data.chat import ChatRenderer, load_tokenizer
from bapo_megatron.evaluation.samples import (
    ResultsError,
    fingerprint,
    iterate_samples,
    load_sets,
    settings_of,
    write_settings,
)
from tests.evaluation.results import sample

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


def test_samples_are_graded_again_without_server_and_configuration(
    samples_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "again"
    cli.app(["eval", "--from", str(samples_file), "--out", str(out)], standalone_mode=False)
    shown, said = capsys.readouterr()
    assert "regraded 8 samples, 3 rewards changed" in said
    (scored,) = json.loads((out / "eval.json").read_text())
    assert (scored["name"], scored["missing_answers"]) == ("sums", 1)
    values = {score["name"]: score["value"] for score in scored["scores"]}
    # "0" and "0.0" are two votes for 0; three for 7 win the second problem.
    assert (values["avg@4"], values["maj@4"]) == (0.375, 0.5)
    assert [problem["votes"] for problem in scored["problems"]] == [[0, 0, -1, 1], [0, 1, 1, 1]]
    assert "avg@4" in shown
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
    random_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
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
    assert json.loads((tmp_path / "run" / "eval.json").read_text())[0]["name"] == "sums"
    assert "1 samples − 1 done = 0, at most 0 tokens" in capsys.readouterr().err
    hotter = resumed.model_copy(update={"eval": config.eval.model_copy(update={"temperature": 1})})
    with pytest.raises(ResultsError, match=r"made with temperature 0\.6"):
        evaluate_model(hotter)
    samples.write_bytes(b"")  # of a run that was killed before its first sample
    with mock.patch("bapo_megatron.commands.evaluate.CollectorClient") as make_source:
        evaluate_model(resumed)
    calls = [mock.call.launch(), mock.call.evaluate_model(weights, resume=True), mock.call.close()]
    assert make_source.return_value.method_calls == calls
    assert make_source.call_args.kwargs["for_training"] is False
    assert "total: 1 samples, at most 99 tokens" in capsys.readouterr().err
