"""What the client does about a server that misbehaves."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np
import pytest

from bapo_megatron.engine.base import Completion, SamplingSettings
from bapo_megatron.engine.sglang.convention import next_token_logprobs
from bapo_megatron.engine.sglang.keys import ApiKeys
from bapo_megatron.errors import RolloutError, ServerError, ServerGoneError
from bapo_megatron.types import FinishReason
from tests.engine.sglang.servers import sample, with_client, with_http
from tests.fakes.fake_sglang import FakeSglang, logprob_of
from tests.fakes.fake_weight_server import FakeWeightServer
from tests.launch import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from bapo_megatron.engine.sglang.client import SglangClient
    from bapo_megatron.engine.sglang.http import SglangHttp

SAMPLING = SamplingSettings(temperature=0.5, max_new_tokens=4)


async def _generate(client: SglangClient) -> Completion:
    return await sample(client, [7, 8, 9], SAMPLING, "sample 1 of group 5")


def _error(fake: FakeSglang) -> str:
    with pytest.raises(RolloutError) as caught:
        with_client(fake.address, _generate)
    return str(caught.value)


def test_a_completion_has_tokens_logprobs_and_versions() -> None:
    with FakeSglang(version="3") as fake:
        completion = with_client(fake.address, _generate)
    assert completion.token_ids.tolist() == [103, 104, 105, 106]
    expected = [logprob_of(token_id, 0.5) for token_id in (103, 104, 105, 106)]
    np.testing.assert_allclose(completion.logprobs, expected, rtol=1e-6)
    assert completion.logprobs.dtype == np.float32
    assert completion.versions == ((3, 4),)
    assert completion.finish_reason is FinishReason.LENGTH


def test_every_sampling_setting_is_sent_so_that_no_server_default_acts() -> None:
    with FakeSglang() as fake:
        with_client(fake.address, _generate)
        assert fake.requests[0]["sampling_params"] == {
            "temperature": 0.5,
            "max_new_tokens": 4,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "stream_interval": 64,
        }


def test_versions_that_change_within_a_completion_are_kept_per_token() -> None:
    spans = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 4}]
    with FakeSglang(version="4", changes={"weight_versions": spans}) as fake:
        completion = with_client(fake.address, _generate)
    assert completion.versions == ((3, 1), (4, 3))


def test_versions_that_leave_a_token_out_are_refused() -> None:
    spans = [{"version": "3", "start": 1, "end": 4}]
    with FakeSglang(version="3", changes={"weight_versions": spans}) as fake:
        assert "do not cover its 4 tokens" in _error(fake)


def test_a_control_call_is_repeated_where_the_connection_breaks() -> None:
    with FakeSglang(connections_to_drop=2) as fake:

        async def probe(http: SglangHttp) -> dict[int, float]:
            return await next_token_logprobs(http, [7, 8], 1.0, num_top=2)

        logprobs = with_http(fake.address, probe)
        assert len(fake.requests) == 3
    # The token at position 2 is 102, and the best two of 3 sin(t) are 8 and 14.
    assert set(logprobs) == {102, 8, 14}


def test_a_connection_that_breaks_is_named() -> None:
    with FakeSglang(connections_to_drop=1) as fake:
        error = _error(fake)
    assert error.startswith(f"{fake.address}: the connection broke (")
    assert "request: sample 1 of group 5" in error


def test_a_server_that_is_not_there_is_named() -> None:
    address = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(RolloutError, match=r"no connection .*rollout\.servers") as e:
        with_client(address, _generate)
    assert str(e.value).startswith(address)


def test_silence_counts_from_the_last_token_of_any_request_and_not_while_paused() -> None:
    async def watch(client: SglangClient) -> None:
        assert client.silence_s == 0.0
        tasks = [asyncio.create_task(_generate(client)) for _ in range(2)]
        while client.silence_s < 0.5:
            await asyncio.sleep(0.05)
        await client.pause("retract")
        assert client.silence_s == 0.0
        await client.resume()
        assert client.silence_s < 0.5
        client.give_up("the test ends")
        for task in tasks:
            with pytest.raises(RolloutError, match="the test ends"):
                await task
        assert client.silence_s == 0.0

    with FakeSglang(stalls={3: 1}) as fake:
        with_client(fake.address, watch)


@pytest.mark.parametrize("value", [None, float("nan"), float("-inf")])
def test_an_unusable_logprob_names_server_request_and_position(value: float | None) -> None:
    rows = [[-1.0, 103, None], [-1.0, 104, None], [value, 105, None], [-1.0, 106, None]]
    with FakeSglang(changes={"output_token_logprobs": rows}, is_incremental=False) as fake:
        error = _error(fake)
    assert error.startswith(f"{fake.address}: unusable answer (sample 1 of group 5): log-prob")
    assert "at response token 2 (id 105)" in error


def test_logprobs_of_other_tokens_are_refused() -> None:
    rows = [[-1.0, token_id, None] for token_id in (103, 104, 104, 106)]
    with FakeSglang(changes={"output_token_logprobs": rows}, is_incremental=False) as fake:
        assert "do not belong to its 3 tokens" in _error(fake)


def test_a_repeated_request_id_that_is_answered_without_logprobs_is_refused() -> None:
    with FakeSglang(changes={"output_token_logprobs": []}) as fake:
        assert "log-probs of 0 tokens do not belong to its 3 tokens" in _error(fake)


def test_a_response_that_the_server_cut_off_is_refused() -> None:
    with FakeSglang(stop_at=5, changes={"finish_reason": {"type": "length"}}) as fake:
        error = _error(fake)
    assert "cut off after 3 of 4 tokens" in error
    assert "rollout.server.max_total_tokens" in error


def test_a_refused_key_names_the_variable_to_set() -> None:
    with FakeSglang(api_key="right", admin_api_key="admin") as fake:
        with pytest.raises(RolloutError, match="set BAPO_MEGATRON_API_KEY to the server's key"):
            with_client(fake.address, _generate, ApiKeys("wrong", "admin"))
        completion = with_client(fake.address, _generate, ApiKeys("right", "admin"))
        assert len(completion.token_ids) == 4


def test_keys_do_not_show_up_when_they_are_printed() -> None:
    assert "secret" not in repr(ApiKeys("secret-1", "secret-2"))


def test_a_refused_admin_key_names_its_variable_and_opens_control_calls_only() -> None:
    async def pause(client: SglangClient) -> None:
        await client.pause("retract")

    with FakeSglang(api_key="one", admin_api_key="two") as fake:
        with pytest.raises(RolloutError, match="set BAPO_MEGATRON_ADMIN_API_KEY to the server's"):
            with_client(fake.address, pause, ApiKeys("one", "one"))
        with_client(fake.address, pause, ApiKeys("one", "two"))
        assert fake.pause_mode == "retract"
        fake.pause_mode = None
        assert len(with_client(fake.address, _generate, ApiKeys("one", "two")).token_ids) == 4


def test_an_older_sglang_is_refused_by_its_version() -> None:
    with FakeSglang(sglang_version="0.5.22.post1") as fake:
        assert "runs SGLang 0.5.22.post1, needs at least 0.5.23; update it" in _error(fake)


@pytest.mark.parametrize("version", ["0.5.23.post1", "0.10.0", "1.0", "main"])
def test_a_later_sglang_is_admitted(version: str) -> None:
    with FakeSglang(sglang_version=version) as fake:
        assert len(with_client(fake.address, _generate).token_ids) == 4


def test_an_answer_of_another_program_is_refused() -> None:
    class Other(FakeSglang):
        def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
            return {"hello": "world"}

    with Other() as fake:
        assert "unusable answer (/server_info): KeyError: 'version'" in _error(fake)


def test_a_control_call_without_an_answer_finds_the_server_gone_and_nonsense_is_refused() -> None:
    class Odd(FakeSglang):
        def generate(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
            yield {"meta_info": {}}

    async def use(client: SglangClient) -> None:
        assert await client.version(10.0) == "0"
        with pytest.raises(ServerError, match=r"unusable answer \(probe of its log-probs\)"):
            await client.score([1, 2], 10.0)
        with pytest.raises(ServerError, match=r"unusable answer \(probe of the temperature"):
            await client.check(0.5, [[1, 2]])
        fake.is_hanging = True
        with pytest.raises(ServerGoneError, match=r"no answer within 0\.5 s"):
            await client.version(0.5)
        fake.crash()
        with pytest.raises(ServerGoneError, match="no connection"):
            await client.version(0.5)

    with Odd() as fake:
        with_client(fake.address, use)


def test_a_server_with_ranks_that_buckets_do_not_reach_takes_directories_only() -> None:
    with FakeWeightServer(pipeline_ranks=2) as fake:
        capabilities = with_client(fake.address, lambda client: client.capabilities())
    assert (capabilities.num_ranks, capabilities.cache_tokens) == (2, 1 << 20)
    assert capabilities.methods == {"disk"}
    assert capabilities.remedy == "start it with --pp-size 1 and --dp-size 1"


def test_a_server_that_a_killed_trainer_left_paused_goes_on_when_it_is_checked() -> None:
    with FakeSglang() as fake:
        fake.pause_mode = "retract"
        with_client(fake.address, lambda client: client.check(1.0))
        assert fake.pause_mode is None
