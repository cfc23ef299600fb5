"""Random models with the real vocabulary, batches to train on, and what training them shows.

Batches are npz files, so that neither pyarrow nor transformers is needed. A random model is nearly
uniform over its vocabulary, so −log V ± 0.1 is a plausible log-prob of any token.
"""

import argparse
import gc
import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from bapo_megatron.config.schema import RunConfig
from bapo_megatron.config.scorers import TEACHER_KEY
from bapo_megatron.policy import cpu_compat
from bapo_megatron.policy.experts import GroupedExperts
from bapo_megatron.policy.hf_config import read_hf_config_file
from bapo_megatron.policy.layer_spec import HAVE_TE, uses_transformer_engine
from bapo_megatron.policy.megatron_setup import DTYPES, seed_everything
from bapo_megatron.policy.model import Model
from bapo_megatron.policy.train_state import TrainState
from bapo_megatron.policy.weight_table import hf_shapes, weight_table
from bapo_megatron.runtime.distributed import init_distributed, shutdown_distributed
from bapo_megatron.runtime.gpus import recognize_gpu
from bapo_megatron.tools.planning.plan import PlanOptions, make_plan
from bapo_megatron.tools.planning.scenario import LayerKind
from bapo_megatron.trainer.scorers import frozen_scorers
from bapo_megatron.trainer.split import split_shape
from bapo_megatron.trainer.step import BatchTrainer
from bapo_megatron.types import Group, PromptTokens, RolloutBatch
from tests.benchmarks.samples import make_sample
from tests.gpu.acceptance import Check, SkipPartError
from tests.gpu.loss_clock import LossClock
from tests.gpu.ranks import require_nccl, train_in_ranks
from tests.gpu.step_profile import StepProfile

_QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
}
_EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "norm_topk_prob": True,
}
_HYBRID = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "linear_conv_kernel_dim": 4,
    "tie_word_embeddings": True,
}


def _sizes(
    hidden: int, intermediate: int, layers: int, heads: int, vocab: int, **more: int
) -> dict[str, int]:
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    sizes = dict(zip(names, (hidden, intermediate, layers, heads), strict=True))
    return sizes | {"vocab_size": vocab} | more


def _expert_sizes(heads: int, head_dim: int, num: int, per_token: int, size: int) -> dict[str, int]:
    names = ("num_key_value_heads", "head_dim", "num_experts", "num_experts_per_tok")
    sizes = dict(zip(names, (heads, head_dim, num, per_token), strict=True))
    return sizes | {"moe_intermediate_size": size}


def _hybrid_sizes(heads: int, head_dim: int, delta_heads: int, delta_dim: int) -> dict[str, int]:
    sizes = {"num_key_value_heads": heads, "head_dim": head_dim}
    for kind in ("key", "value"):
        sizes[f"linear_num_{kind}_heads"] = delta_heads
        sizes[f"linear_{kind}_head_dim"] = delta_dim
    return sizes


MODELS: dict[str, dict[str, Any]] = {
    "tiny": _QWEN2 | _sizes(64, 128, 2, 4, 320),
    "0.5B": _QWEN2 | _sizes(896, 4864, 24, 14, 151936),
    "1.5B": _QWEN2 | _sizes(1536, 8960, 28, 12, 151936),
    "thin": _QWEN2
    | _sizes(5120, 27648, 4, 40, 152064)
    | {"num_key_value_heads": 8, "tie_word_embeddings": False},
    "tiny experts": _EXPERTS | _sizes(64, 128, 2, 4, 320, **_expert_sizes(2, 16, 8, 2, 32)),
    "0.8B experts": _EXPERTS
    | _sizes(1024, 3072, 8, 16, 151936, **_expert_sizes(4, 128, 32, 8, 512)),
    "tiny hybrid": _HYBRID | _sizes(64, 128, 4, 4, 320, **_hybrid_sizes(2, 16, 2, 16)),
    "0.5B hybrid": _HYBRID | _sizes(1024, 3584, 12, 8, 248320, **_hybrid_sizes(2, 256, 16, 128)),
}
"""What distinguishes each model's config.json: Qwen2.5's (thin: the 32B's), Qwen3's with fewer
experts, Qwen3.5's."""
BATCHES = {True: (2, 4, 24), False: (8, 8, 2048)}
"""By whether the model is tiny: groups, responses of each, tokens of the longest response."""
_TRAINING = ("forward-only", "forward + backward", "optimizer")
"""Phases of a plan."""
_STD = 0.02
_SPREAD = 0.1


