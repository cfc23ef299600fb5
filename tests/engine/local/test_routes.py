"""The experts that the engine reports are those that its model used, for each token once."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from bapo_megatron.data.record import Completion
from bapo_megatron.engine.base import GenerateRequest
from tests.engine.helpers import make_model_dir
from tests.engine.local.setting import complete, opened, ragged_requests, start
from tests.policy.families import WITH_EXPERTS, params
from tests.policy.tiny_models import load_reference, recorded_routers


@pytest.fixture(scope="module", params=params(WITH_EXPERTS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("model") / request.param, request.param)


def reference_routes(model_dir: Path, token_ids: Sequence[int]) -> np.ndarray:
    """[tokens, layers, experts per token], sorted, of one pass of transformers."""
    model = load_reference(model_dir.name, model_dir)
    with torch.no_grad(), recorded_routers(model) as outputs:
        model(torch.tensor([list(token_ids)]))
    chosen = {number: experts for number, [(_, _, experts)] in outputs.items()}
    none = torch.full_like(next(iter(chosen.values())), -1)
    layers = [chosen.get(number, none) for number in range(len(model.model.layers))]
    return torch.stack(layers, dim=1).sort(dim=-1).values.numpy()


def assert_routes(
    model_dir: Path, requests: Sequence[GenerateRequest], completions: Sequence[Completion]
) -> None:
    """Check every token from ``routes_from`` to the last but one."""
    for request, completion in zip(requests, completions, strict=True):
        assert completion.routes is not None
        assert completion.routes.dtype == np.int16
        tokens = [*request.input_ids, *completion.token_ids.tolist()]
        expected = reference_routes(model_dir, tokens)[request.routes_from : -1]
        actual = completion.routes.reshape(len(completion.routes), *expected.shape[1:])
        np.testing.assert_array_equal(np.sort(actual, axis=-1), expected)


@pytest.mark.parametrize("burst", [1, 7])
async def test_experts_of_prompt_and_response_are_those_of_the_model(
    model: Path, burst: int
) -> None:
    requests = ragged_requests(11, max_new_tokens=20, routes_from=0)
    async with opened(model, max_rows=8) as engine:
        assert_routes(model, requests, await complete(engine, *requests, burst=burst))


async def test_only_what_is_asked_for_is_reported(model: Path) -> None:
    [_, later] = ragged_requests(2, max_new_tokens=9, longest=30, routes_from=1)
    wanting = [later, *ragged_requests(1, max_new_tokens=9, routes_from=0)]
    async with opened(model) as engine:
        silent, *asked = await complete(engine, *ragged_requests(1, max_new_tokens=9), *wanting)
    assert silent.routes is None
    assert_routes(model, wanting, asked)


async def test_a_pause_reports_no_token_twice_and_an_abort_those_of_what_came(model: Path) -> None:
    """After a pause the prefix is computed again, with the same weights."""
    requests = ragged_requests(5, max_new_tokens=20, routes_from=0)
    async with opened(model) as engine:
        streams = await start(engine, *requests)
        for _ in range(3):
            await engine.decode(3)
            await engine.pause("retract")
            await engine.resume()
        await engine.abort(10)
        for stream in streams:
            await stream.task
    completions = [stream.completion for stream in streams]
    assert 9 in {len(completion.token_ids) for completion in completions}
    assert_routes(model, requests, completions)
