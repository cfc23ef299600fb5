"""Log-probs of a model whose base is quantized, as under adapters, against the engine's bfloat16.

    python -m tests.benchmarks.quantized_base MODEL PROMPTS.jsonl

Responses are sampled from bfloat16 weights and scored with the linears of the layers rounded. All
of it computes in float32, so that the differences are those of the weights alone.

Shape legend: B = responses, N = tokens of the longest sequence, T = tokens of a response.
"""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

NUM_PROMPTS, MAX_TOKENS = 24, 48
NF4 = torch.tensor(
    (
        *(-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0),
        *(0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0),
    )
)
"""QLoRA's levels (arXiv 2305.14314, appendix E)."""
_E2M1 = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
FP4 = torch.cat((-_E2M1.flip(0)[:-1], _E2M1))


def by_levels(values: Tensor, levels: Tensor) -> Tensor:
    """Round each value to the nearest of ascending levels."""
    return levels[torch.bucketize(values, (levels[1:] + levels[:-1]) / 2)]


def in_blocks(weight: Tensor, size: int, round_block: Callable[[Tensor], Tensor]) -> Tensor:
    """Round blocks of successive inputs, [blocks, size]; the last block of all may be padded."""
    flat = torch.nn.functional.pad(weight.flatten(), (0, -weight.numel() % size))
    return round_block(flat.view(-1, size)).flatten()[: weight.numel()].view_as(weight)


def int8(block: Tensor) -> Tensor:
    scale = block.abs().amax(dim=1, keepdim=True).clamp(min=1e-30) / 127
    return (block / scale).round() * scale


def nf4(block: Tensor) -> Tensor:
    scale = block.abs().amax(dim=1, keepdim=True).clamp(min=1e-30)
    return by_levels(block / scale, NF4) * scale


def nvfp4(block: Tensor) -> Tensor:
    """e2m1 with scales in e4m3, themselves relative to the largest of the tensor."""
    scale = block.abs().amax(dim=1, keepdim=True) / 6
    whole = scale.amax() / 448
    scale = (scale / whole).to(torch.float8_e4m3fn).float().clamp(min=2**-9) * whole
    return by_levels((block / scale).clamp(-6, 6), FP4) * scale


def fp8(weight: Tensor) -> Tensor:
    """e4m3 in tiles of 128 × 128."""
    rounded = torch.empty_like(weight)
    for rows, target in zip(weight.split(128), rounded.split(128), strict=True):
        for tile, place in zip(rows.split(128, dim=1), target.split(128, dim=1), strict=True):
            scale = tile.abs().amax() / 448
            place.copy_((tile / scale).to(torch.float8_e4m3fn).float() * scale)
    return rounded


FORMATS: dict[str, Callable[[Tensor], Tensor]] = {
    "INT8, blocks of 64": lambda weight: in_blocks(weight, 64, int8),
    "NF4, blocks of 64": lambda weight: in_blocks(weight, 64, nf4),
    "FP8 e4m3, tiles of 128 × 128": fp8,
    "NVFP4, blocks of 16": lambda weight: in_blocks(weight, 16, nvfp4),
}


@dataclass(frozen=True)
class Responses:
    """Sequences, padded on the left up to their responses and on the right after them."""

    ids_BN: Tensor
    attended_BN: Tensor
    start: int
    """Where all responses begin."""
    lengths: list[int]


@torch.no_grad()
def sample(model: torch.nn.Module, tokenizer: Any, prompts: Path) -> Responses:
    """Sample a response to each of the first prompts, without their example."""
    torch.manual_seed(0)
    lines = prompts.read_text().splitlines()[:NUM_PROMPTS]
    texts = [
        tokenizer.apply_chat_template(
            json.loads(line)["prompt"][-1:], add_generation_prompt=True, tokenize=False
        )
        for line in lines
    ]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    generate: Any = model.generate
    ids_BN = generate(
        **inputs, max_new_tokens=MAX_TOKENS, do_sample=True, temperature=1.0, top_k=0, top_p=1.0
    )
    start = inputs["input_ids"].shape[1]
    is_end = ids_BN[:, start:] == tokenizer.eos_token_id
    whole = ids_BN.shape[1] - start
    lengths = [int(row.int().argmax()) + 1 if row.any() else whole for row in is_end]
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, whole), value=1)
    return Responses(ids_BN, mask, start, lengths)


@torch.no_grad()
def logprobs(model: torch.nn.Module, responses: Responses) -> list[Tensor]:
    """Return log-probs of each response, [T] float64."""
    start, scored = responses.start, []
    for number, length in enumerate(responses.lengths):
        ids = responses.ids_BN[number, : start + length]
        ids = ids[responses.attended_BN[number, : start + length].bool()]
        logits = model(ids[None], logits_to_keep=length + 1).logits[0, :-1].double()
        scored.append(logits.log_softmax(-1).gather(1, ids[-length:, None])[:, 0])
    return scored


def rows(directory: Path, prompts: Path) -> Iterator[str]:
    """Yield the table: relative error of the weights, then what the log-probs make of it."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).float()
    tokenizer = AutoTokenizer.from_pretrained(directory, padding_side="left")
    responses = sample(model, tokenizer, prompts)
    exact = logprobs(model, responses)
    yield f"{len(exact)} responses, {sum(map(len, exact))} tokens"
    head = model.get_output_embeddings()
    linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    weights = [linear.weight.detach().clone() for linear in linears]
    square = sum(float(weight.square().sum()) for weight in weights)
    for name, rounded in FORMATS.items():
        error = 0.0
        for linear, weight in zip(linears, weights, strict=True):
            linear.weight.data.copy_(rounded(weight))
            error += float((linear.weight.detach() - weight).square().sum())
        yield _row(name, (error / square) ** 0.5, logprobs(model, responses), exact)


def _row(name: str, error: float, scored: list[Tensor], exact: list[Tensor]) -> str:
    parts = [new - old for new, old in zip(scored, exact, strict=True)]
    delta_T, sum_B = torch.cat(parts), torch.stack([part.sum() for part in parts])
    ratio_T, weight_B = delta_T.exp(), sum_B.exp()
    outside = ((ratio_T < 0.8) | (ratio_T > 1.2)).double().mean()
    effective = weight_B.sum().square() / weight_B.square().sum() / len(weight_B)
    cells = (
        *(name, f"{error:.2%}", f"{delta_T.abs().mean():.4f}", f"{delta_T.abs().max():.2f}"),
        *(f"{(ratio_T - 1 - delta_T).mean():.5f}", f"{outside:.1%}", f"{effective:.0%}"),
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    for line in rows(*map(Path, sys.argv[1:])):
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
