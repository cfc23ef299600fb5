"""Demonstrations alone, or beside RL: from a file to the gradient of a loss with labels.

Most demonstrations have several turns of the assistant, and a weight.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from bapo_megatron.config.load import ConfigError
from bapo_megatron.config.schema import RunConfig
from bapo_megatron.data.dump import decode_batch, read_batch
from bapo_megatron.data.rows import DataError
from bapo_megatron.rollout.demonstrations import DemonstrationSource
from bapo_megatron.telemetry.sinks import read_metrics
from bapo_megatron.trainer.check import check_training
from tests.distributed_launch import joined, run_ranks, take_port
from tests.policy.oracle import Gradients
from tests.policy.parity_ranks import hf_gradients
from tests.policy.tiny_models import load_reference
from tests.tolerances import EPS, HEADROOM, assert_within
from tests.trainer.one_update import Case, assert_same_gradients, build_trainer
from tests.trainer.runs import differing_weights, exported_weights, train_whole_run

pytestmark = pytest.mark.distributed

NUM_ROWS = 12
COEFFICIENT = 0.3
NLL = {"objective": "nll", "entropy_coefficient": 0.0}
MIXED = {
    "objective": "clip",
    "entropy_coefficient": 0.0,
    "demonstrations": {"coefficient": COEFFICIENT, "share": 1},
}

WITHOUT_ADVANTAGES = {"objective": "bapo", "behaviour": "recomputed", "advantage": "none"}
"""Scorers compute nothing, and the objective collects demonstrations alone."""


class Row(NamedTuple):
    """A demonstration as tokens."""

    ids: list[int]
    is_trained: list[bool]
    weight: float


def _rows(num_rows: int, *, is_weighted: bool, seed: int = 3) -> list[Row]:
    """Random tokens; two rows in three have two turns, and tokens that do not train at the end."""
    rng, rows = np.random.default_rng(seed), []
    for number in range(num_rows):
        lengths = rng.integers(1, 12, 2 if number % 3 == 0 else 5)
        is_trained = np.repeat(np.arange(len(lengths)) % 2 == 1, lengths)
        ids = rng.integers(3, 200, len(is_trained))
        weight = float(rng.uniform(0, 2)) if is_weighted else 1.0
        rows.append(Row(ids.tolist(), is_trained.tolist(), weight))
    return rows


def _config(root: Path, model: Path, rows: Sequence[Row], **sections: Any) -> RunConfig:
    data = root / "rows.jsonl"
    root.mkdir(parents=True, exist_ok=True)
    lines = ({"token_ids": r.ids, "is_trained": r.is_trained, "weight": r.weight} for r in rows)
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = {
        "name": "imitation",
        "run_dir": str(root / "run"),
        "model": {"path": str(model), "dtype": "float32"},
        "demonstrations": {
            "train": [{"path": str(data)}],
            "sequences_per_step": 4,
            "max_tokens": 1024,
        },
        "algorithm": {"objective": "nll"},
        "optimizer": {"lr": 1e-3},
        "train": {"steps": 6, "max_tokens_per_micro_batch": 4096},
        "log": {"tensorboard": False, "console": False},
    }
    for name, section in sections.items():
        settings[name] = {**settings[name], **section} if name in settings else section
    return RunConfig.model_validate(settings)


def _source(config: RunConfig) -> DemonstrationSource:
    return DemonstrationSource(config, lambda _: None)


def _keys(source: DemonstrationSource, step: int) -> list[str]:
    """Number of the row of each demonstration of a step."""
    samples = decode_batch(source.collect(step)).samples
    return [sample.prompt.prompt_id.removeprefix("rows.jsonl:") for sample in samples]


def _labelled_gradients(
    model_dir: Path, rows: Sequence[Row], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Gradients of transformers' loss over a padded batch; labels are −100 where nothing trains."""
    model = load_reference("qwen2", model_dir).eval().to(dtype)
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(r.ids) for r in rows], batch_first=True)
    masks = [torch.tensor(r.is_trained) for r in rows]
    mask = torch.nn.utils.rnn.pad_sequence(masks, batch_first=True)
    sizes = torch.tensor([len(r.ids) for r in rows])
    is_real = torch.arange(ids.shape[1]) < sizes[:, None]
    model(input_ids=ids, attention_mask=is_real, labels=ids.where(mask, -100)).loss.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def _loss(model: torch.nn.Module, rows: Sequence[Row]) -> tuple[Tensor, int]:
    """Σ w (−ℓ) over the trained tokens of all rows, one row at a time, and their number."""
    total = torch.zeros((), dtype=torch.float64)
    for row in rows:
        logprobs = model(torch.tensor([row.ids])).logits[0, :-1].log_softmax(-1)
        logprob_L = logprobs.gather(1, torch.tensor(row.ids[1:])[:, None])[:, 0]
        total = total - row.weight * logprob_L[torch.tensor(row.is_trained[1:])].sum()
    return total, sum(sum(row.is_trained[1:]) for row in rows)


