"""Models with experts against transformers in every layout, and checkpoints across layouts."""

import math
import tempfile
from pathlib import Path
from typing import Any

from torch import Tensor

from tests.benchmarks.harness import columns, finish, machine, page, report_arguments
from tests.distributed_launch import run_ranks
from tests.policy import checkpoint_ranks
from tests.policy.checkpoint_ranks import EXPERTS as CHECKPOINTS
from tests.policy.layouts import BATCHES, LAYOUTS, by_rank, cases_of, run_cases
from tests.policy.layouts import EXPERTS as FAMILIES
from tests.policy.parity_ranks import multiples_of
from tests.policy.tiny_models import (
    load_reference,
    make_model,
    make_problems,
    reference_gradients,
    reference_logits,
)

COLUMNS = {
    "layout": "{layout}",
    "ranks": "{ranks}",
    "family": "{family}",
    "logits": "{logits:.1e}",
    "gradients": "{gradients:.1e}",
    "norm": "{norm:.1e}",
}
PAIRS = {"saved by": "{source}", "resumed by": "{layout}", "weights": "{weights:.1e}"}


def measure_layouts(root: Path) -> list[dict[str, Any]]:
    """Return one row per layout and family."""
    models = {name: make_model(name, root / name, num_hidden_layers=4) for name in FAMILIES}
    references = {name: load_reference(name, path) for name, path in models.items()}
    problems = make_problems(batches=BATCHES)
    gradients = {name: reference_gradients(model, problems) for name, model in references.items()}
    cases = cases_of(FAMILIES, *(layout.name for layout in LAYOUTS))
    results = by_rank(run_cases, cases, models, root / "export")
    rows = []
    for case in cases:
        of_ranks, (layout, family) = results[str(case)], case
        row = {"layout": layout.name, "ranks": layout.ranks, "family": family}
        row["logits"] = max(_logit_errors(of_ranks, references[family]))
        rows.append(row | _gradient_errors(of_ranks[0], gradients[family]))
    return rows


def _logit_errors(results: list[dict[str, Any]], reference: Any) -> list[float]:
    errors = []
    for result in results:
        data_rank, data_size, context_rank, size = result["place"]
        problems = make_problems(0, *multiples_of(size), batches=BATCHES)[data_rank::data_size]
        for actual_NV, problem in zip(result["logits"], problems, strict=False):
            whole_NV = reference_logits(reference, problem)
            if size > 1:
                whole_NV = whole_NV[problem.part(context_rank, size).micro_batch.target_T]
            errors.append(float((actual_NV - whole_NV).abs().max()))
    return errors


def _gradient_errors(result: dict[str, Any], expected: dict[str, Tensor]) -> dict[str, float]:
    norm = math.sqrt(sum(float(value.double().square().sum()) for value in expected.values()))
    relative = [
        float((result["gradients"][name] - value).norm() / value.norm())
        for name, value in expected.items()
        # A shift of all keys hardly moves a softmax: a small rest of large terms.
        if value.any() and not name.endswith("k_proj.bias")
    ]
    return {"gradients": max(relative), "norm": abs(result["step"].grad_norm / norm - 1)}


def measure_checkpoints(root: Path) -> list[dict[str, Any]]:
    """Return one row per pair of layouts: what saved, and what continued."""
    model = make_model("glm4_moe", root / "model")
    names = [name for layouts in CHECKPOINTS.values() for name in layouts]
    results: dict[str, Any] = {}
    for _ in range(2):  # all have saved before the second round
        for ranks, layouts in CHECKPOINTS.items():
            saved = [name for name in names if (root / name).is_dir()]
            sources = {name: [s for s in saved if s != name] for name in layouts}
            arguments = (model, root, layouts, sources)
            results |= run_ranks(checkpoint_ranks.run_layouts, ranks, *arguments, timeout_s=1800)[0]
    rows = []
    for source in names:
        for layout in names:
            resumed = results[f"{layout} from {source}"]["weights"][-1]
            expected = results[layout]["weights"][-1]
            difference = max(float((resumed[n] - expected[n]).abs().max()) for n in expected)
            rows.append({"source": source, "layout": layout, "weights": difference})
    return rows


def _markdown(report: dict[str, Any]) -> str:
    return page(
        "Experts in every layout",
        report["machine"],
        "Random models of 4 layers and 8 experts in float32, packed micro-batches: largest "
        "difference of a logit to transformers, of a tensor's gradient (relative, the worst "
        "tensor), and of the gradient norm.",
        columns(report["layouts"], COLUMNS),
        "A run that is saved after one update and continued with another one, in the same layout "
        "or another: largest difference of a weight to the run that was not interrupted.",
        columns(report["checkpoints"], PAIRS),
    )


def main() -> None:
    options = report_arguments(__doc__ or "").parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "pairs").mkdir()
        report = {
            "machine": machine(),
            "layouts": measure_layouts(Path(scratch)),
            "checkpoints": measure_checkpoints(Path(scratch) / "pairs"),
        }
    finish(options.out, _markdown(report), report)


if __name__ == "__main__":
    main()
