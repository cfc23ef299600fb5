"""The file of the experts that engines chose: what is written, who reads what, and refusals."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bapo_megatron.data.micro_batch import build_micro_batch, shard_context
from bapo_megatron.data.packing import PackingRules, SequenceFlops
from bapo_megatron.data.routes import RouteFiles, narrowed, routes_path, write_routes
from bapo_megatron.types import Sample
from tests.data.samples import add_branch, make_batch

LAYERS, PER_TOKEN, EXPERTS = 3, 2, 200
STEP = 5


def files_in(directory: Path, layers: tuple[int, ...] = (0, 1, 2), **changes: Any) -> RouteFiles:
    sizes = {"num_layers": LAYERS, "num_experts": EXPERTS, "per_token": PER_TOKEN, **changes}
    return RouteFiles(directory, layers=layers, **sizes)


def routed_samples(largest: int = EXPERTS - 1) -> list[Sample]:
    """Samples with different experts for every token, of which the last one has none."""
    samples, number = list(make_batch().samples), 0
    for sample in samples:
        num_rows = sample.sequence_tokens - 1
        values = (largest - np.arange(num_rows * LAYERS * PER_TOKEN) - number) % (largest + 1)
        sample.routes = values.reshape(num_rows, -1).astype(np.int16)
        number += 7
    return samples


def written(directory: Path, samples: list[Sample]) -> Path:
    path = routes_path(directory, STEP)
    write_routes(path, samples)
    return path


def expected_routes(sample: Sample) -> np.ndarray:
    assert sample.routes is not None
    known = sample.routes.reshape(len(sample.routes), LAYERS, PER_TOKEN)
    missing = sample.sequence_tokens - len(known)
    return np.pad(known, ((0, missing), (0, 0), (0, 0)), constant_values=-1)


@pytest.mark.parametrize(("largest", "dtype"), [(127, np.int8), (128, np.int16)])
def test_every_rank_reads_its_samples_and_layers(tmp_path: Path, largest: int, dtype: Any) -> None:
    samples = routed_samples(largest)
    written(tmp_path, samples)
    opened = files_in(tmp_path, layers=(2, 0)).open(STEP, samples)
    for index in (3, 0, 5):
        routes = opened.of(index)
        assert routes.dtype == dtype
        np.testing.assert_array_equal(routes, expected_routes(samples[index])[:, [2, 0]])


def test_a_micro_batch_has_the_routes_of_its_tokens_and_none_for_padding(tmp_path: Path) -> None:
    samples, chosen = routed_samples(), [1, 4, 3]
    written(tmp_path, samples)
    opened = files_in(tmp_path, layers=(1,)).open(STEP, samples)
    zeros = np.zeros(len(samples))
    rules = PackingRules(1, 64, SequenceFlops(1, 0), sequence_multiple=4, total_multiple=16)
    whole = build_micro_batch(samples, chosen, zeros, zeros, rules, routes=opened)
    assert whole.routes is not None
    assert whole.routes.shape == (whole.num_tokens, 1, PER_TOKEN)
    expected = torch.full(whole.routes.shape, -1)
    for start, index in zip(whole.cu_seqlens.tolist(), chosen, strict=False):
        part = torch.from_numpy(expected_routes(samples[index])[:, [1]])
        expected[start : start + len(part)] = part
    assert torch.equal(whole.routes.long(), expected)
    places = torch.arange(whole.num_tokens)
    for rank in range(2):
        local = shard_context(whole, rank, 2)
        assert local.routes is not None
        kept = torch.isin(places, _places(whole.cu_seqlens.tolist(), rank))
        assert torch.equal(local.routes.long(), expected[kept])


def test_sequences_of_an_episode_have_routes_of_their_own(tmp_path: Path) -> None:
    samples = routed_samples()
    branch = add_branch(samples[1], (2,), shared_tokens=1)
    branch.routes = np.arange(5 * LAYERS * PER_TOKEN).reshape(5, -1).astype(np.int16)
    sequences = [sequence for sample in samples for sequence in sample.sequences]
    written(tmp_path, sequences)
    opened = files_in(tmp_path).open(STEP, sequences)
    for index, sequence in enumerate(sequences):
        np.testing.assert_array_equal(opened.of(index), expected_routes(sequence))
    rules, zeros = PackingRules(1, 64, SequenceFlops(1, 0)), np.zeros(len(samples))
    built = build_micro_batch(sequences, [2, 3], zeros, zeros, rules, routes=opened)
    assert built.routes is not None
    np.testing.assert_array_equal(built.routes[:6], expected_routes(branch))


def _places(offsets: list[int], rank: int) -> torch.Tensor:
    """Positions in the whole that one of two context ranks holds: quarters 0 and 3, or 1 and 2."""
    quarters = {0: (0, 3), 1: (1, 2)}[rank]
    parts = []
    for start, end in pairwise(offsets):
        size = (end - start) // 4
        parts += [torch.arange(start + q * size, start + (q + 1) * size) for q in quarters]
    return torch.cat(parts)


def test_a_batch_without_samples_on_a_rank_is_free(tmp_path: Path) -> None:
    samples = routed_samples()
    written(tmp_path, samples)
    opened = files_in(tmp_path).open(STEP, samples)
    rules = PackingRules(data_size=1, max_tokens=64, flops=SequenceFlops(1, 0))
    empty = build_micro_batch(samples, [], np.zeros(6), np.zeros(6), rules, routes=opened)
    assert empty.routes is not None
    assert empty.routes.tolist() == [[[-1, -1]] * LAYERS]


@pytest.mark.parametrize(
    ("shape", "problem"),
    [
        ((9, 6), r"sample 1 of group 1: .*\[6\] experts per token for 9 of 6 tokens"),
        ((5, 4), r"sample 0 of group 0: .*\[4, 6\] experts per token"),  # of another model
    ],
)
def test_samples_that_cannot_be_written_are_named(
    tmp_path: Path, shape: tuple[int, int], problem: str
) -> None:
    samples = routed_samples()
    samples[3].routes = np.zeros(shape, np.int8)
    with pytest.raises(ValueError, match=problem):
        written(tmp_path, samples)
    assert not routes_path(tmp_path, STEP).exists()


@pytest.mark.parametrize(
    ("experts", "problem"),
    [
        ((7, 7), r"must have 2 different experts from 0 to 199, got \[7, 7\]"),
        ((3, 200), r"got \[3, 200\]"),
        ((-1, 4), r"got \[-1, 4\]"),
    ],
)
def test_impossible_experts_are_refused_by_token_and_layer(
    tmp_path: Path, experts: tuple[int, int], problem: str
) -> None:
    samples = routed_samples()
    assert samples[2].routes is not None
    samples[2].routes[1, 4:] = experts
    path = written(tmp_path, samples)
    opened = files_in(tmp_path).open(STEP, samples)
    opened.of(1)
    with pytest.raises(
        ValueError, match=rf"^{path}: token 1 of sequence 2 in layer 2: .*{problem}"
    ):
        opened.of(2)
    files_in(tmp_path, layers=(0, 1)).open(STEP, samples).of(2)  # another stage's layer


def test_files_that_do_not_fit_are_refused_with_a_remedy(tmp_path: Path) -> None:
    samples = routed_samples()
    files = files_in(tmp_path)
    with pytest.raises(ValueError, match=r"step_000005\.safetensors: cannot be read .*No such"):
        files.open(STEP, samples)
    path = written(tmp_path, samples)
    with pytest.raises(ValueError, match=r"must have 6 experts for each of the batch's 20 tokens"):
        files.open(STEP, samples[:4])
    with pytest.raises(ValueError, match=r"must have 12 experts"):
        files_in(tmp_path, num_layers=6).open(STEP, samples)
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(ValueError, match=r"cannot be read .*router_replay=none"):
        files.open(STEP, samples)


def test_what_an_engine_did_not_return_is_free_unless_it_returns_nothing(tmp_path: Path) -> None:
    """An episode failed before its first token, or a server after the last one."""
    samples = routed_samples()
    samples[2].routes = None
    written(tmp_path, samples)
    opened = files_in(tmp_path).open(STEP, samples)
    assert (opened.of(2) == -1).all()
    np.testing.assert_array_equal(opened.of(3), expected_routes(samples[3]))
    for sample in samples:
        sample.routes = None
    with pytest.raises(ValueError, match=r"needs an engine that returns .* set it to none"):
        written(tmp_path, samples)


def test_an_empty_array_is_narrowed_to_bytes() -> None:
    assert narrowed(np.empty((0, 6), np.int16)).dtype == np.int8