def _gradients_in(
    model_dir: Path,
    dump: Path,
    layouts: dict[str, tuple[dict[str, Any], int, int]],
    algorithm: dict[str, Any],
    demonstrations: Path | None = None,
) -> dict[str, tuple[dict[str, Tensor], dict[str, float]]]:
    """Gradients and sums of an update of a dump in each layout, by its name."""
    results = {}
    for name, (sizes, budget, chunk) in layouts.items():
        with joined(**sizes) as groups:
            ops = {"logits_chunk_tokens": chunk}
            case = Case(algorithm=algorithm, budget=budget, ops=ops)
            optimizer = {"lr": 0.0, "clip_grad": 1e9}
            trainer = build_trainer(model_dir, groups, case, sizes=sizes, optimizer=optimizer)
            trainer.output.temperature = 1.0
            beside = None if demonstrations is None else read_batch(demonstrations)
            result, *_ = trainer.train(read_batch(dump), beside)
            assert not result.skipped
            results[name] = hf_gradients(trainer.state), result.sums
    return results


LAYOUTS = {
    1: {"packed": ({}, 4096, 0), "one sequence each": ({}, 48, 0), "chunks": ({}, 4096, 7)},
    2: {
        "TP 2": ({"tensor": 2}, 128, 0),
        "PP 2": ({"pipeline": 2}, 64, 0),
        "CP 2": ({"context": 2}, 64, 0),
        "DP 2": ({}, 64, 0),
    },
}
"""Fields of ``ParallelConfig``, tokens of a micro-batch and of a chunk of logits, by ranks."""


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return _rows(NUM_ROWS, is_weighted=False)


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory, random_model: Path, rows: list[Row]) -> Path:
    """All rows as a batch."""
    root = tmp_path_factory.mktemp("dump")
    sections = {"demonstrations": {"sequences_per_step": NUM_ROWS}, "data": {"shuffle": False}}
    source = _source(_config(root, random_model, rows, **sections))
    (root / "batch.parquet").write_bytes(source.collect(1).content)
    return root / "batch.parquet"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_gradients_are_those_of_transformers_loss_with_labels_in_every_layout(
    random_model: Path, rows: list[Row], dump: Path, ranks: int
) -> None:
    exact = _labelled_gradients(random_model, rows, torch.float64)
    bounds = Gradients.of(exact, _labelled_gradients(random_model, rows, torch.float32))
    [found, *_] = run_ranks(_gradients_in, ranks, random_model, dump, LAYOUTS[ranks], NLL)
    num_tokens = sum(sum(row.is_trained[1:]) for row in rows)
    for gradients, sums in found.values():
        bounds.check(gradients)
        assert sums["tokens"] == num_tokens
    if ranks == 1:
        assert_same_gradients(found["one sequence each"][0], found["packed"][0])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("has_advantages", [True, False])
def test_mixed_demonstrations_add_their_weighted_mean_times_the_coefficient(
    tmp_path: Path, random_model: Path, mixed_dumps: Path, ranks: int, has_advantages: bool
) -> None:
    rows, sampled = _rows(4, is_weighted=True, seed=5), mixed_dumps / "step_000001.parquet"
    (tmp_path / "beside").write_bytes(
        _source(_config(tmp_path, random_model, rows)).collect(1).content
    )
    algorithm = MIXED if has_advantages else MIXED | WITHOUT_ADVANTAGES
    layouts = LAYOUTS[ranks]
    arguments = (ranks, random_model, sampled, layouts, algorithm)
    [mixed, *_] = run_ranks(_gradients_in, *arguments, tmp_path / "beside")
    alone: dict[str, Any] = {}
    if has_advantages:
        [alone, *_] = run_ranks(_gradients_in, *arguments)
    model = load_reference("qwen2", random_model).eval().double()
    total, num_tokens = _loss(model, rows)
    loss = COEFFICIENT * total / num_tokens
    loss.backward()
    loss = loss.detach()
    for name, (gradients, sums) in mixed.items():
        expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        if has_advantages:
            of_sampled, counted = alone[name]
            expected = {n: of_sampled[n] + gradient for n, gradient in expected.items()}
            same = ("tokens", "policy_loss", "positive_clipped", "entropy", "effective_samples")
            assert [sums[n] for n in same] == [counted[n] for n in same]
        assert_same_gradients(gradients, expected)
        assert_within(abs(sums["demonstration_loss"] - float(loss)), HEADROOM * EPS * float(loss))


