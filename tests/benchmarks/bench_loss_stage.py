"""The loss stage of a micro-batch: ours against torch, and chunked against all logits at once.

    python -m tests.benchmarks.bench_loss_stage --out docs/benchmarks/loss_stage_cpu_202611

The first table begins at the logits: log-probs, entropy, search, loss, gradient of the logits. The
second begins at the hidden states, so it includes the products with the language-model head:
forward, the gradient of the hidden states and that of the head, in float32 as Megatron keeps it.
Shape legend: T = tokens, V = columns, H = hidden size.
"""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from bapo_megatron.algorithm.objectives.bapo import Bapo
from bapo_megatron.ops.chunked import OutputHead
from bapo_megatron.runtime.distributed import ProcessGroups
from tests.benchmarks.bench_logprob import by_log_softmax, by_logsumexp
from tests.benchmarks.bench_search import recipe_loop
from tests.benchmarks.harness import (
    Contender,
    Section,
    arguments,
    count_kernels,
    count_operators,
    interleave,
    publish,
)
from tests.benchmarks.stage import Stage, count_collectives, make_losses
from tests.distributed_launch import run_ranks
from tests.fakes.given_tokens import CONTEXT, one_rank
from tests.ops.kernel_calls import path_of

CHUNKS = (256, 512, 1024, 2048)


def from_logits(stage: Stage) -> list[Contender]:
    """Ours with and without its search, and the same in torch with the released recipe's search."""
    objective = stage.losses.objective
    assert isinstance(objective, Bapo)
    path = path_of(objective.search.grid)
    (micro_batch,) = stage.micro_batches
    searching = make_losses(stage.groups, stage.num_columns, scope="micro_batch")
    tokens = stage.tokens()
    behaviour_T, advantage_T, mask_T = stage.behaviour_T, stage.advantage_T, stage.mask_T
    weight_T = micro_batch.loss_weight_T

    def ours() -> object:
        return stage.run_one(searching, micro_batch, None)

    def search() -> object:
        return objective.decide(objective.statistics(tokens))

    def in_torch(function: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> object:
        leaf = stage.work_CV.detach().requires_grad_()
        logprob_T, _ = function(leaf, micro_batch.target_T)
        current = (logprob_T.detach(), behaviour_T, advantage_T, mask_T)
        low, high = recipe_loop(current, path, 2 / 3)  # P/N for a share of 0.4
        ratio_T = (logprob_T - behaviour_T).clamp(-20.0, 20.0).exp()
        surrogate_T = torch.minimum(ratio_T * advantage_T, ratio_T.clamp(low, high) * advantage_T)
        return torch.autograd.grad(-(weight_T * surrogate_T).sum(), leaf)

    compiled = {
        "torch.compile, log_softmax": torch.compile(by_log_softmax, dynamic=False),
        "torch.compile, logsumexp": torch.compile(by_logsumexp, dynamic=False),
    }
    contenders = [
        Contender("ours", ours, stage.restore),
        Contender("ours, bounds known", stage.run, stage.restore),
        Contender("search alone", search),
        Contender("search with its safe tokens and all-reduce", stage.collect),
    ]
    for name, function in {**compiled, "eager torch": by_log_softmax}.items():
        contenders.append(
            Contender(name, lambda function=function: in_torch(function), stage.restore)
        )
    return contenders


def from_hidden_states(stage: Stage, hidden_size: int) -> list[Contender]:
    """All logits at once, then chunks of several sizes, with the products of the head."""
    generator = torch.Generator().manual_seed(1)
    num_tokens, num_columns = stage.logits_CV.shape
    (micro_batch,) = stage.micro_batches

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(stage.device, torch.bfloat16)

    hidden_TH = normal(num_tokens, hidden_size).requires_grad_()
    weight_VH = torch.nn.Parameter(normal(num_columns, hidden_size) / 30)
    main_grad_VH = torch.zeros(weight_VH.shape, device=stage.device)
    weight_VH.main_grad = main_grad_VH  # type: ignore[attr-defined]

    def whole() -> object:
        loss, _ = stage.losses.loss(
            hidden_TH @ weight_VH.t(), micro_batch, decision=stage.decision, context=CONTEXT
        )
        grad_hidden_TH, grad_weight_VH = torch.autograd.grad(loss, (hidden_TH, weight_VH))
        main_grad_VH.add_(grad_weight_VH)
        return grad_hidden_TH

    def chunked(chunk_tokens: int) -> Callable[[], object]:
        losses = make_losses(
            stage.groups, num_columns, head=OutputHead(weight_VH), chunk_tokens=chunk_tokens
        )

        def run() -> object:
            loss, _ = losses.loss(hidden_TH, micro_batch, decision=stage.decision, context=CONTEXT)
            return torch.autograd.grad(loss, hidden_TH)

        return run

    sizes = [size for size in CHUNKS if size < num_tokens]
    return [
        Contender("all at once", whole),
        *(Contender(f"chunks of {size}", chunked(size)) for size in sizes),
    ]


def launches(contenders: list[Contender], device: torch.device) -> str:
    """How many operators each contender dispatches; on a GPU also how many kernels it launches."""
    parts = []
    for contender in contenders:
        text = f"{contender.name}: {count_operators(contender).total()}"
        if device.type == "cuda":
            text += f" ({count_kernels(contender)} kernels)"
        parts.append(text)
    return f"Operators dispatched, without views and allocations: {'; '.join(parts)}."


def measure(options: argparse.Namespace, groups: ProcessGroups) -> list[Section]:
    device = groups.device
    stage = Stage(options.tokens, options.columns, options.tokens, groups)
    by_logits = from_logits(stage)
    logits = interleave(by_logits, device, rounds=options.rounds)
    by_hidden = from_hidden_states(stage, options.hidden)
    hidden = interleave(by_hidden, device, rounds=options.hidden_rounds)
    search, plain, chunked = run_ranks(count_collectives, 2)[0]
    shape = f"{options.tokens} × {options.columns}, bfloat16"
    medians = {timing.name: timing.median_s for timing in logits}
    not_compiled = [c for c in by_logits if not c.name.startswith("torch.compile")]
    return [
        Section(
            f"From logits, {shape}",
            logits,
            "ours",
            remarks=[
                "Ours searches the bounds of its one micro-batch. The search takes "
                f"{medians['search alone'] / medians['ours']:.2%} of the loss stage.",
                f"Collectives of a micro-batch, counted on 2 tensor-parallel ranks: {plain}. The "
                f"search adds, per update of data-parallel ranks: {search}.",
                launches(not_compiled, device),
            ],
        ),
        Section(
            f"From hidden states, {shape}, hidden size {options.hidden}",
            hidden,
            "all at once",
            remarks=[
                "The bounds are known. Memory is beyond hidden states, weight and its float32 "
                "gradient. The gradient of the hidden states is "
                f"{4 * options.tokens * options.hidden / 1e6:.1f} MB in float32 and half of it in "
                "bfloat16. Collectives of 4 chunks, counted on 2 tensor-parallel ranks: "
                f"{chunked}.",
                launches(by_hidden, device),
            ],
        ),
    ]


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--columns", type=int, default=19008, help="152,064 over 8 ranks")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--hidden-rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    with one_rank(device) as groups:
        publish("Loss stage", measure(options, groups), options, device)


if __name__ == "__main__":
    main()
