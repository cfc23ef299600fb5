"""Another process of ``acceptance sync``: receives buckets as an engine does, and checks them.

python -m tests.gpu.receiver PLACE DEVICE MEBIBYTES …
"""

import json
import sys

import torch

from bapo_megatron.engine.base import GroupPlace
from bapo_megatron.engine.collective import join_group


def main(place: str, device: str, *mebibytes: str) -> None:
    """Print ``right`` when every bucket is."""
    group = join_group(GroupPlace(**json.loads(place) | {"first_rank": 1}), 60.0, 120.0)
    for size in map(int, mebibytes):
        flat = torch.zeros(size << 20, dtype=torch.uint8, device=device)
        group.broadcast(flat, root=0).wait()
        if not bool((flat == size % 251).all()):
            sys.exit(f"{size} MiB: wrong bytes")
    print("right")  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
