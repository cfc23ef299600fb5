r"""A layer's experts: grouped products against one product after the other, forward and backward.

    python -m tests.benchmarks.bench_grouped_experts \
        --out docs/benchmarks/grouped_experts_cpu_202611

Shape legend: E = experts, I = channels of the hidden states, F = channels of an expert, N = tokens
of all experts.
"""

import torch
from megatron.core.transformer.moe.experts import SequentialMLP

from bapo_megatron.policy.experts import GroupedExperts
from tests.benchmarks.harness import Contender, Section, interleave, publish, report_arguments
from tests.distributed_launch import joined, run_ranks
from tests.policy.test_experts import make

SHAPES = ((4, 64, 128, 2048), (16, 512, 256, 4096), (64, 1024, 384, 4096), (128, 2048, 768, 2048))
"""[E, I, F, N]: the demo's; small ones; Qwen3-30B-A3B's layer last."""


def contenders(shape: tuple[int, int, int, int], dtype: torch.dtype) -> list[Contender]:
    num_experts, hidden_size, inner, num_tokens = shape
    generator = torch.Generator().manual_seed(0)
    experts = make(num_experts, inner, hidden_size, params_dtype=dtype)
    assert not experts.loop_reason(dtype)
    drawn = torch.randint(num_experts, (num_tokens,), generator=generator)
    sizes = torch.bincount(drawn, minlength=num_experts)
    hidden = torch.randn(num_tokens, hidden_size, generator=generator).to(dtype).requires_grad_()
    probs = torch.rand(num_tokens, generator=generator)
    leaves = [hidden, *experts.parameters()]

    def run(kind: type[SequentialMLP]) -> object:
        output, _ = kind.forward(experts, hidden, sizes, probs)
        return torch.autograd.grad(output.float().square().sum(), leaves)

    return [
        Contender("one by one", lambda: run(SequentialMLP)),
        Contender("grouped", lambda: run(GroupedExperts)),
    ]


def measure(rounds: int) -> list[Section]:
    sections = []
    with joined():
        for shape in SHAPES:
            for dtype in (torch.float32, torch.bfloat16):
                timings = interleave(contenders(shape, dtype), torch.device("cpu"), rounds=rounds)
                text = "{} experts, {} channels, {} of an expert, {} tokens, {}"
                title = text.format(*shape, str(dtype).removeprefix("torch."))
                sections.append(Section(title, timings, "one by one"))
    return sections


def main() -> None:
    parser = report_arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    [sections] = run_ranks(measure, 1, options.rounds, timeout_s=1800)
    publish("Grouped experts", sections, options, torch.device("cpu"))


if __name__ == "__main__":
    main()