def _train_runs(configs: Sequence[RunConfig]) -> None:
    for config in configs:
        take_port()
        train_whole_run(config)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_a_run_resumed_within_an_epoch_is_bit_for_bit_the_uninterrupted_one(
    tmp_path: Path, random_model: Path, ranks: int
) -> None:
    rows, heldout = _rows(10, is_weighted=True), _rows(5, is_weighted=False, seed=8)
    _config(tmp_path / "heldout", random_model, heldout)
    sections = {
        "algorithm": {"objective": "nll", "updates_per_batch": 2, "advantage": "rloo"},
        "eval": {"every_steps": 2},
    }

    def config(name: str, steps: int, **changes: Any) -> RunConfig:
        section = {"heldout": [{"path": str(tmp_path / "heldout" / "rows.jsonl")}]}
        section |= {"sequences_per_step": 4} | changes.pop("demonstrations", {})
        more = {"demonstrations": section, "train": {"steps": steps}}
        return _config(tmp_path / name, random_model, rows, **sections, **more, **changes)

    # 12.5 demonstrations, of which the fourth step is the last.
    whole = config("whole", 100, demonstrations={"epochs": 1.25})
    parts = config("parts", 3), config("parts", 4, resume=True)
    run_ranks(_train_runs, ranks, (whole, *parts))
    assert not differing_weights(parts[0].run_dir, exported_weights(whole.run_dir))
    measured = read_metrics(whole.run_dir / "metrics.jsonl")
    assert [row["step"] for row in measured if "heldout/rows/loss" in row] == [0, 2, 4]
    assert measured[-1]["demonstrations/epoch"] == 1.6
    assert "steps: 4\n" in (whole.run_dir / "config.yaml").read_text()
    meaningless = ("reward/", "rollout/", "mismatch/", "clip/", "policy/kl", "policy/effective")
    assert not [name for row in measured for name in row if name.startswith(meaningless)]
    model = load_reference("qwen2", random_model).eval().double()
    loss, num_tokens = _loss(model, heldout)
    exact = float(loss.detach()) / num_tokens
    assert_within(abs(measured[0]["heldout/rows/loss"] - exact), HEADROOM * EPS * exact)
    perplexity = measured[0]["heldout/rows/perplexity"]
    assert perplexity == pytest.approx(np.exp(measured[0]["heldout/rows/loss"]))


def test_every_epoch_has_every_row_once_in_an_order_of_its_own(
    tmp_path: Path, random_model: Path
) -> None:
    source = _source(_config(tmp_path, random_model, _rows(8, is_weighted=False)))
    epochs = [_keys(source, 1) + _keys(source, 2), _keys(source, 3) + _keys(source, 4)]
    assert [sorted(keys) for keys in epochs] == [list("01234567")] * 2
    assert epochs[0] != epochs[1]
    assert epochs[0] != list("01234567")
    assert source.steps_per_epoch == 2


def test_held_out_rows_are_sent_in_batches(
    tmp_path: Path, random_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = _rows(5, is_weighted=False)
    config = _config(tmp_path, random_model, rows)
    section = config.demonstrations.model_copy(update={"heldout": config.demonstrations.train})
    monkeypatch.setattr("bapo_megatron.rollout.demonstrations._BATCH_ROWS", 2)
    source = _source(config.model_copy(update={"demonstrations": section}))
    assert source.num_heldout_batches == 3
    batches = [decode_batch(source.heldout(number)) for number in (1, 2, 3)]
    assert [batch.step for batch in batches] == [1, 2, 3]
    ids = [
        np.concatenate([s.prompt.token_ids, s.response_token_ids]).tolist()
        for batch in batches
        for s in batch.samples
    ]
    # Tokens after the last one that trains predict nothing.
    assert [row.ids[: len(found)] for row, found in zip(rows, ids, strict=True)] == ids


def test_a_resumed_run_with_other_demonstrations_is_refused(
    tmp_path: Path, random_model: Path
) -> None:
    rows = _rows(4, is_weighted=False)
    _source(_config(tmp_path, random_model, rows))
    _source(_config(tmp_path, random_model, rows, resume=True))
    with pytest.raises(DataError, match="the run began with other demonstrations"):
        _source(_config(tmp_path, random_model, rows[::-1], resume=True))


@pytest.mark.parametrize(
    ("sections", "rule"),
    [
        (
            {"algorithm": {"updates_per_batch": 3}},
            "updates_per_batch: must divide demonstrations.sequences_per_step = 4",
        ),
        (
            {"demonstrations": {"max_tokens": 4096}},
            "demonstrations.max_tokens: must be at most the",
        ),
        ({"train": {"max_tokens_per_micro_batch": 64}}, "demonstrations.max_tokens = 1024"),
    ],
)
def test_settings_that_demonstrations_cannot_have_are_refused(
    tmp_path: Path, random_model: Path, sections: dict[str, Any], rule: str
) -> None:
    with pytest.raises(ConfigError, match=rule):
        check_training(_config(tmp_path, random_model, [], **sections), 1)