Sections = dict[str, dict[str, Any]]
_CHUNKED: Sections = {"ops": {"logits_chunk_tokens": 1024}}
_RECOMPUTED: Sections = {"algorithm": {"behaviour": "recomputed"}}
_FULL: Sections = {"megatron": {"recompute": "full"}}
_ADAPTERS: Sections = {"model": {"lora": {"rank": 16}}}
_DENSE: dict[str, Sections] = {
    "plain": {},
    "chunked logits": _CHUNKED,
    "recomputed behaviour": _RECOMPUTED,
    "full recompute": _FULL,
    "adapters": _ADAPTERS,
    "reference": {"algorithm": {"kl": {"coefficient": 0.1}}},
    "teacher": _CHUNKED
    | {"algorithm": {"distillation": {"coefficient": 1.0, "loss": "reverse_kl"}}},
    "optimizer offload": {"megatron": {"optimizer_offload_share": 0.5}},
}
VARIANTS: dict[str, dict[str, Sections]] = {
    "tiny": _DENSE,
    "0.5B": _DENSE,
    "1.5B": {name: _DENSE[name] for name in ("plain", "full recompute", "optimizer offload")},
    "experts": {
        "plain": {},
        "recomputed behaviour": _RECOMPUTED,
        "replayed routes": {
            "algorithm": {"behaviour": "recomputed", "router_replay": "behaviour"},
            "megatron": {"recompute": "full"},
        },
        "adapters": _ADAPTERS,
    },
    "hybrid": {"plain": {}, "full recompute": _FULL, "adapters": _ADAPTERS},
}
"""Ways to train each model, by the last word of its name. Teacher and reference are the policy."""
_SAME_UPDATE = {
    **dict.fromkeys(("chunked logits", "full recompute", "optimizer offload"), "plain"),
    **dict.fromkeys(("reference", "teacher"), "plain"),
    "replayed routes": "recomputed behaviour",
}
"""Variants whose first update has the gradient of another one's."""
_FLOAT32: Sections = {"model": {"dtype": "float32"}}
LAYOUTS: dict[str, dict[str, dict[str, int]]] = {
    "tiny": {
        "tensor": {"tensor": 2},
        "pipeline": {"pipeline": 2},
        "context": {"context": 2},
        "data": {},
    },
    "tiny experts": {"expert": {"expert": 2}},
}
"""Of two ranks."""


@dataclass(frozen=True)
class Trained:
    """Of rank 0."""

    grad_norms: list[float]
    tokens_per_s: float
    step_s: float
    """Of the second step."""
    flops: float
    """Of its GEMMs and attention, as ``plan`` counts them."""
    planned_s: float
    """``plan``'s estimate for its passes and the optimizer, on an H200."""
    peak_bytes: int
    """0 on the CPU."""
    planned_bytes: float
    loss_stage_share: float
    """Of the second step; with chunked logits it includes the products of the head."""
    is_fused: bool
    """Whether the layers are Transformer Engine's."""


def model(options: argparse.Namespace) -> Iterator[Check]:
    """Write a model and a batch of each size."""
    for size in options.sizes:
        directory = options.dir / size
        write_model_and_batch(directory, size, torch.device(options.device))
        batch = read_batch_arrays(directory / "batch.npz")
        yield Check(f"model and batch ({size})", float(len(batch.groups) > 0))


def train(options: argparse.Namespace) -> Iterator[Check]:
    """Train dense models in every variant for two steps on one batch; the second is timed."""
    yield from _train(_dense(options), options)


