"""The bound search of one update: ours against the released recipe's loop on the same tokens.

    python -m tests.benchmarks.bench_search --device cpu --out docs/benchmarks/search_cpu_202611

The recipe evaluates its surrogate anew for every candidate, over all tokens; on several ranks each
candidate also costs an all-reduce and a wait for the device. Ours bins the tokens once. The share
of the loss stage divides by the partials, combine, loss and in-place gradient of the same tokens.
Shape legend: T = tokens, V = columns, K = pairs of bounds on the path.
"""

import torch
from torch import Tensor

from bapo_megatron.algorithm.objectives.bapo import BapoConfig
from bapo_megatron.ops.contributions import BOUNDS_FIELDS, EXIT_NAMES
from tests.benchmarks.harness import Contender, Section, arguments, interleave, publish
from tests.benchmarks.stage import Stage
from tests.fakes.given_tokens import one_rank
from tests.ops.kernel_calls import path_of


def recipe_loop(
    tokens: tuple[Tensor, Tensor, Tensor, Tensor], path: list[tuple[float, float]], target: float
) -> tuple[float, float]:
    """Walk the pairs in order; each one is two clamps and two sums over all tokens, and a wait."""
    logprob_T, behaviour_T, advantage_T, mask_T = tokens
    ratio_T = (logprob_T - behaviour_T).clamp(-20.0, 20.0).exp()
    for low, high in path:
        clipped_T = torch.where(advantage_T >= 0, ratio_T.clamp(max=high), ratio_T.clamp(min=low))
        effective_T = clipped_T * advantage_T * mask_T
        positive = effective_T.clamp(min=0).sum()
        negative = -effective_T.clamp(max=0).sum()
        if bool(positive >= target * negative):
            return low, high
    return path[-1]


def measure(stage: Stage, rounds: int) -> list[Section]:
    """Time search and stage; both searches walk their whole path, the worst case of the loop."""
    config = BapoConfig.model_validate({"preset": "recipe", "target": 255.0})
    search = config.search()
    tokens = (stage.logprob_T, stage.behaviour_T, stage.advantage_T, stage.mask_T)
    path = path_of(search.grid)

    def ours() -> Tensor:
        return search.bounds(search.contributions(*tokens))

    result = dict(zip(BOUNDS_FIELDS, ours().tolist(), strict=True))
    assert EXIT_NAMES[int(result["exit"])] == "exhausted"
    assert (result["low"], result["high"]) == recipe_loop(tokens, path, config.target) == path[-1]
    paper = BapoConfig().search()
    paper_path = path_of(paper.grid)

    def ours_paper() -> Tensor:
        return paper.bounds(paper.contributions(*tokens))

    contenders = [
        Contender("ours", ours),
        Contender("ours, the paper's grid", ours_paper),
        Contender("released loop", lambda: recipe_loop(tokens, path, config.target)),
        Contender(
            "released loop, the paper's grid",
            lambda: recipe_loop(tokens, paper_path, config.target),
        ),
        Contender("loss stage", stage.run, stage.restore),
    ]
    timings = interleave(contenders, stage.device, rounds=rounds)
    medians = {timing.name: timing.median_s for timing in timings}
    share = medians["ours, the paper's grid"] / medians["loss stage"]
    return [
        Section(
            f"{len(stage.logprob_T):,} tokens; the loss stage reads {stage.num_columns:,} columns",
            timings,
            "ours",
            remarks=[
                f"The search over the paper's {len(paper_path)} pairs takes "
                f"{share:.2%} of the loss stage. Its collective is one all-reduce of "
                f"{8 * paper.grid.num_slots:,} bytes per update; the loop's, on several ranks, "
                f"are 2 sums for each of up to {len(path)} (recipe) or "
                f"{len(paper_path)} (paper) pairs."
            ],
        )
    ]


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--columns", type=int, default=19008, help="152,064 over 8 ranks")
    parser.add_argument("--stage-tokens", type=int, default=4096, help="tokens per micro-batch")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    with one_rank(device) as groups:
        stage = Stage(options.tokens, options.columns, options.stage_tokens, groups)
        publish("Bound search", measure(stage, options.rounds), options, device)


if __name__ == "__main__":
    main()
