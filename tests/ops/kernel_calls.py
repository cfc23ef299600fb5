"""Short calls of ``torch.ops.bapo`` for the kernel tests, with the usual arguments filled in.

Shape legend: N = rows of logits, V = columns, T = tokens, P = tensor-parallel ranks.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bapo_megatron.ops import extension
from tests.cuda_emulation import launchers
from tests.oracles.bound_search import Rule, Tokens
from tests.oracles.logprob import token_logprobs
from tests.tolerances import assert_within

ISAS: list[str] = extension.build_info()["available_isas"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LOWER, UPPER = (0.6, 0.9, 0.02), (1.2, 3.0, 0.05)
"""The candidates of the paper, of which ``paper_rule`` knows the values."""
GRID = extension.ClipGrid(LOWER, UPPER)
NONFINITE, OUT_OF_RANGE, POSITIVE, NEGATIVE = range(-4, 0)
"""Slots at the end of the table."""


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 2e-6) -> None:
    """Within tolerance · max(1, |expected|), or both NaN or the same infinity."""
    assert actual.shape == expected.shape
    error = (actual.detach().double() - expected).abs() / expected.double().abs().clamp(min=1.0)
    same = (actual.isnan() & expected.isnan()) | (actual.double() == expected)
    if not same.all():
        assert_within(error[~same].max(), tolerance)


@contextmanager
def instruction_set(name: str) -> Iterator[None]:
    """Run the CPU ops with one instruction set."""
    extension.use_isa(name)
    try:
        yield
    finally:
        extension.use_isa("auto")


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Run torch's operators with this many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class DeviceKernels:
    """``torch.ops.bapo`` on a CUDA device, for tensors on the CPU."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        op = getattr(torch.ops.bapo, name)

        def run(*arguments: Any) -> Any:
            moved = [_on_cuda(argument) for argument in arguments]
            result = op(*moved)
            if result is None:  # the first argument has been overwritten
                _storage(arguments[0]).copy_(_storage(moved[0]))
                return None
            return result.cpu() if isinstance(result, Tensor) else tuple(x.cpu() for x in result)

        return run


def _on_cuda(argument: Any) -> Any:
    """A copy with the same strides and the same offset from a boundary of 16 bytes."""
    if not isinstance(argument, Tensor) or argument.dtype is torch.uint8:  # grids stay on the CPU
        return argument
    whole = _storage(argument).cuda()
    return whole.as_strided(argument.shape, argument.stride(), argument.storage_offset())


def _storage(tensor: Tensor) -> Tensor:
    """Also what lies around a view."""
    size = tensor.untyped_storage().nbytes() // tensor.itemsize
    return tensor.as_strided((size,), (1,), 0)


def token_results(kernels: Any, logits_TV: Tensor, target_T: Tensor) -> tuple[Tensor, ...]:
    """Log-prob, entropy, maximum and log-sum of one rank that holds the whole vocabulary."""
    part_T4 = kernels.logprob_partials(logits_TV, None, target_T, 0, logits_TV.shape[1], 1.0)
    return tuple(kernels.logprob_combine(part_T4[None], 1.0))


def assert_token_results(
    results: Sequence[Tensor], logits_TV: Tensor, target_T: Tensor, temperature: float = 1.0
) -> None:
    """The four numbers of each token against float64; the maximum is a logit."""
    expected = token_logprobs(logits_TV, target_T, temperature)
    assert_close(results[0], expected.logprob_T)
    assert_close(results[1], expected.entropy_T)
    max_T = logits_TV.float().amax(1)
    assert torch.equal(results[2], max_T)
    d_TV = (logits_TV.double() - max_T[:, None]) / temperature
    assert_close(results[3], torch.logsumexp(d_TV, 1))


