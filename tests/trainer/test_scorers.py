"""References and teachers in the trainer: against float64, in replays, after a resume.

``test_layouts.py`` has whole runs with them in layouts.
"""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bapo_megatron.data.dump import read_batch, write_batch
from bapo_megatron.telemetry.sinks import read_metrics
from tests.distributed_launch import run_ranks
from tests.policy.tiny_models import load_reference
from tests.trainer.exact_policy import ExactPolicy
from tests.trainer.one_update import (
    TEMPERATURE,
    Case,
    Updates,
    assert_same_gradients,
    make_updates,
    make_updates_in_layouts,
)
from tests.trainer.runs import (
    assert_same_training,
    differing_weights,
    exported_weights,
    repeatable_rows,
    train,
    write_run,
)

pytestmark = pytest.mark.distributed

COEFFICIENT = 0.3
KL_KINDS = ("k1", "k2", "k3", "k1+", "k3+")


# --- one update, against autograd in float64 ---


@pytest.fixture(scope="module")
def references(random_model: Path, other_model: Path, episode_dump: Path) -> list[Tensor]:
    """log π_ref of every response, [R] float64."""
    return [ref.detach() for ref in ExactPolicy(other_model, read_batch(episode_dump)).logprobs]


@pytest.fixture(scope="module")
def scored_dump(
    tmp_path_factory: pytest.TempPathFactory, episode_dump: Path, references: list[Tensor]
) -> Path:
    """``episode_dump`` with both columns."""
    batch = read_batch(episode_dump)
    for sample, reference_R in zip(batch.samples, references, strict=True):
        values = reference_R.numpy()[sample.loss_mask].astype(np.float32)
        sample.columns = {"reference_logprob": values, "teacher_logprob": values}
    path = tmp_path_factory.mktemp("scored") / "step_000001.parquet"
    write_batch(path, batch)
    return path


def _kl(kind: str, **options: Any) -> dict[str, Any]:
    return {"kl": {"coefficient": COEFFICIENT, "kind": kind, **options}}


TEACHER = {"distillation": {"coefficient": COEFFICIENT, "teacher": {"path": "unused"}}}
PLAIN = {"objective": "none", "entropy_coefficient": 0.0}
"""The loss −A·r."""
CASES = {
    "none": Case(PLAIN),
    **{kind: Case({**PLAIN, **_kl(kind)}) for kind in KL_KINDS},
    **{f"reward {kind}": Case({**PLAIN, **_kl(kind, where="reward")}) for kind in KL_KINDS[:3]},
    "teacher": Case({**PLAIN, **TEACHER}),
    "teacher alone": Case({**PLAIN, **TEACHER, "advantage": "distill"}),
}


@pytest.fixture(scope="module")
def updates(random_model: Path, scored_dump: Path) -> Updates:
    return run_ranks(make_updates, 1, random_model, scored_dump, {}, CASES)[0]


def _difference(updates: Updates, name: str) -> dict[str, Tensor]:
    plain = updates["none"]["gradients"]
    return {n: g - plain[n] for n, g in updates[name]["gradients"].items()}


@pytest.mark.parametrize("kind", KL_KINDS)
def test_the_gradient_of_the_divergence_is_that_of_its_definition(
    updates: Updates, exact: ExactPolicy, references: list[Tensor], kind: str
) -> None:
    differences = [ell - ref for ell, ref in zip(exact.logprobs, references, strict=True)]
    if kind == "k1":
        values = differences
    elif kind == "k3":
        values = [(-x).exp() - 1 + x for x in differences]
    else:
        values = [x.square() / 2 for x in differences]
    expected = exact.gradients(COEFFICIENT * exact.token_mean(values))
    assert_same_gradients(_difference(updates, kind), expected)


def test_the_reported_divergence_is_the_mean_of_k3(
    updates: Updates, exact: ExactPolicy, references: list[Tensor]
) -> None:
    values = [
        (ref - ell).exp() - 1 + ell - ref
        for ell, ref in zip(exact.logprobs, references, strict=True)
    ]
    sums = updates["k1"]["sums"]
    expected = float(exact.token_mean(values).detach())
    assert sums["reference_kl"] / sums["tokens"] == pytest.approx(expected, rel=1e-5)
    sums = updates["teacher"]["sums"]
    leads = [mu - ref for mu, ref in zip(exact.behaviours, references, strict=True)]
    expected = float(exact.token_mean(leads))
    assert sums["teacher_kl"] / sums["tokens"] == pytest.approx(expected, rel=1e-5)


def _policy_gradient(exact: ExactPolicy, advantages: list[Any]) -> dict[str, Tensor]:
    tokens = zip(exact.logprobs, exact.behaviours, advantages, strict=True)
    losses = [-advantage * (ell - mu).exp() for ell, mu, advantage in tokens]
    return exact.gradients(exact.token_mean(losses))


