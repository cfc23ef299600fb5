"""The sampling loop of an evaluation against a pool without servers."""

import asyncio
import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bapo_megatron.config.schema import RunConfig
from bapo_megatron.data.record import Completion
from bapo_megatron.engine.base import GenerateRequest, SamplingSettings, sample_seed
from bapo_megatron.errors import RolloutError
from bapo_megatron.evaluation.samples import EvalSet, iterate_samples
from bapo_megatron.reward.base import Response, Score
from bapo_megatron.rollout.buffer import Episode, PendingGroup
from bapo_megatron.rollout.evaluation import Evaluator
from bapo_megatron.rollout.messages import Evaluate
from bapo_megatron.types import EvalResult, FinishReason, Prompt, VersionSpan
from tests.evaluation.results import TextEquality
from tests.fakes.fake_pool import FakePool
from tests.fakes.stepped_pool import SteppedPool
from tests.rollout.batching_setup import single_turn

SETS = {"sums": 5, "products": 3}
"""Name of each set and its number of prompts."""


class Pool(FakePool):
    """Answers at once, until it fails, or loses its weights."""

    def __init__(self, *, fails_after: int | None = None, loses_after: int | None = None) -> None:
        super().__init__(version=7)
        self.fails_after, self.loses_after = fails_after, loses_after
        self.requests: list[tuple[str, SamplingSettings]] = []
        self.affinities: dict[str, int] = {}

    async def generate(
        self,
        plan: Callable[[], GenerateRequest | None],
        on_part: Callable[[Completion], None],
        affinity: int,
    ) -> bool:
        await asyncio.sleep(0)
        if len(self.requests) == self.fails_after:
            raise RolloutError("no server left")
        if len(self.requests) == self.loses_after:
            self.needs_weights = True
            await asyncio.Event().wait()
        request = plan()
        assert request is not None
        assert not request.return_logprobs
        self.requests.append((request.label, request.sampling))
        self.affinities[request.label.rpartition(",")[0]] = affinity
        tokens = np.full(3, len(self.requests), dtype=np.int32)
        versions = (VersionSpan(self.version, 3),)
        on_part(Completion(tokens, np.empty(0, np.float32), versions, FinishReason.STOP))
        return True


class EvenIsRight:
    """Grades the first token, the number of the request; after delays by a seed, if any."""

    def __init__(self, seed: int | None = None) -> None:
        self._delays = None if seed is None else random.Random(seed)

    async def score(self, episode: Episode, group: PendingGroup) -> None:
        if self._delays is not None:
            await asyncio.sleep(self._delays.choice((0, 0.0002, 0.002)))
        tokens = episode.finished().response_token_ids.tolist()
        is_odd = tokens[0] % 2
        score = Score(float(not is_odd), answer_found=True, extracted=str(is_odd))
        episode.graded = Response(str(tokens), ""), score


def evaluate(
    run_dir: Path,
    pool: Pool | SteppedPool,
    *,
    evaluator: Evaluator | None = None,
    resume: bool = False,
    **eval_: Any,
) -> list[EvalResult] | None:
    evaluator = evaluator or make_evaluator(run_dir, **eval_)
    request = Evaluate(moment="", weights="m (0123)", resume=resume)
    return asyncio.run(evaluator.evaluate(pool, request))


def make_evaluator(run_dir: Path, grader: EvenIsRight | None = None, **eval_: Any) -> Evaluator:
    config = RunConfig.model_validate(
        {
            "name": "test",
            "run_dir": run_dir,
            "model": {"path": "m"},
            "rollout": {"max_connections": 2},
            "eval": {
                "sets": [{"path": "s.jsonl", "name": name} for name in SETS],
                "samples_per_prompt": 4,
                "bootstrap_resamples": 100,
                **eval_,
            },
        }
    )
    sets = [
        EvalSet(
            name,
            tuple(Prompt(f"{name}:{row}", (row,), "0", "?") for row in range(size)),
            config.eval.sampling_of(dataset),
        )
        for (name, size), dataset in zip(SETS.items(), config.eval.sets, strict=True)
    ]
    judge = grader or EvenIsRight()
    return Evaluator(single_turn(), judge, TextEquality(), sets, config, lambda _: None)


def keys(run_dir: Path, name: str) -> list[tuple[str, int]]:
    return sorted(sample.key for sample in iterate_samples(run_dir / "eval" / f"{name}.jsonl"))


