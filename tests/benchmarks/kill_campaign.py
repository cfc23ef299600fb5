"""End, freeze and starve everything that a run consists of; nothing may be lost, doubled or left.

python -m tests.benchmarks.kill_campaign --out docs/benchmarks/kills_cpu_202611

Each of ``--runs`` is a run of two ranks under examples/single_node.sh, started again by the same
command as a requeued job is, with one way of weight sync and two SGLang servers: its own, which
end with the trainer, or those of examples/rollout_servers.sh, which outlive it in the middle of a
weight sync. Faults come one after the other, each kind once before any of them twice, in an order,
at moments and with victims drawn from ``--seed``; the next one comes when the run makes steps with
both servers again. After the last one the run ends by itself. Then:

* ``kill_account`` follows every group through dumps, metrics and the last checkpoint;
* an undisturbed replay of the dumps must give the same weights, bit for bit;
* no process may be left, nor a file in /dev/shm or the temporary directory.

Takes root: both directories are this program's own, and the disk that fills up is a small one. The
checkout must not be under /tmp. The default, 33 faults, takes about an hour on two cores. To try it
out, add ``--faults 2 --kinds kill-rank-sync kill-server``. Where something is wrong, the directory
of the run is copied to ``OUT.failed``.
"""

import argparse
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bapo_megatron.runtime.processes import end_by_exception
from tests.benchmarks import harness
from tests.benchmarks.kill_account import Account
from tests.benchmarks.kill_run import COLUMNS, KINDS, MARK, KilledRun, Kind, mount, processes

RUNS = ("broadcast:served", "disk:own", "tensor:served", "tensor:own", "broadcast:own")
_COMPILED = "bapo_megatron_compiled_"
"""Code of torch.compile, which stays (docs/security.md)."""


def plan(kinds: Sequence[Kind], num_faults: int, seed: int) -> list[Kind]:
    """An order of faults; none comes twice before all others have come."""
    assert kinds, "no kind that this run can suffer"
    chance, order = random.Random(seed), []
    while len(order) < num_faults:
        order += chance.sample(kinds, len(kinds))
    return order[:num_faults]


def report(name: str, run: KilledRun, account: Account) -> list[str]:
    """The blocks of a run's section."""
    return [
        f"## {name}",
        "\n".join(harness.columns(run.faults, COLUMNS)),
        f"{account.num_steps} steps. Groups: {account.num_drawn} drawn = {account.num_trained} "
        f"trained once + {account.num_waiting} in the buffer. {account.num_lost_requests} requests "
        "were continued on another server. The weights are those of an undisturbed replay, bit for "
        "bit. No process was left, nor a file in /dev/shm or the temporary directory.",
    ]


def files() -> set[Path]:
    """What is in /dev/shm and the temporary directory, but for what may stay."""
    paths = {*Path("/dev/shm").iterdir(), *Path("/tmp").iterdir()}
    return {path for path in paths if not path.name.startswith(_COMPILED)}


def check(run: KilledRun, order: Sequence[Kind]) -> Account:
    """Let a run go to its end through faults; fail where anything is wrong or left."""
    before = files()  # this process's own
    account = run.finish(order)
    assert not account.problems, "\n".join(account.problems)
    assert not (alive := processes()), [process.cmdline() for process in alive]
    assert not (left := files() - before), left
    return account


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    names = [kind.name for kind in KINDS]
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=RUNS[:2], metavar="METHOD:WHOSE")
    parser.add_argument("--faults", type=int, help="per run; default: one of each kind")
    parser.add_argument("--kinds", nargs="+", choices=names, default=names, metavar="KIND")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="without suffix")
    options = parser.parse_args()
    if MARK not in os.environ:  # again, where mounts are nobody else's
        os.environ |= {MARK: "1", "TMPDIR": "/tmp"}
        module = ["-m", "tests.benchmarks.kill_campaign", *sys.argv[1:]]
        os.execvp("unshare", ["unshare", "--mount", sys.executable, *module])
    end_by_exception()
    where, blocks = harness.machine(), []
    for directory in (Path("/dev/shm"), Path("/tmp")):
        mount(directory, "mode=1777")
    root = Path(tempfile.mkdtemp(prefix="campaign-"))
    for number, name in enumerate(options.runs):
        method, _, whose = name.partition(":")
        directory = root / f"{method}_{whose}"  # SGLang takes no colon in a model's path
        chosen = [kind for kind in KINDS if kind.name in options.kinds]
        kinds = [kind for kind in chosen if whose == "served" or kind.victim != "owner"]
        seed = options.seed + number
        run = KilledRun(directory, method, whose == "served", random.Random(seed))
        try:
            account = check(run, plan(kinds, options.faults or len(kinds), seed))
        except BaseException:
            run.close()
            shutil.copytree(directory, options.out.with_suffix(".failed"))
            raise
        blocks += report(name, run, account)
        text = harness.page("What kills, freezes and a full disk cost a run", where, *blocks)
        options.out.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