def experts(options: argparse.Namespace) -> Iterator[Check]:
    """Train models with experts likewise; then without grouped products, and beside dense ones."""
    sizes = [size for size in options.sizes if size.endswith("experts")]
    yield from _train(sizes, options)
    on_gpu = options.device == "cuda"
    where = "" if on_gpu else " on a CPU"
    for size in sizes:
        grouped = train_variant(options.dir / size, {}, on_gpu=on_gpu)
        if not grouped.is_fused:
            with patch.object(GroupedExperts, "loop_reason", lambda *_: "to compare"):
                looped = train_variant(options.dir / size, {}, on_gpu=on_gpu)
            ratio = grouped.tokens_per_s / looped.tokens_per_s
            yield Check(f"grouped against one by one{where} ({size})", ratio)
            difference = _norm_difference(grouped.grad_norms, looped.grad_norms)
            yield Check(f"gradient norm difference ({size}, one by one)", difference)
        dense = _dense(options)[0]
        plain = train_variant(options.dir / dense, {}, on_gpu=on_gpu)
        ratio = (grouped.flops / grouped.step_s) / (plain.flops / plain.step_s)
        yield Check(f"experts' share of the dense model's FLOP/s{where} ({size}, {dense})", ratio)


def hybrid(options: argparse.Namespace) -> Iterator[Check]:
    """Train hybrids likewise."""
    yield from _train([size for size in options.sizes if size.endswith("hybrid")], options)


def fp8(options: argparse.Namespace) -> Iterator[Check]:
    """Train dense models in FP8 and in bfloat16."""
    if not HAVE_TE or options.device == "cpu":
        raise SkipPartError("Transformer Engine is not installed (docs/launch.md)")
    if torch.cuda.get_device_capability() < (8, 9):
        raise SkipPartError(f"{torch.cuda.get_device_name()} does not support FP8")
    for size in _dense(options):
        plain, quantized = (
            train_variant(options.dir / size, {"megatron": {"fp8": recipe}}, on_gpu=True)
            for recipe in ("none", "hybrid")
        )
        ratio = quantized.tokens_per_s / plain.tokens_per_s
        yield Check(f"fp8 against bfloat16 ({size})", ratio)
        difference = _norm_difference(quantized.grad_norms, plain.grad_norms)
        yield Check(f"gradient norm difference, fp8 ({size})", difference)


def ranks(options: argparse.Namespace) -> Iterator[Check]:
    """Train tiny models in two ranks on one device, in every layout, beside one rank."""
    if options.device == "cuda":
        require_nccl()
    for size, layouts in LAYOUTS.items():
        directory = options.dir / size
        if not (directory / "batch.npz").exists():
            write_model_and_batch(directory, size, torch.device(options.device))
        one = train_in_ranks(directory, _FLOAT32, 1, options.device)
        if options.device == "cuda":
            cpu = train_in_ranks(directory, _FLOAT32, 1, "cpu")
            difference = _norm_difference(one["grad_norms"], cpu["grad_norms"])
            yield Check(f"norm difference of GPU and CPU ({size})", difference)
        for name, parallel in layouts.items():
            two = train_in_ranks(directory, _FLOAT32 | {"parallel": parallel}, 2, options.device)
            difference = _norm_difference(two["grad_norms"], one["grad_norms"])
            yield Check(f"norm difference of two ranks ({size}, {name})", difference)


def thin(options: argparse.Namespace) -> Iterator[Check]:
    """Time and memory of a layer as wide as a 32B's, beside ``plan``."""
    size = "thin" if options.device == "cuda" else "tiny"
    trained = {}
    for layers in (2, 4):
        directory = options.dir / f"{size} {layers}"
        MODELS[directory.name] = MODELS[size] | {"num_hidden_layers": layers}
        write_model_and_batch(directory, directory.name, torch.device(options.device))
        trained[layers] = train_variant(directory, {}, on_gpu=options.device == "cuda")
    two, four = trained[2], trained[4]
    yield Check(f"milliseconds of two layers ({size})", 1e3 * two.step_s)
    yield Check(f"milliseconds of four layers ({size})", 1e3 * four.step_s)
    if options.device == "cuda":  # a plan is for a GPU
        layer_s = (four.step_s - two.step_s) / 2
        planned_s = (four.planned_s - two.planned_s) / 2
        yield Check(f"a layer's time over plan ({size})", layer_s / planned_s)
        layer_bytes = (four.peak_bytes - two.peak_bytes) / 2
        planned_bytes = (four.planned_bytes - two.planned_bytes) / 2
        yield Check(f"a layer's memory over plan ({size})", layer_bytes / planned_bytes)
        yield Check(f"plan over a layer's memory ({size})", planned_bytes / layer_bytes)


