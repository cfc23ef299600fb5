"""Cost of ``checkpoint.verify``: loading a checkpoint with and without its checksums, in turns.

One rank without a GPU. A resumed run reads from storage, so the pages of the files are dropped
before each load; loads from the page cache, where the share is highest, come beside it.

    python -m tests.benchmarks.bench_verify --out docs/benchmarks/verify_cpu_202611
"""

import os
import tempfile
from functools import partial
from pathlib import Path

import torch

from bapo_megatron.config.megatron import ParallelConfig
from bapo_megatron.config.schema import CheckpointConfig
from bapo_megatron.policy import cpu_compat
from bapo_megatron.policy.checkpoint import CheckpointSaver, load_checkpoint
from bapo_megatron.policy.megatron_import import import_megatron
from bapo_megatron.runtime.distributed import init_distributed, shutdown_distributed
from tests.benchmarks import harness


def drop_pages(directory: Path) -> None:
    """Have the kernel forget what it holds of a directory's files."""
    for path in directory.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    parser = harness.arguments("Loading with and without checksums.")
    parser.add_argument("--hidden", type=int, default=1024, help="width of the model")
    parser.add_argument("--layers", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    import_megatron()
    cpu_compat.install()
    groups = init_distributed(ParallelConfig())
    from tests.policy.parity_ranks import build
    from tests.policy.tiny_models import make_model

    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        make_model(
            "qwen2",
            model,
            hidden_size=options.hidden,
            intermediate_size=4 * options.hidden,
            num_hidden_layers=options.layers,
        )
        policy = build(model, groups)
        saver = CheckpointSaver(Path(folder) / "checkpoints", CheckpointConfig())
        saved = saver.save(1, policy, {})
        num_bytes = sum(path.stat().st_size for path in saved.glob("*.distcp"))
        sections = [
            harness.Section(
                f"One checkpoint of {num_bytes / 1e9:.2f} GB from {where}",
                harness.interleave(
                    [
                        harness.Contender(
                            name,
                            partial(load_checkpoint, saved, policy, verify=verify),
                            prepare=prepare,
                            num_bytes=num_bytes,
                        )
                        for name, verify in (("without checksums", False), ("with checksums", True))
                    ],
                    groups.device,
                    rounds=options.rounds,
                ),
                "without checksums",
            )
            for where, prepare in (
                ("storage", partial(drop_pages, saved)),
                ("the page cache", lambda: None),
            )
        ]
    harness.publish("Verifying a checkpoint", sections, options, groups.device)
    shutdown_distributed()


if __name__ == "__main__":
    main()
