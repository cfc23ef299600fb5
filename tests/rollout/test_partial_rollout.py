"""Responses that several weights versions sampled, by a model: each token is its own."""

from __future__ import annotations

import asyncio
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from bapo_megatron.config.megatron import ModelConfig
from bapo_megatron.config.rollout import LocalConfig, RolloutConfig
from bapo_megatron.data.staleness import token_versions
from bapo_megatron.engine.local.engine import LocalBackend
from bapo_megatron.rollout.batching import BatchCollector
from bapo_megatron.rollout.pool import EnginePool
from bapo_megatron.types import FinishReason, Prompt
from bapo_megatron.weight_sync.receive import Load, WeightReceiver
from tests.data.prompt_sets import make_stream
from tests.engine.helpers import reference_logprobs
from tests.engine.sglang.servers import load_weights, with_client
from tests.fakes.fake_pool import deliver
from tests.rollout.batching_setup import Rewards, make_batches
from tests.rollout.pool import clients_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from bapo_megatron.engine.base import Engine
    from bapo_megatron.engine.sglang.server import SglangServer
    from bapo_megatron.rollout.buffer import Episode, PendingGroup
    from bapo_megatron.types import RolloutBatch

TEMPERATURE = 0.8
STEPS = 5
MAX_TOKENS = 180
PROMPTS = [Prompt(f"p:{number}", (3, 20 + number, 77, 4), "", "") for number in range(16)]


class PatientGrader:
    """Lets a batch be complete only while another response is in the middle.

    Where the engine samples by itself, nothing else makes sure of it.
    """

    num_timeouts = num_errors = 0
    sees_groups = False
    teacher = None
    batches: BatchCollector
    num_groups = 0
    """Groups of all batches so far; those after them wait for their scores."""

    async def score(self, episode: Episode, group: PendingGroup) -> None:
        while episode.group_id >= self.num_groups or not self.is_one_in_the_middle():
            await asyncio.sleep(0.01)
        episode.texts = ("scored",)

    def is_one_in_the_middle(self) -> bool:
        """Whether a response has tokens and many are missing; also where all have ended."""
        num_open = 0
        for group in self.batches.state().buffer:
            for episode in group.episodes:
                if not episode.is_finished:
                    num_open += 1
                    if 0 < episode.num_tokens < 0.8 * MAX_TOKENS:
                        return True
        return num_open == 0


