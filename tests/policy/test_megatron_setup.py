"""Settings that are passed to Megatron."""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from bapo_megatron.config.megatron import MegatronConfig
from bapo_megatron.policy.layer_spec import uses_transformer_engine
from bapo_megatron.policy.megatron_import import APEX_PRODUCTS, import_megatron
from bapo_megatron.policy.megatron_setup import _speed_options, memory_options


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({}, {}),
        (
            {"recompute": "selective"},
            {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
        ),
        (
            {"recompute": "full", "recompute_layers": 2},
            {
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 2,
            },
        ),
        ({"fp8": "hybrid", "fp8_recipe": "blockwise"},) * 2,
    ],
)
def test_memory_settings_have_megatrons_names(
    settings: dict[str, Any], options: dict[str, Any]
) -> None:
    config = MegatronConfig.model_validate(settings)
    assert memory_options(config, has_transformer_engine=True) == options
    built = TransformerConfig(num_layers=4, hidden_size=64, num_attention_heads=4, **options)
    assert {name: getattr(built, name) for name in options} == options


def test_fp8_is_refused_without_transformer_engine() -> None:
    with pytest.raises(ValueError, match=r"^megatron\.fp8: e4m3 needs .* Transformer Engine"):
        memory_options(MegatronConfig(fp8="e4m3"), has_transformer_engine=False)


def test_layers_without_a_gpu_or_in_float32_are_ours() -> None:
    assert not uses_transformer_engine(torch.device("cpu"), torch.bfloat16)
    assert not uses_transformer_engine(torch.device("cuda"), torch.float32)


def test_a_transformer_engine_that_megatron_cannot_import_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "transformer_engine")
    monkeypatch.setattr("bapo_megatron.policy.layer_spec.HAVE_TE", False)
    with pytest.raises(ValueError, match=r"^transformer-engine: installed, but Megatron cannot"):
        uses_transformer_engine(torch.device("cuda"), torch.bfloat16)
    monkeypatch.setattr("bapo_megatron.policy.layer_spec.HAVE_TE", True)
    assert uses_transformer_engine(torch.device("cuda"), torch.bfloat16)


@pytest.mark.parametrize("fused", [False, True], ids=["own layers", "Transformer Engine"])
def test_on_a_gpu_layers_add_up_gradients_and_messages_do_not_stop_the_host(fused: bool) -> None:
    on_gpu = _speed_options(torch.device("cuda", 0), fused=fused, interleaved=False)
    assert on_gpu["gradient_accumulation_fusion"]
    assert (on_gpu["batch_p2p_comm"], on_gpu["batch_p2p_sync"]) == (True, False)
    on_cpu = _speed_options(torch.device("cpu"), fused=False, interleaved=False)
    assert not on_cpu["gradient_accumulation_fusion"]


def test_the_module_of_apex_is_stood_in_for_on_a_gpu_where_there_is_no_apex(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, APEX_PRODUCTS, None)  # type: ignore[arg-type] - not there
    import_megatron()
    assert sys.modules[APEX_PRODUCTS] is None
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    import_megatron()
    module = importlib.import_module(APEX_PRODUCTS)
    for dtype in (torch.float32, torch.bfloat16):
        sum_OI = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
        input_NI = torch.tensor([[1.0, 10.0], [2.0, 20.0]], dtype=dtype)
        gradient_NO = torch.tensor([[1.0, 0.0, 2.0], [0.0, 1.0, 1.0]], dtype=dtype)
        module.wgrad_gemm_accum_fp32(input_NI, gradient_NO, sum_OI)
        # Row o: Σ over tokens of gradient[n, o] · input[n], on what was there.
        assert sum_OI.tolist() == [[2.0, 12.0], [5.0, 24.0], [9.0, 46.0]]
    half_OI = torch.ones(1, 2, dtype=torch.bfloat16)
    module.wgrad_gemm_accum_fp16(input_NI, gradient_NO[:, :1].contiguous(), half_OI)
    assert half_OI.tolist() == [[2.0, 11.0]]
    apex = ModuleType(APEX_PRODUCTS)
    apex.__spec__ = module.__spec__
    monkeypatch.setitem(sys.modules, APEX_PRODUCTS, apex)
    import_megatron()
    assert sys.modules[APEX_PRODUCTS] is apex


def test_megatron_does_not_import_w_and_b(tmp_path: Path) -> None:
    """It makes temporary directories, which a killed rank leaves."""
    (tmp_path / "wandb.py").write_text("print('imported')")
    code = (
        "from bapo_megatron.policy.megatron_import import import_megatron as go; go()\n"
        "print('then'); import wandb"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "then\nimported\n"
