"""The probes of a new server tell temperature conventions and models apart."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest

from bapo_megatron.engine.sglang.convention import check_model, check_temperature_convention
from bapo_megatron.errors import RolloutError
from tests.engine.sglang.servers import with_http
from tests.fakes.fake_sglang import LOGITS_V, FakeSglang, V

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import Any

    from bapo_megatron.engine.sglang.http import SglangHttp

PROMPTS = [[5, 6, 7], [8, 9]]
QWEN = {"architectures": ["Qwen2ForCausalLM"], "vocab_size": 64, "hidden_size": 32}


def _probe(fake: FakeSglang, temperature: float) -> None:
    async def run(http: SglangHttp) -> None:
        await check_temperature_convention(http, temperature, PROMPTS)

    with_http(fake.address, run)


@pytest.mark.parametrize("temperature", [0.6, 0.9, 1.3])
def test_logprobs_of_the_tempered_distribution_pass(temperature: float) -> None:
    with FakeSglang() as fake:
        _probe(fake, temperature)
        assert len(fake.requests) == 4


@pytest.mark.parametrize("temperature", [0.6, 0.9, 1.3])
def test_logprobs_that_ignore_the_temperature_name_the_variable(temperature: float) -> None:
    with (
        FakeSglang(ignores_temperature=True) as fake,
        pytest.raises(RolloutError, match="SGLANG_RETURN_ORIGINAL_LOGPROB=1") as caught,
    ):
        _probe(fake, temperature)
    assert str(caught.value).startswith(f"{fake.address}: its log-probs ignore the temperature")


def test_nothing_is_asked_at_temperature_1() -> None:
    with FakeSglang(ignores_temperature=True) as fake:
        _probe(fake, 1.0)
        assert fake.requests == []


def test_an_indifferent_model_has_the_same_logprobs_under_both_conventions() -> None:
    with FakeSglang(ignores_temperature=True, logits_V=np.zeros(V)) as fake:
        _probe(fake, 0.6)


def test_logprobs_that_follow_no_convention_are_refused() -> None:
    class Doubling(FakeSglang):
        """Its logits double at temperatures other than 1."""

        def generate(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
            is_run = body["sampling_params"]["temperature"] != 1.0
            self.logits_V = LOGITS_V * (2.0 if is_run else 1.0)
            return super().generate(body)

    with Doubling() as fake, pytest.raises(RolloutError, match="belong neither to"):
        _probe(fake, 0.6)


@pytest.mark.parametrize(
    ("reported", "files", "message"),
    [
        (["Qwen2ForCausalLM"], None, ""),
        (None, None, ""),
        (["Qwen2ForCausalLM"], QWEN, ""),
        (["Qwen2ForCausalLM"], {**QWEN, "head_dim": 128}, ""),
        (
            ["LlamaForCausalLM", "Other"],
            None,
            "architectures must be ['Qwen2ForCausalLM'], got ['LlamaForCausalLM', 'Other']",
        ),
        # The directory was overwritten since: what the server reports counts.
        (["LlamaForCausalLM"], QWEN, "must be ['Qwen2ForCausalLM'], got ['LlamaForCausalLM']"),
        (["Qwen2ForCausalLM"], {**QWEN, "vocab_size": 65}, "vocab_size must be 64, got 65"),
        (["Qwen2ForCausalLM"], {**QWEN, "hidden_size": 48}, "hidden_size must be 32, got 48"),
    ],
)
def test_architecture_vocabulary_and_sizes_are_those_of_the_run(
    tmp_path: Path, reported: list[str] | None, files: dict[str, Any] | None, message: str
) -> None:
    own, theirs = tmp_path / "own", tmp_path / "theirs"
    own.mkdir()
    (own / "config.json").write_text(json.dumps(QWEN))
    if files is not None:
        theirs.mkdir()
        (theirs / "config.json").write_text(json.dumps(files))

    async def check(http: SglangHttp) -> str:
        try:
            await check_model(http, str(theirs), own)
        except RolloutError as error:
            return str(error)
        return ""

    with FakeSglang(architectures=reported) as fake:
        found = with_http(fake.address, check)
        if message:
            assert found.startswith(f"{fake.address}: serves another model than model.path: ")
            assert message + f" ('{theirs}'); start it with '{own}', or take it off" in found
        else:
            assert found == ""
