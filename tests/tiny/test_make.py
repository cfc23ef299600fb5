from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest
import torch

from bapo_megatron.tiny import make
from bapo_megatron.tiny.make import make_tiny
from bapo_megatron.tiny.model import build_tokenizer
from bapo_megatron.tiny.warmup import WarmupSettings
from tests.policy.tiny_models import load_reference

if TYPE_CHECKING:
    from pathlib import Path

SHORT = WarmupSettings(num_steps=6, batch_size=64, num_rise_steps=2)
FILES = ("train.jsonl", "heldout.jsonl", "model/model.safetensors", "model/tokenizer.json")


def make_short(out_dir: Path, seed: int = 0):
    return make_tiny(out_dir, seed, settings=SHORT)


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory):
    """Where ``made`` lies; not to be changed."""
    return tmp_path_factory.mktemp("made") / "tiny"


@pytest.fixture(scope="module")
def made(tiny_dir):
    """What seed 0 makes."""
    return make_short(tiny_dir)


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.usefixtures("made")
def test_the_same_seed_gives_the_same_bytes_whatever_the_thread_count(tiny_dir, tmp_path):
    num_threads = torch.get_num_threads()
    torch.set_num_threads(num_threads + 1)
    try:
        make_short(tmp_path)
        assert torch.get_num_threads() == num_threads + 1
    finally:
        torch.set_num_threads(num_threads)
    for name in FILES:
        assert (tmp_path / name).read_bytes() == (tiny_dir / name).read_bytes()


def test_other_users_may_read_the_weights(made):
    assert (made.model_dir / "model.safetensors").stat().st_mode & 0o777 == 0o644


@pytest.mark.usefixtures("made")
def test_another_seed_gives_other_weights_and_other_data(tiny_dir, tmp_path):
    make_short(tmp_path, seed=1)
    for name in FILES[:3]:
        assert (tmp_path / name).read_bytes() != (tiny_dir / name).read_bytes()


def test_report_names_the_files_and_heldout_prompts_are_new(made, tiny_dir):
    train, heldout = (rows(tiny_dir / f"{name}.jsonl") for name in ("train", "heldout"))
    assert made.model_dir == tiny_dir / "model"
    assert (len(train), len(heldout)) == (2048, 512)
    assert len({row["prompt"] for row in train + heldout}) == 2560
    assert all(set(row) == {"prompt", "answer"} for row in train + heldout)
    digits = [int(digit) for digit in heldout[0]["prompt"].removesuffix("=?").split("+")]
    assert heldout[0]["answer"] == str(sum(digits))
    assert made.num_parameters == 115_264
    assert 0 < made.final_loss < 7


@pytest.mark.usefixtures("made")
def test_an_earlier_result_is_replaced(tiny_dir, tmp_path):
    shutil.copytree(tiny_dir, tmp_path / "tiny")
    (tmp_path / "tiny" / "model" / "mark").touch()
    make_short(tmp_path / "tiny")
    assert not (tmp_path / "tiny" / "model" / "mark").exists()


def test_a_directory_of_somebody_else_is_refused_and_unchanged(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(ValueError, match="would be lost; name another directory"):
        make_short(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_file_in_the_place_of_the_directory_is_refused(tmp_path):
    (tmp_path / "tiny").touch()
    with pytest.raises(ValueError, match=": not a directory; name another one"):
        make_short(tmp_path / "tiny")


@pytest.mark.usefixtures("made")
def test_an_interrupted_write_leaves_the_earlier_result(tiny_dir, tmp_path, monkeypatch):
    out_dir = tmp_path / "tiny"
    shutil.copytree(tiny_dir, out_dir)
    before = {name: (out_dir / name).read_bytes() for name in FILES}

    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(make, "_write_problems", fail)
    with pytest.raises(KeyboardInterrupt):
        make_short(out_dir, seed=1)
    assert {name: (out_dir / name).read_bytes() for name in FILES} == before
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


@pytest.mark.slow
def test_the_warmed_up_model_is_right_in_about_a_third_and_writes_boxed_answers(tmp_path):
    report = make_tiny(tmp_path / "tiny", 0)
    texts, answers = sample_answers(report.model_dir, rows(tmp_path / "tiny" / "heldout.jsonl"))
    boxed = [text.partition("\n\\boxed{")[2] for text in texts]
    right = [text == f"{answer}}}<eos>" for text, answer in zip(boxed, answers, strict=True)]
    well_formed = [text.endswith("}<eos>") for text in boxed]
    assert 0.22 < sum(right) / 512 < 0.45
    assert sum(well_formed) / 512 > 0.95


@torch.no_grad()
def sample_answers(model_dir: Path, problems: list[dict[str, str]]) -> tuple[list[str], list[str]]:
    """One response of at most 80 tokens per problem at temperature 1, cut after ``<eos>``."""
    tokenizer = build_tokenizer()
    model = load_reference("qwen2", model_dir)
    generator = torch.Generator().manual_seed(0)
    texts, answers = [], []
    # Prompts of one length need no padding on the left.
    for num_characters in sorted({len(row["prompt"]) for row in problems}):
        chosen = [row for row in problems if len(row["prompt"]) == num_characters]
        ids = tokenizer([f"<bos><|user|>{row['prompt']}<|assistant|>" for row in chosen])
        ids_BS = torch.tensor(ids["input_ids"])
        prompt_length = ids_BS.shape[1]
        new_ids, cache = ids_BS, None
        for _ in range(80):
            output = model(new_ids, past_key_values=cache, use_cache=True)
            cache, probabilities = output.past_key_values, output.logits[:, -1].softmax(-1)
            new_ids = torch.multinomial(probabilities, 1, generator=generator)
            ids_BS = torch.cat((ids_BS, new_ids), dim=1)
        for row, response in zip(chosen, ids_BS[:, prompt_length:], strict=True):
            text, end, _ = tokenizer.decode(response).partition("<eos>")
            texts.append(text + end)
            answers.append(row["answer"])
    return texts, answers