@pytest.mark.parametrize("kind", KL_KINDS[:3])
def test_a_penalty_in_the_reward_moves_the_advantages_of_whole_responses(
    updates: Updates, exact: ExactPolicy, references: list[Tensor], kind: str
) -> None:
    penalized = copy.copy(exact)
    sums = []
    for behaviour_R, ref_R, mask_R in zip(exact.behaviours, references, exact.masks, strict=True):
        x = behaviour_R - ref_R
        value_R = {"k1": x, "k2": x.square() / 2, "k3": (-x).exp() - 1 + x}[kind]
        sums.append(float((mask_R * value_R).sum()))
    penalized.rewards = exact.rewards - COEFFICIENT * np.reshape(sums, exact.rewards.shape)
    expected = _policy_gradient(exact, penalized.advantages)
    assert_same_gradients(updates[f"reward {kind}"]["gradients"], expected)


@pytest.mark.parametrize("name", ["teacher", "teacher alone"])
def test_a_teacher_adds_its_lead_over_the_sampled_log_prob_to_each_advantage(
    updates: Updates, exact: ExactPolicy, references: list[Tensor], name: str
) -> None:
    leads = zip(references, exact.behaviours, exact.advantages, strict=True)
    is_alone = name == "teacher alone"
    advantages = [COEFFICIENT * (t - mu) + (0.0 if is_alone else a) for t, mu, a in leads]
    expected = _policy_gradient(exact, advantages)
    assert_same_gradients(updates[name]["gradients"], expected)


# --- divergences over the vocabulary, against autograd in float64 ---

TOP_K = 7
LOSSES = ("reverse_kl", "forward_kl", "top_k")


@pytest.fixture(scope="module")
def divergences(random_model: Path, other_model: Path, episode_dump: Path) -> dict[str, Any]:
    """The divergences [R] of each response, with a graph to the policy, and the teacher's rows."""
    batch = read_batch(episode_dump)
    exact = ExactPolicy(random_model, batch)
    teacher = load_reference("qwen2", other_model).eval().double()
    values: dict[str, list[Any]] = {loss: [] for loss in (*LOSSES, "rows")}
    for sample in batch.samples:
        ids = torch.tensor([[*sample.prompt.token_ids, *sample.response_token_ids.tolist()]])
        rows = slice(len(sample.prompt.token_ids) - 1, -1)
        log_p = (exact.model(ids).logits[0, rows] / TEMPERATURE).log_softmax(-1)
        with torch.no_grad():
            log_q = (teacher(ids).logits[0, rows] / TEMPERATURE).log_softmax(-1)
        values["reverse_kl"].append((log_p.exp() * (log_p - log_q)).sum(-1))
        values["forward_kl"].append((log_q.exp() * (log_q - log_p)).sum(-1))
        top, top_ids = log_q.topk(TOP_K)
        top = top.float().double()  # as a dump keeps them
        kept = top.log_softmax(-1)
        values["top_k"].append((kept.exp() * (kept - log_p.gather(1, top_ids))).sum(-1))
        values["rows"].append((log_q, top_ids, top))
    return {"exact": exact, **values}


@pytest.fixture(scope="module")
def distilled(
    tmp_path_factory: pytest.TempPathFactory,
    random_model: Path,
    other_model: Path,
    episode_dump: Path,
    divergences: dict[str, Any],
) -> dict[str, Updates]:
    """One update of each loss, on one rank and on two."""
    batch, padded = read_batch(episode_dump), ((0, 0), (0, 1))
    for sample, (log_q, top_ids, top) in zip(batch.samples, divergences["rows"], strict=True):
        mask = sample.loss_mask
        ids = torch.tensor(sample.response_token_ids).long()
        sampled = log_q.gather(1, ids[:, None])[:, 0]
        sample.columns = {
            "teacher_logprob": sampled.numpy()[mask].astype(np.float32),
            # The last one is missing, as an engine's ids beyond the tokenizer's are.
            "teacher_top_ids": np.pad(top_ids.numpy()[mask], padded, constant_values=-1),
            "teacher_top_logprobs": np.pad(top.numpy()[mask], padded, constant_values=np.nan),
        }
        for name, dtype in (("teacher_top_ids", np.int32), ("teacher_top_logprobs", np.float32)):
            sample.columns[name] = sample.columns[name].astype(dtype)
    dump = tmp_path_factory.mktemp("top") / "step_000001.parquet"
    write_batch(dump, batch)
    cases = {loss: _distilling(loss, other_model) for loss in LOSSES}
    made: dict[str, Updates] = {}
    for ranks in (1, 2):
        layouts = {n: (sizes, cases) for n, (num, sizes) in LAYOUTS.items() if num == ranks}
        made |= run_ranks(make_updates_in_layouts, ranks, random_model, dump, layouts)[0]
    return made


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "TP 2, SP": (2, {"tensor": 2, "sequence": True}),
    "CP 2": (2, {"context": 2}),
    "PP 2": (2, {"pipeline": 2}),
}


