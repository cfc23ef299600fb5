"""Makes the demo's tiny model, pretrained on sums, and its data (deterministic).

python -m examples.tiny runs/demo-tiny-seed0 --seed 0
"""

import argparse
from pathlib import Path

from bapo_megatron.errors import describe_cause
from bapo_megatron.runtime.processes import end_by_exception
from examples.tiny.make import make_tiny
from examples.tiny.model import EXPERTS_PER_TOKEN

_INTERRUPTED = 130


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser("examples.tiny", description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="gets model/, train.jsonl and heldout.jsonl")
    parser.add_argument("--seed", type=int, default=0, help="of data, initialisation and warm-up")
    parser.add_argument("--experts", type=int, default=0, help="of a layer; 0: a dense model")
    options = parser.parse_args()
    if not 0 <= options.seed < 2**63:
        parser.error("--seed must be in [0, 2^63)")
    if not (options.experts == 0 or EXPERTS_PER_TOKEN <= options.experts <= 256):
        parser.error(f"--experts must be 0 or in [{EXPERTS_PER_TOKEN}, 256]")
    end_by_exception()
    try:
        report = make_tiny(options.out, seed=options.seed, num_experts=options.experts)
    except (ValueError, OSError) as error:
        parser.exit(1, f"{parser.prog}: {describe_cause(error)}\n")
    except KeyboardInterrupt:
        parser.exit(_INTERRUPTED, f"{parser.prog}: interrupted\n")
    print(
        f"made {report.model_dir} ({report.num_parameters:,} parameters) "
        f"in {report.warmup_s:.0f} s, final loss {report.final_loss:.3f}"
    )


if __name__ == "__main__":
    main()