def profile(options: argparse.Namespace) -> Iterator[Check]:
    """Where the second step's time goes: shares by kind of kernel, a table and a trace."""
    on_gpu = options.device == "cuda"
    for size in _dense(options):
        recorder = StepProfile(options.dir / f"profile {size}", on_gpu=on_gpu)
        trained = train_variant(options.dir / size, {}, on_gpu=on_gpu)
        train_variant(options.dir / size, {}, on_gpu=on_gpu, watch=recorder.running)
        for kind, share in recorder.shares().items():
            yield Check(f"time share ({size}, {kind})", share)
        gpu = recognize_gpu(torch.cuda.get_device_name()) if on_gpu else None
        if gpu is not None:
            share = trained.flops / trained.step_s / gpu.bfloat16_flops
            layers = "" if trained.is_fused else ", our layers"
            yield Check(f"share of the peak{layers} ({size})", share)


def _dense(options: argparse.Namespace) -> list[str]:
    return [size for size in options.sizes if " " not in size]


def _norm_difference(norms: list[float], others: list[float]) -> float:
    """The largest of all updates, relative."""
    return max(abs(a / b - 1) for a, b in zip(norms, others, strict=True))


def _train(sizes: list[str], options: argparse.Namespace) -> Iterator[Check]:
    on_gpu = options.device == "cuda"
    for size in sizes:
        norms: dict[str, list[float]] = {}
        for name, variant in VARIANTS[size.split()[-1]].items():
            if name == "optimizer offload" and not on_gpu:
                continue
            label = f"({size}, {name})"
            trained = train_variant(options.dir / size, variant, on_gpu=on_gpu)
            norms[name] = trained.grad_norms
            yield Check(f"gradient norm {label}", sum(trained.grad_norms))
            yield Check(f"tokens per second {label}", trained.tokens_per_s)
            if name == "plain":
                where = "" if on_gpu else " on a CPU"
                yield Check(f"loss stage share{where} {label}", trained.loss_stage_share)
            if on_gpu:
                yield Check(f"peak over plan {label}", trained.peak_bytes / trained.planned_bytes)
                yield Check(f"plan over peak {label}", trained.planned_bytes / trained.peak_bytes)
        for name in sorted(norms.keys() & _SAME_UPDATE.keys()):
            # Of the first update, before which all have the same weights.
            difference = abs(norms[name][0] / norms[_SAME_UPDATE[name]][0] - 1)
            yield Check(f"gradient norm difference ({size}, {name})", difference)


def write_model_and_batch(directory: Path, size: str, device: torch.device) -> None:
    """Write what ``train_variant`` reads."""
    write_model(directory, size, device)
    shape, vocab_size = BATCHES[size.startswith("tiny")], MODELS[size]["vocab_size"]
    write_batch_arrays(directory / "batch.npz", vocab_size, *shape)