def test_every_sample_is_made_once_and_the_results_are_written(tmp_path: Path) -> None:
    pool = Pool()
    sums, products = evaluate(tmp_path, pool)
    assert len(pool.requests) == len({label for label, _ in pool.requests}) == 4 * 8
    for name, size in SETS.items():
        assert keys(tmp_path, name) == [
            (f"{name}:{row}", i) for row in range(size) for i in range(4)
        ]
    assert (sums.name, sums.num_prompts, products.num_prompts) == ("sums", 5, 3)
    assert (sums.version, sums.generated_tokens) == (7, 60)
    written = json.loads((tmp_path / "eval.json").read_text())
    scores = [entry["scores"][0]["value"] for entry in written]
    assert scores == [sums.avg_at_k, products.avg_at_k]
    assert len(set(pool.affinities.values())) == 8
    assert max(pool.affinities.values()) < 0


@pytest.mark.parametrize("fails_after", [0, 1, 7, 20, 31])
def test_after_a_failure_another_process_makes_what_is_missing_and_nothing_twice(
    tmp_path: Path, fails_after: int
) -> None:
    failing = Pool(fails_after=fails_after)
    with pytest.raises(RolloutError, match="no server left"):
        evaluate(tmp_path, failing)
    before = {name: (tmp_path / "eval" / f"{name}.jsonl").read_bytes() for name in SETS}
    num_kept = sum(content.count(b"\n") for content in before.values())
    assert num_kept <= fails_after
    pool = Pool()
    results = evaluate(tmp_path, pool, resume=True)
    assert len(pool.requests) == 32 - num_kept
    for name, size in SETS.items():
        assert len(keys(tmp_path, name)) == len(set(keys(tmp_path, name))) == 4 * size
        assert (tmp_path / "eval" / f"{name}.jsonl").read_bytes().startswith(before[name])
    for result in results:
        times = [s.elapsed_s for s in iterate_samples(tmp_path / "eval" / f"{result.name}.jsonl")]
        assert times == sorted(times)
        assert result.wall_s == times[-1]


def test_the_same_process_goes_on_where_servers_lost_the_weights(tmp_path: Path) -> None:
    evaluator = make_evaluator(tmp_path)
    assert evaluate(tmp_path, Pool(loses_after=10), evaluator=evaluator) is None
    num_kept = sum(len(keys(tmp_path, name)) for name in SETS)
    assert 0 < num_kept <= 10
    pool = Pool()
    evaluate(tmp_path, pool, evaluator=evaluator)
    assert len(pool.requests) == 32 - num_kept
    again = Pool()
    evaluate(tmp_path, again, evaluator=evaluator)  # the next one is a new one
    assert len(again.requests) == 32


def test_each_set_is_sampled_by_its_own_settings_and_each_sample_with_its_own_seed(
    tmp_path: Path,
) -> None:
    pool = Pool()
    changes = {"samples_per_prompt": 2, "temperature": 1.5, "top_p": 0.9, "top_k": 20}
    evaluate(
        tmp_path,
        pool,
        sets=[
            {"path": "s.jsonl", "name": "sums"},
            {"path": "s.jsonl", "name": "products", "max_response_tokens": 9, **changes},
        ],
    )
    for name, num_requests, settings in (
        ("sums", 20, SamplingSettings(0.6, 4096, seed=0)),
        ("products", 6, SamplingSettings(1.5, 9, top_p=0.9, top_k=20, seed=0)),
    ):
        sent = [replace(s, seed=0) for label, s in pool.requests if f" of {name}," in label]
        assert sent == [settings] * num_requests
    assert len({request.seed for _, request in pool.requests}) == 26


def test_seeds_are_the_same_in_every_process_and_differ_between_runs() -> None:
    assert sample_seed(0, "sums", "a:0", 3) == 1202916968
    assert sample_seed(1, "sums", "a:0", 3) != sample_seed(0, "sums", "a:0", 3)


def test_with_an_engine_that_is_driven_an_evaluation_repeats(tmp_path: Path) -> None:
    responses, results = [], []
    for seed in (1, 2):
        pool = SteppedPool(delay_seed=seed, is_slow=seed == 2)
        run_dir = tmp_path / str(seed)
        evaluator = make_evaluator(run_dir, EvenIsRight(seed))
        scored = evaluate(run_dir, pool, evaluator=evaluator)
        results.append([replace(result, wall_s=0.0, tokens_per_s=0.0) for result in scored])
        responses.append(
            {
                (name, sample.key): sample.response
                for name in SETS
                for sample in iterate_samples(run_dir / "eval" / f"{name}.jsonl")
            }
        )
        assert [label for label in pool.labels if "sums" in label] == [
            f"evaluation of sums, sums:{row}, sample {i}" for row in range(5) for i in range(4)
        ]
    assert responses[0] == responses[1]
    assert results[0] == results[1]
