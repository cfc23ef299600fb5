"""The loss stage of a micro-batch: ours against torch, and chunked against all logits at once.

    python -m tests.benchmarks.bench_loss_stage --out docs/benchmarks/loss_stage_cpu_202611

The first table begins at the logits: log-probs, entropy, search, loss, gradient of the logits. The
second begins at the hidden states, so it includes the products with the language-model head:
forward, the gradient of the hidden states and that of the head, in float32 as Megatron keeps it.
Shape legend: T = tokens, V = columns, H = hidden size.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from bapo_megatron.config.schema import BapoConfig
from bapo_megatron.ops.backend import select_kernels
from bapo_megatron.ops.chunked import OutputHead, chunked_policy_loss
from bapo_megatron.ops.contributions import ContributionTable, accumulate, search_bounds
from bapo_megatron.ops.logprob import vocab_parallel_logprobs
from bapo_megatron.ops.policy_loss import clipped_policy_loss
from tests.benchmarks.bench_logprob import by_log_softmax, by_logsumexp
from tests.benchmarks.bench_search import recipe_loop
from tests.benchmarks.collective_ranks import count_collectives
from tests.benchmarks.harness import Contender, Section, arguments, interleave, publish
from tests.benchmarks.stage import Stage, make_stage
from tests.distributed_launch import run_ranks
from tests.ops.kernel_calls import path_of

CHUNKS = (256, 512, 1024, 2048)


def from_logits(stage: Stage) -> list[Contender]:
    """Ours, and the same stage in torch with the released recipe's search."""
    config = BapoConfig.model_validate({})
    kernels = select_kernels("auto", stage.device)
    path = path_of(ContributionTable(config, device=stage.device, kernels=kernels).grid)
    tokens = (stage.behaviour_T, stage.advantage_T, stage.mask_T, stage.weight_T)
    behaviour_T, advantage_T, mask_T, weight_T = tokens

    def ours() -> object:
        leaf = stage.work_CV.detach().requires_grad_()
        logprob_T, entropy_T = vocab_parallel_logprobs(
            leaf.view_as(leaf),
            stage.target_C,
            vocab_size=stage.num_columns,
            kernels=kernels,
            overwrite_logits=True,
        )
        table = ContributionTable(config, device=stage.device, kernels=kernels)
        accumulate(table, logprob_T, behaviour_T, advantage_T, mask_T)
        loss, _ = clipped_policy_loss(
            logprob_T,
            behaviour_logprob_T=behaviour_T,
            advantage_T=advantage_T,
            mask_T=mask_T,
            loss_weight_T=weight_T,
            bounds=search_bounds(table, config),
            dual_clip=None,
            entropy_T=entropy_T,
            kernels=kernels,
        )
        return torch.autograd.grad(loss, leaf)

    def in_torch(function: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> object:
        leaf = stage.work_CV.detach().requires_grad_()
        logprob_T, _ = function(leaf, stage.target_C)
        current = (logprob_T.detach(), behaviour_T, advantage_T, mask_T)
        low, high = recipe_loop(current, path, 2 / 3)  # P/N for a share of 0.4
        ratio_T = (logprob_T - behaviour_T).clamp(-20.0, 20.0).exp()
        surrogate_T = torch.minimum(ratio_T * advantage_T, ratio_T.clamp(low, high) * advantage_T)
        return torch.autograd.grad(-(weight_T * surrogate_T).sum(), leaf)

    compiled = {
        "torch.compile, log_softmax": torch.compile(by_log_softmax, dynamic=False),
        "torch.compile, logsumexp": torch.compile(by_logsumexp, dynamic=False),
    }
    contenders = [Contender("ours", ours, stage.restore)]
    for name, function in {**compiled, "eager torch": by_log_softmax}.items():
        contenders.append(
            Contender(name, lambda function=function: in_torch(function), stage.restore)
        )
    return contenders


def from_hidden_states(stage: Stage, hidden_size: int) -> list[Contender]:
    """All logits at once, then chunks of several sizes, with the products of the head."""
    generator = torch.Generator().manual_seed(1)
    num_tokens, num_columns = stage.logits_CV.shape
    kernels = select_kernels("auto", stage.device)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(stage.device, torch.bfloat16)

    hidden_TH = normal(num_tokens, hidden_size).requires_grad_()
    weight_VH = torch.nn.Parameter(normal(num_columns, hidden_size) / 30)
    main_grad_VH = torch.zeros(weight_VH.shape, device=stage.device)
    rows_T = torch.arange(num_tokens, device=stage.device)

    def whole() -> object:
        logits_TV = hidden_TH @ weight_VH.t()
        logprob_T, entropy_T = vocab_parallel_logprobs(
            logits_TV,
            stage.target_C,
            vocab_size=num_columns,
            kernels=kernels,
            overwrite_logits=True,
        )
        loss, _ = clipped_policy_loss(
            logprob_T,
            behaviour_logprob_T=stage.behaviour_T,
            advantage_T=stage.advantage_T,
            mask_T=stage.mask_T,
            loss_weight_T=stage.weight_T,
            bounds=stage.bounds,
            dual_clip=None,
            entropy_T=entropy_T,
            kernels=kernels,
        )
        grad_hidden_TH, grad_weight_VH = torch.autograd.grad(loss, (hidden_TH, weight_VH))
        main_grad_VH.add_(grad_weight_VH)
        return grad_hidden_TH

    def chunked(chunk_tokens: int) -> object:
        weight_VH.main_grad = main_grad_VH  # type: ignore[attr-defined]
        loss, _, _ = chunked_policy_loss(
            hidden_TH,
            OutputHead(weight_VH),
            stage.target_C,
            rows_T=rows_T,
            vocab_size=num_columns,
            temperature=1.0,
            behaviour_logprob_T=stage.behaviour_T,
            advantage_T=stage.advantage_T,
            mask_T=stage.mask_T,
            loss_weight_T=stage.weight_T,
            bounds=stage.bounds,
            dual_clip=None,
            entropy_coefficient=0.0,
            chunk_tokens=chunk_tokens,
            kernels=kernels,
        )
        return torch.autograd.grad(loss, hidden_TH)

    sizes = [size for size in CHUNKS if size < num_tokens]
    return [
        Contender("all at once", whole),
        *(
            Contender(f"chunks of {size}", lambda size=size: chunked(size))  # type: ignore[misc]
            for size in sizes
        ),
    ]


def measure(options: argparse.Namespace, device: torch.device) -> list[Section]:
    """Both tables."""
    stage = make_stage(options.tokens, options.columns, options.tokens, device)
    logits = interleave(from_logits(stage), device, rounds=options.rounds)
    hidden = interleave(
        from_hidden_states(stage, options.hidden), device, rounds=options.hidden_rounds
    )
    plain, chunked = run_ranks(count_collectives, 2)[0]
    shape = f"{options.tokens} × {options.columns}, bfloat16"
    return [
        Section(
            f"From logits, {shape}",
            logits,
            "ours",
            remarks=[
                "Collectives of a micro-batch, counted on 2 tensor-parallel ranks: "
                f"{plain}. The search adds one all-reduce per update."
            ],
        ),
        Section(
            f"From hidden states, {shape}, hidden size {options.hidden}",
            hidden,
            "all at once",
            remarks=[
                "Memory is beyond hidden states, weight and its float32 gradient. The gradient of "
                f"the hidden states is {4 * options.tokens * options.hidden / 1e6:.1f} MB in "
                "float32 and half of it in bfloat16. Collectives of 4 chunks, counted on 2 "
                f"tensor-parallel ranks: {chunked}."
            ],
        ),
    ]


def main() -> None:
    """Run and report."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--columns", type=int, default=19008, help="152,064 over 8 ranks")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--hidden-rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    publish("Loss stage", measure(options, device), options, device)


if __name__ == "__main__":
    main()
