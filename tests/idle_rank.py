"""A rank that joins its groups, and tells where processes of torchrun listen until it is killed.

Its argument is the file for the ports, one on each line.
"""

import sys
import time
from pathlib import Path

import psutil

from bapo_megatron.config.megatron import ParallelConfig
from bapo_megatron.policy import cpu_compat
from bapo_megatron.policy.megatron_import import import_megatron
from bapo_megatron.runtime.distributed import barrier, init_distributed
from bapo_megatron.runtime.files import atomic_write_text


def main(ports: Path) -> None:
    import_megatron()
    cpu_compat.install()
    groups = init_distributed(ParallelConfig())
    barrier(groups)
    if groups.rank == 0:
        torchrun = psutil.Process().parent()
        assert torchrun is not None
        listening = {
            connection.laddr.port
            for process in [torchrun, *torchrun.children(recursive=True)]
            for connection in process.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        }
        atomic_write_text(ports, "".join(f"{port}\n" for port in sorted(listening)))
    time.sleep(600)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
