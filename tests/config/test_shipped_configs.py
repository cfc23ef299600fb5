from __future__ import annotations

from pathlib import Path

import pytest

from bapo_megatron.config.check import check_config
from bapo_megatron.config.load import ConfigError
from tests.config.shipped import (
    FOLDER,
    FRAGMENTS,
    NAMES,
    PAPER_RUNS,
    hf_config,
    load_shipped,
    write_inputs,
)


@pytest.mark.parametrize("name", NAMES)
def test_every_file_loads_is_a_screen_at_most_and_says_what_it_is_for(name: str) -> None:
    lines = (FOLDER / f"{name}.yaml").read_text().splitlines()
    assert len(lines) <= 50
    assert max(map(len, lines)) <= 100
    assert lines[0].startswith("# ")
    config = load_shipped(name)
    if name not in FRAGMENTS:
        assert config.name == name
        assert config.run_dir == Path("runs").absolute() / name


@pytest.mark.parametrize("name", PAPER_RUNS)
def test_the_paper_s_values_are_those_of_its_section_5_1(name: str) -> None:
    config = load_shipped(name)
    assert (config.optimizer.lr, config.rollout.temperature) == (2e-6, 0.6)
    assert config.algorithm.advantage == "grpo"
    assert config.eval.samples_per_prompt == 16
    assert [dataset.path.stem for dataset in config.eval.sets] == ["aime24", "aime25"]
    response_tokens = 65536 if "64k" in name else 8192
    assert config.rollout.max_response_tokens == response_tokens
    bounds = config.algorithm.bapo
    ranges = (bounds.lower.start, bounds.lower.max, bounds.upper.start, bounds.upper.max)
    assert (bounds.lower.step, bounds.upper.step) == (0.02, 0.05)
    if name.startswith("octothinker"):  # appendix A
        assert (bounds.target, ranges) == (0.45, (0.8, 0.9, 1.2, 2.0))
    else:
        assert (bounds.target, ranges) == (0.4, (0.6, 0.9, 1.2, 3.0))


@pytest.mark.parametrize("name", PAPER_RUNS)
def test_the_longest_sequence_fits_the_micro_batch_and_the_model(name: str) -> None:
    config, model = load_shipped(name), hf_config(load_shipped(name))
    parallel, prompt_tokens = config.parallel, config.data.max_prompt_tokens
    longest = prompt_tokens + config.rollout.max_response_tokens
    per_rank = config.train.max_tokens_per_micro_batch
    assert longest <= per_rank * parallel.context
    # Megatron divides a sequence into two chunks for each context-parallel rank, and sequence
    # parallel divides what a rank has.
    assert per_rank % (2 * parallel.tensor) == 0
    assert prompt_tokens + config.eval.max_response_tokens <= model["max_position_embeddings"]
    assert longest <= model["max_position_embeddings"]


@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [
        ("r1-distill-qwen-7b-8k", 4),
        ("r1-distill-qwen-7b-8k-staleness4", 16),
        ("bp-math-7b-64k", 8),
        ("bp-math-32b-64k", 128),
        ("octothinker-3b", 2),
    ],
)
def test_a_run_passes_the_checks_at_its_start(
    name: str, num_ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_shipped(name)
    write_inputs(config)
    check_config(config, num_ranks)
    with pytest.raises(ConfigError, match="must divide the number of ranks"):
        check_config(config, num_ranks + 1)


@pytest.mark.parametrize(
    ("name", "replica_ranks"),
    [
        ("r1-distill-qwen-7b-8k", 4),
        ("bp-math-7b-64k", 8),
        ("bp-math-32b-64k", 64),
        ("octothinker-3b", 2),
    ],
)
def test_the_layout_divides_the_model_and_fills_whole_nodes(name: str, replica_ranks: int) -> None:
    config, model = load_shipped(name), hf_config(load_shipped(name))
    parallel = config.parallel
    assert parallel.tensor * parallel.pipeline * parallel.context == replica_ranks
    assert model["num_attention_heads"] % parallel.tensor == 0
    assert model["num_key_value_heads"] % parallel.tensor == 0
    assert model["num_hidden_layers"] % (parallel.pipeline * parallel.virtual_pipeline) == 0
    assert parallel.tensor <= 8  # within the fast links of a node
    assert 128 % replica_ranks == 0


def test_the_evaluation_of_aime_is_the_paper_s_and_its_cost_is_as_the_file_says() -> None:
    config = load_shipped("eval-aime")
    samplings = [config.eval.sampling_of(dataset) for dataset in config.eval.sets]
    assert [dataset.path.stem for dataset in config.eval.sets] == ["aime24", "aime25"]
    for sampling in samplings:
        assert (sampling.samples_per_prompt, sampling.temperature) == (16, 0.6)
        assert (sampling.max_response_tokens, sampling.top_p, sampling.top_k) == (65536, 1.0, -1)
        assert sampling.max_prompts is None
    text = (FOLDER / "eval-aime.yaml").read_text()
    assert f"{2 * 30 * 16} samples, at most {2 * 30 * 16 * 65536:,} tokens" in text
    longest = config.data.max_prompt_tokens + 65536
    assert longest <= hf_config(config)["max_position_embeddings"]
