"""Responses that several weights versions sampled, by a model: each token is its own."""

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from bapo_megatron.config.megatron import ModelConfig
from bapo_megatron.config.rollout import LocalConfig, RolloutConfig
from bapo_megatron.data.staleness import token_versions
from bapo_megatron.engine.base import Engine
from bapo_megatron.engine.local.engine import LocalBackend
from bapo_megatron.rollout.pool import EnginePool
from bapo_megatron.types import Prompt, RolloutBatch
from bapo_megatron.weight_sync.receive import Load, WeightReceiver
from tests.data.prompt_sets import make_stream
from tests.engine.helpers import reference_logprobs
from tests.fakes.fake_pool import deliver
from tests.rollout.batching_setup import Rewards, make_batches

TEMPERATURE = 0.8
STEPS = 5
PROMPTS = [Prompt(f"p:{number}", (3, 20 + number, 77, 4), "", "") for number in range(16)]


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
) -> list[RolloutBatch]:
    pool = EnginePool(engines, config, version=None)
    batches = make_batches(
        Rewards(equal=()), config, prompts=make_stream(PROMPTS), total_steps=STEPS
    )
    batches.attach(pool)
    weights = WeightReceiver(pool.states, config, batches)
    collected = []
    try:
        await pool.states.wait_for_engines()
        for step, model in enumerate(models):
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
    config = RolloutConfig.model_validate(
        {
            "groups_per_step": 3,
            "samples_per_group": 4,
            # Most responses are as long as they may be, so they would begin and end together.
            "max_response_tokens": 60,
            "temperature": TEMPERATURE,
            "staleness": {"max_age": STEPS},  # batches wait for their scores
            **rollout,
        }
    )
    batches = await _collect([await backend.connect("local")], models, config)
    assert sum(batch.stats.resumed_samples for batch in batches) > 0
    _check(batches, models)
