from pathlib import Path

import pytest

from tests.config.shipped import (
    CLUSTER_RUNS,
    FOLDER,
    FRAGMENTS,
    NAMES,
    PAPER_RUNS,
    hf_config,
    load_shipped,
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


@pytest.mark.parametrize("name", [*CLUSTER_RUNS, "eval-aime", "first-node"])
def test_everything_that_a_run_on_gpus_reads_can_be_fetched(name: str) -> None:
    config = load_shipped(name)
    sources = {source.path for source in config.sources}
    assert {*config.models.values(), *config.files.values()} <= sources


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