def write_model(directory: Path, size: str, device: torch.device) -> None:
    """Write config.json and random weights, matrices by a normal distribution."""
    directory.mkdir(parents=True, exist_ok=True)
    shared = {"max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1e6}
    (directory / "config.json").write_text(json.dumps(MODELS[size] | shared))
    hf = read_hf_config_file(directory / "config.json")
    generator = torch.Generator(device).manual_seed(0)
    tensors = {}
    for weight in weight_table(hf):
        for name, dimensions in hf_shapes(weight, hf).items():
            tensor = torch.empty(dimensions, dtype=torch.bfloat16, device=device)
            if tensor.ndim > 1:
                tensor.normal_(std=_STD, generator=generator)
            else:
                tensor.fill_(0.0 if name.endswith("bias") else 1.0)
            tensors[name] = tensor.cpu()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def write_batch_arrays(
    path: Path, vocab_size: int, num_groups: int, group_size: int, max_tokens: int
) -> None:
    """Write random prompts, responses and their log-probs, half of each group right."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(max_tokens // 4, max_tokens + 1, (num_groups, group_size))
    total = int(lengths.sum())
    np.savez(
        path,
        prompts=rng.integers(0, vocab_size, (num_groups, 16), dtype=np.int32),
        lengths=lengths,
        tokens=rng.integers(0, vocab_size, total, dtype=np.int32),
        logprobs=(-math.log(vocab_size) + rng.normal(0, _SPREAD, total)).astype(np.float32),
    )


def read_batch_arrays(path: Path) -> RolloutBatch:
    """Read what ``write_batch_arrays`` wrote, as the batch of step 1."""
    arrays = np.load(path)
    ends = np.cumsum(arrays["lengths"]).reshape(arrays["lengths"].shape)
    groups = []
    for group_id, tokens in enumerate(arrays["prompts"]):
        prompt = PromptTokens(f"random:{group_id}", tokens)
        samples = []
        for index, end in enumerate(ends[group_id].tolist()):
            length = int(arrays["lengths"][group_id, index])
            ids, logprobs = (arrays[name][end - length : end] for name in ("tokens", "logprobs"))
            reward, spans = float(index % 2), [(0, length)]
            samples.append(make_sample(group_id, index, prompt, ids, logprobs, spans, reward))
        groups.append(Group(group_id, tuple(samples)))
    return RolloutBatch(step=1, version=0, groups=tuple(groups))


def train_variant(
    directory: Path,
    variant: Sections,
    *,
    on_gpu: bool,
    watch: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Trained:
    """Train two steps of two updates, in the ranks of the environment; ``watch`` the second."""
    batch = read_batch_arrays(directory / "batch.npz")
    longest = max(len(s.response_token_ids) for s in batch.samples) + 16
    sections: Sections = {
        "algorithm": {"updates_per_batch": 2},
        "train": {"steps": 2, "max_tokens_per_micro_batch": max(4 * longest, 64)},
        "data": {"max_prompt_tokens": 16},
        "rollout": {"max_response_tokens": longest, "dump": False},  # dumps need pyarrow
    }
    sections["model"] = {"path": str(directory), "dtype": "bfloat16" if on_gpu else "float32"}
    for name, values in variant.items():
        sections[name] = {**sections.get(name, {}), **values}
    if teaching := sections["algorithm"].get("distillation"):
        sections["algorithm"]["distillation"] = teaching | {"teacher": {"path": str(directory)}}
    if "ops" in sections and not on_gpu:
        sections["ops"] = {"logits_chunk_tokens": 16}  # several, of a tiny batch
    config = RunConfig.model_validate(
        {"name": "acceptance", "run_dir": str(directory / "run"), **sections}
    )
    if on_gpu:
        gc.collect()  # what the variant before has left
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    else:
        cpu_compat.install()
    groups = init_distributed(config.parallel)
    try:
        seed_everything(0, groups)
        model = Model.build(
            config.model,
            config.parallel,
            config.megatron,
            groups,
            returns_hidden_states=config.ops.logits_chunk_tokens > 0,
        )
        state = TrainState.build(model, config.optimizer, config.megatron, 4)
        trainer = BatchTrainer(
            state=state,
            config=config.algorithm,
            ops=config.ops,
            temperature=1.0,
            staleness=config.rollout.staleness,
            shape=split_shape(model, config.parallel, config.megatron, config.train),
            scorers=frozen_scorers(config, model),
        )
        norms = [result.grad_norm for result in trainer.train(batch)]
        clock = LossClock(groups.device)
        began = time.perf_counter()
        with clock.running(), watch():
            results = trainer.train(batch)
        norms += [result.grad_norm for result in results]
        seconds = time.perf_counter() - began
        lengths = [16 + len(sample.response_token_ids) for sample in batch.samples]
        peak = torch.cuda.max_memory_allocated() if on_gpu else 0
        fused = uses_transformer_engine(groups.device, DTYPES[config.model.dtype])
        kind: LayerKind = "transformer-engine" if fused else "local"
        options = PlanOptions(
            trainer_gpus=dist.get_world_size(),
            gpu="H200",
            layers=kind,
            prompt_tokens=16,
            response_tokens=sum(lengths) // len(lengths) - 16,
        )
        plan = make_plan(config, model.hf, options, {TEACHER_KEY: model.hf})
        return Trained(
            grad_norms=norms,
            tokens_per_s=sum(lengths) / seconds,
            step_s=seconds,
            flops=3 * plan.workload.forward_flops_per_update * plan.workload.updates_per_step,
            planned_s=sum(phase.seconds for phase in plan.phases if phase.name in _TRAINING),
            peak_bytes=peak,
            planned_bytes=plan.worst_stage.total_bytes,
            loss_stage_share=clock.seconds() / seconds,
            is_fused=fused,
        )
    finally:
        shutdown_distributed()