def _distilling(loss: str, teacher: Path) -> Case:
    engine = "local" if loss == "top_k" else ""
    distillation = {
        "coefficient": COEFFICIENT,
        "loss": loss,
        "top_k": TOP_K,
        "teacher": {"path": str(teacher), "engine": engine, "memory": "host"},
    }
    algorithm = {**PLAIN, "advantage": "distill", "distillation": distillation}
    ops = {"logits_chunk_tokens": 16}
    return Case(algorithm, ops=ops, teacher=None if engine else teacher)


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_divergence_over_the_vocabulary_and_its_gradient_are_exact(
    distilled: dict[str, Updates], divergences: dict[str, Any], loss: str, layout: str
) -> None:
    update, exact = distilled[layout][loss], divergences["exact"]
    mean = exact.token_mean(divergences[loss])
    sums = update["sums"]
    assert sums["teacher_kl"] / sums["tokens"] == pytest.approx(float(mean.detach()), rel=1e-6)
    expected = exact.gradients(COEFFICIENT * mean)
    assert_same_gradients(update["gradients"], expected)


# --- whole runs ---


@pytest.mark.exhaustive
def test_a_coefficient_of_0_is_the_run_without_a_reference(
    tmp_path: Path, replay_config: Path
) -> None:
    few = ("train.steps=2",)
    without = train(replay_config, tmp_path / "without", *few)
    train(replay_config, tmp_path / "zero", *few, "algorithm.kl.coefficient=0")
    assert_same_training(tmp_path / "zero", tmp_path / "without")
    measured = train(replay_config, tmp_path / "measured", *few, "algorithm.kl.measure=true")
    assert without[0]["train/forward_only_flops"] < measured[0]["train/forward_only_flops"]
    assert measured[0]["kl/reference"] < measured[1]["kl/reference"]
    rows = repeatable_rows(tmp_path / "measured")
    for row in rows:
        del row["kl/reference"]
    assert rows == repeatable_rows(tmp_path / "without")
    assert not differing_weights(tmp_path / "measured", exported_weights(tmp_path / "without"))


@pytest.mark.exhaustive
def test_a_scored_dump_replays_without_the_models(
    tmp_path: Path, random_model: Path, other_model: Path
) -> None:
    config = write_run(
        tmp_path,
        random_model,
        rollout={"engine": "local"},
        algorithm={
            "updates_per_batch": 2,
            "kl": {"coefficient": 0.1, "reference": {"path": str(other_model)}},
            "distillation": {"coefficient": 0.1, "teacher": {"path": str(other_model)}},
        },
        eval={"sets": []},
    )
    train(config, tmp_path / "run")
    replayed = (
        f"replay={tmp_path / 'run' / 'rollouts'}",
        "algorithm.kl.reference.path=gone",
        "algorithm.distillation.teacher.path=gone",
    )
    rows = train(config, tmp_path / "replay", *replayed)
    assert all(row["kl/reference"] > 0.1 for row in rows)
    assert not differing_weights(tmp_path / "replay", exported_weights(tmp_path / "run"))
    originals = read_metrics(tmp_path / "run" / "metrics.jsonl")
    for row, original in zip(rows, originals, strict=True):
        for name in ("kl/reference", "kl/teacher", "loss/policy", "policy/grad_norm"):
            assert row[name] == original[name], name
    # In two stages, with context parallelism, the dump has the same values.
    layout = ("parallel.pipeline=2", "parallel.context=2", "ops.logits_chunk_tokens=16")
    train(config, tmp_path / "divided", "train.steps=1", *layout, ranks=4)
    dumps = [tmp_path / run / "rollouts" / "step_000001.parquet" for run in ("run", "divided")]
    for sample, other in zip(*(read_batch(dump).samples for dump in dumps), strict=True):
        for name in ("reference_logprob", "teacher_logprob"):
            values, others = sample.columns[name], other.columns[name]
            assert len(values) == sample.num_sampled
            assert np.allclose(values, others, rtol=0, atol=1e-5)


@pytest.mark.exhaustive
def test_a_reference_that_follows_the_policy_is_the_same_after_a_resume(
    tmp_path: Path, replay_config: Path
) -> None:
    follows = ("algorithm.kl.coefficient=0.1", "algorithm.kl.reference.update_every=2")
    saved = ("checkpoint.every_steps=3", "optimizer.schedule=constant", *follows)
    rows = train(replay_config, tmp_path / "whole", *saved)
    # Two updates per step: the second moves away from the reference, which step 2 has reset.
    assert rows[2]["kl/reference"] < rows[1]["kl/reference"]
    train(replay_config, tmp_path / "cut", *saved, "train.steps=3")
    resumed = train(replay_config, tmp_path / "cut", *saved, "resume=true", ranks=2)
    assert resumed[-1]["kl/reference"] == pytest.approx(rows[-1]["kl/reference"], rel=1e-4)
    train(replay_config, tmp_path / "same", *saved, "train.steps=3")
    train(replay_config, tmp_path / "same", *saved, "resume=true")
    assert_same_training(tmp_path / "same", tmp_path / "whole")
