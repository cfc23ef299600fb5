import json
import sys
from pathlib import Path

import pytest
import torch

from examples.tiny import __main__
from examples.tiny.make import WarmupSettings, learning_rate, make_tiny, pad_batch

SHORT = WarmupSettings(num_steps=6, batch_size=64, num_rise_steps=2)
FILES = ("train.jsonl", "heldout.jsonl", "model/model.safetensors", "model/tokenizer.json")


def make_short(out_dir: Path, seed: int = 0):
    return make_tiny(out_dir, seed, settings=SHORT)


def contents(out_dir: Path) -> dict[str, bytes]:
    return {name: (out_dir / name).read_bytes() for name in FILES}


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """What ``make_tiny`` says of seed 0; its files are not to be changed."""
    return make_short(tmp_path_factory.mktemp("tiny") / "tiny")


@pytest.fixture
def tiny_dir(report):
    return report.model_dir.parent


def test_the_same_seed_gives_the_same_bytes_whatever_the_thread_count_and_another_one_others(
    tiny_dir, tmp_path
):
    make_short(tmp_path, seed=1)
    differing = [n for n, old in contents(tiny_dir).items() if contents(tmp_path)[n] != old]
    assert tuple(differing) == FILES[:3]
    num_threads = torch.get_num_threads()
    torch.set_num_threads(num_threads + 1)
    try:
        make_short(tmp_path)  # in place of the other
        assert torch.get_num_threads() == num_threads + 1
    finally:
        torch.set_num_threads(num_threads)
    assert contents(tmp_path) == contents(tiny_dir)


def test_the_report_names_the_files(report, tiny_dir):
    train, heldout = (rows(tiny_dir / f"{name}.jsonl") for name in ("train", "heldout"))
    assert report.model_dir == tiny_dir / "model"
    assert (len(train), len(heldout)) == (2048, 512)
    assert all(set(row) == {"prompt", "answer"} for row in train + heldout)
    digits = [int(digit) for digit in heldout[0]["prompt"].removesuffix("=?").split("+")]
    assert heldout[0]["answer"] == str(sum(digits))
    assert report.num_parameters == 115_264
    assert 0 < report.final_loss < 7
    # Other users may read the weights.
    assert (report.model_dir / "model.safetensors").stat().st_mode & 0o777 == 0o644


def test_what_is_of_somebody_else_is_refused_and_unchanged(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    for out_dir in (tmp_path, tmp_path / "thesis.tex"):
        with pytest.raises((ValueError, NotADirectoryError), match=str(out_dir)):
            make_short(out_dir)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["x", f"--seed={10**30}"], 2, "--seed must be in"),
        (["x", "--experts=1"], 2, "--experts must be 0 or in [2, 256]"),
        (["/dev/null/x"], 1, "/dev/null"),
    ],
)
def test_bad_arguments_are_one_line(arguments, status, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["examples.tiny", *arguments])
    monkeypatch.setattr(__main__, "end_by_exception", lambda: None)
    with pytest.raises(SystemExit) as ended:
        __main__.main()
    assert ended.value.code == status
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_batches_are_padded_on_the_right_and_only_responses_have_labels():
    input_ids, labels = pad_batch([([2, 9], [7, 1]), ([3], [1])], pad_id=0)
    assert input_ids.tolist() == [[2, 9, 7, 1], [3, 1, 0, 0]]
    assert labels.tolist() == [[-100, -100, 7, 1], [-100, 1, -100, -100]]


def test_learning_rate_rises_linearly_and_falls_along_a_cosine():
    settings = WarmupSettings(num_steps=5, num_rise_steps=2, peak_lr=0.8)
    rates = [learning_rate(step, settings) for step in range(5)]
    # cos(pi / 4) = 0.70711, so 0.4 * 1.70711, 0.4 * 1, 0.4 * 0.29289
    assert rates == pytest.approx([0.4, 0.8, 0.682843, 0.4, 0.117157], abs=1e-6)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_warmed_up_model_knows_the_mixture_of_solutions(tmp_path):
    # ln(320) = 5.77 is the loss of a model that knows nothing.
    assert 0.2 < make_tiny(tmp_path / "tiny", 0).final_loss < 2.0