@dataclass(frozen=True)
class StridedLogits:
    """Logits inside a larger buffer of NaN: a read outside shows in results, a write here."""

    buffer: Tensor
    view_NV: Tensor

    def border_is_intact(self) -> bool:
        """Also the columns beside each row."""
        is_inside = torch.zeros(len(self.buffer), dtype=torch.bool)
        view = self.view_NV
        is_inside.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(True)
        return bool(self.buffer[~is_inside].isnan().all())


def strided_logits(
    num_rows: int,
    num_columns: int,
    dtype: torch.dtype,
    *,
    gap: int | None = None,
    offset: int = 1,
    seed: int = 0,
) -> StridedLogits:
    """Normal logits of spread 4, ``gap`` elements between rows, 16 + ``offset`` before them.

    By default the stride is odd: rows begin at every residue of a boundary of 16 bytes.
    """
    stride = num_columns + (1 - num_columns % 2 if gap is None else gap)
    buffer = torch.full((16 + offset + num_rows * stride + 16,), torch.nan, dtype=dtype)
    view_NV = buffer.as_strided((num_rows, num_columns), (stride, 1), 16 + offset)
    view_NV.copy_(random_logits(num_rows, num_columns, dtype, seed=seed))
    return StridedLogits(buffer, view_NV)


def adversarial_rows(num_columns: int) -> Tensor:
    """[R, V] float32: maxima at either end, none, or hardly any possible column."""
    spike_V = torch.zeros(num_columns)
    spike_V[num_columns // 2] = 300.0
    some_impossible_V = torch.linspace(-3, 3, num_columns)
    some_impossible_V[::3] = -torch.inf
    only_last_V = torch.full((num_columns,), -torch.inf)
    only_last_V[-1] = -7.0
    climbing_V = torch.linspace(-80, 80, num_columns)
    return torch.stack(
        [
            torch.full((num_columns,), 80.0),
            torch.full((num_columns,), -1e4),
            spike_V,
            some_impossible_V,
            only_last_V,
            climbing_V,
            climbing_V.flip(0),
        ]
    )


def random_logits(
    num_rows: int, num_columns: int, dtype: torch.dtype, *, scale: float = 4.0, seed: int = 0
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(num_rows, num_columns, generator=generator) * scale).to(dtype)


def random_targets(num_tokens: int, vocab_size: int, *, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (num_tokens,), generator=generator)


def grid_tensor(grid: extension.ClipGrid) -> Tensor:
    return torch.frombuffer(bytearray(grid.to_bytes()), dtype=torch.uint8)


def plain_candidates(grid: extension.ClipGrid) -> tuple[list[float], list[float], float | None]:
    """Lower and upper candidates and the dual clip, read from the grid's bytes."""
    plain = launchers.plain_grid(grid)
    lower, upper = plain.lower[: plain.num_lower], plain.upper[: plain.num_upper]
    return lower, upper, plain.lower[plain.num_lower] if plain.has_dual_clip else None


def path_of(grid: extension.ClipGrid) -> list[tuple[float, float]]:
    """The (low, high) pairs in the order of the search: those it reports for an empty table."""
    result = extension.search([0] * grid.num_slots, grid, 0.5, "surrogate", "share")
    return [(pair.clip_low, pair.clip_high) for pair in result.candidates]


def filled_table(
    tokens: Tokens,
    grid: extension.ClipGrid,
    weight: str = "uniform",
    *,
    table: Tensor | None = None,
    kernels: Any = torch.ops.bapo,
) -> Tensor:
    """[slots] int64: the tokens added to a table, a new one unless it is given."""
    if table is None:
        table = torch.zeros(grid.num_slots, dtype=torch.int64)
    arrays = [torch.from_numpy(array) for array in tokens.arrays()]
    kernels.contributions_(table, grid_tensor(grid), *arrays, weight)
    return table


def search_table(table: Tensor, grid: extension.ClipGrid, rule: Rule) -> extension.SearchResult:
    return extension.search(table.tolist(), grid, rule.target, rule.contribution, rule.measure)  # type: ignore[arg-type]
