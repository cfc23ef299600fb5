"""Which servers are refused before anything is started."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from bapo_megatron.config.load import ConfigError, load_config
from bapo_megatron.engine.load import load_kind
from bapo_megatron.engine.sglang.kind import SglangKind

if TYPE_CHECKING:
    from collections.abc import Callable

    Check = Callable[..., None]

COLOCATED = ("rollout.colocated=true", "rollout.weight_sync.method=tensor")


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    """Checks a configuration with overrides, whose model has 6 heads, on a machine with GPUs."""
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    Path("model/config.json").write_text(
        json.dumps({"num_attention_heads": 6, "architectures": ["Qwen3_5"]})
    )
    Path("model/model.safetensors").touch()
    Path("model/tokenizer_config.json").touch()
    for name, text in (("half", "http://a:1\nhttp://a"), ("empty", "\n"), ("bare", "a:1\n")):
        Path(name).write_text(text)
    Path("run.yaml").write_text("{name: x, run_dir: runs/x, model: {path: model}}")

    def run(*overrides: str, num_gpus: int = 0, is_here: bool = True) -> None:
        monkeypatch.setattr("bapo_megatron.engine.sglang.settings.count_gpus", lambda: num_gpus)
        SglangKind().check(load_config(Path("run.yaml"), overrides), is_here=is_here)

    return run


DRAFT = (
    "rollout.server.speculative={method: draft, draft_model: model, draft_tokens: 3}",
    "rollout.server.max_running_requests=64",
)
MTP = ("rollout.server.speculative.method=mtp", "rollout.server.max_running_requests=64")
FP8 = ("rollout.server.quantization=fp8", "algorithm.behaviour=recomputed")
CORRECTED = "algorithm.correction.kind=token"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.server.tensor=4"], r"rollout\.server\.tensor: .*num_attention_heads = 6, got 4"),
        *(
            ([f"rollout.servers=['{address}']"], rf"rollout\.servers: .*'{re.escape(address)}'")
            for address in (
                *("localhost:30000", "http://a b", "http://a:0", "http://a:99999"),
                *("http://a:1/?b=c", "http://:1"),
            )
        ),
        (["rollout.servers=[http://a:1, http://a:1/]"], r"rollout\.servers: .*'http://a:1' 2 "),
        (["rollout.servers=[http://user:password@a:1]"], r"rollout\.servers: .*'@'.*_API_KEY"),
        (
            ["rollout.servers=[http://a:1, http://a:2]", "rollout.min_servers=3"],
            r"rollout\.min_servers: must be at most the 2 servers of the run, got 3",
        ),
        (["rollout.servers_file=none"], r"rollout\.servers_file: .*No such file"),
        (["rollout.servers_file=half"], r"rollout\.servers_file: .*got 'http://a:1.nhttp://a'"),
        (["rollout.servers_file=empty"], r"rollout\.servers_file: .*got '.n'"),
        (["rollout.servers_file=bare"], r"rollout\.servers_file: .*got 'a:1'"),
        (
            ["rollout.server.extra_args=[--api-key, s3cret]"],
            r"rollout\.server\.extra_args: .*got --api-key: .* BAPO_MEGATRON_API_KEY ",
        ),
        (
            ["rollout.server.extra_args=[--admin-api-key=s3cret]"],
            r"rollout\.server\.extra_args: .*got --admin-api-key: .*BAPO_MEGATRON_ADMIN_API_KEY ",
        ),
        (
            ["rollout.health.stuck_timeout_s=300"],
            r"rollout\.health\.patience_s: .* = 900, .* got 900",
        ),
        (
            ["rollout.server.count=3", "rollout.server.port=65534"],
            r"rollout\.server\.port: .*65535, got 65534",
        ),
        (
            ["rollout.server.count=5", "rollout.server.tensor=2"],
            r"rollout\.server\.count: .*8 visible GPUs, got 0 \+ 5 × 2",
        ),
        (
            ["rollout.server.count=4", "rollout.server.first_gpu=5"],
            r"rollout\.server\.count: .*8 visible GPUs, got 5 \+ 4 × 1",
        ),
        (
            ["rollout.colocated=true", "rollout.server.first_gpu=4"],
            r"rollout\.server\.first_gpu: must be 0 .*got 4",
        ),
        (
            ["rollout.colocated=true", "rollout.weight_sync.method=broadcast"],
            r"rollout\.weight_sync\.method: must be tensor or disk .* got broadcast by auto",
        ),
        (FP8, r"algorithm\.correction\.kind: must not be none .*: fp8"),
        ([*FP8, CORRECTED], r"rollout\.server\.quantization: needs .* got \['Qwen3_5"),
        (MTP[:1], r"rollout\.server\.max_running_requests: must be set .*mtp, got null.* 48"),
        (
            [*MTP, "algorithm.router_replay=rollout"],
            r"algorithm\.router_replay: must not be rollout .*mtp",
        ),
        ([*DRAFT, *COLOCATED], r"rollout\.colocated: must be false with .*draft, got true"),
        (
            [*DRAFT, "rollout.weight_sync.method=disk"],
            r"rollout\.weight_sync\.method: must be broadcast or tensor .*draft, got disk",
        ),
        (
            [DRAFT[0].replace("model,", "none,"), DRAFT[1]],
            r"rollout\.server\.speculative\.draft_model: no such directory",
        ),
        (MTP, r"rollout\.server\.speculative\.method: mtp needs layers"),
        (
            ["rollout.server.extra_args=[--speculative-algorithm=NGRAM]"],
            r"rollout\.server\.extra_args: .*set rollout\.server\.speculative",
        ),
        (
            ["rollout.server.extra_args=[--quantization, fp8]"],
            r"rollout\.server\.extra_args: .*set rollout\.server\.quantization",
        ),
    ],
)
def test_servers_that_cannot_be_used_or_spoil_log_probs_or_weight_syncs_are_refused(
    check: Check, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{message}") as caught:
        check(*overrides, num_gpus=8)
    assert not any(secret in str(caught.value) for secret in ("s3cret", "password@"))


def test_acceleration_passes_where_it_is_exact_or_corrected(check: Check) -> None:
    check(*DRAFT, num_gpus=8)
    with pytest.raises(ConfigError, match=r"without a GPU, got .* likeliest token"):
        check(*DRAFT)
    fields = {"num_attention_heads": 6, "mtp_num_hidden_layers": 1}
    architecture = {"architectures": ["Qwen3ForCausalLM"]}
    Path("model/config.json").write_text(json.dumps(fields | architecture))
    check(*MTP, num_gpus=8)
    check(*FP8, CORRECTED, num_gpus=8)
    with pytest.raises(ConfigError, match=r"without a GPU, got none and fp8"):
        check(*FP8, CORRECTED)


def test_a_draft_model_goes_with_its_method(check: Check) -> None:
    for overrides in ("{method: draft}", "{method: mtp, draft_model: model}"):
        with pytest.raises(ConfigError, match=r"draft_model' must be set with method: draft, and"):
            check(f"rollout.server.speculative={overrides}")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["rollout.weight_sync.method=broadcast"],
            r"method: must be tensor or disk .*broadcast: S",
        ),
        (
            ["rollout.weight_sync.in_flight=retract"],
            r"in_flight: must be abort .*retract: a paused",
        ),
        (["rollout.colocated=true"], r"colocated: must be false .*got true: .* loses the base"),
        (
            ["model.lora.targets=[q_proj,o_proj]"],
            r"all or none of k_proj, q_proj, v_proj .*o_proj, q",
        ),
        (["model.lora.targets=[down_proj,up_proj]"], r"all or none of gate_proj, up_proj "),
        (["model.lora.targets=[q_proj,k_proj,v_proj,down_proj]"], ""),
        (
            ["model.path=other"],
            r"model\.path: model_type .*llama, mistral, qwen2, qwen3 .*got gpt_o",
        ),
        ([], ""),
    ],
)
def test_adapters_go_only_to_servers_that_compute_them_as_merged_weights(
    check: Check, overrides: list[str], message: str
) -> None:
    fields = {"num_attention_heads": 6, "architectures": ["Qwen2ForCausalLM"]}
    shutil.copytree("model", "other")
    for directory, model_type in (("model", "qwen2"), ("other", "gpt_oss")):
        text = json.dumps(fields | {"model_type": model_type})
        Path(directory, "config.json").write_text(text)
    sync = ["rollout.weight_sync.adapters=adapter", "rollout.weight_sync.method=tensor"]
    refused = pytest.raises(ConfigError, match=message) if message else contextlib.nullcontext()
    with refused:
        check("model.lora.rank=8", *sync, *overrides, num_gpus=8)


def test_servers_that_fit_this_machine_pass(check: Check) -> None:
    with pytest.raises(ConfigError, match=r"^rollout\.colocated: .*got 0 visible GPUs"):
        check("rollout.colocated=true")
    port = "rollout.server.port=65532"
    check("rollout.server.count=4", "rollout.server.tensor=2", port, num_gpus=8)
    check(*COLOCATED, num_gpus=8)
    broadcast = ["rollout.weight_sync.method=broadcast", "rollout.weight_sync.backend=gloo"]
    check("rollout.colocated=true", *broadcast, num_gpus=8)
    check("rollout.server.count=4")  # SGLang's CPU engine


def test_servers_of_others_need_not_fit_this_machine(check: Check) -> None:
    check("rollout.servers=[http://a:1, http://a:2]", "rollout.server.tensor=4")
    check("rollout.servers=[http://a:1]", "rollout.server.count=9", num_gpus=8)
    check("rollout.servers=[http://a:1]", "rollout.health.patience_s=1")  # nor its start
    check("rollout.server.count=8", *COLOCATED, is_here=False)


def test_an_engine_is_named_by_its_short_name_or_by_its_class() -> None:
    assert type(load_kind("sglang")) is SglangKind
    assert type(load_kind("bapo_megatron.engine.sglang.kind:SglangKind")) is SglangKind
    with pytest.raises(ConfigError, match=r"^rollout\.engine: .*not_there"):
        load_kind("not_there:X")


def test_a_window_that_sglang_ignores_must_hold_the_longest_sequence(check: Check) -> None:
    def write(**fields: Any) -> None:
        whole = {"model_type": "mistral", "num_attention_heads": 8, **fields}
        Path("model/config.json").write_text(json.dumps(whole))

    prompt, fitting, longer = (
        f"{key}={tokens}"
        for key, tokens in (
            ("data.max_prompt_tokens", 1024),
            ("rollout.max_response_tokens", 3072),
            ("rollout.max_response_tokens", 3073),
        )
    )
    write()
    check(prompt, fitting)
    with pytest.raises(ConfigError, match=r"at most the window 4096 of a mistral, got 4097"):
        check(prompt, longer)
    write(sliding_window=None)
    check(prompt, longer)