@pytest.fixture(scope="module")
def models(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The model, and others whose weights differ so much that no version passes for another."""
    directory = tmp_path_factory.mktemp("versions")
    models = [model_dir]
    for version in range(1, STEPS):
        target = directory / f"version_{version}"
        shutil.copytree(model_dir, target)
        tensors = load_file(model_dir / "model.safetensors")
        tensors["model.layers.1.mlp.down_proj.weight"] *= 1.0 + version / 2
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
        models.append(target)
    return models


async def _collect(
    engines: Sequence[Engine],
    models: list[Path],
    config: RolloutConfig,
    grader: PatientGrader | Rewards,
) -> list[RolloutBatch]:
    pool = EnginePool(engines, config, version=None)
    batches = make_batches(grader, config, prompts=make_stream(PROMPTS), total_steps=STEPS)
    batches.attach(pool)
    weights = WeightReceiver(pool.states, config, batches)
    collected = []
    try:
        await pool.states.wait_for_engines()
        for step, model in enumerate(models):
            if isinstance(grader, PatientGrader):
                grader.batches = batches
                while config.async_steps > 0 and step > 0 and not grader.is_one_in_the_middle():
                    await asyncio.sleep(0.01)
                grader.num_groups += config.groups_per_step
            await weights.load(Load(model_dir=model, version=step))
            await weights.resume(())
            batch = await asyncio.wait_for(batches.collect(step + 1, deliver), 120)
            assert batch is not None
            collected.append(batch)
    finally:
        await pool.drain()
        await batches.close()
        await pool.states.close()
    return collected


def _config(**rollout: Any) -> RolloutConfig:
    """Three groups of four per step."""
    return RolloutConfig.model_validate(
        {
            "groups_per_step": 3,
            "samples_per_group": 4,
            "max_response_tokens": MAX_TOKENS,
            "temperature": TEMPERATURE,
            "stream_tokens": 8,
            "staleness": {"max_age": STEPS},  # batches wait for their scores
            **rollout,
        }
    )


def _check(batches: list[RolloutBatch], models: list[Path]) -> None:
    """Each token has the log-prob of its own version, and some responses have several versions."""
    samples = [sample for batch in batches for sample in batch.samples]
    assert any(len(sample.versions) > 1 for sample in samples)
    for sample in samples:
        assert (np.diff(token_versions(sample.versions)) >= 0).all()
        versions = token_versions(sample.versions)
        for version in np.unique(versions):
            expected = reference_logprobs(
                models[version], sample.prompt.token_ids, sample.response_token_ids, TEMPERATURE
            )
            difference = np.where(versions == version, sample.behaviour_logprobs - expected, 0.0)
            np.testing.assert_allclose(difference, 0.0, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "rollout",
    [{"async_steps": 1, "local": {"decode_steps_ahead": 25}}, {"partial_tokens": 25}],
    ids=["ahead", "rounds"],
)
async def test_logprobs_of_the_local_engine_are_those_of_each_tokens_own_version(
    models: list[Path], rollout: dict[str, Any]
) -> None:
    backend = LocalBackend(ModelConfig(path=models[0], dtype="float32"), LocalConfig(), "cpu")
    # Most responses are as long as they may be, so they would begin and end together.
    config = _config(max_response_tokens=60, **rollout)
    engines = [await backend.connect("local")]
    batches = await _collect(engines, models, config, Rewards(equal=()))
    assert sum(batch.stats.resumed_samples for batch in batches) > 0
    _check(batches, models)


def _collect_on(
    server: SglangServer, models: list[Path], config: RolloutConfig, grader: PatientGrader | Rewards
) -> list[RolloutBatch]:
    async def collect() -> list[RolloutBatch]:
        engines = clients_of([server.address], config, server.keys)
        return await _collect(engines, models, config, grader)

    try:
        return asyncio.run(collect())
    finally:  # other tests expect its first weights
        with_client(server.address, lambda client: load_weights(client, models[0], 0), server.keys)


@pytest.mark.sglang
def test_a_server_stops_each_response_at_the_tokens_of_its_round(
    server: SglangServer, models: list[Path]
) -> None:
    config = _config(partial_tokens=60)

    batches = _collect_on(server, models, config, Rewards(equal=()))
    _check(batches, models)
    for sample in (sample for batch in batches for sample in batch.samples):
        if sample.finish_reason is FinishReason.LENGTH:
            assert sample.num_sampled == MAX_TOKENS
        # Other weights sample only from where a round has ended.
        ends = np.cumsum([span.num_tokens for span in sample.versions])
        assert (ends[:-1] % 60 == 0).all()


@pytest.mark.sglang
@pytest.mark.parametrize(("async_steps", "in_flight"), [(0, "abort"), (1, "retract")])
def test_logprobs_of_a_server_are_those_of_each_tokens_own_version(
    server: SglangServer, models: list[Path], async_steps: int, in_flight: str
) -> None:
    config = _config(
        async_steps=async_steps,
        # One step ahead, what begins in step 1 is trained by the last step.
        oversample_groups=9 if async_steps == 0 else 4,
        weight_sync={"in_flight": in_flight},
        max_connections=8,  # so that some have not ended, however late the loop looks
    )

    batches = _collect_on(server, models, config, PatientGrader())
    if in_flight == "abort":
        assert sum(batch.stats.resumed_samples for batch in batches) > 0
    _check(batches, models)
